"""The adapter for transports written in Python, with a transport that copies inside this process."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from uccl_ep_core import _native
from uccl_ep_core.capabilities import Capabilities
from uccl_ep_core.errors import TransportError
from uccl_ep_core.python_transport import PythonTransport, Signal, Write

sys.path.insert(0, str(Path(__file__).parent))
import engine_ranks as ranks


class Loopback(PythonTransport):
    """All ranks in one process; writes are copies."""

    def __init__(self, group: list[Loopback]) -> None:
        self.group = group
        self.completions: list[tuple[int, int]] = []
        self.arrivals: list[tuple[int, int]] = []
        self.fail = False
        self.alive = True
        group.append(self)

    @classmethod
    def probe(cls, options: Any) -> Any:
        return []

    @classmethod
    def open(cls, device: Any, options: Any) -> Loopback:
        return cls([])

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            write_order=True,
            signal_order=True,
            imm_bits=32,
            imm_after_payload=True,
            delivery_complete=True,
            exactly_once=True,
            native_signal="host",
            peer_failure="event",
        )

    def address(self) -> bytes:
        return b""

    def connect(self, rank, addresses, peers, lanes, timeout_s):
        self.rank = rank
        super().connect(rank, addresses, peers, lanes, timeout_s)

    def close(self) -> None:
        self._ops = None

    def post_writes(self, lane: int, writes: list[Write]) -> int:
        if self.fail:
            raise OSError("the cable is out")
        for write in writes[:3]:
            peer = self.group[write.peer]
            source = self.view(write.local_region, write.local_offset, write.nbytes)
            peer.view(write.remote_region, write.remote_offset, write.nbytes)[:] = source
            if write.immediate is not None:
                peer.arrivals.append((write.immediate, self.rank))
            self.completions.append((write.token, 0))
        return min(3, len(writes))

    def post_signals(self, lane: int, signals: list[Signal]) -> int:
        for signal in signals:
            self.group[signal.peer].raise_word(signal.remote_region, signal.remote_offset, signal.value)
            self.completions.append((signal.token, 0))
        return len(signals)

    def poll_completions(self, lane: int, capacity: int) -> list[tuple[int, int]]:
        taken, self.completions = self.completions[:capacity], self.completions[capacity:]
        return taken

    def poll_arrivals(self, lane: int, capacity: int) -> list[tuple[int, int]]:
        taken, self.arrivals = self.arrivals[:capacity], self.arrivals[capacity:]
        return taken

    def peer_alive(self, peer: int) -> bool:
        return self.group[peer].alive


class Mending(Loopback):
    """Breaks at every seventh write: it and all behind it fail until the lane is renewed, at the second request."""

    def __init__(self, group: list[Loopback]) -> None:
        super().__init__(group)
        self.posted = self.asked = 0
        self.down = False

    def post_writes(self, lane: int, writes: list[Write]) -> int:
        for write in writes:
            self.posted += 1
            self.down = self.down or self.posted % 7 == 0
            if self.down:
                self.completions.append((write.token, -5))
            else:
                super().post_writes(lane, [write])
        return len(writes)

    def post_signals(self, lane: int, signals: list[Signal]) -> int:
        if not self.down:
            return super().post_signals(lane, signals)
        self.completions += [(signal.token, -5) for signal in signals]
        return len(signals)

    def renew_lane(self, lane: int) -> bool:
        self.asked += 1
        self.down = self.asked % 2 == 1
        return not self.down


def two(kind):
    group: list[Loopback] = []
    both = [ranks.Rank(rank, 2, kind(group)) for rank in range(2)]
    yield both
    for rank in both:
        rank.close()


@pytest.fixture
def pair():
    yield from two(Loopback)


@pytest.fixture
def mending():
    yield from two(Mending)


def connect(pair, plan):
    for rank in pair:
        rank.connect([b"", b""], plan, 1)


def verdict_of(rank):
    deadline = time.monotonic() + ranks.WAIT_S
    while not rank.verdicts.aborted and time.monotonic() < deadline:
        time.sleep(0.001)
    return rank.verdicts.agree(0.05)


def carry(pair):
    """Forty messages of two writes each, checked byte by byte."""
    sender, receiver = pair
    name = sender.layout.signal_index(_native.SignalKind.DIRECT_DATA, 0, 0)
    for value in range(1, 41):
        if value > 8:
            sender.wait_completed(0, 2 * (value - 8))
        place = value % 8 * 64
        sender.data.view()[place : place + 64] = bytes([value]) * 64
        for half in (0, 32):
            sender.push(
                0,
                peer=1,
                local_offset=place + 32 - half,
                remote_offset=4096 + place + 32 - half,
                bytes=32,
                signal=name,
                value=value,
                last=half == 32,
            )
        receiver.wait_signal(name, value)
        assert bytes(receiver.data.view()[4096 + place : 4096 + place + 64]) == bytes([value]) * 64


@pytest.mark.parametrize("plan", ["native", "counted", "fenced"])
def test_a_python_transport_carries_messages_under_every_plan(pair, plan):
    connect(pair, plan)
    carry(pair)
    assert pair[0].engine.stats()["lane_generations"] == 0


@pytest.mark.parametrize("plan", ["native", "counted", "fenced"])
def test_a_python_transport_may_renew_its_lanes(mending, plan):
    connect(mending, plan)
    carry(mending)
    stats = mending[0].engine.stats()
    assert stats["lane_generations"] >= 40 // 7
    assert stats["retried"] >= stats["lane_generations"]


def test_an_exception_becomes_the_groups_error(pair):
    connect(pair, "counted")
    pair[0].transport.fail = True
    name = pair[0].layout.signal_index(_native.SignalKind.DIRECT_DATA, 0, 0)
    pair[0].push(0, peer=1, local_offset=0, remote_offset=0, bytes=8, signal=name, value=1)
    verdict = verdict_of(pair[0])
    assert (verdict.culprit, verdict.reason) == (1, _native.Reason.TRANSPORT)
    assert "the cable is out" in pair[0].engine.error()


def test_a_dead_peer_is_asked_for(pair):
    connect(pair, "counted")
    pair[1].transport.alive = False
    verdict = verdict_of(pair[0])
    assert (verdict.culprit, verdict.reason) == (1, _native.Reason.DEAD)


def test_bytes_outside_a_region_are_refused(pair):
    transport = pair[0].transport
    nbytes = pair[0].data.nbytes
    assert len(transport.view(0, nbytes - 8, 8)) == 8
    for region, offset, count in ((0, nbytes - 7, 8), (2, 0, 1), (0, -1, 1), (-1, 0, 1)):
        with pytest.raises(TransportError):
            transport.view(region, offset, count)
    with pytest.raises(TransportError, match="multiple of 8"):
        transport.raise_word(1, 4, 1)
