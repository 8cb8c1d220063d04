"""Machine code of the kernels for one AMD architecture: built with the package, or compiled at first use."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from uccl_ep_core.device_runtime.compile_cache import CompileCache, cache_key
from uccl_ep_core.device_runtime.compiler import CompileError, run_compiler
from uccl_ep_core.device_runtime.objects import find_object
from uccl_ep_core.device_runtime.offline import KernelResources, OfflineBuild, OfflineCompiler, check_complete
from uccl_ep_core.device_runtime.sources import SourceTree, Unit
from uccl_ep_core.errors import BackendUnavailableError

from . import toolchain

ARCHITECTURES = ("gfx90a", "gfx942", "gfx950", "gfx1201")
"""What objects are built for ahead of time: CDNA 2 to 4, and one RDNA with 32 lanes."""

MAX_THREADS_PER_BLOCK = 512
"""As in native/primitives.hpp."""

STATIC_SHARED_BYTES = 2048
"""Most shared memory that a kernel has of its own; what a launch asks for comes on top (resources.json has each). In
low-latency dispatch the compiler keeps four bytes of each thread there."""

_OBJECTS = Path(__file__).with_name("objects")


def source_tree() -> SourceTree:
    return SourceTree.of_package(str(Path(__file__).with_name("__init__.py")))


class HipOffline(OfflineCompiler):
    """clang and lld from a pip package: no ROCm is needed."""

    architectures = ARCHITECTURES
    suffix = "co"
    table = Path(__file__).with_name("resources.json")

    def unavailable_because(self) -> str:
        return f"clang is not there as a Python package; {toolchain.REMEDY}" if toolchain.pip_clang_missing() else ""

    def units(self, traced: bool = False) -> Sequence[Unit]:
        return source_tree().units(traced)

    def compile(self, unit: Unit, architecture: str) -> OfflineBuild:
        compiled = toolchain.compile_with_clang(unit, architecture)
        for kernel in unit.kernels:
            # A launch finds a kernel by its descriptor, which the linker exports under this name.
            if f"{kernel}.kd\0".encode() not in compiled.image:
                raise CompileError(f"{unit.name} for {architecture} has no descriptor of {kernel}")
        return check_complete(unit, architecture, OfflineBuild(compiled.image, read_resources(compiled.log)))


OFFLINE = HipOffline()

_REMARK = re.compile(r"remark: <unknown>:0:0:\s*([^:]+): (\S+)")


def read_resources(log: str) -> dict[str, KernelResources]:
    """Figures of each kernel from the compiler's remarks."""
    found: dict[str, KernelResources] = {}
    figures: dict[str, int] = {}
    name = ""
    for line in log.splitlines():
        match = _REMARK.search(line)
        if match is None:
            continue
        key, value = match[1].strip(), match[2]
        if key == "Function Name":
            name, figures = value, {}
        elif value.isdigit():
            figures[key] = int(value)
        if key.startswith("LDS Size"):  # the last line of a kernel
            found[name] = KernelResources(
                registers=figures["VGPRs"] + figures.get("AGPRs", 0),
                stack_bytes=figures["ScratchSize [bytes/lane]"],
                spills=figures["VGPRs Spill"],
                scalar_spills=figures["SGPRs Spill"],
                shared_bytes=figures[key],
            )
    return found


class UnitImages:
    """Gives the machine code of units for one architecture.

    Args:
        hiprtc_path: the run-time compiler to use, "" to look for it.
        runtime_path: the HIP runtime in use.
        cache: where compiled code is kept.
    """

    def __init__(
        self, architecture: str, *, hiprtc_path: str, runtime_path: str, cache: CompileCache, timeout_s: float
    ) -> None:
        self._architecture = architecture
        self._hiprtc_path = hiprtc_path
        self._runtime_path = runtime_path
        self._cache = cache
        self._timeout_s = timeout_s

    def __call__(self, unit: Unit) -> tuple[bytes, str]:
        built = find_object(_OBJECTS, unit.name, unit.digest, lambda architecture: architecture == self._architecture)
        if built is not None:
            return built, "built with the package"
        compiler = toolchain.find_hiprtc(self._hiprtc_path, self._runtime_path)
        if compiler is None:
            raise BackendUnavailableError(
                f"the kernels were not built for {self._architecture} and no hipRTC was found to compile them; "
                f"install ROCm's hipRTC, or build the package with clang there ({toolchain.REMEDY})"
            )
        options = (f"--offload-arch={self._architecture}", *toolchain.RTC_OPTIONS)
        key = cache_key(unit.digest, *options, compiler.identity)
        image = self._cache.get(
            key,
            lambda: (
                run_compiler(
                    compiler,
                    name=unit.name,
                    source=unit.source,
                    headers=unit.headers,
                    options=options,
                    timeout_s=self._timeout_s,
                ).image
            ),
            # The holder of the lock has its own limit; others wait a little longer than that.
            timeout_s=2 * self._timeout_s,
        )
        return image, f"compiled by {Path(compiler.path).name}"
