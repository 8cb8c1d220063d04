"""Set-up half of the ibverbs transport: pyverbs makes everything, ``native/`` posts and polls on it."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from uccl_ep_core.capabilities import Capabilities
from uccl_ep_core.errors import BackendUnavailableError, TransportError
from uccl_ep_core.transport import Device, Memory, Option, Transport

from . import queue_pairs, raw, selection
from .addressing import Address, RailAddress, RegionAddress
from .hello import MAX_PAIRS, Hello, SilentPeerError
from .iwarp import Listener
from .loader import VerbsMissingError, data_plane, verbs
from .rail import Rail, Registration
from .renewal import Renewals
from .settings import OPTIONS, Settings

MAX_WRITE = 16 << 20
SIGNAL_BYTES = 8
IDLE_RECEIVES = 2
"""Receives of a queue pair without immediates: the greeting, and one that is flushed when the connection ends."""


def _send_requests(settings: Settings) -> int:
    """Work requests of a queue pair that takes ``send_depth`` writes: each may need a fencing read, and a write
    is only taken while there is room for the most that one can need."""
    return 2 * settings.send_depth + 8


class IbverbsTransport(Transport):
    """Reliable connected queue pairs, one for each peer and lane; lanes are spread over the devices (rails)."""

    OPTIONS: ClassVar[Mapping[str, Option]] = OPTIONS

    def __init__(self, rails: list[Rail], settings: Settings, native: Any, why: str) -> None:
        self._rails = rails
        self._settings = settings
        self._native = native
        self._why = why
        self._nonce = secrets.randbits(63)
        self._memories: list[Memory] = []
        self._registered: list[list[Registration]] = []  # by region, then rail
        self._hellos: list[Hello | None] = []
        self._listeners: list[Listener | None] = []
        self._queues: list[Any] = []
        self._pairs: list[queue_pairs.QueuePair] = []
        self._plane: Any = None
        self._lanes = 0
        self._depths = (0, 0)
        self._closed = False

    # --- devices ---

    @classmethod
    def probe(cls, options: Mapping[str, Any]) -> Sequence[Device]:
        try:
            library, _ = verbs(), data_plane()
        except VerbsMissingError as missing:
            return [Device("ibverbs", False, *missing.args)]
        return selection.listing(Settings.of(options), library.origin)

    @classmethod
    def open(cls, device: str | None, options: Mapping[str, Any]) -> IbverbsTransport:
        try:
            library, native = verbs(), data_plane()
        except VerbsMissingError as missing:
            raise BackendUnavailableError(f"ibverbs: {missing.args[0]}; {missing.args[1]}") from None
        settings = Settings.of(options)
        nics, why = selection.choose(device, settings)
        rails: list[Rail] = []
        try:
            for nic in nics:
                rails.append(Rail(library, nic, settings))
            transport = cls(rails, settings, native, why)
        except BaseException:
            for rail in rails:
                rail.close()
            raise
        try:
            transport._open_exchange()
        except Exception as error:
            transport.close()
            raise BackendUnavailableError(f"ibverbs: {nics[0].name}: {error}") from error
        return transport

    def _open_exchange(self) -> None:
        for rail in self._rails:
            self._hellos.append(None if rail.kind == "iwarp" else Hello(rail, self._native))
            self._listeners.append(Listener(rail) if rail.kind == "iwarp" else None)

    # --- promises ---

    @property
    def capabilities(self) -> Capabilities:
        rails, settings = self._rails, self._settings
        ordered = not settings.relaxed_ordering
        # iWARP carries no immediates in its standard (RFC 5040), and drivers refuse them.
        immediates = all(rail.kind != "iwarp" for rail in rails)
        gpu = all(rail.gpu_memory for rail in rails)
        signals = ordered and all(rail.inline_bytes >= SIGNAL_BYTES for rail in rails)
        return Capabilities(
            # What the reliable connection itself orders, iWARP does not: its writes may be placed as
            # their segments come, and only a later message of another kind proves them placed.
            write_order=ordered and immediates,
            signal_order=signals and immediates,
            imm_bits=32 if immediates else 0,
            imm_after_payload=immediates,
            # An acknowledgement says that the peer's NIC has the bytes, not that its memory has.
            delivery_complete=False,
            flush="read_after_write",
            exactly_once=True,
            peer_failure="error_completion",
            native_signal=("device" if gpu else "host") if signals and immediates else "none",
            device_memory=gpu,
            max_message=min(MAX_WRITE, *(rail.port_limits.max_msg_sz for rail in rails)),
            send_queue_depth=min(settings.send_depth, *(max(1, rail.limits.max_qp_wr // 2 - 8) for rail in rails)),
            lanes=min(settings.lanes, MAX_PAIRS * len(rails)),
            inline_bytes=min(rail.inline_bytes for rail in rails),
        )

    @property
    def renews(self) -> bool:
        """Whether a queue pair in error is replaced. What rdma_cm has connected, only rdma_cm could connect anew."""
        return self._settings.renew_timeout_s > 0 and all(rail.kind != "iwarp" for rail in self._rails)

    # --- memory and addresses ---

    def register(self, memory: Memory) -> int:
        self._registered.append([rail.register(memory) for rail in self._rails])
        self._memories.append(memory)
        return len(self._memories) - 1

    def address(self) -> bytes:
        rails = []
        for index, rail in enumerate(self._rails):
            hello, listener = self._hellos[index], self._listeners[index]
            regions = [
                RegionAddress(it.base, it.nbytes, it.chunk_bytes, it.rkeys)
                for it in (by_rail[index] for by_rail in self._registered)
            ]
            rails.append(
                RailAddress(
                    device=rail.name,
                    kind=rail.kind,
                    gid=str(rail.gid.gid) if rail.gid else "",
                    lid=rail.port_limits.lid,
                    hello_qp=hello.number if hello else 0,
                    ip=rail.ip,
                    cm_port=listener.port if listener else 0,
                    mtu=rail.mtu,
                    reads=rail.reads,
                    regions=regions,
                )
            )
        return Address(os.uname().nodename, self._nonce, rails).pack()

    # --- connections ---

    def connect(
        self, rank: int, addresses: Sequence[bytes], peers: Sequence[int], lanes: int, timeout_s: float
    ) -> None:
        if not 1 <= lanes <= self.capabilities.lanes:
            raise TransportError(f"{lanes} lanes were asked for: use 1 to {self.capabilities.lanes}")
        deadline = time.monotonic() + timeout_s
        known = {peer: Address.unpack(addresses[peer], peer) for peer in peers}
        for peer, address in known.items():
            self._check_peer(peer, address)
        self._lanes = lanes
        self._depths = self._choose_depths(len(peers), lanes)
        promises = self.capabilities
        self._plane = self._native.Plane(
            num_ranks=len(addresses),
            max_message=promises.max_message,
            immediates=promises.imm_bits > 0,
            signals=promises.native_signal != "none",
            renewals=self.renews,
        )
        for lane in range(lanes):
            self._add_lane(lane, rank, known)
        for index, rail in enumerate(self._rails):
            pairs = [pair for pair in self._pairs if pair.lane % len(self._rails) == index]
            listener, hello = self._listeners[index], self._hellos[index]
            if listener is not None:
                listener.connect(rank, self._nonce, known, index, pairs, deadline)
            elif hello is not None:
                self._exchange(hello, rail, rank, known, index, pairs, deadline)

    def _check_peer(self, peer: int, address: Address) -> None:
        mine, theirs = [rail.kind for rail in self._rails], [rail.kind for rail in address.rails]
        if mine != theirs:
            raise TransportError(
                f"this rank uses {', '.join(rail.name for rail in self._rails)} ({', '.join(mine)}) and rank {peer} "
                f"uses {', '.join(rail.device for rail in address.rails)} ({', '.join(theirs)}): name devices of "
                f"equal kinds and number with the option device"
            )

    def _choose_depths(self, num_peers: int, lanes: int) -> tuple[int, int]:
        """Depths of a queue pair such that no completion queue can overflow, also when all of them fail."""
        settings = self._settings
        send, receive = _send_requests(settings), settings.receive_depth
        if not self.capabilities.imm_bits:
            receive = IDLE_RECEIVES
        for rail in self._rails:
            share = rail.limits.max_cqe // max(1, num_peers)
            send = min(send, rail.limits.max_qp_wr, share)
            receive = min(receive, rail.limits.max_qp_wr, share)
            lanes_here = -(-lanes // len(self._rails))
            if num_peers * lanes_here + 2 > rail.limits.max_qp:
                fewer = max(1, rail.limits.max_qp // (num_peers + 2))
                raise TransportError(
                    f"{rail.name} has {rail.limits.max_qp} queue pairs; {num_peers} peers times {lanes_here} lanes "
                    f"need more: lower general.num_proxies to {fewer}"
                )
        if send < 16 or receive < IDLE_RECEIVES:
            raise TransportError(f"a completion queue of this device is too short for {num_peers} peers")
        return send, receive

    def _add_lane(self, lane: int, rank: int, known: Mapping[int, Address]) -> None:
        index = lane % len(self._rails)
        rail = self._rails[index]
        send_depth, receive_depth = self._depths
        library = rail.verbs
        try:
            send_queue = library.cq.CQ(rail.context, max(1, len(known) * send_depth))
            # Room for two of each pair: one that fails, and the next that fails before its receives are looked at.
            room = min(2 * len(known) * receive_depth, rail.limits.max_cqe)
            receive_queue = library.cq.CQ(rail.context, max(1, room))
        except Exception as error:
            raise TransportError(
                f"{rail.name} cannot make a completion queue for {len(known)} peers: {error}; lower send_depth"
            ) from error
        self._queues += [send_queue, receive_queue]
        hello = self._hellos[index]
        local = [self._region(by_rail[index], by_rail[index].lkeys) for by_rail in self._registered]
        self._plane.add_lane(
            device=rail.name,
            local=local,
            flush_address=rail.flush_buffer.buf,
            flush_key=rail.flush_buffer.lkey,
            send_queue=raw.handle(send_queue),
            receive_queue=raw.handle(receive_queue),
            wake_fd=hello.wake_fd if hello is not None and self.renews else -1,
        )
        for peer, address in known.items():
            psn = random.randrange(1 << 24)
            pair = queue_pairs.create(rail, send_queue, receive_queue, lane, peer, psn, self._depths)
            self._pairs.append(pair)
            listener = self._listeners[index]
            if listener is not None and peer > rank:
                listener.expect(pair)
            remote = [
                self._native.Region(base=it.base, bytes=it.nbytes, chunk_bytes=it.chunk_bytes, keys=it.keys)
                for it in address.rails[index].regions
            ]
            try:
                self._plane.add_pair(
                    lane=lane,
                    peer=peer,
                    queue_pair=raw.handle(pair.qp),
                    protection_domain=raw.handle(rail.domain),
                    qp_num=pair.number,
                    send_depth=send_depth,
                    receive_depth=receive_depth if listener is None else 0,
                    inline_bytes=rail.inline_bytes,
                    remote=remote,
                )
            except (ValueError, RuntimeError) as error:
                raise TransportError(f"{rail.name}: {error} (pyverbs at {rail.verbs.origin})") from error

    def _region(self, registration: Registration, keys: list[int]) -> Any:
        return self._native.Region(
            base=registration.base,
            bytes=registration.nbytes,
            chunk_bytes=registration.chunk_bytes,
            keys=keys,
            readable=registration.readable,
        )

    def _exchange(
        self,
        hello: Hello,
        rail: Rail,
        rank: int,
        known: Mapping[int, Address],
        index: int,
        pairs: Sequence[queue_pairs.QueuePair],
        deadline: float,
    ) -> None:
        by_peer = {peer: [pair for pair in pairs if pair.peer == peer] for peer in known}
        try:
            hello.begin(rank, self._nonce, known, index, by_peer)
            numbers = hello.numbers(deadline)
            for peer, mine in by_peer.items():
                theirs = numbers[peer]
                if len(theirs) != len(mine):
                    raise TransportError(
                        f"rank {peer} made {len(theirs)} lanes on {known[peer].rails[index].device} and this rank "
                        f"{len(mine)} on {rail.name}: all ranks need the same general.num_proxies"
                    )
                for pair, (number, psn) in zip(mine, theirs, strict=True):
                    queue_pairs.connect(pair, known[peer].rails[index], number, psn)
            if self.renews:
                remotes = {peer: address.rails[index] for peer, address in known.items()}
                limit_s = self._settings.renew_timeout_s
                hello.serve(
                    Renewals(rail, self._native, self._plane, pairs, remotes, self._depths, limit_s, hello.note)
                )
            hello.ready()
            hello.wait_ready(deadline)
        except SilentPeerError as silent:
            where = known[silent.rank].rails[index]
            raise TransportError(
                f"{rail.name}: rank {silent.rank} ({known[silent.rank].host}, {where.device}, {where.gid}) did not "
                f"answer in time; see that its process is up and that the two addresses reach each other over this "
                f"network, and raise timeout_s where ranks start far apart"
            ) from None

    @property
    def native_ops(self) -> int:
        if self._plane is None:
            raise TransportError("the ibverbs transport is not connected: call connect() first")
        return int(self._plane.ops_address)

    def break_lane(self, lane: int) -> bool:
        """Move this end's queue pairs of a lane into their error state; True where they will be replaced."""
        if not self.renews:
            return False
        for pair in self._pairs:
            if pair.lane == lane:
                pair.fail()
        return True

    def statistics(self, lane: int) -> Mapping[str, int]:
        """Counts of one lane: work requests, doorbells, completions, fencing reads, receive refills."""
        return dict(self._plane.statistics(lane)) if self._plane is not None else {}

    def describe(self) -> Mapping[str, Any]:
        rails = []
        for rail in self._rails:
            facts: dict[str, Any] = {
                "device": rail.name,
                "kind": rail.kind,
                "driver": rail.nic.driver,
                "interface": rail.interface,
                "address": f"GID {rail.gid.index}: {rail.gid.gid} {rail.gid.version}" if rail.gid else rail.ip,
                "mtu": rail.mtu,
                "atomics": bool(rail.limits.atomic_caps),
                "inline_bytes": rail.inline_bytes,
                "gpu_memory": rail.gpu_memory or "staged in host memory",
                "registrations": [len(by_rail[self._rails.index(rail)].rkeys) for by_rail in self._registered],
            }
            pair = next((it for it in self._pairs if it.rail is rail), None)
            if pair is not None:
                with pair.lock:
                    facts["order_within_a_write"] = raw.data_in_order(pair.qp)
            rails.append(facts)
        settings = self._settings
        return {
            "chosen": self._why,
            "rails": rails,
            "lanes": self._lanes,
            "send_depth": self._depths[0],
            "receive_depth": self._depths[1],
            "timeout": f"{settings.timeout} ({4.096e-6 * 2**settings.timeout:.3g} s), {settings.retry} retries",
            "errors": f"replaced within {settings.renew_timeout_s:g} s" if self.renews else "final",
            "service_level": settings.service_level,
            "traffic_class": settings.traffic_class,
            "relaxed_ordering": settings.relaxed_ordering,
            "pyverbs": self._rails[0].verbs.origin if self._rails else "",
        }

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for listener in self._listeners:
            if listener is not None:
                listener.close()
        for hello in self._hellos:
            if hello is not None:
                hello.close()
        for thing in [*(pair.qp for pair in self._pairs), *self._queues]:
            with contextlib.suppress(Exception):
                thing.close()
        self._plane = None
        self._pairs, self._queues = [], []
        for rail in self._rails:
            rail.close()
