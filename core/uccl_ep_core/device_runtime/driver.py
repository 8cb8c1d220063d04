"""What a vendor's driver must offer so that `RuntimeBackend` can do the rest.

One method is one call of the vendor's API with its words for errors. Everything that is policy
(which memory, when to import, how to wait, where code comes from) lies in the shared backend.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses

from ..errors import EPError

IPC_HANDLE_BYTES = 64


class DriverError(EPError):
    """A call of the driver failed; carries the call, the vendor's code and its words."""

    def __init__(self, call: str, code: int, words: str) -> None:
        super().__init__(f"{call} failed: {words} (code {code})")
        self.call = call
        self.code = code


@dataclasses.dataclass(frozen=True)
class DeviceFacts:
    """What the backend must know of one device.

    Attributes:
        architecture: the name compilers know it by.
        unique_id: equal in every process that sees this device, whatever its ordinal there.
        max_threads_per_block: what the kernels are compiled for, or the device's limit where that is less.
        max_shared_bytes: dynamic shared memory one block can be given.
        staging_bytes: the part of it, at its end, that the primitives use for copies in every launch.
        cooperative: all blocks of a grid can be guaranteed to run at the same time.
        dmabuf: device memory can be exported as a dma-buf.
    """

    ordinal: int
    name: str
    architecture: str
    unique_id: bytes
    pci_address: str
    multiprocessors: int
    warp_size: int
    max_threads_per_block: int
    max_shared_bytes: int
    staging_bytes: int
    cooperative: bool
    dmabuf: bool


class Driver(abc.ABC):
    """One vendor's driver. All handles and addresses are plain integers."""

    name: str
    allocation_granularity: int = 2 << 20
    """Exported memory is rounded up to this many bytes: a smaller allocation shares its page with
    others, and a peer that maps the page would see those too."""

    @abc.abstractmethod
    def device_count(self) -> int: ...

    @abc.abstractmethod
    def facts(self, ordinal: int) -> DeviceFacts: ...

    @abc.abstractmethod
    def attach(self, ordinal: int) -> None:
        """Share the device's context with torch, from now to the end of the process.

        It is never given back: windows and events of closed buffers may be freed at any later time.
        """

    @abc.abstractmethod
    def active(self, ordinal: int) -> contextlib.AbstractContextManager[None]:
        """Calls inside apply to this device, on the calling thread; the previous device comes back."""

    @abc.abstractmethod
    def can_access(self, ordinal: int, peer: int) -> bool:
        """Whether kernels of a device can reach the memory of another, as the driver reports it."""

    # ---- memory ----
    @abc.abstractmethod
    def allocate(self, nbytes: int, *, polled_by_peers: bool) -> int:
        """Device memory. ``polled_by_peers``: peers or CPUs write into it while a kernel reads."""

    @abc.abstractmethod
    def free(self, pointer: int) -> None: ...

    @abc.abstractmethod
    def fill_zero(self, pointer: int, nbytes: int) -> None:
        """Synchronous."""

    @abc.abstractmethod
    def copy_to_host(self, destination: int, source: int, nbytes: int) -> None: ...

    @abc.abstractmethod
    def copy_to_device(self, destination: int, source: int, nbytes: int) -> None: ...

    @abc.abstractmethod
    def export_memory(self, pointer: int) -> bytes: ...

    @abc.abstractmethod
    def import_memory(self, handle: bytes) -> int: ...

    @abc.abstractmethod
    def release_import(self, pointer: int) -> None: ...

    @abc.abstractmethod
    def register_host(self, pointer: int, nbytes: int) -> int:
        """Pin host memory, map it for kernels, and return the address kernels use."""

    @abc.abstractmethod
    def unregister_host(self, pointer: int) -> None: ...

    @abc.abstractmethod
    def dmabuf_fd(self, pointer: int, nbytes: int) -> int | None:
        """A new file descriptor, or None where the driver refuses."""

    # ---- streams and events ----
    @abc.abstractmethod
    def create_stream(self) -> int:
        """A stream of the highest priority that does not wait for the default stream."""

    @abc.abstractmethod
    def destroy_stream(self, stream: int) -> None: ...

    @abc.abstractmethod
    def stream_done(self, stream: int) -> bool: ...

    @abc.abstractmethod
    def is_capturing(self, stream: int) -> bool: ...

    @abc.abstractmethod
    def create_event(self) -> int: ...

    @abc.abstractmethod
    def destroy_event(self, event: int) -> None: ...

    @abc.abstractmethod
    def record_event(self, event: int, stream: int) -> None: ...

    @abc.abstractmethod
    def wait_event(self, stream: int, event: int) -> None: ...

    @abc.abstractmethod
    def event_done(self, event: int) -> bool: ...

    # ---- kernels ----
    @abc.abstractmethod
    def load_module(self, image: bytes) -> int: ...

    @abc.abstractmethod
    def unload_module(self, module: int) -> None: ...

    @abc.abstractmethod
    def get_function(self, module: int, name: str) -> int: ...

    @abc.abstractmethod
    def parameter_bytes(self, function: int) -> int | None:
        """Size of the kernel's one parameter struct, or None where the driver cannot say."""

    @abc.abstractmethod
    def allow_shared_bytes(self, function: int, nbytes: int) -> None: ...

    @abc.abstractmethod
    def resident_blocks(self, function: int, threads: int, shared_bytes: int) -> int:
        """Blocks of this kernel that fit one multiprocessor at a time."""

    @abc.abstractmethod
    def launch(
        self,
        function: int,
        *,
        blocks: int,
        threads: int,
        shared_bytes: int,
        stream: int,
        parameters: bytes,
        cooperative: bool,
    ) -> None: ...
