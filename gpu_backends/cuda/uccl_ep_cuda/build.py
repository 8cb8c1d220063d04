"""Machine code of a kernel source for one device: built with the package, or compiled at first use."""

from __future__ import annotations

import re
from pathlib import Path

from uccl_ep_core.device_runtime import (
    CompileCache,
    Compiled,
    CompilerLibrary,
    SourceTree,
    Unit,
    cache_key,
    find_object,
    run_compiler,
)
from uccl_ep_core.errors import BackendUnavailableError

from . import nvrtc

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
"""What objects are built for ahead of time."""

OPTIONS = ("-std=c++20", "-default-device", "-fmad=false", "--dopt=on", "--ptxas-options=-v")
"""-fmad=false: rounding is part of the contract, an fma is written where one is meant."""

MAX_THREADS_PER_BLOCK = 384
"""As in native/primitives.hpp."""

_OBJECTS = Path(__file__).with_name("objects")
_ARCHITECTURE = re.compile(r"sm_(\d+)(\d)$")


def source_tree() -> SourceTree:
    return SourceTree.of_package(str(Path(__file__).with_name("__init__.py")))


def staging_bytes(architecture: str) -> int:
    """As in native/staging.hpp."""
    match = _ARCHITECTURE.match(architecture)
    return 192 << 10 if match is not None and 9 <= int(match[1]) < 12 else 64 << 10


def compile_unit(unit: Unit, architecture: str, compiler: CompilerLibrary, timeout_s: float) -> Compiled:
    """Compile without a cache and without a device."""
    return run_compiler(
        compiler,
        name=unit.name,
        source=unit.source,
        headers=unit.headers,
        options=(f"--gpu-architecture={architecture}", *OPTIONS),
        timeout_s=timeout_s,
    )


def runs_on(built_for: str, device: str) -> bool:
    """Machine code runs on its own architecture and later minor versions of the same major one."""
    built, actual = _ARCHITECTURE.match(built_for), _ARCHITECTURE.match(device)
    return built is not None and actual is not None and built[1] == actual[1] and int(built[2]) <= int(actual[2])


class UnitImages:
    """Gives the machine code of units for one architecture.

    Args:
        nvrtc_path: the compiler to use, "" to look for it.
        newest_major: CUDA major version that the driver knows.
        cache: where compiled code is kept.
    """

    def __init__(
        self, architecture: str, *, nvrtc_path: str, newest_major: int, cache: CompileCache, timeout_s: float
    ) -> None:
        self._architecture = architecture
        self._nvrtc_path = nvrtc_path
        self._newest_major = newest_major
        self._cache = cache
        self._timeout_s = timeout_s

    def __call__(self, unit: Unit) -> tuple[bytes, str]:
        built = find_object(
            _OBJECTS, unit.name, unit.digest, lambda architecture: runs_on(architecture, self._architecture)
        )
        if built is not None:
            return built, "built with the package"
        compiler = nvrtc.find_nvrtc(self._nvrtc_path, self._newest_major)
        if compiler is None:
            raise BackendUnavailableError(
                f"the kernels were not built for {self._architecture} and no NVRTC of CUDA "
                f"{self._newest_major} or older was found to compile them; {nvrtc.REMEDY}"
            )
        key = cache_key(unit.digest, self._architecture, *OPTIONS, compiler.identity)
        image = self._cache.get(
            key,
            lambda: compile_unit(unit, self._architecture, compiler, self._timeout_s).image,
            # The holder of the lock has its own limit; others wait a little longer than that.
            timeout_s=2 * self._timeout_s,
        )
        return image, f"compiled by {Path(compiler.path).name}"
