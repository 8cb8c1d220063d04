"""write_order, signal_order and native_signal, watched from both ends while the sender goes on step by step."""

from __future__ import annotations

import struct
from collections.abc import Callable

from .. import abi
from ..context import Context
from ..driver import PromiseBroken
from .check import OUTBOX, Check, Message, make_messages

ROUNDS = 5
TRAIN = 24
STRIDE = 64  # bytes from one flag to the next
FLAG_SOURCES = 32 << 10  # where the sender keeps the flags it writes, in its control window


def _word(view: memoryview, offset: int) -> int:
    return int(struct.unpack_from("<Q", view, offset)[0])


def _watch(context: Context, step: Callable[[], bool]) -> None:
    """Rank 0 looks after each of its own polls, rank 1 as often as it can, until both have seen the end."""
    driver = context.driver
    assert driver is not None
    if not context.eventually(step):
        raise PromiseBroken(f"rank {context.rank} did not see the end of a train within {context.limit_s:.0f} s")
    if context.rank == 0:
        driver.wait_all(context.limit_s)
        step()
    context.barrier("train seen")


class _Train:
    """Payloads of which a counter says how many must be visible."""

    def __init__(self, messages: list[Message], window: memoryview, counted: Callable[[], int], promise: str) -> None:
        self.messages, self.window, self.counted, self.promise = messages, window, counted, promise
        self.verified = 0

    def step(self) -> bool:
        """Verify what the counter covers; True at the end. The counter is read before the payloads."""
        until = self.counted()
        for message in self.messages[self.verified : until]:
            if not message.is_at(self.window):
                missing = message.what_is_missing(self.window)
                raise PromiseBroken(
                    f"{self.promise}: {self._of(until)} was visible before the write of {message.nbytes} bytes "
                    f"posted {until - 1 - message.index} message(s) earlier on the lane; missing was {missing}"
                )
        self.verified = max(self.verified, until)
        return self.verified == len(self.messages)

    def _of(self, until: int) -> str:
        return f"what was posted behind message {until - 1}"


def write_order(context: Context) -> None:
    """Flags behind payloads, then many writes to one word, of which the last must win."""
    driver = context.open()
    assert context.windows is not None
    target = context.peers[1]
    largest = min(16 << 10, context.capabilities.max_ordered_bytes or 16 << 10)
    flag_bytes = context.rounded(8)
    for round_number in range(1, ROUNDS + 1):
        messages = make_messages(context, TRAIN, largest=largest, source=context.rank == 0)
        context.barrier("filled")
        if context.rank == 0:
            writes = []
            for message in messages:
                source = FLAG_SOURCES + message.index * STRIDE
                struct.pack_into("<Q", context.windows.views[abi.CONTROL], source, round_number)
                writes.append(context.write(1, message.remote_offset, message.local_offset, message.nbytes))
                writes.append(
                    context.write(
                        1,
                        message.index * STRIDE,
                        source,
                        flag_bytes,
                        remote_region=abi.CONTROL,
                        local_region=abi.CONTROL,
                    )
                )
            driver.post(0, writes)

        def highest_flag(number: int = round_number) -> int:
            flags = (_word(target[abi.CONTROL], index * STRIDE) for index in reversed(range(TRAIN)))
            return next((TRAIN - place for place, flag in enumerate(flags) if flag == number), 0)

        _watch(context, _Train(messages, target[abi.DATA], highest_flag, "write_order").step)
    _last_writer_wins(context)


def _last_writer_wins(context: Context) -> None:
    driver = context.driver
    assert driver is not None
    assert context.windows is not None
    count, nbytes = 200, context.rounded(8)
    at = TRAIN * STRIDE
    if context.rank == 0:
        for value in range(1, count + 1):
            struct.pack_into("<Q", context.windows.views[abi.DATA], OUTBOX + value * STRIDE, value)
        writes = [
            context.write(1, at, OUTBOX + value * STRIDE, nbytes, remote_region=abi.CONTROL)
            for value in range(1, count + 1)
        ]
        driver.post(0, writes)
    seen = 0

    def step() -> bool:
        nonlocal seen
        value = _word(context.peers[1][abi.CONTROL], at)
        if value < seen:
            raise PromiseBroken(
                f"write_order: write {value} to a word landed after write {seen}, which was posted later"
            )
        seen = value
        return seen == count

    _watch(context, step)
    if context.rank == 0:
        context.eventually(lambda: step() and False, 0.05)


def _signal_regions(context: Context) -> list[int]:
    return [abi.CONTROL, abi.DATA] if context.capabilities.native_signal == "device" else [abi.CONTROL]


def signal_order(context: Context) -> None:
    """A signal behind each payload counts the messages."""
    driver = context.open()
    at = {abi.CONTROL: 0, abi.DATA: OUTBOX - STRIDE}
    sent = dict.fromkeys(at, 0)
    for round_number in range(ROUNDS):
        region = _signal_regions(context)[round_number % len(_signal_regions(context))]
        messages = make_messages(context, TRAIN, source=context.rank == 0)
        base = sent[region]
        sent[region] += TRAIN
        context.barrier("filled")
        if context.rank == 0:
            for message in messages:
                driver.post(0, [context.write(1, message.remote_offset, message.local_offset, message.nbytes)])
                driver.post(0, [abi.Signal(1, region, at[region], base + message.index + 1, 0)], label="signal")

        def signalled(region: int = region, base: int = base) -> int:
            return max(0, _word(context.peers[1][region], at[region]) - base)

        _watch(context, _Train(messages, context.peers[1][abi.DATA], signalled, "signal_order").step)


def native_signal(context: Context) -> None:
    """Two words rise through full-width values; nobody ever sees one fall or a value that was not posted."""
    driver = context.open()
    for region in _signal_regions(context):
        words = []
        for offset in (128, 192):
            bits = [context.rng.choice([6, 31, 33, 63]) for _ in range(60)]
            words.append((offset, [*sorted({context.rng.getrandbits(count) + 1 for count in bits}), (1 << 64) - 1]))
        if context.rank == 0:
            columns = [[abi.Signal(1, region, offset, value, 0) for value in values] for offset, values in words]
            shorter = min(len(column) for column in columns)
            signals = [
                signal for pair in zip(*(column[:shorter] for column in columns), strict=True) for signal in pair
            ]
            driver.post(0, signals + [column[-1] for column in columns], label="signal")
        _watch(context, _Rise(context.peers[1][region], words).step)


class _Rise:
    """Words that may only hold values that were posted, and never fall."""

    def __init__(self, view: memoryview, words: list[tuple[int, list[int]]]) -> None:
        self.view, self.words, self.seen = view, words, [0] * len(words)

    def step(self) -> bool:
        """Look once; True when all hold their last value."""
        for place, (offset, values) in enumerate(self.words):
            value = _word(self.view, offset)
            if value and value not in values:
                raise PromiseBroken(f"native_signal: a word held {value:#x}, never posted: it was torn, or added twice")
            if value < self.seen[place]:
                raise PromiseBroken(f"native_signal: a word fell from {self.seen[place]} to {value}")
            self.seen[place] = value
        return all(value == values[-1] for value, (_, values) in zip(self.seen, self.words, strict=True))


CHECKS = (
    Check("write_order", "writes of a lane become visible in the order posted", write_order, lambda c: c.write_order),
    Check("signal_order", "a signal lands after the writes before it", signal_order, lambda c: c.signal_order),
    Check(
        "native_signal",
        "signals rise through exactly the values posted",
        native_signal,
        lambda c: c.native_signal != "none" and c.signal_order,
    ),
)
