"""delivery_complete or flush, and exactly_once."""

from __future__ import annotations

from collections import Counter

from .. import abi
from ..context import Context
from ..driver import Posted, PromiseBroken
from .check import Check, Message, make_messages

ROUNDS = 5
BATCH = 40


def fenced_is_placed(context: Context) -> None:
    """At the completion of a fenced write its bytes must be at the target; unfenced ones run beside them."""
    driver = context.open()
    promise = "delivery_complete" if context.capabilities.delivery_complete else f"flush {context.capabilities.flush}"
    for _ in range(ROUNDS):
        messages = make_messages(context, BATCH, source=context.rank == 0)
        fences = [context.rng.random() < 0.6 for _ in messages]
        context.barrier("filled")
        if context.rank == 0:
            waiting: dict[int, Message] = {}

            def completed(token: int, posted: Posted, waiting: dict[int, Message] = waiting) -> None:
                message = waiting.pop(token, None)
                if message is not None and not posted.status and not message.is_at(context.peers[1][abi.DATA]):
                    missing = message.what_is_missing(context.peers[1][abi.DATA])
                    raise PromiseBroken(
                        f"{promise}: a fenced write of {message.nbytes} bytes completed before it was placed; "
                        f"missing at the target was {missing}"
                    )

            driver.on_completion = completed
            for message, fenced in zip(messages, fences, strict=True):
                write = context.write(1, message.remote_offset, message.local_offset, message.nbytes, fenced=fenced)
                while (accepted := driver.post_once(0, [write], "fenced write" if fenced else "write")) == 0:
                    driver.progress()
                if accepted < 0:
                    raise PromiseBroken(f"{promise}: post refused a fenced write: {driver.last_error()!r}")
                if fenced:
                    waiting[max(driver.ledger)] = message
            driver.wait_all(context.limit_s, "writes")
            driver.on_completion = None
        _wait_placed(context, messages)


def _wait_placed(context: Context, messages: list[Message]) -> None:
    inbox = context.peers[1][abi.DATA]
    if not context.eventually(lambda: all(message.is_at(inbox) for message in messages)):
        raise PromiseBroken("an unfenced write completed but was never placed")
    context.barrier("batch done")


class _Graves:
    """Overwrites each message as soon as it is there; a second copy would undo that."""

    def __init__(self, messages: list[Message], inbox: memoryview) -> None:
        self.messages, self.inbox = messages, inbox
        self.tombstones: dict[int, bytes] = {}

    def bury(self) -> bool:
        """Verify all tombstones, set new ones; True when every message has one."""
        for message in self.messages:
            at = slice(message.remote_offset, message.remote_offset + message.nbytes)
            if message.index in self.tombstones:
                if self.inbox[at] != self.tombstones[message.index]:
                    raise PromiseBroken(
                        f"exactly_once: a write of {message.nbytes} bytes landed a second time, on bytes that the "
                        f"receiver had used again"
                    )
            elif message.is_at(self.inbox):
                self.tombstones[message.index] = bytes(byte ^ 0xFF for byte in message.content)
                self.inbox[at] = self.tombstones[message.index]
        return len(self.tombstones) == len(self.messages)


def exactly_once(context: Context) -> None:
    """No message and no immediate may ever come twice."""
    context.open()
    for number in range(ROUNDS):
        _once_round(context, number * BATCH)


def _once_round(context: Context, base: int) -> None:
    driver = context.driver
    assert driver is not None
    immediate = context.capabilities.imm_bits > 0
    messages = make_messages(context, BATCH, largest=4096, source=context.rank == 0)
    stops = [context.rng.randint(1, 12) for _ in range(12)]
    graves = _Graves(messages, context.peers[context.rank][abi.DATA])
    context.barrier("filled")
    if context.rank == 0:
        numbers = [base + m.index if immediate else None for m in messages]
        writes = [
            context.write(1, m.remote_offset, m.local_offset, m.nbytes, immediate=number)
            for m, number in zip(messages, numbers, strict=True)
        ]
        driver.post(0, writes)
    for stop in stops:
        if context.rank == 0:
            for _ in range(stop):
                driver.progress()
        context.barrier("stand still", progress=context.rank == 1)
        if context.rank == 1:
            driver.progress()
            graves.bury()
        context.barrier("go on", progress=context.rank == 1)
    if context.rank == 0:
        driver.wait_all(context.limit_s, "writes")
    elif not context.eventually(graves.bury):
        raise PromiseBroken(f"{BATCH - len(graves.tombstones)} of {BATCH} writes never arrived whole")
    context.linger(0.03)
    context.barrier("lingered")
    if context.rank == 1:
        graves.bury()
        times = Counter(value for value, _ in driver.arrived)
        twice = [value for value in times if times[value] > 1]
        if twice:
            raise PromiseBroken(
                f"exactly_once: immediate {twice[0]} arrived more than once, and so did {len(twice) - 1} others"
            )
    context.barrier("batch done")


CHECKS = (
    Check(
        "delivery_complete",
        "a fenced write is placed when it completes (delivery_complete or flush)",
        fenced_is_placed,
        lambda c: c.delivery_complete or c.flush != "none",
    ),
    Check("exactly_once", "no write arrives twice", exactly_once, lambda c: c.exactly_once),
)
