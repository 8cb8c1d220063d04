"""A GPU backend over any vendor's driver: everything that does not depend on the vendor's words."""

from __future__ import annotations

import abc
import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from .. import shared_memory
from ..errors import ArgumentError, BackendUnavailableError, BufferClosedError, ConfigurationError
from ..gpu_backend import Event, GpuBackend, KernelLimits, Window
from ..transport import Device, Memory
from .driver import DeviceFacts, Driver, DriverError
from .events import RuntimeEvent, poll
from .kernels import KernelTable
from .library import LibraryNotFoundError
from .torch_device import TorchDevice
from .windows import (
    RuntimeWindow,
    WindowHandle,
    WindowImportError,
    machine_identity,
    on_device,
    process_identity,
)

if TYPE_CHECKING:
    from typing_extensions import Self

_SHARED_ALIGNMENT = 128  # bytes; the staging behind a kernel's own shared memory starts aligned


class RuntimeBackend(GpuBackend, abc.ABC):
    """One device. A vendor's subclass names its devices, opens its driver and compiles for a device.

    Attributes:
        VENDOR: what devices are called: ``VENDOR:ordinal``.
        DRIVER_REMEDY: what to do where the driver is missing or fails.
        DEVICE_REMEDY: where it sees no device.
        TORCH_REMEDY: where torch cannot use the device.

    Args:
        driver: the vendor's driver.
        ordinal: the device.
        torch_device: where tensors and the current stream come from.
        make_kernels: loads all kernels for this device; its context is current.
        max_blocks: blocks of a launch that wait for each other; 0: one a multiprocessor.
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
    def make_kernels(cls, driver: Driver, facts: DeviceFacts, options: Mapping[str, Any]) -> KernelTable:
        """All kernels for this device, whose context is current."""

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
    def open(cls, device: str | None, options: Mapping[str, Any]) -> Self:
        ordinal = cls._ordinal(device)
        devices = cls.probe(options)
        chosen = next((found for found in devices if found.name in (f"{cls.VENDOR}:{ordinal}", cls.VENDOR)), None)
        if chosen is None:
            names = ", ".join(found.name for found in devices)
            raise BackendUnavailableError(f"there is no device {cls.VENDOR}:{ordinal}; there are: {names}")
        if not chosen.usable:
            raise BackendUnavailableError(f"{chosen.name} cannot be used: {chosen.reason}. {chosen.remedy}")
        settings = {name: option.default for name, option in cls.OPTIONS.items()} | dict(options)
        return cls(
            cls.open_driver(options),
            ordinal,
            cls.torch_device_of(ordinal),
            lambda driver, facts: cls.make_kernels(driver, facts, settings),
            settings["max_blocks"],
        )

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

    def __init__(
        self,
        driver: Driver,
        ordinal: int,
        torch_device: TorchDevice,
        make_kernels: Callable[[Driver, DeviceFacts], KernelTable],
        max_blocks: int = 0,
    ) -> None:
        self._driver = driver
        self._torch = torch_device
        self._closed = False
        self._live: set[RuntimeWindow] = set()
        self.facts = driver.facts(ordinal)
        if max_blocks > self.facts.multiprocessors:
            raise ConfigurationError(
                f"max_blocks = {max_blocks}: {self.facts.name} runs at most {self.facts.multiprocessors} "
                f"blocks that wait for each other"
            )
        self._max_blocks = max_blocks or self.facts.multiprocessors
        torch_device.initialize()
        driver.attach(ordinal)
        with driver.active(ordinal):
            if driver.is_capturing(torch_device.current_stream()):
                raise ConfigurationError(
                    "a buffer cannot be built while a graph is being captured; build it before the capture"
                )
            # All kernels are loaded now: loading later could fall into a capture, where it is refused.
            self._kernels = make_kernels(driver, self.facts)
            try:
                self._communication_stream = driver.create_stream()
            except BaseException:
                self._kernels.close()
                raise

    # ---- facts ----
    @property
    def ordinal(self) -> int:
        return self.facts.ordinal

    @property
    def torch_device(self) -> torch.device:
        return self._torch.device

    @property
    def limits(self) -> KernelLimits:
        warps = self.facts.max_threads_per_block // self.facts.warp_size
        shared_bytes = self.facts.max_shared_bytes - self.facts.staging_bytes
        return KernelLimits(self._max_blocks, warps, self.facts.warp_size, shared_bytes)

    def describe(self) -> Mapping[str, Any]:
        """Facts for ``uccl-ep info``."""
        return {
            "device": self.facts.name,
            "architecture": self.facts.architecture,
            "pci_address": self.facts.pci_address,
            "multiprocessors": self.facts.multiprocessors,
            "cooperative_launch": self.facts.cooperative,
            "kernels": self._kernels.origin,
        }

    # ---- memory ----
    def allocate_data_window(self, nbytes: int, *, for_transport: bool, device_memory: bool) -> Window:
        if for_transport and not device_memory:
            return self.allocate_host_window(nbytes)
        granularity = self._driver.allocation_granularity
        window = self._allocate(-(-nbytes // granularity) * granularity, nbytes, exported=True, dmabuf=for_transport)
        return window

    def allocate_device_memory(self, nbytes: int) -> Window:
        return self._allocate(max(nbytes, 1), nbytes, exported=False, dmabuf=False)

    def _allocate(self, rounded: int, nbytes: int, *, exported: bool, dmabuf: bool) -> RuntimeWindow:
        self._check_open()
        driver, ordinal = self._driver, self.ordinal
        with driver.active(ordinal):
            pointer = driver.allocate(rounded, polled_by_peers=exported)
            undo = [on_device(driver, ordinal, driver.free, pointer)]
            try:
                driver.fill_zero(pointer, rounded)
                payload = driver.export_memory(pointer) if exported else None
                descriptor = driver.dmabuf_fd(pointer, rounded) if dmabuf and self.facts.dmabuf else None
            except BaseException:
                undo.pop()()
                raise
        if descriptor is not None:
            undo.append(_closer(descriptor))
        memory = Memory(pointer, nbytes, device=ordinal, dmabuf_fd=descriptor)
        return self._keep(RuntimeWindow(memory, pointer, undo, payload))

    def copy_to_device(self, window: Window, data: bytes, offset: int = 0) -> None:
        self._check_open()
        if offset < 0 or offset + len(data) > window.memory.nbytes:
            raise ArgumentError(f"bytes [{offset}, {offset + len(data)}) do not fit {window.memory.nbytes}")
        source = (ctypes.c_char * max(len(data), 1)).from_buffer_copy(data or b"\0")
        with self._driver.active(self.ordinal):
            self._driver.copy_to_device(window.device_pointer + offset, ctypes.addressof(source), len(data))

    def allocate_host_window(self, nbytes: int) -> Window:
        self._check_open()
        return self._map_host(shared_memory.create(nbytes))

    def _map_host(self, memory: shared_memory.SharedMemory) -> RuntimeWindow:
        driver, ordinal = self._driver, self.ordinal
        try:
            with driver.active(ordinal):
                device_pointer = driver.register_host(memory.pointer, memory.nbytes)
        except BaseException:
            memory.close()
            raise
        handle = bytes(memory.handle())
        undo: list[Callable[[], None]] = [
            memory.close,
            on_device(driver, ordinal, driver.unregister_host, memory.pointer),
        ]
        described = Memory(memory.pointer, memory.nbytes, share_handle=handle)
        return self._keep(RuntimeWindow(described, device_pointer, undo, handle))

    def export_window(self, window: Window) -> bytes:
        self._check_open()
        if not isinstance(window, RuntimeWindow) or window.payload is None:
            raise ArgumentError("this window is private to its rank; allocate a data window or a host window to share")
        memory = window.memory
        device = "" if memory.device is None else self.facts.unique_id.hex()
        return WindowHandle(
            self._driver.name,
            machine_identity(),
            process_identity(),
            window.device_pointer,
            memory.nbytes,
            device,
            window.payload,
        ).pack()

    def import_window(self, handle: bytes) -> Window:
        self._check_open()
        wanted = WindowHandle.unpack(handle)
        if wanted.host != machine_identity():
            raise WindowImportError("the window lies on another machine")
        if not wanted.device:
            return self._map_host(shared_memory.attach(wanted.payload))
        if wanted.driver != self._driver.name:
            raise WindowImportError(f"the window lies in memory of {wanted.driver}, this rank uses {self._driver.name}")
        owner = self._check_reach(wanted.device)
        memory = Memory(wanted.pointer, wanted.nbytes, device=self.ordinal if owner is None else owner)
        if wanted.process == process_identity():
            # Ranks that are threads of one process share its addresses already.
            return self._keep(RuntimeWindow(memory, wanted.pointer, []))
        driver, ordinal = self._driver, self.ordinal
        with driver.active(ordinal):
            pointer = driver.import_memory(wanted.payload)
        undo = [on_device(driver, ordinal, driver.release_import, pointer)]
        memory = Memory(pointer, wanted.nbytes, device=memory.device)
        return self._keep(RuntimeWindow(memory, pointer, undo))

    def _check_reach(self, unique_id: str) -> int | None:
        """The ordinal of the device that holds a window, or None where this process does not see it."""
        with self._driver.active(self.ordinal):
            for peer in range(self._driver.device_count()):
                facts = self.facts if peer == self.ordinal else self._driver.facts(peer)
                if facts.unique_id.hex() != unique_id:
                    continue
                if peer != self.ordinal and not self._driver.can_access(self.ordinal, peer):
                    raise WindowImportError(
                        f"kernels of {self.facts.name} at {self.facts.pci_address} cannot reach memory of the device "
                        f"at {facts.pci_address}: no peer access between them"
                    )
                return peer
        return None

    def _keep(self, window: RuntimeWindow) -> RuntimeWindow:
        self._live.add(window)
        window.when_closed(lambda: self._live.discard(window))
        return window

    # ---- kernels ----
    def launch(
        self,
        kernel: str,
        parameters: bytes,
        *,
        num_blocks: int,
        warps_per_block: int,
        shared_bytes: int = 0,
        stream: int | None = None,
        cooperative: bool = True,
    ) -> None:
        self._check_open()
        limits = self.limits
        if not 1 <= warps_per_block <= limits.max_warps_per_block:
            raise ArgumentError(f"warps_per_block = {warps_per_block}: must be 1 to {limits.max_warps_per_block}")
        if num_blocks < 1 or (cooperative and num_blocks > limits.max_blocks):
            raise ArgumentError(f"num_blocks = {num_blocks}: must be 1 to {limits.max_blocks}")
        if shared_bytes > limits.max_shared_bytes:
            raise ArgumentError(f"shared_bytes = {shared_bytes}: at most {limits.max_shared_bytes} on this device")
        shared_bytes = -(-shared_bytes // _SHARED_ALIGNMENT) * _SHARED_ALIGNMENT + self.facts.staging_bytes
        target = self.current_stream() if stream is None else stream
        threads = warps_per_block * limits.warp_size
        with self._driver.active(self.ordinal):
            function = self._kernels.ready(kernel, parameters, num_blocks, threads, shared_bytes, cooperative)
            self._driver.launch(
                function,
                blocks=num_blocks,
                threads=threads,
                shared_bytes=shared_bytes,
                stream=target,
                parameters=parameters,
                cooperative=cooperative and self.facts.cooperative and num_blocks > 1,
            )

    # ---- tensors, streams, events ----
    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._torch.empty(shape, dtype)

    def current_stream(self) -> int:
        return self._torch.current_stream()

    def communication_stream(self) -> int:
        self._check_open()
        return self._communication_stream

    def record_event(self, stream: int | None = None) -> Event:
        self._check_open()
        event = RuntimeEvent(self._driver, self.ordinal, self.current_stream)
        event.record(self.current_stream() if stream is None else stream)
        return event

    def synchronize(self, stream: int | None, timeout_s: float) -> bool:
        target = self.current_stream() if stream is None else stream
        with self._driver.active(self.ordinal):
            return poll(lambda: self._driver.stream_done(target), timeout_s)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for window in list(self._live):
            window.close()
        with self._driver.active(self.ordinal):
            self._driver.destroy_stream(self._communication_stream)
            self._kernels.close()

    def _check_open(self) -> None:
        if self._closed:
            raise BufferClosedError("this backend was closed")


def _closer(descriptor: int) -> Callable[[], None]:
    return lambda: os.close(descriptor)
