"""The CUDA driver, opened at run time: nothing links against it, and a machine without it is no error."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence

from uccl_ep_core.device_runtime.driver import IPC_HANDLE_BYTES, DeviceFacts, Driver, DriverError
from uccl_ep_core.device_runtime.library import Library

from . import build
from . import driver_api as api


class CudaDriver(Driver):
    """See `Driver`. Raises `LibraryNotFoundError` or `DriverError` where there is no usable driver.

    Args:
        libraries: names or paths tried in order.
    """

    name = "cuda"

    def __init__(self, libraries: Sequence[str] = api.LIBRARIES) -> None:
        self._api = Library(libraries, api.PROTOTYPES, api.OPTIONAL)
        self._contexts: dict[int, int] = {}
        self._utility_streams: dict[int, int] = {}
        self._call("cuInit", 0)
        version = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(version))
        self.version = (version.value // 1000, version.value % 1000 // 10)
        """Newest CUDA this driver knows, as (major, minor)."""

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._api, name)(*arguments)
        if code != api.SUCCESS:
            raise DriverError(name, code, self._words(code))

    def _words(self, code: int) -> str:
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        self._api.cuGetErrorName(code, ctypes.byref(name))
        self._api.cuGetErrorString(code, ctypes.byref(text))
        return f"{(name.value or b'unknown error').decode()}: {(text.value or b'no description').decode()}"

    # ---- devices ----
    def device_count(self) -> int:
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def _device(self, ordinal: int) -> int:
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        return device.value

    def _attribute(self, device: int, attribute: int) -> int:
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
        return value.value

    def facts(self, ordinal: int) -> DeviceFacts:
        device = self._device(ordinal)
        name, address = ctypes.create_string_buffer(256), ctypes.create_string_buffer(32)
        unique = api.Uuid()
        self._call("cuDeviceGetName", name, len(name), device)
        self._call("cuDeviceGetPCIBusId", address, len(address), device)
        self._call("cuDeviceGetUuid_v2", ctypes.byref(unique), device)
        major = self._attribute(device, api.ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        minor = self._attribute(device, api.ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        try:
            dmabuf = self._api.has("cuMemGetHandleForAddressRange") and bool(
                self._attribute(device, api.ATTRIBUTE_DMA_BUF_SUPPORTED)
            )
        except DriverError:  # older than the attribute
            dmabuf = False
        return DeviceFacts(
            ordinal=ordinal,
            name=name.value.decode(),
            architecture=f"sm_{major}{minor}",
            unique_id=bytes(unique.bytes),
            pci_address=address.value.decode(),
            multiprocessors=self._attribute(device, api.ATTRIBUTE_MULTIPROCESSOR_COUNT),
            warp_size=self._attribute(device, api.ATTRIBUTE_WARP_SIZE),
            max_threads_per_block=min(
                build.MAX_THREADS_PER_BLOCK, self._attribute(device, api.ATTRIBUTE_MAX_THREADS_PER_BLOCK)
            ),
            max_shared_bytes=self._attribute(device, api.ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
            staging_bytes=build.staging_bytes(f"sm_{major}{minor}"),
            cooperative=bool(self._attribute(device, api.ATTRIBUTE_COOPERATIVE_LAUNCH)),
            dmabuf=dmabuf,
        )

    def attach(self, ordinal: int) -> None:
        if ordinal in self._contexts:
            return
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device(ordinal))
        self._contexts[ordinal] = context.value or 0
        with self.active(ordinal):
            # Work of the default stream would wait for kernels of other streams, perhaps for ever:
            # they may be waiting for this rank.
            self._utility_streams[ordinal] = self.create_stream()

    @contextlib.contextmanager
    def active(self, ordinal: int) -> Iterator[None]:
        wanted = self._contexts[ordinal]
        current = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(current))
        if current.value == wanted:
            yield
            return
        self._call("cuCtxPushCurrent_v2", wanted)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(current))

    def can_access(self, ordinal: int, peer: int) -> bool:
        able = ctypes.c_int()
        self._call("cuDeviceCanAccessPeer", ctypes.byref(able), self._device(ordinal), self._device(peer))
        return bool(able.value)

    def _utility_stream(self) -> int:
        current = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(current))
        for ordinal, context in self._contexts.items():
            if context == current.value:
                return self._utility_streams[ordinal]
        raise DriverError("cuCtxGetCurrent", 201, "no device of this backend is current")

    # ---- memory ----
    def allocate(self, nbytes: int, *, polled_by_peers: bool) -> int:
        pointer = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), nbytes)
        return pointer.value

    def free(self, pointer: int) -> None:
        self._call("cuMemFree_v2", pointer)

    def fill_zero(self, pointer: int, nbytes: int) -> None:
        stream = self._utility_stream()
        self._call("cuMemsetD8Async", pointer, 0, nbytes, stream)
        self._call("cuStreamSynchronize", stream)

    def copy_to_host(self, destination: int, source: int, nbytes: int) -> None:
        stream = self._utility_stream()
        self._call("cuMemcpyDtoHAsync_v2", destination, source, nbytes, stream)
        self._call("cuStreamSynchronize", stream)

    def copy_to_device(self, destination: int, source: int, nbytes: int) -> None:
        stream = self._utility_stream()
        self._call("cuMemcpyHtoDAsync_v2", destination, source, nbytes, stream)
        self._call("cuStreamSynchronize", stream)

    def export_memory(self, pointer: int) -> bytes:
        handle = api.IpcHandle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
        return bytes(handle.reserved)

    def import_memory(self, handle: bytes) -> int:
        native = api.IpcHandle.from_buffer_copy(handle.ljust(IPC_HANDLE_BYTES, b"\0"))
        pointer = ctypes.c_uint64()
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), native, api.IPC_LAZY_ENABLE_PEER_ACCESS)
        return pointer.value

    def release_import(self, pointer: int) -> None:
        self._call("cuIpcCloseMemHandle", pointer)

    def register_host(self, pointer: int, nbytes: int) -> int:
        flags = api.HOST_REGISTER_PORTABLE | api.HOST_REGISTER_DEVICEMAP
        self._call("cuMemHostRegister_v2", pointer, nbytes, flags)
        device_pointer = ctypes.c_uint64()
        try:
            self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(device_pointer), pointer, 0)
        except DriverError:
            self.unregister_host(pointer)
            raise
        return device_pointer.value

    def unregister_host(self, pointer: int) -> None:
        self._call("cuMemHostUnregister", pointer)

    def dmabuf_fd(self, pointer: int, nbytes: int) -> int | None:
        if not self._api.has("cuMemGetHandleForAddressRange"):
            return None
        descriptor = ctypes.c_int(-1)
        code = self._api.cuMemGetHandleForAddressRange(
            ctypes.byref(descriptor), pointer, nbytes, api.RANGE_HANDLE_DMA_BUF_FD, 0
        )
        if code != api.SUCCESS or descriptor.value < 0:
            return None
        # A NIC writes here behind the driver's back, so copies of the driver must not run ahead of their call.
        enabled = ctypes.c_uint(1)
        self._call("cuPointerSetAttribute", ctypes.byref(enabled), api.POINTER_ATTRIBUTE_SYNC_MEMOPS, pointer)
        return descriptor.value

    # ---- streams and events ----
    def create_stream(self) -> int:
        least, greatest, stream = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        self._call("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
        self._call("cuStreamCreateWithPriority", ctypes.byref(stream), api.STREAM_NON_BLOCKING, greatest.value)
        return stream.value or 0

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy_v2", stream)

    def stream_done(self, stream: int) -> bool:
        return self._done("cuStreamQuery", stream)

    def is_capturing(self, stream: int) -> bool:
        status = ctypes.c_int()
        self._call("cuStreamIsCapturing", stream, ctypes.byref(status))
        return status.value != 0

    def create_event(self) -> int:
        event = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), api.EVENT_DISABLE_TIMING)
        return event.value or 0

    def destroy_event(self, event: int) -> None:
        self._call("cuEventDestroy_v2", event)

    def record_event(self, event: int, stream: int) -> None:
        self._call("cuEventRecord", event, stream)

    def wait_event(self, stream: int, event: int) -> None:
        self._call("cuStreamWaitEvent", stream, event, 0)

    def event_done(self, event: int) -> bool:
        return self._done("cuEventQuery", event)

    def _done(self, query: str, handle: int) -> bool:
        # A query by this thread must not break a capture that another thread has begun.
        mode = ctypes.c_int(api.CAPTURE_MODE_RELAXED)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        try:
            code = getattr(self._api, query)(handle)
        finally:
            self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        if code not in (api.SUCCESS, api.ERROR_NOT_READY):
            raise DriverError(query, code, self._words(code))
        return bool(code == api.SUCCESS)

    # ---- kernels ----
    def load_module(self, image: bytes) -> int:
        module = ctypes.c_void_p()
        buffer = ctypes.create_string_buffer(image, len(image))
        self._call("cuModuleLoadData", ctypes.byref(module), buffer)
        return module.value or 0

    def unload_module(self, module: int) -> None:
        self._call("cuModuleUnload", module)

    def get_function(self, module: int, name: str) -> int:
        function = ctypes.c_void_p()
        self._call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        return function.value or 0

    def parameter_bytes(self, function: int) -> int | None:
        if not self._api.has("cuFuncGetParamInfo"):
            return None
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        if self._api.cuFuncGetParamInfo(function, 0, ctypes.byref(offset), ctypes.byref(size)) != api.SUCCESS:
            return None
        return size.value

    def allow_shared_bytes(self, function: int, nbytes: int) -> None:
        self._call("cuFuncSetAttribute", function, api.FUNCTION_MAX_DYNAMIC_SHARED_BYTES, nbytes)

    def resident_blocks(self, function: int, threads: int, shared_bytes: int) -> int:
        blocks = ctypes.c_int()
        self._call("cuOccupancyMaxActiveBlocksPerMultiprocessor", ctypes.byref(blocks), function, threads, shared_bytes)
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
        # The driver copies the parameters before it returns.
        buffer = ctypes.create_string_buffer(parameters, len(parameters))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        shape = (blocks, 1, 1, threads, 1, 1, shared_bytes, stream)
        if cooperative:
            self._call("cuLaunchCooperativeKernel", function, *shape, pointers)
        else:
            self._call("cuLaunchKernel", function, *shape, pointers, None)
