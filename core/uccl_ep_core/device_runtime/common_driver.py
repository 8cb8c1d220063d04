"""What drivers have in common that follow one interface under names of their own: streams, events, modules, launches.

Such interfaces differ in devices and contexts, in how memory is allocated and copied, and in what they tell of a
kernel: that stays with each.
"""

from __future__ import annotations

import abc
import ctypes
import dataclasses
from ctypes import c_char_p, c_int, c_void_p

from .driver import IPC_HANDLE_BYTES, Driver, DriverError
from .library import Library


class IpcHandle(ctypes.Structure):
    """Names an allocation in other processes; passed by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * IPC_HANDLE_BYTES)]


class Uuid(ctypes.Structure):
    """Names a device."""

    _fields_ = [("bytes", ctypes.c_ubyte * 16)]


SUCCESS = 0
ERROR_NOT_READY = 600
EVENT_DISABLE_TIMING = 2
STREAM_NON_BLOCKING = 1
IPC_LAZY_ENABLE_PEER_ACCESS = 1
HOST_REGISTER_PORTABLE = 1
HOST_REGISTER_MAPPED = 2
RANGE_HANDLE_DMA_BUF_FD = 1
CAPTURE_MODE_RELAXED = 2

_OnePointer = c_void_p * 1


@dataclasses.dataclass(frozen=True)
class Names:
    """A vendor's names of the functions that are called here; device addresses are pointers in their prototypes."""

    error_name: str
    error_text: str
    device_count: str
    device_attribute: str
    free: str
    fill_async: str
    host_register: str
    host_unregister: str
    host_device_pointer: str
    ipc_export: str
    ipc_open: str
    ipc_close: str
    range_handle: str
    stream_priorities: str
    stream_create: str
    stream_destroy: str
    stream_query: str
    stream_synchronize: str
    stream_is_capturing: str
    stream_wait_event: str
    exchange_capture_mode: str
    event_create: str
    event_destroy: str
    event_record: str
    event_query: str
    module_load: str
    module_unload: str
    module_function: str
    resident_blocks: str
    launch: str
    launch_cooperative: str


class CommonDriver(Driver):
    """See `Driver`. A subclass names the functions, and adds what is its own."""

    names: Names

    def __init__(self, library: Library) -> None:
        self._api = library

    @abc.abstractmethod
    def _utility_stream(self) -> int:
        """The current device's stream for the driver's own copies.

        Work of the default stream would wait for kernels of other streams, perhaps for ever: they may be waiting for
        this rank.
        """

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._api, name)(*arguments)
        if code != SUCCESS:
            raise DriverError(name, code, self._words(code))

    def _words(self, code: int) -> str:
        name, text = c_char_p(), c_char_p()
        getattr(self._api, self.names.error_name)(code, ctypes.byref(name))
        getattr(self._api, self.names.error_text)(code, ctypes.byref(text))
        return f"{(name.value or b'unknown error').decode()}: {(text.value or b'no description').decode()}"

    def _handle(self, name: str, *arguments: object) -> int:
        """What a function returns through its first argument, a handle or an address."""
        handle = c_void_p()
        self._call(name, ctypes.byref(handle), *arguments)
        return handle.value or 0

    def _number(self, name: str, *arguments: object) -> int:
        """What a function returns through its first argument, an int."""
        number = c_int()
        self._call(name, ctypes.byref(number), *arguments)
        return number.value

    # ---- devices ----
    def device_count(self) -> int:
        return self._number(self.names.device_count)

    def _attribute(self, device: int, attribute: int) -> int:
        return self._number(self.names.device_attribute, attribute, device)

    # ---- memory ----
    def free(self, pointer: int) -> None:
        self._call(self.names.free, pointer)

    def fill_zero(self, pointer: int, nbytes: int) -> None:
        stream = self._utility_stream()
        self._call(self.names.fill_async, pointer, 0, nbytes, stream)
        self._call(self.names.stream_synchronize, stream)

    def export_memory(self, pointer: int) -> bytes:
        handle = IpcHandle()
        self._call(self.names.ipc_export, ctypes.byref(handle), pointer)
        return bytes(handle.reserved)

    def import_memory(self, handle: bytes) -> int:
        native = IpcHandle.from_buffer_copy(handle.ljust(IPC_HANDLE_BYTES, b"\0"))
        return self._handle(self.names.ipc_open, native, IPC_LAZY_ENABLE_PEER_ACCESS)

    def release_import(self, pointer: int) -> None:
        self._call(self.names.ipc_close, pointer)

    def register_host(self, pointer: int, nbytes: int) -> int:
        self._call(self.names.host_register, pointer, nbytes, HOST_REGISTER_PORTABLE | HOST_REGISTER_MAPPED)
        try:
            return self._handle(self.names.host_device_pointer, pointer, 0)
        except DriverError:
            self.unregister_host(pointer)
            raise

    def unregister_host(self, pointer: int) -> None:
        self._call(self.names.host_unregister, pointer)

    def dmabuf_fd(self, pointer: int, nbytes: int) -> int | None:
        if not self._api.has(self.names.range_handle):
            return None
        descriptor = c_int(-1)
        code = getattr(self._api, self.names.range_handle)(
            ctypes.byref(descriptor), pointer, nbytes, RANGE_HANDLE_DMA_BUF_FD, 0
        )
        return descriptor.value if code == SUCCESS and descriptor.value >= 0 else None

    # ---- streams and events ----
    def create_stream(self) -> int:
        least, greatest = c_int(), c_int()
        self._call(self.names.stream_priorities, ctypes.byref(least), ctypes.byref(greatest))
        return self._handle(self.names.stream_create, STREAM_NON_BLOCKING, greatest.value)

    def destroy_stream(self, stream: int) -> None:
        self._call(self.names.stream_destroy, stream)

    def stream_done(self, stream: int) -> bool:
        return self._done(self.names.stream_query, stream)

    def is_capturing(self, stream: int) -> bool:
        status = c_int()
        self._call(self.names.stream_is_capturing, stream, ctypes.byref(status))
        return status.value != 0

    def create_event(self) -> int:
        return self._handle(self.names.event_create, EVENT_DISABLE_TIMING)

    def destroy_event(self, event: int) -> None:
        self._call(self.names.event_destroy, event)

    def record_event(self, event: int, stream: int) -> None:
        self._call(self.names.event_record, event, stream)

    def wait_event(self, stream: int, event: int) -> None:
        self._call(self.names.stream_wait_event, stream, event, 0)

    def event_done(self, event: int) -> bool:
        return self._done(self.names.event_query, event)

    def _done(self, query: str, handle: int) -> bool:
        # A query by this thread must not break a capture that another thread has begun.
        mode = c_int(CAPTURE_MODE_RELAXED)
        self._call(self.names.exchange_capture_mode, ctypes.byref(mode))
        try:
            code = getattr(self._api, query)(handle)
        finally:
            self._call(self.names.exchange_capture_mode, ctypes.byref(mode))
        if code not in (SUCCESS, ERROR_NOT_READY):
            raise DriverError(query, code, self._words(code))
        return bool(code == SUCCESS)

    # ---- kernels ----
    def load_module(self, image: bytes) -> int:
        return self._handle(self.names.module_load, ctypes.create_string_buffer(image, len(image)))

    def unload_module(self, module: int) -> None:
        self._call(self.names.module_unload, module)

    def get_function(self, module: int, name: str) -> int:
        return self._handle(self.names.module_function, module, name.encode())

    def resident_blocks(self, function: int, threads: int, shared_bytes: int) -> int:
        return self._number(self.names.resident_blocks, function, threads, shared_bytes)

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
    ) -> None:
        # The driver copies the parameters before it returns.
        buffer = ctypes.create_string_buffer(parameters, len(parameters))
        pointers = _OnePointer(ctypes.addressof(buffer))
        shape = (blocks, 1, 1, threads, 1, 1, shared_bytes, stream)
        if cooperative:
            self._call(self.names.launch_cooperative, function, *shape, pointers)
        else:
            self._call(self.names.launch, function, *shape, pointers, None)
