"""A GPU backend over any vendor's driver: everything that does not depend on the vendor's words."""

from __future__ import annotations

import abc
import ctypes
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from .. import shared_memory
from ..errors import ArgumentError, BufferClosedError, ConfigurationError
from ..gpu_backend import Event, GpuBackend, KernelLimits, Window
from ..transport import Memory
from .discovery import VendorDevices
from .driver import DeviceFacts, Driver
from .events import RuntimeEvent, poll
from .kernels import KernelTable
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
_TRACED_BYTES = 128  # of a block, for the word of each warp in which a traced kernel counts (`span_count`)


class RuntimeBackend(VendorDevices, GpuBackend, abc.ABC):
    """One device. A vendor's subclass names its devices, opens its driver and compiles for a device.

    Args:
        driver: the vendor's driver.
        ordinal: the device.
        torch_device: where tensors and the current stream come from.
        make_kernels: loads all kernels for this device; its context is current.
        max_blocks: blocks of a launch that wait for each other; 0: one a multiprocessor.
        traced: the kernels are of the build that records spans.
    """

    BLOCK_TEAMS: ClassVar[int] = 1
    """`KernelLimits.block_teams`, as the primitives are."""

    @classmethod
    @abc.abstractmethod
    def make_kernels(cls, driver: Driver, facts: DeviceFacts, options: Mapping[str, Any]) -> KernelTable:
        """All kernels for this device, whose context is current."""

    @classmethod
    def open(cls, device: str | None, options: Mapping[str, Any]) -> Self:
        ordinal = cls.choose(device, options)
        settings = {name: option.default for name, option in cls.OPTIONS.items()} | dict(options)
        return cls(
            cls.open_driver(options),
            ordinal,
            cls.torch_device_of(ordinal),
            lambda driver, facts: cls.make_kernels(driver, facts, settings),
            settings["max_blocks"],
            bool(settings.get("trace_kernels", False)),
        )

    def __init__(
        self,
        driver: Driver,
        ordinal: int,
        torch_device: TorchDevice,
        make_kernels: Callable[[Driver, DeviceFacts], KernelTable],
        max_blocks: int = 0,
        traced: bool = False,
    ) -> None:
        self._driver = driver
        self._traced = traced
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

    @functools.cached_property
    def limits(self) -> KernelLimits:
        warps = self.facts.max_threads_per_block // self.facts.warp_size
        shared_bytes = self.facts.max_shared_bytes - self.facts.staging_bytes
        if self._traced:
            shared_bytes -= _TRACED_BYTES
        return KernelLimits(self._max_blocks, warps, self.facts.warp_size, shared_bytes, self.BLOCK_TEAMS)

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
        window.check_range(offset, len(data))
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

    def copy_from_device(self, window: Window, nbytes: int, offset: int = 0) -> bytes:
        self._check_open()
        window.check_range(offset, nbytes)
        target = (ctypes.c_char * max(nbytes, 1))()
        with self._driver.active(self.ordinal):
            self._driver.copy_to_host(ctypes.addressof(target), window.device_pointer + offset, nbytes)
        return target.raw[:nbytes]

    @property
    def traces_kernels(self) -> bool:
        return self._traced

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

    def is_capturing(self) -> bool:
        self._check_open()
        with self._driver.active(self.ordinal):
            return self._driver.is_capturing(self._torch.current_stream())

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
