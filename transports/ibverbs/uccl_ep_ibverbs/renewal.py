"""Replaces queue pairs in error, together with the peer.

One object serves one device, on the thread of its datagram queue pair (`hello.Hello`), over which both ends agree. For
a write that failed to be safe to repeat, nothing of the old queue pair may still land: so each end destroys its own
first and only then says that it has a new one. Every message is repeated until what it asks for has come:

    PREPARED  my old queue pair is gone; the new one has this number
    READY     it is connected to yours, so you may send
    SEEN      I know that yours is ready: no answer is needed

Either end may begin; an end that noticed nothing is told to by the other's message. Generations number the queue pairs
of a lane and peer, on both ends alike, so that a late message is never taken for one of this renewal.
"""

from __future__ import annotations

import dataclasses
import random
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from . import queue_pairs, raw
from .addressing import RailAddress
from .queue_pairs import QueuePair
from .rail import Rail

PREPARED, READY, SEEN = 1, 2, 4
_NOTE = struct.Struct("<IIIII")  # lane, generation, flags, number, packet sequence number
FIRST_REPEAT_S, LAST_REPEAT_S = 0.02, 0.25


@dataclasses.dataclass
class _Renewal:
    """Of one queue pair, under way."""

    pair: QueuePair
    generation: int  # of the new queue pair
    deadline: float
    failed: bool = False  # the old one was moved to its error state
    prepared: bool = False
    connected: bool = False
    heard: bool = False
    theirs: tuple[int, int] | None = None  # number and packet sequence number
    peer_ready: bool = False
    trouble: str = ""
    not_before: float = 0.0  # of the next try, after a device refused one
    next_send: float = 0.0
    interval: float = FIRST_REPEAT_S

    def again(self, generation: int) -> None:
        """Begin anew, with another queue pair than the one that was prepared."""
        self.generation = generation
        self.prepared = self.connected = self.peer_ready = False
        self.theirs = None
        self.next_send = 0.0


class Renewals:
    """The queue pairs of one device that are being replaced.

    Args:
        rail: the device.
        native: the module of the data plane.
        plane: the data plane, all of whose pairs exist.
        pairs: this device's.
        remotes: addresses of the peers' devices, by rank.
        depths: of send and receive queues.
        limit_s: seconds that one renewal may take.
        send: takes a rank and the bytes of a message to its `Renewals`.
    """

    def __init__(
        self,
        rail: Rail,
        native: Any,
        plane: Any,
        pairs: Iterable[QueuePair],
        remotes: Mapping[int, RailAddress],
        depths: tuple[int, int],
        limit_s: float,
        send: Callable[[int, bytes], None],
    ) -> None:
        self._rail, self._stages, self._plane = rail, native.Stage, plane
        self._pairs = {(pair.lane, pair.peer): pair for pair in pairs}
        self._remotes, self._depths, self._limit_s, self._send = remotes, depths, limit_s, send
        self._generations = dict.fromkeys(self._pairs, 0)
        self._under_way: dict[tuple[int, int], _Renewal] = {}
        self._gone: set[int] = set()

    def look(self, now: float) -> None:
        """Begin to replace what the data plane found broken."""
        for key in self._pairs:
            if key not in self._under_way and self._stage(key) in (self._stages.BROKEN, self._stages.DRAINED):
                self._begin(key, now)

    def work(self, now: float) -> float | None:
        """Go on with all renewals; the time at which to do so again, or None."""
        for key in list(self._under_way):
            self._step(key, now)
        return min((min(it.next_send, it.deadline) for it in self._under_way.values()), default=None)

    def take(self, rank: int, data: bytes, now: float) -> None:
        """A message of the same device's `Renewals` on that rank."""
        if len(data) != _NOTE.size:
            return
        lane, generation, flags, number, psn = _NOTE.unpack(data)
        key = (lane, rank)
        if key not in self._pairs:
            return
        renewal = self._under_way.get(key)
        if renewal is not None and renewal.generation < generation:
            # The peer's new queue pair failed, perhaps before it was connected.
            if renewal.connected:
                self._plane.ask(lane, rank, generation)
                renewal.peer_ready = True
                self._step(key, now)
                renewal = self._under_way.get(key)
            else:
                renewal.again(generation)
        if generation > self._generations[key]:
            if renewal is None:
                renewal = self._begin(key, now)
                renewal.generation = generation
                self._plane.ask(lane, rank, generation)
            if renewal.generation > generation:
                return  # it learns of that by the next message
            renewal.heard = True
            if flags & PREPARED and renewal.theirs is None:
                renewal.theirs = (number, psn)
            renewal.peer_ready |= bool(flags & READY)
            self._step(key, now)
        elif generation == self._generations[key] and not flags & SEEN:
            self._tell(key, generation, PREPARED | READY | SEEN)

    def gone(self, rank: int, now: float) -> None:
        """The rank has closed: its queue pairs are not replaced any more."""
        self._gone.add(rank)
        self.work(now)

    def end(self, words: str) -> None:
        """No queue pair is replaced from now on."""
        for lane in {lane for lane, _ in self._pairs}:
            self._plane.end_renewals(lane, words)

    def _stage(self, key: tuple[int, int]) -> Any:
        return self._plane.stage(*key)

    def _begin(self, key: tuple[int, int], now: float) -> _Renewal:
        renewal = _Renewal(self._pairs[key], self._generations[key] + 1, now + self._limit_s)
        self._under_way[key] = renewal
        return renewal

    def _step(self, key: tuple[int, int], now: float) -> None:
        renewal, stage = self._under_way[key], self._stage(key)
        before = (renewal.prepared, renewal.connected)
        if now >= renewal.not_before:
            try:
                self._advance(key, renewal, stage)
            except Exception as error:  # of the device, or of the way to the peer; tried again until the time is up
                renewal.trouble = str(error)
                renewal.not_before = now + renewal.interval
                renewal.again(renewal.generation + 1)
        if renewal.connected and renewal.peer_ready:
            del self._under_way[key]
            self._generations[key] = renewal.generation
            self._plane.ready(*key)
            self._tell(key, renewal.generation, PREPARED | READY | SEEN)
            return
        if now >= renewal.deadline or key[1] in self._gone:
            del self._under_way[key]
            self._plane.give_up(*key, self._why_not(renewal))
            return
        if now >= renewal.next_send or before != (renewal.prepared, renewal.connected):
            flags = (PREPARED if renewal.prepared else 0) | (READY if renewal.connected else 0)
            self._tell(key, renewal.generation, flags)
            renewal.next_send = now + renewal.interval * random.uniform(0.75, 1.25)
            renewal.interval = min(2 * renewal.interval, LAST_REPEAT_S)

    def _advance(self, key: tuple[int, int], renewal: _Renewal, stage: Any) -> None:
        """What can be done now."""
        if stage == self._stages.BROKEN and not renewal.failed:
            renewal.pair.fail()
            renewal.failed = True
        if stage == self._stages.DRAINED and not renewal.prepared:
            self._replace(renewal)
        if renewal.prepared and renewal.theirs is not None and not renewal.connected:
            queue_pairs.connect(renewal.pair, self._remotes[key[1]], *renewal.theirs)
            renewal.connected = True
            self._plane.connected(*key, renewal.generation)

    def _replace(self, renewal: _Renewal) -> None:
        old = renewal.pair
        new = queue_pairs.create(
            self._rail, old.send_queue, old.receive_queue, old.lane, old.peer, random.randrange(1 << 24), self._depths
        )
        with old.lock:
            former, old.qp, old.psn = old.qp, new.qp, new.psn
        # Whatever reached it has landed before this returns, and nothing lands after.
        former.close()
        self._plane.prepare_pair(
            lane=old.lane,
            peer=old.peer,
            queue_pair=raw.handle(old.qp),
            protection_domain=raw.handle(self._rail.domain),
            qp_num=old.number,
        )
        renewal.prepared = True

    def _tell(self, key: tuple[int, int], generation: int, flags: int) -> None:
        pair = self._pairs[key]
        number, psn = (pair.number, pair.psn) if flags & PREPARED else (0, 0)
        self._send(key[1], _NOTE.pack(key[0], generation, flags, number, psn))

    def _why_not(self, renewal: _Renewal) -> str:
        peer = renewal.pair.peer
        if peer in self._gone:
            return f"rank {peer} has closed its transport"
        if renewal.trouble:
            return renewal.trouble
        if not renewal.heard:
            return (
                f"rank {peer} did not answer within {self._limit_s:g} s; see whether its process and the link are up, "
                f"or raise the option renew_timeout_s"
            )
        slow = "rank " + str(peer) if renewal.prepared else "this rank"
        return f"{slow} did not finish within {self._limit_s:g} s; see whether its proxy gets a core"
