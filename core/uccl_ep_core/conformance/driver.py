"""Drives one transport through its ops table and keeps a ledger of every operation it accepted."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from . import abi


class PromiseBroken(Exception):
    """A transport did not do what it promises; the message says which promise and how it showed."""


class Untested(Exception):
    """A check found nothing to test; raised by all ranks alike.

    Attributes:
        outcome: ``"not claimed"`` where the transport does not promise it, ``"not tested"`` where it does.
    """

    def __init__(self, outcome: str, words: str) -> None:
        super().__init__(words)
        self.outcome = outcome


@dataclasses.dataclass
class Posted:
    """One accepted operation."""

    lane: int
    peer: int
    nbytes: int
    label: str
    status: int | None = None


def message_of(code: int) -> str:
    """A negative errno in words."""
    return f"{code} ({os.strerror(-code)})" if code < 0 else str(code)


class Driver:
    """The data half of one connected transport, seen from one rank."""

    BATCH = 64

    def __init__(self, ops_address: int, num_lanes: int) -> None:
        self.ops = abi.Ops.from_address(ops_address)
        self.num_lanes = num_lanes
        self.ledger: dict[int, Posted] = {}
        self.outstanding = 0
        self.arrived: list[tuple[int, int]] = []
        self.errors: list[Posted] = []
        self.on_completion: Callable[[int, Posted], None] | None = None
        self.on_arrival: Callable[[int, int], None] | None = None
        self.slowest_post_s = 0.0
        self.slowest_renewal_s = 0.0
        self._next_token = 0
        self._completions = (abi.Completion * self.BATCH)()
        self._arrivals = (abi.Arrival * self.BATCH)()

    def last_error(self, lane: int = 0) -> str:
        """The transport's own words about its last error."""
        address = self.ops.last_error(self.ops.context, lane)
        return ctypes.string_at(address).decode(errors="replace") if address else ""

    def post_once(self, lane: int, operations: Sequence[abi.Write] | Sequence[abi.Signal], label: str = "write") -> int:
        """One call of post_writes or post_signals; what it returned. The ledger takes what was accepted."""
        kind: Any = type(operations[0])
        array = (kind * len(operations))(*operations)
        for index in range(len(operations)):
            array[index].token = self._next_token + index
        call = self.ops.post_writes if kind is abi.Write else self.ops.post_signals
        begin = time.perf_counter()
        accepted = int(call(self.ops.context, lane, array, len(operations)))
        self.slowest_post_s = max(self.slowest_post_s, time.perf_counter() - begin)
        if accepted > len(operations):
            raise PromiseBroken(f"post accepted {accepted} operations of a batch of {len(operations)}")
        for index in range(max(accepted, 0)):
            operation = array[index]
            nbytes = operation.bytes if isinstance(operation, abi.Write) else 8
            self.ledger[self._next_token + index] = Posted(lane, operation.peer, nbytes, label)
        self.outstanding += max(accepted, 0)
        # Also refused tokens are never used again: a late completion of one must not look like another's.
        self._next_token += len(operations)
        return accepted

    def post(
        self,
        lane: int,
        operations: Sequence[abi.Write] | Sequence[abi.Signal],
        limit_s: float = 20.0,
        label: str = "write",
    ) -> None:
        """Post all of them, polling while the queue is full."""
        done, end = 0, time.monotonic() + limit_s
        while done < len(operations):
            accepted = self.post_once(lane, operations[done : done + self.BATCH], label)
            if accepted < 0:
                raise PromiseBroken(
                    f"post refused a valid {label} with {message_of(accepted)}: {self.last_error(lane)!r}"
                )
            done += accepted
            if done < len(operations):
                self.progress()
                if time.monotonic() > end:
                    raise PromiseBroken(
                        f"the send queue stayed full for {limit_s:.0f} s although completions were polled: "
                        f"{done} of {len(operations)} accepted"
                    )

    def poll(self, lane: int) -> list[tuple[int, Posted]]:
        """One call of poll_completions; tokens with their ledger entries."""
        count = int(self.ops.poll_completions(self.ops.context, lane, self._completions, self.BATCH))
        if count > self.BATCH:
            raise PromiseBroken(f"poll_completions returned {count} entries for a capacity of {self.BATCH}")
        if count < 0:
            raise PromiseBroken(f"poll_completions failed with {message_of(count)}: {self.last_error(lane)!r}")
        polled = []
        for index in range(count):
            completion = self._completions[index]
            posted = self.ledger.get(completion.token)
            if posted is None:
                raise PromiseBroken(f"a completion carries token {completion.token}, which was never accepted")
            if posted.status is not None:
                raise PromiseBroken(f"token {completion.token} ({posted.label}) completed twice")
            if posted.lane != lane:
                raise PromiseBroken(f"an operation posted on lane {posted.lane} completed on lane {lane}")
            posted.status = completion.status
            self.outstanding -= 1
            if completion.status:
                self.errors.append(posted)
            polled.append((completion.token, posted))
            if self.on_completion is not None:
                self.on_completion(completion.token, posted)
        return polled

    def poll_arrivals(self, lane: int) -> int:
        """One call of poll_arrivals; appends (immediate, peer) to ``arrived``."""
        if not self.ops.poll_arrivals:
            return 0
        count = int(self.ops.poll_arrivals(self.ops.context, lane, self._arrivals, self.BATCH))
        if count > self.BATCH:
            raise PromiseBroken(f"poll_arrivals returned {count} entries for a capacity of {self.BATCH}")
        if count < 0:
            raise PromiseBroken(f"poll_arrivals failed with {message_of(count)}: {self.last_error(lane)!r}")
        for index in range(count):
            arrival = self._arrivals[index].immediate, self._arrivals[index].peer
            self.arrived.append(arrival)
            if self.on_arrival is not None:
                self.on_arrival(*arrival)
        return count

    def progress(self) -> None:
        """Poll everything once, as an idle proxy does."""
        for lane in range(self.num_lanes):
            self.poll(lane)
            self.poll_arrivals(lane)

    def wait_all(self, limit_s: float = 10.0, what: str = "operations") -> None:
        """Until every accepted operation completed, all without error."""
        self.settle(limit_s, what)
        self.raise_errors()

    def settle(
        self, limit_s: float = 10.0, what: str = "operations", between: Callable[[], object] | None = None
    ) -> None:
        """Until every accepted operation completed, with or without error; calls ``between`` after each poll."""
        end = time.monotonic() + limit_s
        while self.outstanding:
            self.progress()
            if between is not None:
                between()
            if time.monotonic() > end:
                missing = [(token, entry) for token, entry in self.ledger.items() if entry.status is None]
                token, entry = missing[0]
                raise PromiseBroken(
                    f"{len(missing)} of {len(self.ledger)} accepted {what} never completed (waited {limit_s:.0f} s); "
                    f"the first is token {token}, a {entry.label} of {entry.nbytes} bytes on lane {entry.lane}"
                )

    def raise_errors(self) -> None:
        """An error completion that no fault explains is a broken promise."""
        if self.errors:
            entry = self.errors[0]
            raise PromiseBroken(
                f"a valid {entry.label} of {entry.nbytes} bytes to rank {entry.peer} completed with status "
                f"{message_of(entry.status or 0)}: {self.last_error(entry.lane)!r}"
            )

    @property
    def can_renew(self) -> bool:
        """Whether an error on a lane need not be final."""
        return abi.provides(self.ops, "renew_lane")

    def renew(self, lane: int) -> int:
        """One call of renew_lane; what it answered."""
        begin = time.perf_counter()
        answer = int(self.ops.renew_lane(self.ops.context, lane))
        self.slowest_renewal_s = max(self.slowest_renewal_s, time.perf_counter() - begin)
        return answer

    def peer_state(self, peer: int) -> int | None:
        """What the transport says of a rank; None where it cannot tell."""
        return int(self.ops.peer_state(self.ops.context, peer)) if self.ops.peer_state else None
