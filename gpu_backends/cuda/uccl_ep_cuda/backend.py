"""The CUDA backend."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from uccl_ep_core.device_runtime.backend import RuntimeBackend
from uccl_ep_core.device_runtime.compile_cache import CompileCache
from uccl_ep_core.device_runtime.driver import DeviceFacts, Driver, DriverError
from uccl_ep_core.device_runtime.kernels import KernelTable
from uccl_ep_core.device_runtime.library import LibraryNotFoundError
from uccl_ep_core.device_runtime.torch_device import TorchDevice
from uccl_ep_core.errors import BackendUnavailableError
from uccl_ep_core.transport import Device, Option

from .build import UnitImages, source_tree
from .driver import CudaDriver

_OLDEST_MAJOR = 8  # of compute capability: memory-model instructions and async copies of the kernels

_NO_DRIVER = "install the NVIDIA driver, or in a container pass the GPUs in (docker run --gpus all)"
_TORCH_REMEDY = "install a CUDA build of torch: https://pytorch.org/get-started/locally"


@functools.cache
def open_driver() -> CudaDriver:
    """One driver object a process; a failure is not kept."""
    return CudaDriver()


class CudaBackend(RuntimeBackend):
    """NVIDIA GPUs from compute capability 8.0, through the driver API."""

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "max_blocks": Option(0, "blocks of a launch at most; 0: one for each multiprocessor", minimum=0),
        "nvrtc": Option("", "path of libnvrtc; empty: that of torch's packages or of an installed toolkit"),
        "compile_timeout_s": Option(120.0, "seconds that compiling one file may take", minimum=1.0),
    }

    @classmethod
    def probe(cls, options: Mapping[str, Any]) -> Sequence[Device]:
        try:
            driver = open_driver()
            ordinals = range(driver.device_count())
        except LibraryNotFoundError as error:
            return [Device("cuda", False, f"the CUDA driver is not here: {error}", _NO_DRIVER)]
        except DriverError as error:
            return [Device("cuda", False, str(error), _NO_DRIVER)]
        if not ordinals:
            return [
                Device("cuda", False, "the CUDA driver sees no device", "check nvidia-smi and CUDA_VISIBLE_DEVICES")
            ]
        return [_judge(driver, ordinal) for ordinal in ordinals]

    @classmethod
    def open(cls, device: str | None, options: Mapping[str, Any]) -> CudaBackend:
        ordinal = _ordinal(device)
        devices = cls.probe(options)
        chosen = next((found for found in devices if found.name in (f"cuda:{ordinal}", "cuda")), None)
        if chosen is None:
            names = ", ".join(found.name for found in devices)
            raise BackendUnavailableError(f"there is no device cuda:{ordinal}; there are: {names}")
        if not chosen.usable:
            raise BackendUnavailableError(f"{chosen.name} cannot be used: {chosen.reason}. {chosen.remedy}")
        driver = open_driver()
        settings = {name: option.default for name, option in cls.OPTIONS.items()} | dict(options)

        def make_kernels(opened: Driver, facts: DeviceFacts) -> KernelTable:
            directory = settings.get("cache_dir", "")
            images = UnitImages(
                facts.architecture,
                nvrtc_path=settings["nvrtc"],
                newest_major=driver.version[0],
                cache=CompileCache(Path(directory) if directory else None),
                timeout_s=settings["compile_timeout_s"],
            )
            return KernelTable(opened, facts, source_tree().units(), images)

        return cls(driver, ordinal, TorchDevice(ordinal), make_kernels, settings["max_blocks"])


def _judge(driver: CudaDriver, ordinal: int) -> Device:
    name = f"cuda:{ordinal}"
    try:
        facts = driver.facts(ordinal)
    except DriverError as error:
        return Device(name, False, str(error), _NO_DRIVER)
    details = {
        "name": facts.name,
        "architecture": facts.architecture,
        "pci_address": facts.pci_address,
        "multiprocessors": facts.multiprocessors,
        "dmabuf": facts.dmabuf,
    }
    if int(facts.architecture[3:-1]) < _OLDEST_MAJOR:
        needed = f"use a GPU of compute capability {_OLDEST_MAJOR}.0 or later"
        return Device(name, False, f"{facts.name} is {facts.architecture}", needed, details)
    problem = TorchDevice.unavailable_because()
    if problem:
        return Device(name, False, problem, _TORCH_REMEDY, details)
    return Device(name, True, f"{facts.name}, {facts.architecture}", "", details)


def _ordinal(device: str | None) -> int:
    if not device or device == "cuda":
        return TorchDevice.current_ordinal() if not TorchDevice.unavailable_because() else 0
    match = re.fullmatch(r"(?:cuda:)?(\d+)", device)
    if match is None:
        raise BackendUnavailableError(f"device {device!r} is not a CUDA device; expected for example 'cuda:0'")
    return int(match[1])
