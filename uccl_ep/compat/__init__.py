"""The name `deep_ep`: uccl_ep in its place, for programs that import it and cannot be changed.

Nothing of that name is installed at the top of site-packages, where another library that owns it may lie. The module is
a real one, in the folder ``import_path`` beside this file, and is found only where somebody asks for it: by
`install_as_deep_ep` in this process, by ``uccl-ep run`` in a program and its children, or by the environment
variable ``UCCL_EP_AS_DEEP_EP`` in processes of frameworks that load plugins.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from uccl_ep_core.config import AS_DEEP_EP
from uccl_ep_core.errors import ConfigurationError
from uccl_ep_core.options import convert
from uccl_ep_core.transport import Option

IMPORT_PATH = Path(__file__).parent / "import_path"
NAME = "deep_ep"

# Modules of frameworks that look for deep_ep once, at import, and the name that says what they found.
LOOKED_ALREADY = {
    "megatron.core.transformer.moe.fused_a2a": "HAVE_DEEP_EP",
    "primus_turbo.pytorch.core.backend": "HAVE_DEEP_EP",
    "sglang.srt.layers.moe.token_dispatcher.deepep": "use_deepep",
}

USAGE = """\
usage: uccl-ep run SCRIPT [ARGUMENT ...]
       uccl-ep run -m MODULE [ARGUMENT ...]

Run a Python program in which "import deep_ep" finds uccl_ep, in its child processes too, for example

    uccl-ep run -m torch.distributed.run --nproc-per-node 8 train.py
"""


def install_as_deep_ep() -> ModuleType:
    """Make `import deep_ep` find uccl_ep in this process, from now on; may be called again.

    Call it before anything imports deep_ep or a framework that looks for it. Child processes are not affected, unless
    they import the main module again and the call stands there; ``uccl-ep run`` reaches them all.

    Returns:
        The module `deep_ep`.

    Raises:
        ConfigurationError: another deep_ep is loaded already, or a framework has looked for one in vain.
    """
    loaded = sys.modules.get(NAME)
    if loaded is not None:
        if is_ours(loaded):
            return loaded
        raise ConfigurationError(
            f"another deep_ep is loaded already, from {getattr(loaded, '__file__', None) or 'no file'}: call "
            "uccl_ep.install_as_deep_ep() before anything imports deep_ep, or start the program with `uccl-ep run`"
        )
    for module, attribute in LOOKED_ALREADY.items():
        if module in sys.modules and not getattr(sys.modules[module], attribute, True):
            raise ConfigurationError(
                f"{module} has looked for deep_ep already and will not look again: call "
                "uccl_ep.install_as_deep_ep() before importing it, or start the program with `uccl-ep run`"
            )
    finder = _Finder()
    sys.meta_path.insert(0, finder)  # first: a copy that only lies on the disk is passed over
    try:
        return importlib.import_module(NAME)
    except BaseException:
        sys.meta_path.remove(finder)
        raise


class _Finder(MetaPathFinder):
    """Finds the module for whoever imports or reloads it; where it lies is on no path of this process."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(NAME, [str(IMPORT_PATH)]) if fullname == NAME else None


def is_ours(module: ModuleType) -> bool:
    """Whether a module called deep_ep is the one of this package."""
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve().parent == (IMPORT_PATH / NAME).resolve()


def install_if_asked() -> None:
    """`install_as_deep_ep`, where the environment variable ``UCCL_EP_AS_DEEP_EP`` is true: the plugin of frameworks.

    Raises:
        ConfigurationError: as `install_as_deep_ep`, or the variable is neither true nor false.
    """
    value = os.environ.get(AS_DEEP_EP)
    option = Option(False, "whether `import deep_ep` finds uccl_ep")
    if value and convert(option, value, "as_deep_ep", f"environment variable {AS_DEEP_EP}"):
        install_as_deep_ep()


def main(arguments: list[str]) -> int:
    """``uccl-ep run``: becomes the program that it is given."""
    if arguments in (["-h"], ["--help"]):
        print(USAGE, end="")
        return 0
    target = arguments[1:2] if arguments[:1] == ["-m"] else arguments[:1]
    if not target or target[0].startswith("-"):
        print(USAGE, end="", file=sys.stderr)
        return 2
    if arguments[0] != "-m" and not Path(target[0]).exists():
        raise ConfigurationError(f"there is no script {target[0]}: give a file, or -m and the name of a module")
    _become(arguments, Path.cwd() if arguments[0] == "-m" else Path(target[0]).resolve().parent)


def _become(arguments: list[str], first_folder: Path) -> NoReturn:
    for place in (first_folder / NAME, first_folder / f"{NAME}.py"):
        if place.exists():  # Python looks there first, so that one would be found instead
            raise ConfigurationError(
                f"{place} is what `import deep_ep` would find in this program: run it from another folder"
            )
    inherited = os.environ.get("PYTHONPATH")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(IMPORT_PATH), *([inherited] if inherited else [])]),
        AS_DEEP_EP: "1",
    }
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *arguments], environment)
