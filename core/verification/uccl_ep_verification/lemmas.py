"""The arithmetic of the protocol at its real widths, as queries to z3: no value may contradict a lemma.

The widths are read from the shipped headers, so a lemma cannot go on proving yesterday's constants.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import z3

INCLUDE = Path(__file__).resolve().parents[2] / "native" / "include" / "uccl_ep"


@dataclasses.dataclass(frozen=True)
class Lemma:
    """``build(mutation)`` returns the claim that must hold for all values of its variables."""

    name: str
    build: Callable[[str], Any]
    mutations: tuple[str, ...]


def header_constant(header: str, name: str) -> int:
    """The value of ``name`` in a shipped header, e.g. ``kPeerBits`` of command.hpp."""
    text = (INCLUDE / header).read_text(encoding="utf-8")
    match = re.search(rf"\b{name} = (\d+)\b", text)
    if match is None:
        raise ValueError(f"{header} has no constant {name} with a plain number as its value")
    return int(match.group(1))


def word(name: str) -> Any:
    return z3.BitVec(name, 64)


def less(a: Any, b: Any) -> Any:
    return z3.ULT(a, b)


def at_most(a: Any, b: Any) -> Any:
    return z3.ULE(a, b)


def epoch_window(mutation: str) -> Any:
    """The window takes each of the next 32 messages for itself and refuses each of the last 32."""
    bits = header_constant("immediate.hpp", "kEpochBits") - (mutation == "epoch_one_bit_short")
    epochs = 1 << bits
    window = 32 + (mutation == "window_33")
    life = window + (mutation == "life_one_message_longer")
    complete, message = word("complete"), word("message")
    ahead = ((message & (epochs - 1)) - (complete + 1)) & (epochs - 1)
    coming = z3.And(less(0, message - complete), at_most(message - complete, window))
    past = less(complete - message, life)
    return z3.And(
        z3.Implies(coming, z3.And(ahead == message - (complete + 1), less(ahead, window))),
        z3.Implies(past, z3.Not(less(ahead, window))),
    )


def window_places(mutation: str) -> Any:
    """Two messages of the window never share one of its 32 places (receiver and fenced sender)."""
    places = 31 if mutation == "31_places" else 32
    window = 33 if mutation == "33_in_flight" else 32
    complete, one, other = word("complete"), word("one"), word("other")
    ends = less(complete, (1 << 64) - 64)  # message numbers do not wrap: 2^64 messages take for ever

    def inside(message: Any) -> Any:
        return z3.And(less(complete, message), at_most(message - complete, window))

    apart = z3.URem(one, z3.BitVecVal(places, 64)) != z3.URem(other, z3.BitVecVal(places, 64))
    return z3.Implies(z3.And(ends, inside(one), inside(other), one != other), apart)


def ring_slots(mutation: str) -> Any:
    """Commands that the full check lets into the ring have different slots, for every capacity."""
    first, consumed, count, shift = word("first"), word("consumed"), word("count"), word("shift")
    one, other = word("one"), word("other")
    capacity = z3.BitVecVal(1, 64) << shift
    end = first + count
    allowed = at_most(end - consumed, capacity + 1 if mutation == "one_too_many" else capacity)
    inside = [less(ticket - consumed, end - consumed) for ticket in (one, other)]
    mask = capacity - 1
    return z3.Implies(z3.And(at_most(shift, 20), allowed, one != other, *inside), (one & mask) != (other & mask))


def stale_progress(mutation: str) -> Any:
    """A copy of `consumed` that lags never lets in what the true value would not."""
    end, cached, consumed, capacity = word("end"), word("cached"), word("consumed"), word("capacity")
    lags = at_most(consumed, cached) if mutation == "copy_runs_ahead" else at_most(cached, consumed)
    return z3.Implies(
        z3.And(lags, at_most(consumed, end), at_most(end - cached, capacity), at_most(cached, end)),
        at_most(end - consumed, capacity),
    )


def phase(mutation: str) -> Any:
    """phase_of_ticket is phase_of_lap; it differs from the slot's last lap and from a zeroed slot."""
    ticket, shift = word("ticket"), word("shift")
    capacity = z3.BitVecVal(1, 64) << shift
    if mutation == "capacity_no_power_of_two":
        capacity = capacity + 1
    lap = z3.UDiv(ticket, capacity)
    one = z3.BitVecVal(1 << header_constant("command.hpp", "kPhaseBit"), 64)
    zero = z3.BitVecVal(0, 64)

    def of_ticket(number: Any) -> Any:
        return z3.If((number & capacity) != 0, zero, one)

    of_lap = z3.If(lap & 1 != 0, zero, one)
    if mutation == "first_lap_publishes_zero":
        of_lap = z3.If(lap & 1 != 0, one, zero)
    return z3.Implies(
        z3.And(less(0, shift), at_most(shift, 4), less(ticket, 1 << 16)),
        z3.And(
            of_ticket(ticket) == of_lap,
            of_ticket(ticket) != of_ticket(ticket + capacity),
            z3.Implies(less(ticket, capacity), of_lap == one),
        ),
    )


def packing(mutation: str) -> Any:
    """pack and unpack of command.hpp: every field comes back, at full width, under either phase."""
    operation_bits, peer_bits, bytes_bits, offset_bits, signal_bits, low_bits = (
        header_constant("command.hpp", name)
        for name in ("kOperationBits", "kPeerBits", "kBytesBits", "kOffsetBits", "kSignalBits", "kValueLowBits")
    )
    if mutation == "write_of_24_bits":
        bytes_bits -= 1
    operation, peer, count, local, remote, signal, value, lap = (
        word(name) for name in ("operation", "peer", "bytes", "local", "remote", "signal", "value", "lap")
    )
    phase_bit = (~lap & 1) << 63
    high = 0 if mutation == "value_of_63_bits" else z3.LShR(value, low_bits)
    top = operation_bits + peer_bits + bytes_bits
    signal_shift = offset_bits - (mutation == "offset_overlaps_signal")
    words = (
        phase_bit | operation | (peer << operation_bits) | (count << (operation_bits + peer_bits)) | (high << top),
        phase_bit | local | (signal << signal_shift),
        phase_bit | remote,
        phase_bit | (value & ((1 << low_bits) - 1)),
    )

    def field(number: Any, shift: int, bits: int) -> Any:
        return z3.LShR(number, shift) & ((1 << bits) - 1)

    limits = z3.And(
        less(operation, 1 << operation_bits),
        less(peer, 1 << peer_bits),
        at_most(count, 16 << 20),
        less(local, 1 << offset_bits),
        less(remote, 1 << offset_bits),
        less(signal, 1 << signal_bits),
    )
    back = z3.And(
        field(words[0], 0, operation_bits) == operation,
        field(words[0], operation_bits, peer_bits) == peer,
        field(words[0], operation_bits + peer_bits, bytes_bits) == count,
        field(words[1], 0, offset_bits) == local,
        field(words[1], signal_shift, signal_bits) == signal,
        field(words[2], 0, offset_bits) == remote,
        (field(words[3], 0, low_bits) | (field(words[0], top, 1) << low_bits)) == value,
        *(field(number, 63, 1) == (~lap & 1) for number in words),
    )
    return z3.Implies(limits, back)


def immediate(mutation: str) -> Any:
    """encode and decode of immediate.hpp, for every division of 32 bits into signal and write index."""
    epoch_bits = header_constant("immediate.hpp", "kEpochBits")
    index_bits, signal_bits = word("index_bits"), word("signal_bits")
    signal, epoch, index, last = word("signal"), word("epoch"), word("index"), word("last")
    one = z3.BitVecVal(1, 64)
    total = 33 if mutation == "one_bit_too_many" else 32
    base = 1 + epoch_bits
    travels = (last | (epoch << 1) | (index << base) | (signal << (base + index_bits))) & 0xFFFFFFFF
    limit = (one << index_bits) + (1 if mutation == "index_too_big" else 0)
    limits = z3.And(
        at_most(index_bits, 20),
        at_most(signal_bits, 26),
        index_bits + signal_bits + base == total,
        less(last, 2),
        less(epoch, 1 << epoch_bits),
        less(index, limit),
        less(signal, one << signal_bits),
    )
    back = z3.And(
        travels & 1 == last,
        z3.LShR(travels, 1) & ((1 << epoch_bits) - 1) == epoch,
        z3.LShR(travels, base) & ((one << index_bits) - 1) == index,
        z3.LShR(travels, base + index_bits) == signal,
    )
    return z3.Implies(limits, back)


LEMMAS = (
    Lemma("epoch_window", epoch_window, ("epoch_one_bit_short", "window_33", "life_one_message_longer")),
    Lemma("window_places", window_places, ("31_places", "33_in_flight")),
    Lemma("ring_slots", ring_slots, ("one_too_many",)),
    Lemma("stale_progress", stale_progress, ("copy_runs_ahead",)),
    Lemma("phase", phase, ("capacity_no_power_of_two", "first_lap_publishes_zero")),
    Lemma("packing", packing, ("write_of_24_bits", "value_of_63_bits", "offset_overlaps_signal")),
    Lemma("immediate", immediate, ("one_bit_too_many", "index_too_big")),
)


def check(lemma: Lemma, mutation: str, timeout_s: float) -> tuple[str, str]:
    """("pass", "") where no value contradicts the lemma, ("fail", values) or ("unknown", reason)."""
    solver = z3.Solver()
    solver.set("timeout", int(timeout_s * 1000))
    solver.add(z3.Not(lemma.build(mutation)))
    answer = solver.check()
    if answer == z3.unsat:
        return "pass", ""
    if answer == z3.sat:
        model = solver.model()
        return "fail", ", ".join(sorted(f"{name} = {model[name]}" for name in model.decls()))
    return "unknown", solver.reason_unknown()
