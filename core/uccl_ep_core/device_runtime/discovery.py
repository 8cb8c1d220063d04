"""Which devices a vendor's driver has, which of them can be used, and what to do about the others."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..errors import BackendUnavailableError
from ..transport import Device
from .driver import DeviceFacts, Driver, DriverError
from .library import LibraryNotFoundError
from .torch_device import TorchDevice


class VendorDevices(abc.ABC):
    """The devices of one vendor. A subclass opens the driver, and says which devices it refuses.

    Attributes:
        VENDOR: what devices are called: ``VENDOR:ordinal``.
        DRIVER_REMEDY: what to do where the driver is missing or fails.
        DEVICE_REMEDY: where it sees no device.
        TORCH_REMEDY: where torch cannot use the device.
    """

    VENDOR: ClassVar[str]
    DRIVER_REMEDY: ClassVar[str]
    DEVICE_REMEDY: ClassVar[str]
    TORCH_REMEDY: ClassVar[str]

    @classmethod
    @abc.abstractmethod
    def open_driver(cls, options: Mapping[str, Any]) -> Driver:
        """The driver, one a process. Raises `LibraryNotFoundError` or `DriverError`."""

    @classmethod
    @abc.abstractmethod
    def refuse(cls, facts: DeviceFacts) -> tuple[str, str] | None:
        """Why this device cannot be used, and the remedy; None where it can."""

    @classmethod
    @abc.abstractmethod
    def torch_device_of(cls, ordinal: int) -> TorchDevice:
        """Where tensors and the current stream come from."""

    @classmethod
    def probe(cls, options: Mapping[str, Any]) -> Sequence[Device]:
        try:
            driver = cls.open_driver(options)
            ordinals = range(driver.device_count())
        except LibraryNotFoundError as error:
            return [Device(cls.VENDOR, False, f"its driver is not here: {error}", cls.DRIVER_REMEDY)]
        except DriverError as error:
            return [Device(cls.VENDOR, False, str(error), cls.DRIVER_REMEDY)]
        if not ordinals:
            return [Device(cls.VENDOR, False, "the driver sees no device", cls.DEVICE_REMEDY)]
        return [cls._judge(driver, ordinal) for ordinal in ordinals]

    @classmethod
    def _judge(cls, driver: Driver, ordinal: int) -> Device:
        name = f"{cls.VENDOR}:{ordinal}"
        try:
            facts = driver.facts(ordinal)
        except DriverError as error:
            return Device(name, False, str(error), cls.DRIVER_REMEDY)
        details = {
            "name": facts.name,
            "architecture": facts.architecture,
            "pci_address": facts.pci_address,
            "multiprocessors": facts.multiprocessors,
            "cooperative_launch": facts.cooperative,
            "dmabuf": facts.dmabuf,
        }
        refused = cls.refuse(facts)
        if refused is not None:
            return Device(name, False, *refused, details)
        problem = cls.torch_device_of(ordinal).unavailable_because()
        if problem:
            return Device(name, False, problem, cls.TORCH_REMEDY, details)
        return Device(name, True, f"{facts.name}, {facts.architecture}", "", details)

    @classmethod
    def choose(cls, device: str | None, options: Mapping[str, Any]) -> int:
        """The ordinal of a usable device: the one that is named, or None: torch's current one.

        Raises:
            BackendUnavailableError: there is no such device, or it cannot be used.
        """
        ordinal = cls._ordinal(device)
        devices = cls.probe(options)
        chosen = next((found for found in devices if found.name in (f"{cls.VENDOR}:{ordinal}", cls.VENDOR)), None)
        if chosen is None:
            names = ", ".join(found.name for found in devices)
            raise BackendUnavailableError(f"there is no device {cls.VENDOR}:{ordinal}; there are: {names}")
        if not chosen.usable:
            raise BackendUnavailableError(f"{chosen.name} cannot be used: {chosen.reason}. {chosen.remedy}")
        return ordinal

    @classmethod
    def _ordinal(cls, device: str | None) -> int:
        # Devices have this vendor's name or torch's, which may differ; "1" is short for either.
        torch_device = cls.torch_device_of(0)
        kind, _, number = (device or cls.VENDOR).partition(":")
        if kind.isdigit() and not number:
            kind, number = cls.VENDOR, kind
        if kind not in (cls.VENDOR, torch_device.device.type) or not (number.isdigit() or number == ""):
            raise BackendUnavailableError(f"there is no device {device!r}; expected for example '{cls.VENDOR}:0'")
        if number:
            return int(number)
        return 0 if torch_device.unavailable_because() else torch_device.current_ordinal()
