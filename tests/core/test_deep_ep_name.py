"""`deep_ep`: found only where it was asked for, then real, and never in place of another that is loaded."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REAL = """
import importlib, importlib.util, inspect, sys, weakref
spec = importlib.util.find_spec("deep_ep")
assert spec is not None and spec.loader is not None and spec.origin.endswith("deep_ep/__init__.py"), spec
assert importlib.util.find_spec("deep_ep.utils").origin.endswith("utils.py")
import deep_ep, uccl_ep
from deep_ep import Buffer, Config
from deep_ep.utils import EventHandle, EventOverlap
assert Buffer is uccl_ep.Buffer and Config is uccl_ep.Config
assert deep_ep.EventHandle is EventHandle is uccl_ep.EventHandle
assert deep_ep.EventOverlap is EventOverlap is uccl_ep.EventOverlap
assert str(deep_ep.topk_idx_t) == "torch.int64"
assert uccl_ep.__version__.split("+")[0] in deep_ep.__version__
assert deep_ep.__spec__ is sys.modules["deep_ep"].__spec__ and deep_ep.utils is sys.modules["deep_ep.utils"]
weakref.WeakValueDictionary({0: deep_ep})
for name in ("HybridEPBuffer", "no_such_name"):  # callers probe for these
    assert not hasattr(deep_ep, name)
assert hasattr(deep_ep, "ElasticBuffer") is hasattr(deep_ep, "EPHandle") is hasattr(uccl_ep, "ElasticBuffer")
assert importlib.util.find_spec("deep_ep.hybrid_ep_buffer") is None
"""
RELOAD = """
import deep_ep, importlib, sys, uccl_ep
before = deep_ep.Buffer
assert importlib.reload(deep_ep) is deep_ep and deep_ep.Buffer is before is uccl_ep.Buffer
assert importlib.reload(deep_ep.utils).EventHandle is uccl_ep.EventHandle
del sys.modules["deep_ep"]
import deep_ep as again
assert again is not deep_ep and again.Buffer is before and again.__file__ == deep_ep.__file__
"""
ABSENT = "import importlib.util\nassert importlib.util.find_spec('deep_ep') is None\n"
INSTALL = "import uccl_ep\nassert uccl_ep.install_as_deep_ep() is uccl_ep.install_as_deep_ep()\n"


def environment(**variables: str) -> dict[str, str]:
    """The caller's, without its own settings of this library, and with ``variables``."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("UCCL_EP_") and k != "PYTHONPATH"}
    return {**kept, **variables}


def python(*arguments: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment(**variables),
        cwd=cwd,
    )


def run(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """``uccl-ep run``."""
    script = "import sys; sys.argv[0] = 'uccl-ep'; from uccl_ep.cli import main; main()"
    return python("-c", script, "run", *arguments, cwd=cwd, **variables)


def another_deep_ep(folder: Path) -> Path:
    (folder / "deep_ep").mkdir(parents=True)
    (folder / "deep_ep/__init__.py").write_text("class Buffer: pass\n")
    return folder


def test_it_is_absent_unless_asked_for() -> None:
    done = python("-c", ABSENT + "import uccl_ep, uccl_ep.compat\n" + ABSENT)
    assert done.returncode == 0, done.stderr
    files = importlib.metadata.files("uccl_ep") or []
    assert not [file for file in files if file.parts[0].startswith("deep_ep")]


def test_install_makes_a_real_module() -> None:
    done = python("-c", INSTALL + REAL)
    assert done.returncode == 0, done.stderr


def test_it_can_be_imported_again(tmp_path: Path) -> None:
    """By `importlib.reload`, as notebooks do, and once it is gone from sys.modules; also with another one about."""
    done = python("-c", INSTALL + RELOAD + REAL, PYTHONPATH=str(another_deep_ep(tmp_path)))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("ours_first", [False, True])
def test_another_one_on_disk(tmp_path: Path, ours_first: bool) -> None:
    """One that is loaded is never replaced; one that only lies on the disk is passed over."""
    order = [INSTALL + REAL] if ours_first else ["import deep_ep\n", INSTALL]
    done = python("-c", "".join(order), PYTHONPATH=str(another_deep_ep(tmp_path)))
    if ours_first:
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode == 1
        last = done.stderr.strip().splitlines()[-1]
        assert "ConfigurationError: another deep_ep is loaded already, from " in last
        assert str(tmp_path / "deep_ep/__init__.py") in last and "uccl-ep run" in last


def test_a_framework_that_has_looked_already_is_named(tmp_path: Path) -> None:
    module = tmp_path / "megatron/core/transformer/moe/fused_a2a.py"
    module.parent.mkdir(parents=True)
    looks = "try:\n    import deep_ep\n    HAVE_DEEP_EP = True\nexcept ImportError:\n    HAVE_DEEP_EP = False\n"
    module.write_text(looks)
    late = "import megatron.core.transformer.moe.fused_a2a\n" + INSTALL
    done = python("-c", late, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1 and "fused_a2a has looked for deep_ep already" in done.stderr
    early = INSTALL + "from megatron.core.transformer.moe.fused_a2a import HAVE_DEEP_EP\nassert HAVE_DEEP_EP\n"
    done = python("-c", early + INSTALL, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("group", ["vllm.general_plugins", "sglang.srt.plugins"])
def test_plugins_of_frameworks_act_only_when_asked(group: str) -> None:
    load = (
        "from importlib.metadata import entry_points\n"
        f"for point in entry_points(group={group!r}, name='uccl_ep'): point.load()()\n"
    )
    assert importlib.metadata.entry_points(group=group, name="uccl_ep")
    for value in ("", "0"):
        done = python("-c", load + ABSENT, UCCL_EP_AS_DEEP_EP=value)
        assert done.returncode == 0, done.stderr
    done = python("-c", load + load + REAL, UCCL_EP_AS_DEEP_EP="1")
    assert done.returncode == 0, done.stderr
    done = python("-c", load, UCCL_EP_AS_DEEP_EP="perhaps")
    assert done.returncode == 1 and "environment variable UCCL_EP_AS_DEEP_EP): expected true or false" in done.stderr


def test_the_variable_is_no_option_of_a_buffer() -> None:
    from uccl_ep_core.config import Configuration

    Configuration.resolve({}, {"UCCL_EP_AS_DEEP_EP": "1"})


def test_run_a_script(tmp_path: Path) -> None:
    """The program is the main module, with its own arguments and exit status, and children find the module too."""
    (tmp_path / "beside.py").write_text("value = 7\n")
    script = tmp_path / "program.py"
    script.write_text(
        REAL + "import multiprocessing, subprocess\nimport beside\n"
        "def child(q):\n    import deep_ep, uccl_ep\n    q.put(deep_ep.Buffer is uccl_ep.Buffer)\n"
        "if __name__ == '__main__':\n"
        "    assert sys.argv[1:] == ['--m', '-x', 'a b'], sys.argv\n"
        "    context = multiprocessing.get_context('spawn')\n    queue = context.Queue()\n"
        "    process = context.Process(target=child, args=(queue,))\n    process.start()\n"
        "    assert queue.get(timeout=120) is True\n    process.join()\n"
        "    subprocess.run([sys.executable, '-c', 'import deep_ep'], check=True)\n"
        "    print('ran', beside.value)\n    sys.exit(3)\n"
    )
    done = run(str(script), "--m", "-x", "a b", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (3, "ran 7\n"), done.stderr
    # A copy that a framework brought, in site-packages or on the caller's path, is passed over.
    script.write_text("import importlib.util\nprint(importlib.util.find_spec('deep_ep').origin)\n")
    done = run("program.py", cwd=tmp_path, PYTHONPATH=str(another_deep_ep(tmp_path / "other")))
    assert "uccl_ep/compat/import_path/deep_ep" in done.stdout, done.stdout + done.stderr


def test_run_a_module(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__main__.py").write_text("import deep_ep, sys\nprint('ran', sys.argv[1:])\n")
    done = run("-m", "package", "-m", "x", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "ran ['-m', 'x']\n"), done.stderr


def test_run_refuses(tmp_path: Path) -> None:
    for arguments in ((), ("-m",), ("-x", "file.py")):
        done = run(*arguments, cwd=tmp_path)
        assert done.returncode == 2 and done.stderr.startswith("usage: uccl-ep run"), done
    assert run("--help", cwd=tmp_path).stdout.startswith("usage: uccl-ep run")
    done = run("missing.py", cwd=tmp_path)
    assert done.returncode == 2 and "there is no script missing.py" in done.stderr
    # Python would find the one that lies beside the program first.
    (tmp_path / "program.py").write_text("import deep_ep\n")
    another_deep_ep(tmp_path)
    for arguments in (("program.py",), ("-m", "program")):
        done = run(*arguments, cwd=tmp_path)
        assert done.returncode == 2 and re.search(r"deep_ep is what `import deep_ep` would find", done.stderr), done
