"""The HIP runtime, opened at run time: nothing links against it, and a machine without it is no error."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Sequence

from uccl_ep_core.device_runtime.common_driver import CommonDriver, Uuid
from uccl_ep_core.device_runtime.driver import DeviceFacts
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


class HipDriver(CommonDriver):
    """See `Driver`. Raises `LibraryNotFoundError` or `DriverError` where there is no usable runtime.

    Args:
        libraries: names or paths tried in order.
    """

    name = "hip"
    names = api.NAMES

    def __init__(self, libraries: Sequence[str]) -> None:
        super().__init__(Library(libraries, api.PROTOTYPES, api.OPTIONAL))
        self.library_path = self._api.path
        self._architectures: dict[int, str] = {}
        self._utility_streams: dict[int, int] = {}
        self._parameter_sizes: dict[int, dict[str, int]] = {}
        self._parameter_bytes: dict[int, int | None] = {}
        self._call("hipInit", 0)
        version = self._number("hipRuntimeGetVersion")
        self.version = (version // 10_000_000, version // 100_000 % 100)
        """HIP release, as (major, minor)."""

    # ---- devices ----
    def facts(self, ordinal: int) -> DeviceFacts:
        properties = api.DeviceProperties()
        self._call("hipGetDevicePropertiesR0600", ctypes.byref(properties), ordinal)
        address, unique = ctypes.create_string_buffer(32), Uuid()
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
            self._utility_streams[ordinal] = self.create_stream()

    def active(self, ordinal: int) -> contextlib.AbstractContextManager[None]:
        current = self._current()
        if current == ordinal:  # as in nearly every call: torch has made it current
            return contextlib.nullcontext()
        return self._changed(current, ordinal)

    @contextlib.contextmanager
    def _changed(self, before: int, ordinal: int) -> Iterator[None]:
        self._call("hipSetDevice", ordinal)
        try:
            yield
        finally:
            self._call("hipSetDevice", before)

    def _current(self) -> int:
        return self._number("hipGetDevice")

    def _utility_stream(self) -> int:
        return self._utility_streams[self._current()]

    def can_access(self, ordinal: int, peer: int) -> bool:
        return bool(self._number("hipDeviceCanAccessPeer", ordinal, peer))

    # ---- memory ----
    def allocate(self, nbytes: int, *, polled_by_peers: bool) -> int:
        if not polled_by_peers:
            return self._handle("hipMalloc", nbytes)
        # A running kernel must see what a peer or a NIC writes: memory that its caches keep no
        # copy of. Before MI300 fine-grained memory is that.
        uncached = self._architectures[self._current()].startswith(("gfx94", "gfx95"))
        flags = api.MALLOC_UNCACHED if uncached else api.MALLOC_FINE_GRAINED
        return self._handle("hipExtMallocWithFlags", nbytes, flags)

    def copy_to_host(self, destination: int, source: int, nbytes: int) -> None:
        self._copy(destination, source, nbytes, api.COPY_DEVICE_TO_HOST)

    def copy_to_device(self, destination: int, source: int, nbytes: int) -> None:
        self._copy(destination, source, nbytes, api.COPY_HOST_TO_DEVICE)

    def _copy(self, destination: int, source: int, nbytes: int, kind: int) -> None:
        stream = self._utility_stream()
        self._call("hipMemcpyAsync", destination, source, nbytes, kind, stream)
        self._call("hipStreamSynchronize", stream)

    # ---- kernels ----
    def load_module(self, image: bytes) -> int:
        sizes = parameter_sizes(image)  # raises before there is a module that nobody would unload
        module = super().load_module(image)
        self._parameter_sizes[module] = sizes
        return module

    def get_function(self, module: int, name: str) -> int:
        function = super().get_function(module, name)
        self._parameter_bytes[function] = self._parameter_sizes[module].get(name)
        return function

    def parameter_bytes(self, function: int) -> int | None:
        return self._parameter_bytes.get(function)

    def allow_shared_bytes(self, function: int, nbytes: int) -> None:
        """All of a multiprocessor's shared memory can be used without asking."""
