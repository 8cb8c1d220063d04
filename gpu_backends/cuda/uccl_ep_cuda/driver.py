"""The CUDA driver, opened at run time: nothing links against it, and a machine without it is no error."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence

from uccl_ep_core.device_runtime.common_driver import SUCCESS, CommonDriver, Uuid
from uccl_ep_core.device_runtime.driver import DeviceFacts, DriverError
from uccl_ep_core.device_runtime.library import Library

from . import build
from . import driver_api as api


class CudaDriver(CommonDriver):
    """See `Driver`. Raises `LibraryNotFoundError` or `DriverError` where there is no usable driver.

    Args:
        libraries: names or paths tried in order.
    """

    name = "cuda"
    names = api.NAMES

    def __init__(self, libraries: Sequence[str] = api.LIBRARIES) -> None:
        super().__init__(Library(libraries, api.PROTOTYPES, api.OPTIONAL))
        self._contexts: dict[int, int] = {}
        self._utility_streams: dict[int, int] = {}
        self._call("cuInit", 0)
        version = self._number("cuDriverGetVersion")
        self.version = (version // 1000, version % 1000 // 10)
        """Newest CUDA this driver knows, as (major, minor)."""

    # ---- devices ----
    def _device(self, ordinal: int) -> int:
        return self._number("cuDeviceGet", ordinal)

    def facts(self, ordinal: int) -> DeviceFacts:
        device = self._device(ordinal)
        name, address = ctypes.create_string_buffer(256), ctypes.create_string_buffer(32)
        unique = Uuid()
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
        self._contexts[ordinal] = self._handle("cuDevicePrimaryCtxRetain", self._device(ordinal))
        with self.active(ordinal):
            self._utility_streams[ordinal] = self.create_stream()

    def active(self, ordinal: int) -> contextlib.AbstractContextManager[None]:
        wanted = self._contexts[ordinal]
        if self._handle("cuCtxGetCurrent") == wanted:  # as in nearly every call: torch has made it current
            return contextlib.nullcontext()
        return self._pushed(wanted)

    @contextlib.contextmanager
    def _pushed(self, context: int) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._handle("cuCtxPopCurrent_v2")

    def can_access(self, ordinal: int, peer: int) -> bool:
        return bool(self._number("cuDeviceCanAccessPeer", self._device(ordinal), self._device(peer)))

    def _utility_stream(self) -> int:
        current = self._handle("cuCtxGetCurrent")
        for ordinal, context in self._contexts.items():
            if context == current:
                return self._utility_streams[ordinal]
        raise DriverError("cuCtxGetCurrent", 201, "no device of this backend is current")

    # ---- memory ----
    def allocate(self, nbytes: int, *, polled_by_peers: bool) -> int:
        return self._handle("cuMemAlloc_v2", nbytes)

    def copy_to_host(self, destination: int, source: int, nbytes: int) -> None:
        stream = self._utility_stream()
        self._call("cuMemcpyDtoHAsync_v2", destination, source, nbytes, stream)
        self._call("cuStreamSynchronize", stream)

    def copy_to_device(self, destination: int, source: int, nbytes: int) -> None:
        stream = self._utility_stream()
        self._call("cuMemcpyHtoDAsync_v2", destination, source, nbytes, stream)
        self._call("cuStreamSynchronize", stream)

    def dmabuf_fd(self, pointer: int, nbytes: int) -> int | None:
        descriptor = super().dmabuf_fd(pointer, nbytes)
        if descriptor is not None:
            # A NIC writes here behind the driver's back, so copies of the driver must not run ahead of their call.
            enabled = ctypes.c_uint(1)
            self._call("cuPointerSetAttribute", ctypes.byref(enabled), api.POINTER_ATTRIBUTE_SYNC_MEMOPS, pointer)
        return descriptor

    # ---- kernels ----
    def parameter_bytes(self, function: int) -> int | None:
        if not self._api.has("cuFuncGetParamInfo"):
            return None
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        if self._api.cuFuncGetParamInfo(function, 0, ctypes.byref(offset), ctypes.byref(size)) != SUCCESS:
            return None
        return size.value

    def allow_shared_bytes(self, function: int, nbytes: int) -> None:
        self._call("cuFuncSetAttribute", function, api.FUNCTION_MAX_DYNAMIC_SHARED_BYTES, nbytes)
