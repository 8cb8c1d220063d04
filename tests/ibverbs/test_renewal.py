"""Queue pairs that fail under a stream of writes: replaced on both ends, and what had failed is posted again.

Two ranks of one process on one device, driven the way a proxy drives them; test_broken_lanes.py has the library itself.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from wire import CONTROL, DATA, FENCED, IMMEDIATE, Endpoint, Signal, Write, connect_all, wait

QUICK = {"timeout": 10, "retry": 3}
"""A peer that does not answer is noticed after 4.2 ms, four times."""
CELL = 4096


@pytest.fixture
def ends(connected_device: str) -> Iterator[Callable[..., list[Endpoint]]]:
    """Makes connected ranks, closed when the test ends."""
    made: list[Endpoint] = []

    def make(number: int = 2, lanes: int = 1, **options: Any) -> list[Endpoint]:
        made.extend(Endpoint(connected_device, {**QUICK, **options}, CELL * 64) for _ in range(number))
        connect_all(made, lanes)
        return made

    yield make
    for it in made:
        it.close()


def break_pair(endpoint: Endpoint, peer: int, lane: int = 0) -> None:
    """Move one end's queue pair into its error state, as a fault of the device or the link does."""
    pairs = endpoint.transport._pairs  # type: ignore[attr-defined]
    next(pair for pair in pairs if pair.peer == peer and pair.lane == lane).fail()


class Stream:
    """Writes with immediates from one rank to another; each is posted until it completes without an error."""

    def __init__(self, sender: Endpoint, receiver: Endpoint, peer: int, seed: int) -> None:
        self.sender, self.receiver, self.peer = sender, receiver, peer
        self.content = random.Random(seed).randbytes(len(sender.data))
        ctypes.memmove(sender.data, self.content, len(self.content))
        self.waiting: list[int] = []  # failed, in the order posted
        self.posted = self.done = self.errors = self.renewals = 0
        self.in_flight = 0
        self.down = False
        self.seen: dict[int, int] = {}  # how often each immediate arrived

    def write_of(self, number: int) -> Write:
        place = number % 64 * CELL
        return Write(self.peer, IMMEDIATE, DATA, DATA, place, place, CELL, number, number)

    def step(self) -> None:
        for token, peer, status in self.sender.completions():
            assert peer == self.peer
            self.in_flight -= 1
            if status == 0:
                self.done += 1
            else:
                self.errors += 1
                self.waiting.append(token)
                self.down = True
        for immediate, _ in self.receiver.arrivals():
            self.seen[immediate] = self.seen.get(immediate, 0) + 1
        self.receiver.completions()  # a receiver polls both, as a proxy does
        if self.down and self.in_flight == 0:
            if self.sender.renew() == 0:
                return
            self.down = False
            self.renewals += 1
        if not self.down:
            self.waiting.sort()
            again = [self.write_of(number) for number in self.waiting]
            if again:
                taken = self.sender.write(*again)
                self.in_flight += taken
                del self.waiting[:taken]
            elif self.in_flight < 32:
                taken = self.sender.write(self.write_of(self.posted))
                self.posted += taken
                self.in_flight += taken

    def run(self, number: int, limit_s: float = 30.0) -> None:
        """Until ``number`` more writes are done."""
        goal = self.done + number
        wait(lambda: self.step() or self.done >= goal, limit_s, f"{number} writes")


@pytest.mark.parametrize("side", ["sender", "receiver", "both"])
def test_a_stream_goes_on_over_a_new_queue_pair(ends: Callable[..., list[Endpoint]], side: str) -> None:
    first, second = ends()
    numbers = [it.transport._pairs[0].number for it in (first, second)]  # type: ignore[attr-defined]
    stream = Stream(first, second, 1, seed=5)
    for _ in range(5):
        stream.run(50)
        if side != "receiver":
            break_pair(first, 1)
        if side != "sender":
            break_pair(second, 0)
    stream.run(100)
    wait(lambda: stream.step() or len(stream.seen) >= stream.done, 10, "arrivals")
    assert stream.errors > 0
    assert stream.renewals >= 5
    assert sorted(stream.seen)[: stream.done] == list(range(stream.done)), "a write that completed never arrived"
    assert second.data.raw == stream.content
    for it, before in zip((first, second), numbers, strict=True):
        assert it.transport.statistics(0)["renewals"] >= 5  # type: ignore[attr-defined]
        assert it.transport._pairs[0].number != before  # type: ignore[attr-defined]


def test_an_end_that_sends_nothing_is_told(ends: Callable[..., list[Endpoint]]) -> None:
    """The receiver's queue pair fails without a sound: the sender notices, and both make a new one."""
    first, second = ends()
    break_pair(second, 0)
    assert first.write(Write(1, 0, DATA, DATA, 0, 0, CELL, 0, 1)) == 1
    (completion,) = first.settle(1)
    assert completion[2] < 0
    wait(lambda: second.completions() or first.renew() == 1, 10, "a new queue pair")
    assert not first.dead(1)
    assert first.write(Write(1, FENCED, DATA, DATA, 0, 0, CELL, 0, 2)) == 1
    assert first.settle(1) == [(2, 1, 0)]
    # The other direction of the same queue pair needs no renew_lane: nothing of it had failed.
    plane = second.transport._plane  # type: ignore[attr-defined]
    wait(lambda: second.completions() or plane.stage(0, 0).name == "UP", 10, "the other end's turn")
    assert second.write(Write(0, FENCED, DATA, DATA, 0, 0, 8, 0, 3)) == 1
    assert second.settle(1) == [(3, 0, 0)]


def test_nothing_lands_behind_a_failure_before_the_lane_is_renewed(ends: Callable[..., list[Endpoint]]) -> None:
    first, second = ends()
    word = ctypes.c_uint64.from_buffer(second.control, 64)
    break_pair(first, 1)
    assert first.write(Write(1, 0, DATA, DATA, 0, 0, CELL, 0, 1)) == 1
    assert first.settle(1)[0][2] < 0
    end = time.monotonic() + 1.0  # much longer than a new queue pair takes
    while time.monotonic() < end:
        assert first.signal(Signal(1, CONTROL, 64, 7, 2)) == 1
        assert first.settle(1)[0][2] < 0, "a signal went past the write that failed"
        second.completions()
    assert word.value == 0
    wait(lambda: second.completions() or first.renew() == 1, 10, "a new queue pair")
    assert first.signal(Signal(1, CONTROL, 64, 8, 3)) == 1
    assert first.settle(1) == [(3, 1, 0)]
    wait(lambda: word.value == 8, 10, "the signal")


def test_only_the_pair_that_failed_is_replaced(ends: Callable[..., list[Endpoint]]) -> None:
    first, second, third = ends(3, lanes=2)
    break_pair(first, 1, lane=1)
    assert first.write(Write(1, 0, DATA, DATA, 0, 0, 64, 0, 1), lane=1) == 1
    assert first.settle(1, lane=1)[0][2] < 0
    for peer, lane in ((1, 0), (2, 0), (2, 1)):
        assert first.write(Write(peer, FENCED, DATA, DATA, 0, 0, 64, 0, 5), lane=lane) == 1
        assert first.settle(1, lane=lane) == [(5, peer, 0)]
    wait(lambda: second.completions(lane=1) or first.renew(lane=1) == 1, 10, "a new queue pair")
    plane = second.transport._plane  # type: ignore[attr-defined]
    wait(lambda: second.completions(lane=1) or plane.stage(1, 0).name == "UP", 10, "the other end's turn")
    counts = [[it.transport.statistics(lane)["renewals"] for lane in (0, 1)] for it in (first, second, third)]  # type: ignore[attr-defined]
    assert counts == [[0, 1], [0, 1], [0, 0]]


def test_a_peer_that_does_not_answer_is_dead_in_time(ends: Callable[..., list[Endpoint]]) -> None:
    """The peer's proxy never polls, so its old queue pair is never given up."""
    first, second = ends(renew_timeout_s=1.0)
    break_pair(second, 0)
    assert first.write(Write(1, 0, DATA, DATA, 0, 0, CELL, 0, 1)) == 1
    assert first.settle(1)[0][2] < 0
    begin = time.monotonic()
    wait(lambda: first.completions() or first.dead(1), 5, "the end of the wait")
    assert time.monotonic() - begin > 0.5
    assert first.renew() == 1, "posts on a dead peer fail at once, the lane serves the others"
    assert first.write(Write(1, 0, DATA, DATA, 0, 0, CELL, 0, 2)) == 1
    assert first.settle(1)[0][2] < 0
    words = first.error()
    assert "rank 1" in words and "queue pair" in words, words
    assert "did not finish within 1 s" in words, words


def test_errors_are_final_where_the_option_says_so(ends: Callable[..., list[Endpoint]]) -> None:
    first, second = ends(renew_timeout_s=0.0)
    assert not first.table.renew_lane  # type: ignore[union-attr]
    break_pair(second, 0)
    assert first.write(Write(1, 0, DATA, DATA, 0, 0, CELL, 0, 1)) == 1
    assert first.settle(1)[0][2] < 0
    assert first.dead(1)
