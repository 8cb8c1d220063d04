"""Properties of the shipped halves of the ordering plans, under schedules that hypothesis invents.

The code under test is compiled from the public headers; for the mutants, from a copy in which one line
was changed. A property that no mutant breaks would prove nothing.
"""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "core" / "native" / "include"
SHIM = ROOT / "core" / "verification" / "arithmetic" / "protocol_shim.cpp"
WINDOW = 32
COUNTED, RAISE, DUPLICATE, CLOSED, CONTRADICTION, UNKNOWN_SIGNAL = range(6)
SIGNALS = 3
SIZES = (1, 2, 3, 64, 65, 130)  # writes of a message: below, at and above a word of the bitset

RECEIVER_MUTANTS = {
    "count without index bitset": (
        "counted_receiver.hpp",
        "if (!message.set(imm.index)) {",
        "message.set(imm.index);\n        if (false) {",
    ),
    "bitset of one word": ("counted_receiver.hpp", "if (index >= 64) {", "if (false) {"),
    "epoch not checked": ("counted_receiver.hpp", "(imm.epoch - next) % kEpochs", "(imm.epoch * 0)"),
    "closed epoch accepted": ("counted_receiver.hpp", "if (ahead >= kEpochWindow) {", "if (false) {"),
    "last flag ignored": (
        "counted_receiver.hpp",
        "announced != 0 && seen == announced",
        "seen != 0 && seen >= announced",
    ),
    "one message at a time": (
        "counted_receiver.hpp",
        "while (state.open[(state.complete + 1)",
        "if (state.open[(state.complete + 1)",
    ),
    "epoch of 5 bits": ("immediate.hpp", "kEpochBits = 6", "kEpochBits = 5"),
}
SENDER_MUTANTS = {
    "signal before placement": (
        "fenced_sender.hpp",
        "if (!next.ended || next.outstanding != 0) {",
        "if (!next.ended) {",
    ),
    "signal before the last write": (
        "fenced_sender.hpp",
        "if (!next.ended || next.outstanding != 0) {",
        "if (next.outstanding != 0) {",
    ),
    "two signal writes in flight": ("fenced_sender.hpp", "in_flight_ = true;", "in_flight_ = false;"),
    "window of 33": ("fenced_sender.hpp", "<= kEpochWindow;", "<= kEpochWindow + 1;"),
}

Steps = list[tuple[int, int, int]]
steps = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1 << 16), st.integers(0, 1 << 16)), max_size=120)
relaxed = settings(
    max_examples=150, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def build(folder: Path, mutant: tuple[str, str, str] | None = None) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++20 compiler")
    include = folder / "include"
    shutil.copytree(INCLUDE, include)
    if mutant is not None:
        path = include / "uccl_ep" / mutant[0]
        text = path.read_text(encoding="utf-8")
        assert text.count(mutant[1]) == 1, f"{mutant[0]} no longer has the one line {mutant[1]!r}"
        path.write_text(text.replace(mutant[1], mutant[2]), encoding="utf-8")
    target = folder / "shim.so"
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{include}", str(SHIM), "-o", str(target)]
    subprocess.run(command, check=True, timeout=240)
    library = ctypes.CDLL(str(target))
    u32, u64, handle = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
    for name, result, arguments in (
        ("receiver_new", handle, (u32, u32)),
        ("receiver_free", None, (handle,)),
        ("receiver_max_writes", u64, (handle,)),
        ("receiver_encode", u64, (handle, u32, u64, u32, u32)),
        ("receiver_decode", None, (handle, u64, ctypes.POINTER(u32))),
        ("receiver_accept", u32, (handle, u64, ctypes.POINTER(u32))),
        ("receiver_complete", u64, (handle, u32)),
        ("sender_new", handle, ()),
        ("sender_free", None, (handle,)),
        ("sender_admit", u32, (handle, u64)),
        ("sender_write", None, (handle, u64)),
        ("sender_end", None, (handle, u64)),
        ("sender_placed", None, (handle, u64)),
        ("sender_take_signal", u64, (handle,)),
        ("sender_signal_placed", None, (handle,)),
        ("sender_quiet", u32, (handle,)),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("shipped"))


@dataclasses.dataclass
class Stream:
    """What is true of one signal: the oracle."""

    posted: int = 0
    credited: int = 0
    sizes: dict[int, int] = dataclasses.field(default_factory=dict)
    arrived: dict[int, set[int]] = dataclasses.field(default_factory=dict)

    def complete(self) -> int:
        value = self.credited  # credit never runs ahead of what is complete
        while value < self.posted and len(self.arrived[value + 1]) == self.sizes[value + 1]:
            value += 1
        return value


class CountedRun:
    """A sender that obeys the rules, a network that keeps no order and duplicates, and the receiver."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.receiver = library.receiver_new(32, SIGNALS)
        self.streams = [Stream() for _ in range(SIGNALS)]
        self.network: list[tuple[int, int, int]] = []  # signal, message, write index

    def post(self, signal: int, size: int) -> None:
        stream = self.streams[signal]
        message = stream.posted + 1
        # Credit, and the slot's last message has no copy under way (its writes are complete).
        if message - stream.credited > WINDOW or any((signal, message - WINDOW) == (s, m) for s, m, _ in self.network):
            return
        stream.posted = message
        stream.sizes[message] = size
        stream.arrived[message] = set()
        self.network += [(signal, message, index) for index in range(size)]

    def deliver(self, place: int) -> None:
        signal, message, index = self.network.pop(place)
        stream = self.streams[signal]
        last = index + 1 == stream.sizes[message]
        named = ctypes.c_uint32()
        before = stream.complete()
        fresh = index not in stream.arrived[message]
        stream.arrived[message].add(index)
        bits = self.library.receiver_encode(self.receiver, signal, message, index, last)
        outcome = self.library.receiver_accept(self.receiver, bits, ctypes.byref(named))
        assert named.value == signal
        if not fresh:
            assert outcome == (CLOSED if message <= before else DUPLICATE)
        else:
            assert outcome == (RAISE if stream.complete() > before else COUNTED)
        assert self.library.receiver_complete(self.receiver, signal) == stream.complete()

    def step(self, action: int, a: int, b: int) -> None:
        signal = a % SIGNALS
        if action == 0:
            self.post(signal, SIZES[b % len(SIZES)])
        elif action == 1 and self.network:
            for k in range(b % 8):
                if self.network:
                    self.deliver((a + k * 7919) % len(self.network))
        elif action == 2 and self.network:
            self.network.append(self.network[a % len(self.network)])
        elif action == 3:
            self.streams[signal].credited = self.streams[signal].complete()
        elif action == 4:  # many short messages: the epoch wraps
            for _ in range(b % 48):
                count = len(self.network)
                self.post(signal, 1)
                if len(self.network) > count:
                    self.deliver(count)
                self.streams[signal].credited = self.streams[signal].complete()

    def finish(self) -> None:
        while self.network:
            self.deliver(len(self.network) // 2)
        for signal, stream in enumerate(self.streams):
            assert self.library.receiver_complete(self.receiver, signal) == stream.posted


def drive_receiver(library: ctypes.CDLL, choices: Steps) -> None:
    run = CountedRun(library)
    try:
        for choice in choices:
            run.step(*choice)
        run.finish()
    finally:
        library.receiver_free(run.receiver)


def drive_sender(library: ctypes.CDLL, choices: Steps) -> None:
    """The fenced sender against an oracle of what is placed; signal writes land in order of posting."""
    sender = library.sender_new()
    outstanding: list[int] = []
    ended = 0
    in_flight = 0
    raised = 0

    def complete() -> int:
        return min([*(message - 1 for message in outstanding), ended])

    def admitted() -> bool:
        admits = bool(library.sender_admit(sender, ended + 1))
        assert admits == (ended + 1 - complete() <= WINDOW)
        return admits

    def take() -> None:
        nonlocal in_flight
        value = library.sender_take_signal(sender)
        if value:
            assert in_flight == 0, "two writes of one signal are under way"
            assert raised < value <= complete(), "the signal promises data that are not placed"
            in_flight = value

    try:
        for action, a, b in choices:
            if action == 0:  # goes on with the message that is open
                if admitted():
                    for _ in range(b % 4):
                        library.sender_write(sender, ended + 1)
                        outstanding.append(ended + 1)
                        take()
            elif action == 4:  # ends it, and some short ones behind it
                for k in range(1 + b % 40):
                    if not admitted():
                        break
                    if k > 0:
                        library.sender_write(sender, ended + 1)
                        outstanding.append(ended + 1)
                    ended += 1
                    library.sender_end(sender, ended)
                    take()
            elif action == 1 and outstanding:
                library.sender_placed(sender, outstanding.pop(a % len(outstanding)))
            elif action == 2:
                take()
            elif action == 3 and in_flight:
                raised, in_flight = in_flight, 0
                library.sender_signal_placed(sender)
        if admitted():
            ended += 1
            library.sender_end(sender, ended)
        while outstanding:
            library.sender_placed(sender, outstanding.pop())
        for _ in range(2):
            take()
            if in_flight:
                raised, in_flight = in_flight, 0
                library.sender_signal_placed(sender)
        assert raised == ended
        assert library.sender_quiet(sender)
    finally:
        library.sender_free(sender)


@relaxed
@given(choices=steps)
def test_receiver_counts_every_write_once(shipped: ctypes.CDLL, choices: Steps) -> None:
    drive_receiver(shipped, choices)


@relaxed
@given(choices=steps)
def test_fenced_signal_follows_its_data(shipped: ctypes.CDLL, choices: Steps) -> None:
    drive_sender(shipped, choices)


@relaxed
@given(
    imm_bits=st.sampled_from([0, 16, 31, 32, 48, 64]),
    num_signals=st.integers(1, 1 << 26),
    a=st.integers(0, 1 << 62),
    b=st.integers(0, 1 << 62),
    message=st.integers(0, (1 << 64) - 1),
    last=st.booleans(),
)
def test_codec(shipped: ctypes.CDLL, imm_bits: int, num_signals: int, a: int, b: int, message: int, last: bool) -> None:
    receiver = shipped.receiver_new(imm_bits, num_signals)
    usable = 64 if imm_bits >= 64 else 32 if imm_bits >= 32 else 0
    assert bool(receiver) == (1 + 6 + (num_signals - 1).bit_length() + 4 <= usable)
    if not receiver:
        return
    signal, index = a % num_signals, b % shipped.receiver_max_writes(receiver)
    bits = shipped.receiver_encode(receiver, signal, message, index, last)
    assert bits >> usable == 0
    fields = (ctypes.c_uint32 * 4)()
    shipped.receiver_decode(receiver, bits, fields)
    assert list(fields) == [signal, message % 64, index, last]
    shipped.receiver_free(receiver)


def test_receiver_tells_nonsense_apart(shipped: ctypes.CDLL) -> None:
    receiver = shipped.receiver_new(32, SIGNALS)
    named = ctypes.c_uint32()

    def accept(signal: int, message: int, index: int, last: bool) -> int:
        bits = shipped.receiver_encode(receiver, signal, message, index, last)
        return shipped.receiver_accept(receiver, bits, ctypes.byref(named))

    assert accept(SIGNALS, 1, 0, True) == UNKNOWN_SIGNAL
    assert accept(0, 1, 1, True) == COUNTED
    assert accept(0, 1, 2, True) == CONTRADICTION
    assert accept(1, 1, 5, False) == COUNTED
    assert accept(1, 1, 4, True) == CONTRADICTION
    assert accept(2, 33, 0, True) == CLOSED
    shipped.receiver_free(receiver)


def broken_by(property_of: Callable[[ctypes.CDLL, Steps], None], library: ctypes.CDLL) -> bool:
    @settings(
        max_examples=400,
        deadline=None,
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        phases=[Phase.generate],
    )
    @given(choices=steps)
    def attempt(choices: Steps) -> None:
        property_of(library, choices)

    try:
        attempt()
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("name", RECEIVER_MUTANTS)
def test_receiver_mutant_is_caught(tmp_path: Path, name: str) -> None:
    assert broken_by(drive_receiver, build(tmp_path, RECEIVER_MUTANTS[name]))


@pytest.mark.parametrize("name", SENDER_MUTANTS)
def test_sender_mutant_is_caught(tmp_path: Path, name: str) -> None:
    assert broken_by(drive_sender, build(tmp_path, SENDER_MUTANTS[name]))
