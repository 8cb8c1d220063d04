"""The memory of one rank that kernels, proxies and peers work in."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from uccl_ep_core import _native
from uccl_ep_core.errors import CapabilityError
from uccl_ep_core.gpu_backend import GpuBackend, Window
from uccl_ep_core.kernel_parameters import Group, KernelStatus, SpanTable

from .resources import Resources
from .tracing import KernelTracing

RINGS_PER_PROXY = 4


class Windows:
    """A rank's windows, its channel to the proxies, and the windows of its scale-up domain.

    `Resources` owns each from the moment that it exists, and frees it.

    Args:
        on_device: payload lies in device memory, which the transport then moves from and to; else in host memory.

    Attributes:
        data: payload; what the transport moves.
        control: signals and verdicts, in host memory.
        counters: kernels' own, from one operation to the next.
        channel: rings of commands to the proxies; None without a transport.
        tracing: where kernels record what they do; None unless asked for.
    """

    def __init__(
        self,
        backend: GpuBackend,
        resources: Resources,
        layout: _native.Layout,
        *,
        on_device: bool,
    ) -> None:
        self._backend, self._resources, self._layout = backend, resources, layout
        data_bytes = layout.data_bytes()
        if data_bytes > _native.MAX_WINDOW_BYTES:
            raise CapabilityError(
                f"a data window of {data_bytes} bytes: at most {_native.MAX_WINDOW_BYTES}; use a smaller "
                "num_rdma_bytes, slot_bytes or num_slots"
            )
        self.data = self._own(
            backend.allocate_data_window(data_bytes, for_transport=bool(layout.has_remote), device_memory=on_device)
        )
        self.control = self._own(backend.allocate_host_window(layout.control_bytes()))
        self._status = self._own(backend.allocate_host_window(4096))
        self.counters = self._own(backend.allocate_device_memory(_native.kernels.counters_bytes(layout)))
        self.channel: _native.Channel | None = None
        self.tracing: KernelTracing | None = None
        self.num_rings = 0
        self._rings: Window | None = None
        self._own_messages: Window | None = None
        self._peers: list[Window | None] = []
        self._pointers: Window

    def _own(self, window: Window) -> Window:
        self._resources.windows.append(window)
        return window

    @property
    def kernel_status(self) -> KernelStatus:
        """What a kernel says of its own failure."""
        return KernelStatus.from_address(self._status.memory.pointer)

    def keep_own_messages(self) -> None:
        """A rank's low-latency messages to itself stay in device memory: they need not cross the bus."""
        if self._layout.ll_dispatch_bytes != 0:
            self._own_messages = self._own(self._backend.allocate_device_memory(2 * self._layout.ll_dispatch_bytes))

    def record(self, tracing: KernelTracing) -> None:
        """Kernels record into its windows."""
        self.tracing = self._resources.tracing = tracing
        for window in tracing.windows:
            self._own(window)

    def open_channel(self, num_proxies: int, capacity: int) -> None:
        """Rings of ``capacity`` commands each, `RINGS_PER_PROXY` for each proxy."""
        backend = self._backend
        self.num_rings = num_proxies * RINGS_PER_PROXY
        rings = self._own(backend.allocate_host_window(_native.Channel.host_bytes(self.num_rings, capacity)))
        state = self._own(backend.allocate_device_memory(_native.Channel.state_bytes(self.num_rings)))
        self.channel = _native.Channel(
            self.num_rings, capacity, rings.memory.pointer, rings.device_pointer, state.device_pointer
        )
        views = self.channel.views()
        self._rings = self._own(backend.allocate_device_memory(len(views)))
        backend.copy_to_device(self._rings, views)

    def handles(self) -> tuple[bytes, bytes]:
        """Of the data and the control window, for `import_peers` on other ranks."""
        return self._backend.export_window(self.data), self._backend.export_window(self.control)

    def import_peers(self, rank: int, domain_ranks: Iterable[int], handles: Sequence[tuple[bytes, bytes]]) -> None:
        """Map the windows of the ranks of my domain; kernels find them in a table."""
        backend, num_ranks = self._backend, len(handles)
        self._peers = [None] * (2 * num_ranks)
        for peer in domain_ranks:
            mine = self.data, self.control
            for kind, handle in enumerate(handles[peer]):
                window = mine[kind] if peer == rank else self._own(backend.import_window(handle))
                self._peers[kind * num_ranks + peer] = window
        pointers = [0 if window is None else window.device_pointer for window in self._peers]
        self._pointers = self._own(backend.allocate_device_memory(8 * len(pointers)))
        backend.copy_to_device(self._pointers, struct.pack(f"<{len(pointers)}Q", *pointers))

    def peer_controls(self) -> dict[int, int]:
        """Addresses of the control windows of the other ranks of my domain, by rank."""
        others = [None if window is self.control else window for window in self._peers[len(self._peers) // 2 :]]
        return {rank: window.memory.pointer for rank, window in enumerate(others) if window is not None}

    def fill(self, group: Group) -> None:
        """Tell kernels where all of it is."""
        group.num_rings = self.num_rings
        group.data = self.data.device_pointer
        group.control = self.control.device_pointer
        group.peer_data = self._pointers.device_pointer
        group.peer_control = self._pointers.device_pointer + 8 * (len(self._peers) // 2)
        group.rings = 0 if self._rings is None else self._rings.device_pointer
        group.counters = self.counters.device_pointer
        group.status = self._status.device_pointer
        group.own_messages = 0 if self._own_messages is None else self._own_messages.device_pointer
        group.spans = SpanTable() if self.tracing is None else self.tracing.table()
