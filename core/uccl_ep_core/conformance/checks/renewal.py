"""renew_lane: lanes fail in the middle of traffic and begin new generations, which nothing of an old one may disturb.

Both ranks send at once, since a device may need its peer to begin anew. Each looks at the other's window itself. Every
attempt at a message carries bytes and an immediate of its own, so that the copy of a failed one is known wherever and
whenever it lands; and the place of a failed one is overwritten once the lane is renewed, as its owner may do.
"""

from __future__ import annotations

import random
import struct
import time
from collections import Counter

from .. import abi
from ..context import Context
from ..driver import PromiseBroken, Untested, message_of
from .check import OUTBOX, Check, Message, make_messages
from .limits import HANGING_S

COUNT = 64  # messages of a rank
FRESH = 12  # new ones of a round, behind those that failed in the last
ROUNDS = 200  # at most
IN_VAIN = 16  # rounds, one after another, in which all failed
QUIET_S = 0.01  # after each renewal, for what must not land
PROBE = 2 << 20  # where a write on the broken lane would land
PROBE_SOURCE = OUTBOX + (768 << 10)
TOMBSTONE = 0x80  # a bit that no attempt sets in any byte
SEVEN_BITS = bytes(byte & 0x7F for byte in range(256))


class _Sender:
    """One rank's messages, what became of them, and what it may see of them at its peer."""

    def __init__(self, context: Context, messages: list[Message], rng: random.Random) -> None:
        assert context.driver is not None
        self.context, self.driver, self.rng = context, context.driver, rng
        self.peer = 1 - context.rank
        self.window, self.control = context.peers[self.peer]
        self.claims = context.capabilities
        self.signals = self.claims.native_signal != "none" and self.claims.signal_order
        self.messages = messages
        self.base = [message.content.translate(SEVEN_BITS) for message in messages]
        self.sent: dict[int, bytes] = {}  # content of the last attempt
        self.fresh = [message.index for message in messages]
        self.pending: list[int] = []  # failed, or not posted since the lane had failed
        self.attempt: dict[int, int] = {}  # number of the last one
        self.this_round: list[int] = []
        self.done: set[int] = set()
        self.owed: set[int] = set()  # done before the renewal, to be there before anything that is posted after it
        self.buried: dict[int, bytes] = {}  # failed: what their places hold
        self.revoked: dict[tuple[int, int], int] = {}  # not there when the lane was renewed; renewals until then
        self.floor = self.newest = 0  # the signal at the last renewal; the highest one posted
        self.signal_failed = False
        self.failures = self.renewals = self.in_vain = 0

    @property
    def left(self) -> int:
        """Messages that have not completed without an error."""
        return len(self.fresh) + len(self.pending) + int(self.signal_failed)

    def content(self, index: int, attempt: int, flip: int = 0) -> bytes:
        """Of an attempt; with ``flip`` what no attempt carries."""
        mask = attempt & 0x7F | flip
        return self.base[index].translate(bytes(byte ^ mask for byte in range(256)))

    def holds(self, index: int, content: bytes) -> bool:
        """Whether these bytes are at the message's place."""
        at = self.messages[index].remote_offset
        return bytes(self.window[at : at + len(content)]) == content

    def landed(self, index: int) -> bool:
        """Whether the last attempt is there."""
        return self.holds(index, self.sent[index])

    # ---- what may be seen at any time ----

    def look(self) -> bool:
        """Verify what the renewal promised; always False, for `Context.eventually`."""
        for index, tombstone in self.buried.items():
            if not self.holds(index, tombstone):
                raise PromiseBroken(
                    f"renew_lane: a write of {len(tombstone)} bytes that had failed landed after the lane was renewed "
                    f"(renewal {self.renewals}), on bytes that were used again"
                )
        if self.renewals and any(self.window[PROBE : PROBE + 8]):
            raise PromiseBroken("renew_lane: a write posted on the broken lane landed after the lane was renewed")
        if self.owed and any(self.landed(index) for index in self.this_round):
            late = [index for index in self.owed if not self.landed(index)]
            if late:
                raise PromiseBroken(
                    f"renew_lane: {len(late)} write(s) that completed without an error before the renewal were not "
                    f"there when a write that was posted after it was"
                )
            self.owed.clear()
        if self.signals:
            self.look_at_signal()
        return False

    def look_at_signal(self) -> None:
        value = int(struct.unpack_from("<Q", self.control, 0)[0])
        if value < self.floor:
            raise PromiseBroken(f"renew_lane: the signal fell from {self.floor} to {value} after a renewal")
        if value > self.floor:
            missing = [index for index in range(value) if not self.landed(index)]
            if missing:
                self.raise_if_overwritten(missing[0])
                raise PromiseBroken(
                    f"renew_lane: signal {value} was visible though message {missing[0] + 1} of those before it was not"
                )
            self.floor = value

    def raise_if_overwritten(self, index: int) -> None:
        """A message is not there: say so where the copy of an earlier attempt is."""
        if any(self.holds(index, self.content(index, attempt)) for attempt in range(self.attempt[index])):
            raise PromiseBroken(
                "renew_lane: the copy of a write that had failed landed on the one that was posted after the renewal"
            )

    # ---- one round ----

    def send(self) -> bool:
        """Post what failed, then new messages, and wait for all; whether anything failed."""
        new, self.fresh = self.fresh[:FRESH], self.fresh[FRESH:]
        again = sorted(self.pending)
        operations: list[int | None] = [*again, *([None] if self.signal_failed else []), *new]
        self.pending, self.this_round, self.signal_failed = [], [], False
        stops = self.rng.random() < 0.5  # as a proxy that has seen the error does; without, as before it sees it
        # Not again and again: a transport that fails whenever it is told to would never get anything through.
        breaks_at = self.rng.randrange(max(len(operations), 1)) if self.in_vain == 0 and self.renewals < 8 else -1
        posted: list[tuple[int, int | None]] = []
        for number, index in enumerate(operations):
            if number == breaks_at and self.context.transport is not None:
                self.context.transport.break_lane(0)
            if stops and self.driver.errors:
                self.pending += [left for left in operations[number:] if left is not None]
                self.signal_failed = None in operations[number:]
                break
            self.post(index, posted, signal=index in new)
            for _ in range(self.rng.choice([0, 0, 1, 4]) + 8 * self.in_vain):
                self.driver.progress()
                self.look()
        self.driver.settle(self.context.limit_s, "operations of a lane that failed", self.look)
        return self.judge(posted)

    def post(self, index: int | None, posted: list[tuple[int, int | None]], signal: bool) -> None:
        """A message and, where it is new, its signal; None: the newest signal alone, as a retry must be."""
        if index is not None:
            self.attempt[index] = self.attempt.get(index, -1) + 1
            message, content = self.messages[index], self.content(index, self.attempt[index])
            self.sent[index] = content
            assert self.context.windows is not None
            self.context.windows.views[abi.DATA][message.local_offset : message.local_offset + len(content)] = content
            self.buried.pop(index, None)
            self.this_round.append(index)
            fenced = (self.claims.delivery_complete or self.claims.flush != "none") and self.rng.random() < 0.3
            immediate = self.attempt[index] << 16 | index if self.claims.imm_bits else None
            write = self.context.write(
                self.peer, message.remote_offset, message.local_offset, len(content), immediate=immediate, fenced=fenced
            )
            self.driver.post(0, [write], self.context.limit_s)
            posted.append((max(self.driver.ledger), index))
        if self.signals and (signal or index is None):
            self.newest = self.newest if index is None else index + 1
            self.driver.post(0, [abi.Signal(self.peer, abi.CONTROL, 0, self.newest, 0)], self.context.limit_s, "signal")
            posted.append((max(self.driver.ledger), None))

    def judge(self, posted: list[tuple[int, int | None]]) -> bool:
        """Sort what has completed; whether anything failed."""
        failed = 0
        for token, index in posted:
            if self.driver.ledger[token].status:
                failed += 1
                self.signal_failed = self.signal_failed or index is None
                self.pending += [index] if index is not None else []
            elif failed and (self.claims.write_order or (index is None and self.signals)):
                what = "signal" if index is None else "write"
                raise PromiseBroken(
                    f"renew_lane: a {what} completed without an error behind an operation of its lane that had failed; "
                    f"order is promised, so all behind must fail until the lane is renewed"
                )
            elif index is not None:
                self.done.add(index)
        self.failures += failed
        self.in_vain = self.in_vain + 1 if failed and failed == len(posted) else 0
        if self.in_vain > IN_VAIN:
            raise PromiseBroken(
                f"renew_lane: {IN_VAIN} renewals one after another and everything posted after each of them failed: "
                f"{self.driver.last_error()!r}"
            )
        return failed > 0

    def renew(self) -> None:
        """The broken lane takes nothing; then a new generation, and the places of what failed are used again."""
        probe = self.context.write(self.peer, PROBE, PROBE, self.context.rounded(8))
        if self.driver.post_once(0, [probe], "write on a broken lane") > 0:
            token = max(self.driver.ledger)
            self.driver.settle(self.context.limit_s, "writes on a broken lane", self.look)
            if not self.driver.ledger[token].status:
                raise PromiseBroken("renew_lane: a write posted on the broken lane completed without an error")
        end = time.monotonic() + self.context.limit_s
        while (answer := self.driver.renew(0)) == 0:
            self.driver.progress()
            if time.monotonic() > end:
                raise PromiseBroken(f"renew_lane: still 0 (not yet) after {self.context.limit_s:.0f} s")
        if answer < 0:
            raise PromiseBroken(
                f"renew_lane: {message_of(answer)} though the peer lives: {self.driver.last_error()!r}; a lane that "
                f"cannot be renewed must not offer it"
            )
        if self.driver.slowest_renewal_s > HANGING_S:
            raise PromiseBroken(f"renew_lane blocks: {self.driver.slowest_renewal_s:.1f} s in one call")
        self.driver.errors.clear()
        self.renewals += 1
        self.owed = {index for index in self.done if not self.landed(index)}
        self.bury()

    def bury(self) -> None:
        """At this moment all of the ended generation that ever lands is there."""
        there = {index: self.landed(index) for index in self.this_round}
        lost = False
        for index in self.this_round:
            if lost and there[index] and self.claims.write_order:
                raise PromiseBroken(
                    "renew_lane: a write landed behind one of its lane that had failed and not landed; order is "
                    "promised, so nothing behind may land until the lane is renewed"
                )
            lost = lost or (index in self.pending and not there[index])
        if self.signals:
            self.look_at_signal()
        for index in self.this_round:
            if index not in self.pending:
                continue
            if not there[index]:
                self.revoked[index, self.attempt[index]] = self.renewals
            self.buried[index] = self.content(index, self.attempt[index], TOMBSTONE)
            at = self.messages[index].remote_offset
            self.window[at : at + len(self.buried[index])] = self.buried[index]

    # ---- at the end ----

    def verify(self) -> None:
        """Every message is there as its last attempt carried it."""
        self.context.eventually(lambda: all(self.landed(index) for index in self.done))
        self.context.eventually(self.look, 5 * QUIET_S)
        wrong = [index for index in self.done if not self.landed(index)]
        if not wrong:
            return
        self.raise_if_overwritten(wrong[0])
        raise PromiseBroken(f"renew_lane: {len(wrong)} writes completed without an error and never landed whole")

    def verify_arrivals(self, arrived: list[tuple[int, int]]) -> int:
        """What the peer polled; how many of them were of attempts that had failed."""
        came = Counter((value & 0xFFFF, value >> 16) for value, _ in arrived)
        for index, attempt in came:
            if attempt > self.attempt.get(index, -1):
                raise PromiseBroken(f"renew_lane: immediate {attempt << 16 | index:#x} arrived, which was never posted")
            if (index, attempt) in self.revoked and self.claims.imm_after_payload:
                raise PromiseBroken(
                    f"renew_lane: the immediate of a failed write arrived whose payload was not there at renewal "
                    f"{self.revoked[index, attempt]}: an arrival of an ended generation came late"
                )
            if came[index, attempt] > 1 and self.claims.exactly_once:
                raise PromiseBroken("exactly_once: an immediate arrived more than once after an error on its lane")
        missing = [index for index in self.done if not came[index, self.attempt[index]]]
        if missing:
            raise PromiseBroken(f"renew_lane: {len(missing)} writes completed without an error, immediates never came")
        return sum(times for (index, attempt), times in came.items() if attempt < self.attempt[index])


def renew_lane(context: Context) -> str:
    """Rounds of traffic until every message of both ranks has gone through."""
    driver = context.open()
    if not driver.can_renew:
        raise Untested("not claimed", "the table has no renew_lane: an error on a lane is final and ends the group")
    by_source = [make_messages(context, COUNT, largest=4096, source=False) for _ in range(context.size)]
    rng = random.Random(context.rng.getrandbits(62) + context.rank)
    assert context.windows is not None
    context.windows.views[abi.DATA][PROBE_SOURCE : PROBE_SOURCE + 64] = b"\xaa" * 64
    sender = _Sender(context, by_source[context.rank], rng)
    for _ in range(ROUNDS):
        failed = sender.send()
        context.barrier("sent")
        if failed:
            sender.renew()
        context.barrier("renewed")
        context.eventually(sender.look, QUIET_S)
        if not any(context.exchange("quiet", sender.left)):
            break
    else:
        raise PromiseBroken(f"renew_lane: after {ROUNDS} rounds {sender.left} of {COUNT} messages had not gone through")
    sender.verify()
    late = _arrivals(context, sender) if context.capabilities.imm_bits else 0
    told = context.exchange("told", (sender.renewals, sender.failures, late))
    renewals, failures, late = (sum(column) for column in zip(*told, strict=True))
    if not renewals:
        raise Untested(
            "not tested",
            "the table has renew_lane, but nothing made a lane fail: set the option that does (sim: break_every=25), "
            "or give the transport a break_lane",
        )
    return f"{renewals} renewals, {failures} operations failed, {late} immediates of failed writes told apart"


def _arrivals(context: Context, sender: _Sender) -> int:
    """Fetch until the last attempts of all the peer's messages are in; how many of older ones came to the peer."""
    driver, peer = context.driver, 1 - context.rank
    assert driver is not None
    wanted = {attempt << 16 | index for index, attempt in context.exchange("attempts", sender.attempt)[peer].items()}
    context.eventually(lambda: wanted <= {value for value, _ in driver.arrived})
    context.linger(5 * QUIET_S)
    return sender.verify_arrivals(context.exchange("arrived", driver.arrived)[peer])


CHECKS = (Check("renew_lane", "nothing of a failed lane's generation lands in the next", renew_lane),)
