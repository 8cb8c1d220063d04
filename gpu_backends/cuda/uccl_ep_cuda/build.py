"""Machine code of a kernel source for one device: built with the package, or compiled at first use."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from uccl_ep_core.device_runtime.compile_cache import CompileCache, cache_key
from uccl_ep_core.device_runtime.compiler import Compiled, CompileError, CompilerLibrary, run_compiler
from uccl_ep_core.device_runtime.objects import find_object
from uccl_ep_core.device_runtime.offline import (
    KernelResources,
    OfflineBuild,
    OfflineCompiler,
    check_complete,
)
from uccl_ep_core.device_runtime.sources import SourceTree, Unit
from uccl_ep_core.errors import BackendUnavailableError

from . import nvrtc

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
"""What objects are built for ahead of time."""

OPTIONS = ("-std=c++20", "-default-device", "-fmad=false", "--dopt=on", "--ptxas-options=-v")
"""-fmad=false: rounding is part of the contract, an fma is written where one is meant."""

MAX_THREADS_PER_BLOCK = 384
"""As in native/primitives.hpp."""

NVCC_OPTIONS = ("-std=c++20", "-fmad=false", "-Xptxas=-v")

_OFFLINE_TIMEOUT_S = 600.0
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


class CudaOffline(OfflineCompiler):
    """NVRTC, which needs neither a device nor a driver, or else nvcc."""

    architectures = ARCHITECTURES
    suffix = "cubin"
    table = Path(__file__).with_name("resources.json")

    def unavailable_because(self) -> str:
        if nvrtc.find_nvrtc() is not None or nvrtc.find_nvcc() is not None:
            return ""
        return f"neither NVRTC nor nvcc was found; {nvrtc.REMEDY}"

    def units(self, traced: bool = False) -> Sequence[Unit]:
        return source_tree().units(traced)

    def compile(self, unit: Unit, architecture: str) -> OfflineBuild:
        compiler, nvcc = nvrtc.find_nvrtc(), nvrtc.find_nvcc()
        if compiler is not None:
            compiled = compile_unit(unit, architecture, compiler, timeout_s=_OFFLINE_TIMEOUT_S)
        elif nvcc is not None:
            compiled = nvrtc.compile_with_nvcc(nvcc, unit, (f"-arch={architecture}", *NVCC_OPTIONS), _OFFLINE_TIMEOUT_S)
        else:
            raise CompileError(self.unavailable_because())
        return check_complete(unit, architecture, OfflineBuild(compiled.image, read_resources(compiled.log, unit)))


OFFLINE = CudaOffline()

_PROPERTIES = re.compile(r"Function properties for (\S+)")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


def read_resources(log: str, unit: Unit) -> dict[str, KernelResources]:
    """Figures of each kernel from the assembler's report; a function that is called counts as one of each caller."""
    found: dict[str, KernelResources] = {}
    called_spills = 0
    name = ""
    stack = spills = 0
    for line in log.splitlines():
        if match := _PROPERTIES.search(line):
            name = match[1]
        elif match := _STACK.search(line):
            stack, spills = int(match[1]), int(match[2]) + int(match[3])
            if name not in unit.kernels:
                called_spills += spills
        elif (match := _USED.search(line)) and name in unit.kernels:
            shared = _SHARED.search(line)
            found[name] = KernelResources(int(match[1]), stack, spills, shared_bytes=int(shared[1]) if shared else 0)
    return {name: dataclasses.replace(taken, spills=taken.spills + called_spills) for name, taken in found.items()}


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
