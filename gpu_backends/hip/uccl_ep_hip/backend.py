"""The HIP backend."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from uccl_ep_core.device_runtime.backend import RuntimeBackend
from uccl_ep_core.device_runtime.compile_cache import CompileCache
from uccl_ep_core.device_runtime.driver import DeviceFacts, Driver
from uccl_ep_core.device_runtime.kernels import KernelTable
from uccl_ep_core.device_runtime.torch_device import TorchDevice
from uccl_ep_core.transport import Option

from .build import UnitImages, source_tree
from .driver import HipDriver, candidates

_SUPPORTED = re.compile(r"gfx(90a|94[0-9]|95[0-9]|1[0-9]{3})$")


@functools.cache
def _driver(library: str) -> HipDriver:
    return HipDriver((library,) if library else candidates())


class HipBackend(RuntimeBackend):
    """AMD GPUs, through the HIP runtime. It has never run on a card; docs/backends/hip.md says what was checked."""

    VENDOR = "hip"
    DRIVER_REMEDY = "install ROCm 6 or later, or in a container pass /dev/kfd and /dev/dri in"
    DEVICE_REMEDY = "check rocm-smi and HIP_VISIBLE_DEVICES"
    TORCH_REMEDY = "install a ROCm build of torch: https://pytorch.org/get-started/locally"

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "max_blocks": Option(0, "blocks of a launch at most; 0: one for each compute unit", minimum=0),
        "library": Option("", "path of libamdhip64; empty: that which torch has loaded, else that of the system"),
        "hiprtc": Option("", "path of libhiprtc; empty: that beside the HIP library or of an installed ROCm"),
        "compile_timeout_s": Option(120.0, "seconds that compiling one file may take", minimum=1.0),
    }

    @classmethod
    def open_driver(cls, options: Mapping[str, Any]) -> HipDriver:
        return _driver(options.get("library", ""))

    @classmethod
    def refuse(cls, facts: DeviceFacts) -> tuple[str, str] | None:
        if _SUPPORTED.match(facts.architecture):
            return None
        return f"{facts.name} is {facts.architecture}", "use a GPU of the MI200, MI300 or MI350 series, or RDNA"

    @classmethod
    def make_kernels(cls, driver: Driver, facts: DeviceFacts, options: Mapping[str, Any]) -> KernelTable:
        directory = options.get("cache_dir", "")
        images = UnitImages(
            facts.architecture,
            hiprtc_path=options["hiprtc"],
            runtime_path=cls.open_driver(options).library_path,
            cache=CompileCache(Path(directory) if directory else None),
            timeout_s=options["compile_timeout_s"],
        )
        units = source_tree().units(traced=bool(options.get("trace_kernels", False)))
        return KernelTable(driver, facts, units, images)

    @classmethod
    def torch_device_of(cls, ordinal: int) -> TorchDevice:
        return TorchDevice(ordinal, "hip")
