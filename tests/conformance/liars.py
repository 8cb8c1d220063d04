"""Transports that lie, a class for each lie. The kit must name the lie of each."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from liar import Liar

from uccl_ep_core.conformance import abi
from uccl_ep_core.transport import Memory

SHUFFLED = {"profile": "srd", "delay": 20.0, "early_completion": 0.0}


class Honest(Liar):
    """No lie: shows that it is not the wrapping that the kit objects to."""


class ClaimsOrder(Liar):
    """Claims an order of writes that it does not keep."""

    INNER, INNER_OPTIONS = "sim", SHUFFLED
    CLAIMS: ClassVar[Mapping[str, Any]] = {"write_order": True}


class SignalsOvertake(Liar):
    """Raises signals at once while writes wait for the next polls."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.held: list[tuple[int, int, Any]] = []
        self.polls = 0

    def post_writes(self, lane: int, writes: Any, count: int) -> int:
        for index in range(count):
            copy = abi.Write.from_buffer_copy(writes[index])
            self.held.append((self.polls + 3, lane, copy))
        return count

    def poll_completions(self, lane: int, out: Any, capacity: int) -> int:
        self.polls += 1
        while self.held and self.held[0][0] <= self.polls and super().post_writes(self.held[0][1], self.held[0][2], 1):
            self.held.pop(0)
        return super().poll_completions(lane, out, capacity)


class SignalsAddInHalves(Liar):
    """Raises a 64-bit signal in two steps, a poll apart."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.held: list[Any] = []

    def post_signals(self, lane: int, signals: Any, count: int) -> int:
        for index in range(count):
            half = abi.Signal.from_buffer_copy(signals[index])
            half.value &= 0xFFFFFFFF
            half.token = 1 << 60
            super().post_signals(lane, half, 1)
            self.held.append(abi.Signal.from_buffer_copy(signals[index]))
        return count

    def poll_completions(self, lane: int, out: Any, capacity: int) -> int:
        while self.held and super().post_signals(lane, self.held[0], 1):
            self.held.pop(0)
        count, kept = super().poll_completions(lane, out, capacity), 0
        for index in range(count):
            if out[index].token < 1 << 60:
                out[kept] = out[index]
                kept += 1
        return kept


class EarlyImmediates(Liar):
    """Shows immediates before their payload."""

    INNER, INNER_OPTIONS = "sim", {"profile": "none", "early_completion": 0.0}
    CLAIMS: ClassVar[Mapping[str, Any]] = {"imm_after_payload": True}


class TruncatesImmediates(Liar):
    """Carries 16 bits where it claims 64."""

    def post_writes(self, lane: int, writes: Any, count: int) -> int:
        for index in range(count):
            writes[index].immediate &= 0xFFFF
        return super().post_writes(lane, writes, count)


class WrongSender(Liar):
    """Says that every arrival is from rank 7."""

    def poll_arrivals(self, lane: int, out: Any, capacity: int) -> int:
        count = super().poll_arrivals(lane, out, capacity)
        for index in range(count):
            out[index].peer = 7
        return count


class CompletesBeforeDelivery(Liar):
    """Completes fenced writes as carelessly as others."""

    INNER, INNER_OPTIONS = "sim", {"profile": "iwarp"}
    CLAIMS: ClassVar[Mapping[str, Any]] = {"delivery_complete": True, "flush": "none"}

    def post_writes(self, lane: int, writes: Any, count: int) -> int:
        for index in range(count):
            writes[index].flags &= ~abi.FENCED
        return super().post_writes(lane, writes, count)


class WritesTwice(Liar):
    """Claims exactly_once over a device that doubles."""

    INNER, INNER_OPTIONS = "sim", SHUFFLED | {"duplicate": 0.2}
    CLAIMS: ClassVar[Mapping[str, Any]] = {"exactly_once": True}


class LosesCompletions(Liar):
    """Swallows one completion in fifty."""

    seen = 0

    def poll_completions(self, lane: int, out: Any, capacity: int) -> int:
        count, kept = super().poll_completions(lane, out, capacity), 0
        for index in range(count):
            self.seen += 1
            if self.seen % 50:
                out[kept] = out[index]
                kept += 1
        return kept


class CompletesTwice(Liar):
    """Hands out the first completion of a lane again later."""

    first: Any = None

    def poll_completions(self, lane: int, out: Any, capacity: int) -> int:
        count = super().poll_completions(lane, out, capacity)
        if count and self.first is None:
            self.first = abi.Completion.from_buffer_copy(out[0])
        elif count == 0 and self.first is not None:
            out[0], count = self.first, 1
        return count


class LeaksRegions(Liar):
    """Keeps what was registered, and a descriptor for each."""

    kept: ClassVar[list[tuple[Memory, int]]] = []

    def register(self, memory: Memory) -> int:
        self.kept.append((memory, os.open("/dev/null", os.O_RDONLY)))
        return super().register(memory)


class BlocksInPost(Liar):
    """Takes 20 ms for each post."""

    def post_writes(self, lane: int, writes: Any, count: int) -> int:
        time.sleep(0.02)
        return super().post_writes(lane, writes, count)


class HangsWhenFull(Liar):
    """Waits for room in the queue that only a poll of the same thread could make."""

    def post_writes(self, lane: int, writes: Any, count: int) -> int:
        while (accepted := super().post_writes(lane, writes, count)) == 0:
            time.sleep(0.01)
        return accepted


class FailsWhenFull(Liar):
    """Calls a full queue an error."""

    def post_writes(self, lane: int, writes: Any, count: int) -> int:
        return super().post_writes(lane, writes, count) or -105  # ENOBUFS


class ShallowQueue(Liar):
    """Claims four times the queue it has."""

    CLAIMS: ClassVar[Mapping[str, Any]] = {"send_queue_depth": 4096}


class AcceptsTooMuch(Liar):
    """Names a limit for one write and does not keep it."""

    CLAIMS: ClassVar[Mapping[str, Any]] = {"max_message": 65536}


class DropsTails(Liar):
    """Forgets the last bytes of large writes."""

    def post_writes(self, lane: int, writes: Any, count: int) -> int:
        for index in range(count):
            if writes[index].bytes > 32768:
                writes[index].bytes -= 100
        return super().post_writes(lane, writes, count)


class RoundsSizes(Liar):
    """Moves whole words where it claims single bytes."""

    def post_writes(self, lane: int, writes: Any, count: int) -> int:
        for index in range(count):
            writes[index].bytes = (writes[index].bytes + 7) // 8 * 8
        return super().post_writes(lane, writes, count)


class IgnoresBounds(Liar):
    """Quietly shortens what reaches beyond a region."""

    def post_writes(self, lane: int, writes: Any, count: int) -> int:
        accepted = super().post_writes(lane, writes, count)
        if accepted < 0:
            writes[0].bytes, writes[0].local_offset, writes[0].remote_offset = 8, 0, 0
            writes[0].local_region = writes[0].remote_region = abi.DATA
            writes[0].peer = 1
            return super().post_writes(lane, writes, 1)
        return accepted


class SilentAboutDeath(Liar):
    """Claims events about peers and never has one."""

    def peer_state(self, peer: int) -> int:
        return abi.PEER_ALIVE


class SucceedsAfterDeath(Liar):
    """Claims error completions and completes writes to the dead."""

    CLAIMS: ClassVar[Mapping[str, Any]] = {"peer_failure": "error_completion"}


class CriesWolf(Liar):
    """Calls living peers dead."""

    def peer_state(self, peer: int) -> int:
        return abi.PEER_DEAD


class Crashes(Liar):
    """Takes the process down."""

    def post_writes(self, lane: int, writes: Any, count: int) -> int:
        ctypes.string_at(0)
        return 0
