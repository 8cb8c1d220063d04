"""The HIP backend."""

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
from .driver import HipDriver
from .driver_api import LIBRARIES

_SUPPORTED = re.compile(r"gfx(90a|94[0-9]|95[0-9]|1[0-9]{3})$")

_NO_DRIVER = "install ROCm 6 or later, or in a container pass /dev/kfd and /dev/dri in"
_TORCH_REMEDY = "install a ROCm build of torch: https://pytorch.org/get-started/locally"


@functools.cache
def open_driver(library: str) -> HipDriver:
    """One driver object a process and library; a failure is not kept."""
    return HipDriver((library,) if library else LIBRARIES)


class HipBackend(RuntimeBackend):
    """AMD GPUs, through the HIP runtime. It has never run on a card; docs/backends/hip.md says what was checked."""

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "max_blocks": Option(0, "blocks of a launch at most; 0: one for each compute unit", minimum=0),
        "library": Option("", "path of libamdhip64; empty: that of the system"),
        "hiprtc": Option("", "path of libhiprtc; empty: that beside the HIP library or of an installed ROCm"),
        "compile_timeout_s": Option(120.0, "seconds that compiling one file may take", minimum=1.0),
    }

    @classmethod
    def torch_device_of(cls, ordinal: int) -> TorchDevice:
        """Where tensors come from; a test without a card gives its own."""
        return TorchDevice(ordinal)

    @classmethod
    def probe(cls, options: Mapping[str, Any]) -> Sequence[Device]:
        try:
            driver = open_driver(options.get("library", ""))
            ordinals = range(driver.device_count())
        except LibraryNotFoundError as error:
            return [Device("hip", False, f"the HIP runtime is not here: {error}", _NO_DRIVER)]
        except DriverError as error:
            return [Device("hip", False, str(error), _NO_DRIVER)]
        if not ordinals:
            remedy = "check rocm-smi and HIP_VISIBLE_DEVICES"
            return [Device("hip", False, "the HIP runtime sees no device", remedy)]
        return [cls._judge(driver, ordinal) for ordinal in ordinals]

    @classmethod
    def open(cls, device: str | None, options: Mapping[str, Any]) -> HipBackend:
        ordinal = cls._ordinal(device)
        devices = cls.probe(options)
        chosen = next((found for found in devices if found.name in (f"hip:{ordinal}", "hip")), None)
        if chosen is None:
            names = ", ".join(found.name for found in devices)
            raise BackendUnavailableError(f"there is no device hip:{ordinal}; there are: {names}")
        if not chosen.usable:
            raise BackendUnavailableError(f"{chosen.name} cannot be used: {chosen.reason}. {chosen.remedy}")
        settings = {name: option.default for name, option in cls.OPTIONS.items()} | dict(options)
        driver = open_driver(settings["library"])

        def make_kernels(opened: Driver, facts: DeviceFacts) -> KernelTable:
            directory = settings.get("cache_dir", "")
            images = UnitImages(
                facts.architecture,
                hiprtc_path=settings["hiprtc"],
                runtime_path=driver.library_path,
                cache=CompileCache(Path(directory) if directory else None),
                timeout_s=settings["compile_timeout_s"],
            )
            return KernelTable(opened, facts, source_tree().units(), images)

        return cls(driver, ordinal, cls.torch_device_of(ordinal), make_kernels, settings["max_blocks"])

    @classmethod
    def _judge(cls, driver: HipDriver, ordinal: int) -> Device:
        name = f"hip:{ordinal}"
        try:
            facts = driver.facts(ordinal)
        except DriverError as error:
            return Device(name, False, str(error), _NO_DRIVER)
        details = {
            "name": facts.name,
            "architecture": facts.architecture,
            "pci_address": facts.pci_address,
            "multiprocessors": facts.multiprocessors,
            "warp_size": facts.warp_size,
        }
        if not _SUPPORTED.match(facts.architecture):
            needed = "use a GPU of the MI200, MI300 or MI350 series, or RDNA"
            return Device(name, False, f"{facts.name} is {facts.architecture}", needed, details)
        problem = cls.torch_device_of(ordinal).unavailable_because()
        if problem:
            return Device(name, False, problem, _TORCH_REMEDY, details)
        return Device(name, True, f"{facts.name}, {facts.architecture}", "", details)

    @classmethod
    def _ordinal(cls, device: str | None) -> int:
        if not device or device in ("hip", "cuda"):
            torch_device = cls.torch_device_of(0)
            return torch_device.current_ordinal() if not torch_device.unavailable_because() else 0
        # ROCm builds of torch call their devices "cuda".
        match = re.fullmatch(r"(?:(?:hip|cuda):)?(\d+)", device)
        if match is None:
            raise BackendUnavailableError(f"device {device!r} is not a HIP device; expected for example 'hip:0'")
        return int(match[1])
