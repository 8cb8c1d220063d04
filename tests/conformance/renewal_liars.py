"""Transports whose lanes fail and begin anew, an honest one and a class for each way to lie about that."""

from __future__ import annotations

import ctypes
from typing import Any

from liar import Liar

from uccl_ep_core.conformance import abi
from uccl_ep_core.transport import Memory

EIO = 5
NOBODYS = 1 << 60  # token of an operation of which the caller has heard already


class Renewing(Liar):
    """Hands what was posted on at the next poll; when told to break, what it still holds fails and is forgotten."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.down = False
        self.held: list[Any] = []
        self.failed: list[Any] = []  # since the lane broke
        self.reports: list[tuple[int, int, int]] = []  # token, peer, status

    def connect(self, *arguments: Any) -> None:
        super().connect(*arguments)
        self._renew = abi.RenewLane(lambda _, lane: self.renew_lane(lane))
        self._table.renew_lane = self._renew

    def break_lane(self, lane: int) -> bool:
        self.down = True
        self.fail(self.held)
        self.held = []
        return True

    def fail(self, operations: list[Any]) -> None:
        self.failed += operations
        self.reports += [(operation.token, operation.peer, -EIO) for operation in operations]

    def take(self, operations: Any, count: int) -> int:
        copies = [type(operations[index]).from_buffer_copy(operations[index]) for index in range(count)]
        if self.down:
            self.fail(copies)
        else:
            self.held += copies
        return count

    def post_writes(self, lane: int, writes: Any, count: int) -> int:
        return self.take(writes, count)

    def post_signals(self, lane: int, signals: Any, count: int) -> int:
        return self.take(signals, count)

    def forward(self, lane: int, operation: Any) -> bool:
        post = super().post_writes if isinstance(operation, abi.Write) else super().post_signals
        return post(lane, operation, 1) == 1

    def poll_completions(self, lane: int, out: Any, capacity: int) -> int:
        while self.held and self.forward(lane, self.held[0]):
            self.held.pop(0)
        count, kept = super().poll_completions(lane, out, capacity), 0
        for index in range(count):
            if out[index].token < NOBODYS:
                out[kept] = out[index]
                kept += 1
        while kept < capacity and self.reports:
            out[kept] = abi.Completion(*self.reports.pop(0))
            kept += 1
        return kept

    def renew_lane(self, lane: int) -> int:
        self.down = False
        self.failed = []
        return 1


class NeverBreaks(Renewing):
    """Honest too, but nothing makes it fail."""

    def break_lane(self, lane: int) -> bool:
        return False


class LandsAfterRenewal(Renewing):
    """What failed was on its way still, and lands when nobody expects it any more."""

    def renew_lane(self, lane: int) -> int:
        late = [operation for operation in self.failed if isinstance(operation, abi.Write)]
        for operation in late:
            operation.token = NOBODYS
        self.held += late
        return super().renew_lane(lane)


class LandsOnTheRetry(Renewing):
    """The same, but right behind the write that repeats it under the new generation, with the bytes of then."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.memories: list[Memory] = []
        self.late: dict[int, tuple[Any, bytes]] = {}  # by place

    def register(self, memory: Memory) -> int:
        self.memories.append(memory)
        return super().register(memory)

    def source(self, write: Any) -> int:
        return self.memories[write.local_region].pointer + write.local_offset

    def forward(self, lane: int, operation: Any) -> bool:
        done = super().forward(lane, operation)
        if done and isinstance(operation, abi.Write) and operation.remote_offset in self.late:
            late, content = self.late.pop(operation.remote_offset)
            now = ctypes.string_at(self.source(late), late.bytes)
            ctypes.memmove(self.source(late), content, late.bytes)
            super().forward(lane, late)  # the transport below copies before it returns
            ctypes.memmove(self.source(late), now, late.bytes)
        return done

    def renew_lane(self, lane: int) -> int:
        for operation in self.failed:
            if isinstance(operation, abi.Write):
                operation.token, operation.flags = NOBODYS, 0
                content = ctypes.string_at(self.source(operation), operation.bytes)
                self.late[operation.remote_offset] = operation, content
        return super().renew_lane(lane)


class ArrivesAfterRenewal(Renewing):
    """Of what failed nothing lands any more, but its immediates still come."""

    def renew_lane(self, lane: int) -> int:
        late = [operation for operation in self.failed if isinstance(operation, abi.Write) and operation.bytes > 8]
        for operation in late:
            operation.token, operation.bytes = NOBODYS, 0
        self.held += [operation for operation in late if operation.flags & abi.IMMEDIATE]
        return super().renew_lane(lane)


class CompletesAgainAfterRenewal(Renewing):
    """Reports what failed a second time, under the new generation."""

    def renew_lane(self, lane: int) -> int:
        self.reports += [(operation.token, operation.peer, 0) for operation in self.failed]
        return super().renew_lane(lane)


class RenewsInVain(Renewing):
    """Says that the lane is as new, and fails all that is posted on it."""

    def renew_lane(self, lane: int) -> int:
        return 1


class NeverRenews(Renewing):
    """Offers to renew a lane and is never done."""

    def renew_lane(self, lane: int) -> int:
        return 0


class CannotRenew(Renewing):
    """Offers what it cannot do."""

    def renew_lane(self, lane: int) -> int:
        return -95  # EOPNOTSUPP


class ForgetsWhatCompleted(Renewing):
    """Completes at the post, before anything was handed on, and forgets it when the lane breaks."""

    def take(self, operations: Any, count: int) -> int:
        before = len(self.held)
        super().take(operations, count)
        for operation in self.held[before:]:
            self.reports.append((operation.token, operation.peer, 0))
            operation.token = NOBODYS
        return count

    def break_lane(self, lane: int) -> bool:
        self.down, self.held = True, []
        return True


class WorksWhileBroken(Renewing):
    """A write fails, and its lane takes the next one as if nothing had happened."""

    def break_lane(self, lane: int) -> bool:
        self.fail(self.held[-1:])
        self.held = self.held[:-1]
        return True
