"""The set-up of a group: domains, windows, a transport, and proxies that serve it."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from uccl_ep_core import _native, numa, ordering
from uccl_ep_core.config import Configuration
from uccl_ep_core.errors import BufferClosedError, CapabilityError, EPError

from .bootstrap import Bootstrap, agree, together
from .cores import Cores, Place
from .domains import ranks_per_domain, reachable_ranks
from .low_latency.capacity import LowLatencyCapacity
from .resources import Resources
from .team_grids import BLOCK_TEAMS, Room, Work, suitable_channels
from .tracing import KernelTracing
from .windows import Windows

logger = logging.getLogger("uccl_ep")

MOST_LOW_LATENCY_PARTS = 8
"""Of one message: as many threads bring it to a peer, and its receiver waits for as many signals."""
HOST_SLOT_BYTES = 128 << 10  # stays in the caches
STAGED_PROXIES = 4  # threads that copy 10 GB/s each, to and from what a bus brings at 50
GPU_SLOT_BYTES = 352 << 10  # 24 rows of 7168 bf16; a slot costs some microseconds of signals, whatever it holds
MOST_CHANNELS = 48  # chosen automatically; more bring no bandwidth, and each has its own slots
MOST_RING_BYTES = 1 << 30  # of a data window, in slots of channels whose number was chosen automatically
DEFAULT_LIMIT_S = 300.0  # as plugins.toml has it


def set_up_limit_s(overrides: Mapping[str, Any] | None) -> float:
    """How long a set-up waits for a rank: ``timeout_s``, where the configuration is sound enough to say it."""
    try:
        return float(Configuration.resolve(overrides).general.timeout_s)
    except EPError:
        return DEFAULT_LIMIT_S  # every rank hears of the error in the first step of the set-up


class Connection:
    """The ranks of one group, connected; `Communicator` uses them.

    Collective: every rank of the group constructs it, with equal options. A failure on one rank raises
    on all.

    Args:
        bootstrap: the group.
        torch_device: where the caller's tensors are; chooses the GPU backend where none is named.
        low_latency_bytes: size of the low-latency part, as from `LowLatencyCapacity.hint`; 0: none.
        overrides: configuration given in the call (highest precedence).
        equal: further arguments that every rank must give alike, by name.
        shrink: a rank that is gone ends only what waits for it, see `LowLatency.mask`.
    """

    def __init__(
        self,
        bootstrap: Bootstrap,
        torch_device: torch.device,
        low_latency_bytes: int = 0,
        overrides: Mapping[str, Any] | None = None,
        equal: Mapping[str, Any] | None = None,
        shrink: bool = False,
    ) -> None:
        self.bootstrap = bootstrap
        self.rank = bootstrap.rank
        self.num_ranks = bootstrap.num_ranks
        self._failure: EPError | None = None
        self._closed = False
        self._operation = 0
        self._calls: dict[str, int] = {}
        self._shrink = shrink
        resources = self._resources = Resources()
        resources.rank = self.rank
        self._finalizer = weakref.finalize(self, resources.close)
        try:
            bootstrap.start(set_up_limit_s(overrides))
            self._set_up(torch_device, low_latency_bytes, overrides, equal or {})
        except BaseException:
            try:
                self._finalizer()
            except EPError as kept:
                logger.error("%s", kept)
            raise
        finally:
            bootstrap.finish()

    # ---- set-up ----

    def _set_up(
        self,
        torch_device: torch.device,
        low_latency_bytes: int,
        overrides: Mapping[str, Any] | None,
        equal: Mapping[str, Any],
    ) -> None:
        """All steps of the set-up, in order. Each is agreed on by all ranks, so that a failure raises on every one."""
        self._open_backend(torch_device, overrides)
        self._agree_on_options({"num_rdma_bytes": low_latency_bytes, **equal})
        remote = self._find_domains()
        self._lay_out(low_latency_bytes, bool(remote))
        identities = self._share_windows(bool(remote))
        if remote:
            self._join_transport(remote)
        self._start(identities)

    def _open_backend(self, torch_device: torch.device, overrides: Mapping[str, Any] | None) -> None:
        def configure() -> Any:
            if self.num_ranks > _native.MAX_RANKS:
                raise CapabilityError(f"{self.num_ranks} ranks: at most {_native.MAX_RANKS} are supported")
            configuration = Configuration.resolve(overrides)
            selection = configuration.select_gpu_backend(torch_device)
            backend = selection.plugin.open(selection.device, selection.options)
            if configuration.general.trace_kernels and not backend.traces_kernels:
                backend.close()
                raise CapabilityError(
                    f"trace_kernels = true: GPU backend {selection.name} cannot record what kernels do; set it to false"
                )
            most, wanted = backend.limits.block_teams, configuration.general.block_teams
            if wanted > most:
                backend.close()
                raise CapabilityError(
                    f"block_teams = {wanted}: a block of GPU backend {selection.name} has at most {most} of several "
                    f"warps, use {most}"
                )
            return configuration, selection, backend

        self.configuration, self._backend_selection, self.backend = together(
            self.bootstrap, "opening the GPU backend", configure
        )
        self._resources.backend = self.backend
        self.general = self.configuration.general
        self.num_proxies = self.general.num_proxies or 1
        logger.setLevel(self.general.log_level.upper())

    def _find_domains(self) -> list[int]:
        """Find out who reaches whose memory; returns the ranks that a transport must reach, which is opened then."""
        bootstrap, general = self.bootstrap, self.general
        self._places = bootstrap.all_gather(Place.here(), "comparing hosts")
        self._one_host = len({place.host for place in self._places}) == 1
        self.reachable = reachable_ranks(bootstrap, self.backend)
        self.ranks_per_domain = ranks_per_domain(self.reachable, general.domain_size)
        self.num_domains = self.num_ranks // self.ranks_per_domain
        first = self.rank // self.ranks_per_domain * self.ranks_per_domain
        self.domain_ranks = range(first, first + self.ranks_per_domain)
        remote = [rank for rank in range(self.num_ranks) if rank not in self.domain_ranks]
        self.slot_bytes = general.slot_bytes or (HOST_SLOT_BYTES if self._on_cpu else GPU_SLOT_BYTES)
        wanted = general.num_channels or self._automatic_channels(bool(remote)), self._direct_blocks()
        every = bootstrap.all_gather(wanted, "agreeing on channels")
        self.num_channels, self.direct_blocks = (min(values) for values in zip(*every, strict=True))
        if remote or general.transport != "auto":  # a named transport must be usable, needed or not
            together(bootstrap, "opening the transport", self._open_transport)
        if not remote and self._resources.transport is not None:
            # Of no use: what a device or a provider keeps for it (files in shared memory) would outlive a kill.
            self._resources.transport.close()
            self._resources.transport = None
        if remote and self.general.num_proxies == 0:
            self.num_proxies = min(bootstrap.all_gather(self._automatic_proxies(), "agreeing on proxies"))
        return remote

    def _lay_out(self, low_latency_bytes: int, has_remote: bool) -> None:
        self.capacity = LowLatencyCapacity.of(low_latency_bytes, self.num_ranks, remote=has_remote)
        self.layout = self._layout(
            self.num_channels,
            has_remote,
            ll_dispatch_bytes=self.capacity.dispatch_bytes,
            ll_combine_bytes=self.capacity.combine_bytes,
            ll_outbox_bytes=self.capacity.outbox_bytes,
        )
        num_proxies = self.num_proxies if has_remote else 0
        self.cores = Cores.of(self._places, self.rank, self.backend.waiting_threads + num_proxies)

    def _layout(self, num_channels: int, has_remote: bool, **low_latency: int) -> _native.Layout:
        return _native.Layout(
            num_ranks=self.num_ranks,
            ranks_per_domain=self.ranks_per_domain,
            num_channels=num_channels,
            num_slots=self.general.num_slots,
            slot_bytes=self.slot_bytes,
            has_remote=has_remote,
            # Each part of a low-latency message needs a proxy and a channel's signal of its own.
            ll_parts=min(self.num_proxies, num_channels, MOST_LOW_LATENCY_PARTS) if has_remote else 1,
            **low_latency,
        )

    def _share_windows(self, has_remote: bool) -> dict[int, Any]:
        """Allocate this rank's windows and import those of its domain; returns the identity of every other rank."""
        bootstrap = self.bootstrap
        together(bootstrap, "allocating windows", lambda: self._allocate(has_remote))
        peers = bootstrap.all_gather((self.windows.handles(), _native.PeerMonitor.identity()), "exchanging windows")
        handles = [theirs for theirs, _ in peers]
        together(
            bootstrap,
            "importing windows of the scale-up domain",
            lambda: self.windows.import_peers(self.rank, self.domain_ranks, handles),
        )
        self.verdicts = self._resources.verdicts = _native.Verdicts(
            self.rank,
            self.layout,
            self.windows.control.memory.pointer,
            self.windows.peer_controls(),
            self._shrink,
        )
        return {rank: identity for rank, (_, identity) in enumerate(peers) if rank != self.rank}

    def _join_transport(self, remote: list[int]) -> None:
        addresses = self.bootstrap.all_gather(
            together(self.bootstrap, "registering windows with the transport", self._register),
            "exchanging addresses of the transport",
        )
        together(self.bootstrap, "connecting the transport", lambda: self._connect(addresses, remote))

    def _start(self, identities: dict[int, Any]) -> None:
        self._monitor = self._resources.monitor = _native.PeerMonitor(
            self.verdicts, identities, min(5.0, max(self.general.timeout_s, 0.05))
        )
        self._monitor.start()
        together(self.bootstrap, "starting", lambda: None)  # nobody writes before all are ready
        logger.info("rank %d of %d: %s", self.rank, self.num_ranks, self.describe())

    def _agree_on_options(self, arguments: Mapping[str, Any]) -> None:
        general = self.general
        mine = {
            "slot_bytes": general.slot_bytes,
            "num_slots": general.num_slots,
            "num_proxies": general.num_proxies,
            "domain_size": general.domain_size,
            "gpu_backend": self._backend_selection.name,
            "transport": general.transport,
            "plan": general.plan,
            "low_latency_path": general.low_latency_path,
            "num_sms": general.num_sms,
            **arguments,
        }
        agree(self.bootstrap, "agreeing on options", mine)

    @functools.cached_property
    def dispatch_work(self) -> Work:
        """The roles of one channel of a high-throughput dispatch."""
        return Work.of_dispatch(self.num_ranks, self.ranks_per_domain)

    @functools.cached_property
    def combine_work(self) -> Work:
        """Likewise of a combine."""
        return Work.of_combine(self.num_ranks)

    @property
    def _on_cpu(self) -> bool:
        return self.backend.torch_device.type == "cpu"

    @functools.cached_property
    def team_room(self) -> Room:
        """What a high-throughput kernel may take. A CPU thread runs its warps in turn: teams gain it nothing."""
        limits = self.backend.limits
        suits = 1 if self._on_cpu else min(BLOCK_TEAMS, limits.block_teams)
        return Room(self.most_blocks, limits, self.general.block_teams or suits)

    @property
    def most_blocks(self) -> int:
        """Blocks of a high-throughput kernel, one a multiprocessor: what runs at once, or the option ``num_sms``."""
        running = self.backend.limits.max_blocks
        return min(running, self.general.num_sms or running)

    def _automatic_channels(self, has_remote: bool) -> int:
        """As many as suit the device. Under ``num_sms`` the rows that stay may share the team of a receiver."""
        dispatch = self.dispatch_work if self.general.num_sms else self.dispatch_work.without_sharing()
        most = min(MOST_CHANNELS, MOST_RING_BYTES // self._layout(1, has_remote).data_bytes())
        return suitable_channels(dispatch, self.combine_work, self.team_room, max(1, most))

    def _automatic_proxies(self) -> int:
        """One thread posts writes faster than any NIC takes them. Over shared memory or sockets it copies what lies in
        a window in host memory itself, at a fifth of what a GPU brings over its bus."""
        if self._on_cpu or self.transport.capabilities.device_memory:
            return 1
        spare = Cores.of(self._places, self.rank, 1).for_each_thread - 1  # one is the rank's own
        return max(1, min(STAGED_PROXIES, self.transport.capabilities.lanes, spare))

    def _direct_blocks(self) -> int:
        """Blocks of a direct low-latency kernel: equal on all ranks, as a block meets that of its number elsewhere."""
        return min(self.backend.limits.max_blocks, int(_native.kernels.DIRECT_BLOCKS))

    def _open_transport(self) -> None:
        self._transport_selection = selection = self.configuration.select_transport(one_host=self._one_host)
        self.transport = self._resources.transport = selection.plugin.open(selection.device, selection.options)
        capabilities = self.transport.capabilities
        self.plan = ordering.choose_plan(capabilities, str(selection.options.get("plan", self.general.plan)))
        if self.num_proxies > capabilities.lanes:
            raise CapabilityError(
                f"num_proxies = {self.num_proxies}: transport {selection.name} has at most {capabilities.lanes} lanes"
            )

    def _allocate(self, remote: bool) -> None:
        backend, general = self.backend, self.general
        on_device = remote and self.transport.capabilities.device_memory
        self.staged = remote and not on_device  # the data window lies in host memory
        # Rings, signals and host windows on the node of the device, or of this CPU; the proxies run there too.
        facts = backend.describe() if hasattr(backend, "describe") else {}
        self.numa = numa.home(facts.get("pci_address"))
        with numa.preferring(self.numa[0] if self.numa else None):
            self.windows = Windows(backend, self._resources, self.layout, on_device=on_device)
            if self.staged:
                self.windows.keep_own_messages()
            if general.trace_kernels:
                self.windows.record(KernelTracing(backend, self.rank, general.trace, general.trace_kernel_spans))
            if remote:
                self.windows.open_channel(self.num_proxies, general.ring_capacity)

    def _register(self) -> bytes:
        for number, window in enumerate((self.windows.data, self.windows.control)):
            region = self.transport.register(window.memory)
            if region != number:
                raise CapabilityError(
                    f"transport {self._transport_selection.name} numbered region {number} as {region}: "
                    "register() must count from 0"
                )
        return self.transport.address()

    def _connect(self, addresses: list[bytes], remote: list[int]) -> None:
        general = self.general
        timeout_s = float(self._transport_selection.options.get("timeout_s", general.timeout_s))
        self.transport.connect(self.rank, addresses, remote, self.num_proxies, timeout_s)
        # Kernels alone, without proxies, wait for each other only: they keep polling.
        wake = self.backend.share_cores() if self.cores.crowded else None
        engine = _native.Engine(
            self.rank,
            self.layout,
            self.windows.data.memory.pointer,
            self.windows.control.memory.pointer,
            self.transport.native_ops,
            self.plan.name,
            self.transport.capabilities,
            remote,
            self.windows.channel,
            self.num_proxies,
            self.verdicts,
            {
                "timeout_s": general.timeout_s,
                "max_inflight_peer": general.max_inflight_bytes_per_peer,
                "max_inflight_nic": general.max_inflight_bytes_per_nic,
                "crowded": self.cores.crowded,
                "over_bus": self.backend.waiting_threads == 0,  # kernels run on a GPU
                "wake_function": wake[0] if wake else 0,
                "wake_context": wake[1] if wake else 0,
                "pin": general.pin_proxies,
                "cpus": self.numa[1] if self.numa else [],
                "trace": general.trace,
            },
        )
        self._resources.engine = self.engine = engine
        engine.start()

    # ---- facts ----

    def ensure_open(self) -> None:
        """Raise when the buffer was destroyed. One that a failure closed still tells about itself."""
        if self._closed:
            raise BufferClosedError("this buffer was destroyed: create a new one")

    def describe(self) -> dict[str, Any]:
        """Which plugins were chosen and why, the ordering plan, and the domains."""
        self.ensure_open()
        backend = self._backend_selection
        result: dict[str, Any] = {
            "gpu_backend": {"name": backend.name, "reason": backend.reason},
            "domains": {
                "num_domains": self.num_domains,
                "ranks_per_domain": self.ranks_per_domain,
                "reason": "the ranks that could import each other's memory"
                + (f", at most {self.general.domain_size}" if self.general.domain_size else ""),
            },
        }
        if self.num_domains > 1:
            transport = self._transport_selection
            result["transport"] = {"name": transport.name, "reason": transport.reason, **self.transport.describe()}
            result["plan"] = {"name": self.plan.name, "reason": self.plan.reason}
            result["waits"] = self.cores.describe()
        else:
            result["transport"] = {"name": None, "reason": "all ranks are in one scale-up domain"}
            result["plan"] = {"name": None, "reason": "kernels store into peers' memory and release their own signals"}
        return result
