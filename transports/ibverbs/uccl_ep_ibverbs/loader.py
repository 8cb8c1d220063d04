"""Finds pyverbs at run time and says why where it cannot.

Distributions install pyverbs for their own Python, outside a virtual environment. It is taken from
there by its own folder, so that nothing else of the system's packages becomes importable.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.machinery
import importlib.util
import pathlib
import sys
import sysconfig
from types import ModuleType
from typing import Any

SYSTEM_FOLDERS = (
    "/usr/lib/python3/dist-packages",
    "/usr/lib64/python3/site-packages",
    "/usr/lib/python3/site-packages",
)
INSTALL = (
    "install rdma-core's libraries and pyverbs: on Debian and Ubuntu 'apt-get install python3-pyverbs "
    "ibverbs-providers', on Fedora 'dnf install python3-pyverbs', elsewhere build rdma-core with pyverbs"
)
MODULES = ("base", "device", "pd", "mr", "cq", "qp", "wr", "addr", "cmid", "cm_enums")


@dataclasses.dataclass(frozen=True)
class Verbs:
    """The modules of pyverbs, by name; `enums` is the one that old and new versions name differently."""

    base: Any
    device: Any
    pd: Any
    mr: Any
    cq: Any
    qp: Any
    wr: Any
    addr: Any
    cmid: Any
    cm_enums: Any
    enums: Any
    origin: str


class VerbsMissingError(Exception):
    """pyverbs cannot be used; ``args`` are the reason and the remedy."""


def _system_folder() -> str | None:
    """A folder outside sys.path with a pyverbs for this Python; raises where there is one for another."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    major, minor = sys.version_info[:2]
    others: list[str] = []
    places = [*SYSTEM_FOLDERS, f"/usr/lib64/python{major}.{minor}/site-packages"]
    for folder in map(pathlib.Path, places):
        found = sorted((folder / "pyverbs").glob("device*.so"))
        if any(file.name == f"device{suffix}" for file in found):
            return str(folder)
        others += [str(file) for file in found]
    if others:
        raise VerbsMissingError(
            f"the installed pyverbs ({others[0]}) is for another Python than this one ({suffix})",
            "run with the distribution's Python, or build rdma-core's pyverbs for this one",
        )
    return None


def _import_package() -> ModuleType:
    with_path = importlib.util.find_spec("pyverbs")
    spec = with_path
    if spec is None:
        folder = _system_folder()
        if folder is None:
            raise VerbsMissingError("pyverbs is not installed", INSTALL)
        spec = importlib.machinery.PathFinder.find_spec("pyverbs", [folder])
    if spec is None or spec.loader is None:
        raise VerbsMissingError("pyverbs is not installed", INSTALL)
    package = importlib.util.module_from_spec(spec)
    sys.modules["pyverbs"] = package
    spec.loader.exec_module(package)
    return package


@functools.cache
def _load() -> Verbs | tuple[str, str]:
    # A failure is remembered: half-loaded extension modules of a broken pyverbs do not bear a second try.
    try:
        package = sys.modules.get("pyverbs") or _import_package()
        modules = {name: importlib.import_module(f"pyverbs.{name}") for name in MODULES}
        try:
            enums = importlib.import_module("pyverbs.enums")
        except ModuleNotFoundError:
            enums = importlib.import_module("pyverbs.libibverbs_enums")
    except VerbsMissingError as missing:
        return missing.args
    except Exception as error:
        return (
            f"pyverbs cannot be imported: {error}",
            "pyverbs and libibverbs must come from the same rdma-core: use the distribution's packages of both, "
            "or one build of rdma-core for both",
        )
    return Verbs(**modules, enums=enums, origin=str(package.__path__[0]))


def verbs() -> Verbs:
    """pyverbs, or `VerbsMissingError` with reason and remedy."""
    loaded = _load()
    if isinstance(loaded, Verbs):
        return loaded
    raise VerbsMissingError(*loaded)


def data_plane() -> Any:
    """The compiled half, or `VerbsMissingError` where the package was built without rdma-core's headers."""
    try:
        from . import _native  # type: ignore[attr-defined]
    except ImportError as error:
        raise VerbsMissingError(
            f"this build of uccl_ep has no ibverbs data plane ({error})",
            "install rdma-core's headers (Debian: libibverbs-dev, Fedora: rdma-core-devel) and build uccl_ep again",
        ) from error
    return _native
