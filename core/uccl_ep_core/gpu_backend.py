"""Contract 1: the GPU backend.

A backend plugin is a class with this interface under the entry-point group ``uccl_ep.gpu_backends``.
It gives memory that peers can reach, streams and events that meet torch's current stream, and it
launches the kernels of ``core/kernels`` by name, compiled against its own primitives header.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from .errors import ArgumentError
from .transport import Device, Memory, Option


@dataclasses.dataclass(frozen=True)
class KernelLimits:
    """How many threads can run at once, which bounds a launch whose blocks wait for each other.

    Attributes:
        max_blocks: blocks that are certain to run at the same time.
        max_warps_per_block: warps of one block.
        warp_size: lanes of a warp or wavefront.
        max_shared_bytes: most ``shared_bytes`` of a launch.
        block_teams: most groups of several warps that one block may be divided into, each of which waits for its own
            warps alone (``device::sync_warps``); 1: warps meet all of their block, or alone.
    """

    max_blocks: int
    max_warps_per_block: int
    warp_size: int
    max_shared_bytes: int = 32 << 10
    block_teams: int = 1


class Window(abc.ABC):
    """Memory that is reachable from kernels, and perhaps from peers and transports.

    Attributes:
        memory: where it is, as a transport sees it.
        device_pointer: the address kernels use (differs from ``memory.pointer`` only for mapped host memory).
    """

    memory: Memory
    device_pointer: int

    def check_range(self, offset: int, nbytes: int) -> None:
        """Raise `ArgumentError` where bytes [offset, offset + nbytes) are not all in it."""
        if offset < 0 or offset + nbytes > self.memory.nbytes:
            raise ArgumentError(f"bytes [{offset}, {offset + nbytes}) do not fit {self.memory.nbytes}")

    @abc.abstractmethod
    def close(self) -> None:
        """Free or unmap. May be called twice."""


class Event(abc.ABC):
    """A point in a stream. On the host, work is done when a call returns, so events are always complete."""

    @abc.abstractmethod
    def wait(self, stream: int | None = None) -> None:
        """Make a stream (None: torch's current one) wait for this point."""

    @abc.abstractmethod
    def synchronize(self, timeout_s: float) -> bool:
        """Block the calling thread until this point has passed; False when it has not in time."""


class GpuBackend(abc.ABC):
    """Access to one device. One object serves one buffer of one rank."""

    OPTIONS: ClassVar[Mapping[str, Option]] = {}

    @classmethod
    @abc.abstractmethod
    def probe(cls, options: Mapping[str, Any]) -> Sequence[Device]:
        """List the devices, each refused one with its reason and remedy. Never raises."""

    @classmethod
    @abc.abstractmethod
    def open(cls, device: str | None, options: Mapping[str, Any]) -> GpuBackend:
        """Open a device (None: the current one). Raises `BackendUnavailableError` with the remedy."""

    @property
    @abc.abstractmethod
    def torch_device(self) -> torch.device:
        """Where the caller's tensors must be."""

    @property
    @abc.abstractmethod
    def limits(self) -> KernelLimits: ...

    @property
    def waiting_threads(self) -> int:
        """CPU threads of this rank that poll while a kernel waits; 0 where kernels run on a GPU."""
        return 0

    def share_cores(self) -> tuple[int, int] | None:
        """From now on give cores away while kernels wait: this host has fewer of them than threads that poll.

        Called before the first launch. Returns the address of a C function and of its argument, which proxies call
        when they have raised signals, so that such waits end early; None where kernels keep no core.
        """
        return None

    @abc.abstractmethod
    def allocate_data_window(self, nbytes: int, *, for_transport: bool, device_memory: bool) -> Window:
        """Zeroed payload memory.

        Args:
            nbytes: length.
            for_transport: a transport will register it.
            device_memory: that transport can register GPU memory; otherwise, with ``for_transport``,
                the window lies in host memory that kernels can reach.
        """

    @abc.abstractmethod
    def allocate_host_window(self, nbytes: int) -> Window:
        """Zeroed host memory, mapped for kernels: control windows and rings."""

    @abc.abstractmethod
    def allocate_device_memory(self, nbytes: int) -> Window:
        """Zeroed private memory of the device: counters, ring heads, kernel parameters."""

    @abc.abstractmethod
    def copy_to_device(self, window: Window, data: bytes, offset: int = 0) -> None:
        """Write bytes into a window of `allocate_device_memory`; done when it returns."""

    def copy_from_device(self, window: Window, nbytes: int, offset: int = 0) -> bytes:
        """Read bytes of a window of `allocate_device_memory` that no running kernel writes. Needed where
        `traces_kernels`."""
        raise NotImplementedError

    @property
    def traces_kernels(self) -> bool:
        """Whether launched kernels record spans where they are given a table for them (``Group.spans``), being compiled
        from ``traced_kernels.hpp``. Asked for by the option ``trace_kernels`` of `open`."""
        return False

    @abc.abstractmethod
    def export_window(self, window: Window) -> bytes:
        """A handle with which a process of this host may import the window."""

    @abc.abstractmethod
    def import_window(self, handle: bytes) -> Window:
        """Map a peer's window. Raises any exception where that cannot be done: then the peer is not
        of this scale-up domain, and a transport is used."""

    @abc.abstractmethod
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
        """Run a kernel of ``core/kernels`` by name.

        Args:
            parameters: the bytes of the kernel's parameter struct (``core/kernels/parameters.hpp``).
            num_blocks: at most ``limits.max_blocks`` when ``cooperative``.
            stream: a native stream handle; None: torch's current stream.
        """

    @abc.abstractmethod
    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised contiguous tensor that belongs to the caller."""

    @abc.abstractmethod
    def current_stream(self) -> int:
        """Native handle of torch's current stream."""

    def is_capturing(self) -> bool:
        """Whether what the current stream is given goes into a graph, to run when that is replayed; False where a
        device has no graphs."""
        return False

    @abc.abstractmethod
    def communication_stream(self) -> int:
        """Native handle of the stream this backend's own work runs on when it is not the current one."""

    @abc.abstractmethod
    def record_event(self, stream: int | None = None) -> Event: ...

    @abc.abstractmethod
    def synchronize(self, stream: int | None, timeout_s: float) -> bool:
        """Wait for a stream's work; False when it is not done in time."""

    @abc.abstractmethod
    def close(self) -> None: ...
