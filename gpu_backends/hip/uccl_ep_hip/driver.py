"""The HIP runtime, opened at run time: nothing links against it, and a machine without it is no error."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Sequence

from uccl_ep_core.device_runtime.driver import IPC_HANDLE_BYTES, DeviceFacts, Driver, DriverError
from uccl_ep_core.device_runtime.library import Library

from . import build
from . import driver_api as api
from .code_object import parameter_sizes


def candidates() -> tuple[str, ...]:
    """Libraries to try in order; first the one that this process has loaded.

    A ROCm build of torch may bring its own: with that of the system beside it there would be two runtimes in one
    process, and streams and memory of the one mean nothing to the other.
    """
    try:
        with open("/proc/self/maps") as file:
            paths = [line.split(maxsplit=5)[5].strip() for line in file if "libamdhip64.so" in line]
    except OSError:
        paths = []
    return (*dict.fromkeys(path for path in paths if os.path.isfile(path)), *api.LIBRARIES)


class HipDriver(Driver):
    """See `Driver`. Raises `LibraryNotFoundError` or `DriverError` where there is no usable runtime.

    Args:
        libraries: names or paths tried in order.
    """

    name = "hip"

    def __init__(self, libraries: Sequence[str]) -> None:
        self._api = Library(libraries, api.PROTOTYPES, api.OPTIONAL)
        self.library_path = self._api.path
        self._architectures: dict[int, str] = {}
        self._utility_streams: dict[int, int] = {}
        self._parameter_sizes: dict[int, dict[str, int]] = {}
        self._parameter_bytes: dict[int, int | None] = {}
        self._call("hipInit", 0)
        version = ctypes.c_int()
        self._call("hipRuntimeGetVersion", ctypes.byref(version))
        self.version = (version.value // 10_000_000, version.value // 100_000 % 100)
        """HIP release, as (major, minor)."""

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._api, name)(*arguments)
        if code != api.SUCCESS:
            raise DriverError(name, code, self._words(code))

    def _words(self, code: int) -> str:
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        self._api.hipDrvGetErrorName(code, ctypes.byref(name))
        self._api.hipDrvGetErrorString(code, ctypes.byref(text))
        return f"{(name.value or b'unknown error').decode()}: {(text.value or b'no description').decode()}"

    # ---- devices ----
    def device_count(self) -> int:
        count = ctypes.c_int()
        self._call("hipGetDeviceCount", ctypes.byref(count))
        return count.value

    def _attribute(self, ordinal: int, attribute: int) -> int:
        value = ctypes.c_int()
        self._call("hipDeviceGetAttribute", ctypes.byref(value), attribute, ordinal)
        return value.value

    def facts(self, ordinal: int) -> DeviceFacts:
        properties = api.DeviceProperties()
        self._call("hipGetDevicePropertiesR0600", ctypes.byref(properties), ordinal)
        address, unique = ctypes.create_string_buffer(32), api.Uuid()
        self._call("hipDeviceGetPCIBusId", address, len(address), ordinal)
        self._call("hipDeviceGetUuid", ctypes.byref(unique), ordinal)
        # Reported as for instance gfx942:sramecc+:xnack-; the kernels are compiled for either setting.
        architecture = properties.architecture.decode().split(":")[0]
        cooperative = self._api.has("hipModuleLaunchCooperativeKernel")
        return DeviceFacts(
            ordinal=ordinal,
            name=properties.name.decode(),
            architecture=architecture,
            unique_id=bytes(unique.bytes),
            pci_address=address.value.decode(),
            multiprocessors=self._attribute(ordinal, api.ATTRIBUTE_MULTIPROCESSOR_COUNT),
            warp_size=self._attribute(ordinal, api.ATTRIBUTE_WARP_SIZE),
            max_threads_per_block=min(
                build.MAX_THREADS_PER_BLOCK, self._attribute(ordinal, api.ATTRIBUTE_MAX_THREADS_PER_BLOCK)
            ),
            max_shared_bytes=self._attribute(ordinal, api.ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK)
            - build.STATIC_SHARED_BYTES,
            staging_bytes=0,
            cooperative=cooperative and bool(self._attribute(ordinal, api.ATTRIBUTE_COOPERATIVE_LAUNCH)),
            dmabuf=self._api.has("hipMemGetHandleForAddressRange"),
        )

    def attach(self, ordinal: int) -> None:
        # The runtime has one context a device, which torch shares without being asked.
        if ordinal in self._utility_streams:
            return
        with self.active(ordinal):
            self._architectures[ordinal] = self.facts(ordinal).architecture
            # Work of the default stream would wait for kernels of other streams, perhaps for ever:
            # they may be waiting for this rank.
            self._utility_streams[ordinal] = self.create_stream()

    @contextlib.contextmanager
    def active(self, ordinal: int) -> Iterator[None]:
        current = self._current()
        if current == ordinal:
            yield
            return
        self._call("hipSetDevice", ordinal)
        try:
            yield
        finally:
            self._call("hipSetDevice", current)

    def _current(self) -> int:
        current = ctypes.c_int()
        self._call("hipGetDevice", ctypes.byref(current))
        return current.value

    def can_access(self, ordinal: int, peer: int) -> bool:
        able = ctypes.c_int()
        self._call("hipDeviceCanAccessPeer", ctypes.byref(able), ordinal, peer)
        return bool(able.value)

    # ---- memory ----
    def allocate(self, nbytes: int, *, polled_by_peers: bool) -> int:
        pointer = ctypes.c_void_p()
        if polled_by_peers:
            # A running kernel must see what a peer or a NIC writes: memory that its caches keep no
            # copy of. Before MI300 fine-grained memory is that.
            architecture = self._architectures[self._current()]
            uncached = architecture.startswith(("gfx94", "gfx95"))
            flags = api.MALLOC_UNCACHED if uncached else api.MALLOC_FINE_GRAINED
            self._call("hipExtMallocWithFlags", ctypes.byref(pointer), nbytes, flags)
        else:
            self._call("hipMalloc", ctypes.byref(pointer), nbytes)
        return pointer.value or 0

    def free(self, pointer: int) -> None:
        self._call("hipFree", pointer)

    def fill_zero(self, pointer: int, nbytes: int) -> None:
        stream = self._utility_streams[self._current()]
        self._call("hipMemsetAsync", pointer, 0, nbytes, stream)
        self._call("hipStreamSynchronize", stream)

    def copy_to_host(self, destination: int, source: int, nbytes: int) -> None:
        self._copy(destination, source, nbytes, api.COPY_DEVICE_TO_HOST)

    def copy_to_device(self, destination: int, source: int, nbytes: int) -> None:
        self._copy(destination, source, nbytes, api.COPY_HOST_TO_DEVICE)

    def _copy(self, destination: int, source: int, nbytes: int, kind: int) -> None:
        stream = self._utility_streams[self._current()]
        self._call("hipMemcpyAsync", destination, source, nbytes, kind, stream)
        self._call("hipStreamSynchronize", stream)

    def export_memory(self, pointer: int) -> bytes:
        handle = api.IpcHandle()
        self._call("hipIpcGetMemHandle", ctypes.byref(handle), pointer)
        return bytes(handle.reserved)

    def import_memory(self, handle: bytes) -> int:
        native = api.IpcHandle.from_buffer_copy(handle.ljust(IPC_HANDLE_BYTES, b"\0"))
        pointer = ctypes.c_void_p()
        self._call("hipIpcOpenMemHandle", ctypes.byref(pointer), native, api.IPC_LAZY_ENABLE_PEER_ACCESS)
        return pointer.value or 0

    def release_import(self, pointer: int) -> None:
        self._call("hipIpcCloseMemHandle", pointer)

    def register_host(self, pointer: int, nbytes: int) -> int:
        self._call("hipHostRegister", pointer, nbytes, api.HOST_REGISTER_PORTABLE | api.HOST_REGISTER_MAPPED)
        device_pointer = ctypes.c_void_p()
        try:
            self._call("hipHostGetDevicePointer", ctypes.byref(device_pointer), pointer, 0)
        except DriverError:
            self.unregister_host(pointer)
            raise
        return device_pointer.value or 0

    def unregister_host(self, pointer: int) -> None:
        self._call("hipHostUnregister", pointer)

    def dmabuf_fd(self, pointer: int, nbytes: int) -> int | None:
        if not self._api.has("hipMemGetHandleForAddressRange"):
            return None
        descriptor = ctypes.c_int(-1)
        code = self._api.hipMemGetHandleForAddressRange(
            ctypes.byref(descriptor), pointer, nbytes, api.RANGE_HANDLE_DMA_BUF_FD, 0
        )
        return descriptor.value if code == api.SUCCESS and descriptor.value >= 0 else None

    # ---- streams and events ----
    def create_stream(self) -> int:
        least, greatest, stream = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        self._call("hipDeviceGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
        self._call("hipStreamCreateWithPriority", ctypes.byref(stream), api.STREAM_NON_BLOCKING, greatest.value)
        return stream.value or 0

    def destroy_stream(self, stream: int) -> None:
        self._call("hipStreamDestroy", stream)

    def stream_done(self, stream: int) -> bool:
        return self._done("hipStreamQuery", stream)

    def is_capturing(self, stream: int) -> bool:
        status = ctypes.c_int()
        self._call("hipStreamIsCapturing", stream, ctypes.byref(status))
        return status.value != 0

    def create_event(self) -> int:
        event = ctypes.c_void_p()
        self._call("hipEventCreateWithFlags", ctypes.byref(event), api.EVENT_DISABLE_TIMING)
        return event.value or 0

    def destroy_event(self, event: int) -> None:
        self._call("hipEventDestroy", event)

    def record_event(self, event: int, stream: int) -> None:
        self._call("hipEventRecord", event, stream)

    def wait_event(self, stream: int, event: int) -> None:
        self._call("hipStreamWaitEvent", stream, event, 0)

    def event_done(self, event: int) -> bool:
        return self._done("hipEventQuery", event)

    def _done(self, query: str, handle: int) -> bool:
        # A query by this thread must not break a capture that another thread has begun.
        mode = ctypes.c_int(api.CAPTURE_MODE_RELAXED)
        self._call("hipThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        try:
            code = getattr(self._api, query)(handle)
        finally:
            self._call("hipThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        if code not in (api.SUCCESS, api.ERROR_NOT_READY):
            raise DriverError(query, code, self._words(code))
        return bool(code == api.SUCCESS)

    # ---- kernels ----
    def load_module(self, image: bytes) -> int:
        sizes = parameter_sizes(image)  # raises before there is a module that nobody would unload
        module = ctypes.c_void_p()
        self._call("hipModuleLoadData", ctypes.byref(module), ctypes.create_string_buffer(image, len(image)))
        self._parameter_sizes[module.value or 0] = sizes
        return module.value or 0

    def unload_module(self, module: int) -> None:
        self._call("hipModuleUnload", module)

    def get_function(self, module: int, name: str) -> int:
        function = ctypes.c_void_p()
        self._call("hipModuleGetFunction", ctypes.byref(function), module, name.encode())
        self._parameter_bytes[function.value or 0] = self._parameter_sizes[module].get(name)
        return function.value or 0

    def parameter_bytes(self, function: int) -> int | None:
        return self._parameter_bytes.get(function)

    def allow_shared_bytes(self, function: int, nbytes: int) -> None:
        """All of a multiprocessor's shared memory can be used without asking."""

    def resident_blocks(self, function: int, threads: int, shared_bytes: int) -> int:
        blocks = ctypes.c_int()
        self._call(
            "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor", ctypes.byref(blocks), function, threads, shared_bytes
        )
        return blocks.value

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
        # The runtime copies the parameters before it returns.
        buffer = ctypes.create_string_buffer(parameters, len(parameters))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        shape = (blocks, 1, 1, threads, 1, 1, shared_bytes, stream)
        if cooperative:
            self._call("hipModuleLaunchCooperativeKernel", function, *shape, pointers)
        else:
            self._call("hipModuleLaunchKernel", function, *shape, pointers, None)
