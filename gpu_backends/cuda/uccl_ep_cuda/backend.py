"""The CUDA backend."""

from __future__ import annotations

import functools
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
from .driver import CudaDriver
from .driver_api import LIBRARIES

_OLDEST_MAJOR = 8  # of compute capability: memory-model instructions and async copies of the kernels


@functools.cache
def _driver(library: str) -> CudaDriver:
    return CudaDriver((library,) if library else LIBRARIES)


class CudaBackend(RuntimeBackend):
    """NVIDIA GPUs from compute capability 8.0, through the driver API."""

    VENDOR = "cuda"
    DRIVER_REMEDY = "install the NVIDIA driver, or in a container pass the GPUs in (docker run --gpus all)"
    DEVICE_REMEDY = "check nvidia-smi and CUDA_VISIBLE_DEVICES"
    TORCH_REMEDY = "install a CUDA build of torch: https://pytorch.org/get-started/locally"

    BLOCK_TEAMS = 15  # as many barriers as a block has besides its own

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "max_blocks": Option(0, "blocks of a launch at most; 0: one for each multiprocessor", minimum=0),
        "library": Option("", "path of libcuda; empty: that of the system"),
        "nvrtc": Option("", "path of libnvrtc; empty: that of torch's packages or of an installed toolkit"),
        "compile_timeout_s": Option(120.0, "seconds that compiling one file may take", minimum=1.0),
    }

    @classmethod
    def open_driver(cls, options: Mapping[str, Any]) -> CudaDriver:
        return _driver(options.get("library", ""))

    @classmethod
    def refuse(cls, facts: DeviceFacts) -> tuple[str, str] | None:
        if int(facts.architecture[3:-1]) >= _OLDEST_MAJOR:
            return None
        remedy = f"use a GPU of compute capability {_OLDEST_MAJOR}.0 or later"
        return f"{facts.name} is {facts.architecture}", remedy

    @classmethod
    def make_kernels(cls, driver: Driver, facts: DeviceFacts, options: Mapping[str, Any]) -> KernelTable:
        directory = options.get("cache_dir", "")
        images = UnitImages(
            facts.architecture,
            nvrtc_path=options["nvrtc"],
            newest_major=cls.open_driver(options).version[0],
            cache=CompileCache(Path(directory) if directory else None),
            timeout_s=options["compile_timeout_s"],
        )
        units = source_tree().units(traced=bool(options.get("trace_kernels", False)))
        return KernelTable(driver, facts, units, images)

    @classmethod
    def torch_device_of(cls, ordinal: int) -> TorchDevice:
        return TorchDevice(ordinal, "cuda")
