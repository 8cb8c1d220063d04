"""Exchange of queue pair numbers between InfiniBand and RoCE ranks.

A rank's address is made before it knows its peers, but a reliable connection needs one queue pair
number for each pair of ranks. Each device therefore has one datagram queue pair, whose number is in
the address, and over it the ranks tell each other the numbers. Datagrams may be lost, so they are
sent again until the peer has shown that it needs them no more; a thread goes on answering until the
transport is closed, since the last answer may be lost too. Over the same way the ranks agree on new
queue pairs in place of broken ones (`renewal`), and tell that they close.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import select
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from . import raw
from .addressing import Address
from .queue_pairs import address_handle
from .rail import Rail
from .renewal import Renewals

QKEY = 0x55434550
SLOT = 1024  # bytes; one datagram of every InfiniBand and RoCE path
GRH = 40  # bytes that precede a received datagram
NUM_RECEIVES = 512
FIRST_RECEIVES = 8  # posted before the peers are known; each costs a millisecond on a slow machine
NUM_SENDS = 64
FIRST_RETRY_S, LAST_RETRY_S = 0.02, 0.5

GOODBYE_S = 0.2  # for the last datagrams to leave; who misses his learns of it by time-out

READY, SEEN = 1, 2  # my queue pairs towards you can receive; I know that yours can
NOTE, GONE = 4, 8  # what follows is for the peer's `Renewals`; I am closing
_HEAD = struct.Struct("<4sIIIQQ")  # magic, from, to, flags, nonce of the sender, nonce of the receiver
_PAIR = struct.Struct("<II")  # number, packet sequence number
_MAGIC = b"UEP1"
MAX_PAIRS = (SLOT - _HEAD.size) // _PAIR.size


class SilentPeerError(Exception):
    """A peer did not answer in time."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} did not answer")
        self.rank = rank


@dataclasses.dataclass
class _Peer:
    nonce: int
    route: Any  # pyverbs AH
    hello_qp: int
    pairs: list[tuple[int, int]]  # mine, towards this peer
    theirs: list[tuple[int, int]] | None = None
    ready: bool = False  # mine are connected
    peer_ready: bool = False
    peer_saw: bool = False
    next_send: float = 0.0
    interval: float = FIRST_RETRY_S


class Hello:
    """The datagram queue pair of one device, and the thread that serves it."""

    def __init__(self, rail: Rail, native: Any) -> None:
        self._rail = rail
        verbs, enums = rail.verbs, rail.verbs.enums
        self._channel = verbs.cq.CompChannel(rail.context)
        self._queue = verbs.cq.CQ(rail.context, NUM_RECEIVES + NUM_SENDS, None, self._channel)
        self._fd = native.channel_fd(raw.handle(self._channel), raw.handle(self._queue))
        self._buffer = verbs.mr.MR(rail.domain, (NUM_RECEIVES + NUM_SENDS) * (GRH + SLOT), enums.IBV_ACCESS_LOCAL_WRITE)
        cap = verbs.qp.QPCap(max_send_wr=NUM_SENDS, max_recv_wr=NUM_RECEIVES, max_send_sge=1, max_recv_sge=1)
        init = verbs.qp.QPInitAttr(qp_type=enums.IBV_QPT_UD, scq=self._queue, rcq=self._queue, cap=cap, sq_sig_all=1)
        self._qp = verbs.qp.QP(rail.domain, init)
        attr = verbs.qp.QPAttr(qp_state=enums.IBV_QPS_INIT, port_num=rail.port)
        attr.qkey = QKEY
        self._qp.modify(attr, enums.IBV_QP_STATE | enums.IBV_QP_PKEY_INDEX | enums.IBV_QP_PORT | enums.IBV_QP_QKEY)
        for slot in range(FIRST_RECEIVES):
            self._post_receive(slot)
        self._qp.modify(verbs.qp.QPAttr(qp_state=enums.IBV_QPS_RTR, port_num=rail.port), enums.IBV_QP_STATE)
        attr = verbs.qp.QPAttr(qp_state=enums.IBV_QPS_RTS, port_num=rail.port)
        attr.sq_psn = 0
        self._qp.modify(attr, enums.IBV_QP_STATE | enums.IBV_QP_SQ_PSN)
        self._free = list(range(NUM_RECEIVES, NUM_RECEIVES + NUM_SENDS))
        self._rank = -1
        self._nonce = 0
        self._peers: dict[int, _Peer] = {}
        self._changed = threading.Condition()
        self._failure: Exception | None = None
        self._closing = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._thread: threading.Thread | None = None
        self._renewals: Renewals | None = None

    @property
    def number(self) -> int:
        return int(self._qp.qp_num)

    @property
    def wake_fd(self) -> int:
        """A byte written here lets the thread look for queue pairs in error; does not block."""
        return self._wake_write

    def begin(
        self, rank: int, nonce: int, addresses: Mapping[int, Address], rail_index: int, pairs: Mapping[int, list[Any]]
    ) -> None:
        """Start to tell each peer the numbers of the queue pairs made for it."""
        self._rank, self._nonce = rank, nonce
        for slot in range(FIRST_RECEIVES, min(NUM_RECEIVES, 2 * len(addresses))):
            self._post_receive(slot)
        verbs = self._rail.verbs
        for peer, address in addresses.items():
            where = address.rails[rail_index]
            route = verbs.addr.AH(self._rail.domain, attr=address_handle(self._rail, where))
            mine = [(pair.number, pair.psn) for pair in pairs[peer]]
            self._peers[peer] = _Peer(address.nonce, route, where.hello_qp, mine)
        self._queue.req_notify()
        self._thread = threading.Thread(target=self._serve, name=f"uccl_ep hello {self._rail.name}", daemon=True)
        self._thread.start()

    def numbers(self, deadline: float) -> Mapping[int, list[tuple[int, int]]]:
        """Wait for the numbers of all peers; `SilentPeerError` when the time is up."""
        self._wait(deadline, lambda it: it.theirs is not None)
        return {rank: it.theirs for rank, it in self._peers.items() if it.theirs is not None}

    def ready(self) -> None:
        """Tell all peers that the queue pairs towards them can receive."""
        with self._changed:
            for it in self._peers.values():
                it.ready = True
                it.next_send = 0.0
                it.interval = FIRST_RETRY_S
        os.write(self._wake_write, b"r")

    def wait_ready(self, deadline: float) -> None:
        """Wait until all peers are ready; `SilentPeerError` when the time is up."""
        self._wait(deadline, lambda it: it.peer_ready)

    def serve(self, renewals: Renewals) -> None:
        """From now on replace queue pairs."""
        self._renewals = renewals

    def note(self, rank: int, data: bytes) -> None:
        """Send bytes to a rank's `Renewals`, once; on this object's thread alone."""
        self._send(rank, self._peers[rank], NOTE, data)

    def _wait(self, deadline: float, condition: Callable[[_Peer], bool]) -> None:
        with self._changed:
            while True:
                if self._failure is not None:
                    raise self._failure
                missing = next((rank for rank, it in self._peers.items() if not condition(it)), None)
                if missing is None:
                    return
                left = deadline - time.monotonic()
                if left <= 0:
                    raise SilentPeerError(missing)
                self._changed.wait(min(left, 1.0))

    # --- the thread ---

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        try:
            while not self._closing:
                for fd, _ in poll.poll(self._work()):
                    if fd == self._wake_read:
                        os.read(self._wake_read, 64)
                        if self._renewals is not None:
                            self._renewals.look(time.monotonic())
                    else:
                        self._channel.get_cq_event(self._queue)
                        self._queue.ack_events(1)
                        self._queue.req_notify()
                self._take_completions()
            self._say_goodbye()
        except Exception as error:
            if self._renewals is not None:
                self._renewals.end(f"the thread that replaces queue pairs failed: {error}")
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _work(self) -> int | None:
        """Do what is due; milliseconds until something is again, or None."""
        now = time.monotonic()
        times = [self._send_due(now), self._renewals.work(now) if self._renewals is not None else None]
        soonest = min((it for it in times if it is not None), default=None)
        return None if soonest is None else max(1, int(1000 * (soonest - now)))

    def _say_goodbye(self) -> None:
        deadline = time.monotonic() + GOODBYE_S
        for rank, it in self._peers.items():
            while not self._free and time.monotonic() < deadline:
                self._take_completions()
            if it.peer_ready:
                self._send(rank, it, GONE)
        while len(self._free) < NUM_SENDS and time.monotonic() < deadline:
            self._take_completions()

    def _send_due(self, now: float) -> float | None:
        """Send the numbers that are due; the time at which to look again, or None."""
        soonest: float | None = None
        with self._changed:
            for rank, it in self._peers.items():
                if it.peer_ready and it.peer_saw:
                    continue
                if it.next_send <= now:
                    self._send_numbers(rank, it)
                    it.interval = min(2 * it.interval, LAST_RETRY_S)
                    # Spread, so that thousands of ranks do not answer one of them at the same moment.
                    it.next_send = now + it.interval * random.uniform(0.75, 1.25)
                soonest = it.next_send if soonest is None else min(soonest, it.next_send)
        return soonest

    def _send_numbers(self, rank: int, it: _Peer) -> None:
        flags = (READY if it.ready else 0) | (SEEN if it.peer_ready else 0)
        self._send(rank, it, flags, b"".join(_PAIR.pack(*pair) for pair in it.pairs))

    def _send(self, rank: int, it: _Peer, flags: int, payload: bytes = b"") -> None:
        if not self._free:
            return  # sent again when it is due the next time
        slot = self._free.pop()
        data = _HEAD.pack(_MAGIC, self._rank, rank, flags, self._nonce, it.nonce) + payload
        offset = slot * (GRH + SLOT)
        self._buffer.write(data, len(data), offset)
        verbs, enums = self._rail.verbs, self._rail.verbs.enums
        element = verbs.wr.SGE(self._buffer.buf + offset, len(data), self._buffer.lkey)
        request = verbs.wr.SendWR(slot, opcode=enums.IBV_WR_SEND, num_sge=1, sg=[element])
        request.set_wr_ud(it.route, it.hello_qp, QKEY)
        self._qp.post_send(request)

    def _post_receive(self, slot: int) -> None:
        verbs = self._rail.verbs
        element = verbs.wr.SGE(self._buffer.buf + slot * (GRH + SLOT), GRH + SLOT, self._buffer.lkey)
        self._qp.post_recv(verbs.wr.RecvWR(slot, 1, [element]))

    def _take_completions(self) -> None:
        while True:
            count, completions = self._queue.poll(32)
            for completion in completions:
                slot = int(completion.wr_id)
                if slot >= NUM_RECEIVES:
                    self._free.append(slot)
                    continue
                if completion.status == self._rail.verbs.enums.IBV_WC_SUCCESS and completion.byte_len > GRH:
                    length = completion.byte_len - GRH
                    self._take(bytes(self._buffer.read(length, slot * (GRH + SLOT) + GRH)))
                self._post_receive(slot)
            if not count:
                return

    def _take(self, data: bytes) -> None:
        if len(data) < _HEAD.size:
            return
        magic, sender, receiver, flags, nonce, my_nonce = _HEAD.unpack_from(data)
        it = self._peers.get(sender)
        # Anything else is a stray datagram, or one for an earlier buffer whose queue pair had this number.
        if magic != _MAGIC or it is None or receiver != self._rank or (nonce, my_nonce) != (it.nonce, self._nonce):
            return
        if flags & (NOTE | GONE):
            if self._renewals is not None and flags & NOTE:
                self._renewals.take(sender, data[_HEAD.size :], time.monotonic())
            elif self._renewals is not None:
                self._renewals.gone(sender, time.monotonic())
            return
        with self._changed:
            if it.theirs is None:
                it.theirs = list(_PAIR.iter_unpack(data[_HEAD.size :]))
            it.peer_ready |= bool(flags & READY)
            it.peer_saw |= bool(flags & SEEN)
            if it.ready and not flags & SEEN:
                self._send_numbers(sender, it)
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread and release the queue pair."""
        self._closing = True
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"c")
        if self._thread is not None:
            self._thread.join(timeout=10)
            self._thread = None
        with contextlib.suppress(Exception):
            self._qp.close()
        for it in self._peers.values():
            with contextlib.suppress(Exception):
                it.route.close()
        self._peers = {}
        for thing in (self._queue, self._channel, self._buffer):
            with contextlib.suppress(Exception):
                thing.close()
        for fd in (self._wake_read, self._wake_write):
            with contextlib.suppress(OSError):
                os.close(fd)
