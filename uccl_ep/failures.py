"""From a verdict in shared memory to the exception that every surviving rank raises."""

from __future__ import annotations

from typing import Any

from uccl_ep_core.errors import PeerFailure

REASONS = ("none", "timeout", "dead", "mismatch", "transport", "bad command", "protocol", "closed")
PHASES = (
    "none",
    "notify",
    "dispatch",
    "forward",
    "combine",
    "low-latency dispatch send",
    "low-latency dispatch receive",
    "low-latency combine send",
    "low-latency combine receive",
    "barrier",
    "transport",
    "idle",
)
OPERATIONS = {0: "none", 1: "notify", 2: "dispatch", 3: "combine", 4: "low-latency dispatch", 5: "low-latency combine"}


def _word(words: tuple[str, ...], index: Any) -> str:
    number = int(index)
    return words[number] if number < len(words) else f"unknown ({number})"


def peer_failure(verdict: Any, rank: int, detail: tuple[int, ...] = (), words: str = "") -> PeerFailure:
    """The exception for a verdict (fields as in ``struct Verdict`` of layout.hpp).

    Args:
        rank: the rank that raises.
        detail: what this rank's own kernel found in a message that did not match.
        words: what the engine said, where it failed.
    """
    reason = _word(REASONS, verdict.reason)
    phase = _word(PHASES, verdict.phase)
    elapsed_s = verdict.elapsed_ns / 1e9
    head = f"rank {verdict.culprit} is at fault ({reason}), as rank {verdict.reporter} noticed in {phase}"
    counts = f"operation {verdict.operation}, signal {verdict.signal}: expected {verdict.expected}, seen {verdict.seen}"
    tail = {
        "timeout": f"it did not signal within {elapsed_s:.3f} s; is it late, stuck, or in fewer calls than the others? "
        "(a longer wait: timeout_s)",
        "dead": "its process is gone",
        "mismatch": _mismatch(detail),
        "closed": "it destroyed its buffer while others still waited for it",
        "transport": "the transport reported an error towards it",
        "bad command": "it pushed a command outside its window, which its proxy refused",
        "protocol": "its messages broke the ordering protocol",
    }.get(reason, "")
    message = f"{head}: {tail} [{counts}]" + (f"; {words}" if words else "") + f" (raised on rank {rank})"
    return PeerFailure(
        message,
        rank=verdict.culprit,
        reason=reason,
        phase=phase,
        reporter=verdict.reporter,
        signal=verdict.signal,
        expected=verdict.expected,
        seen=verdict.seen,
        operation=verdict.operation,
        elapsed_s=elapsed_s,
    )


def _mismatch(detail: tuple[int, ...]) -> str:
    if len(detail) != 4 or not any(detail):
        return "it is in another operation, or passed another shape, than the rank that noticed"
    operation, kind, found, expected = detail
    if kind >> 32 == 0xFFFFFFFF:  # of the same call, in another format: stream.hpp
        return (
            f"its rows have {found_low(operation)} bytes, scale bytes (combine: dtype) {operation >> 32} and top-k "
            f"{found_low(kind)}; this rank has {found_low(found)}, {found >> 32} and {expected}: ranks must pass "
            "the same dtype, scales and top-k weights"
        )
    if kind in OPERATIONS:
        return (
            f"its message is of operation {operation} ({OPERATIONS[kind]}) with rows of {found} bytes; rows of "
            f"{expected} bytes were expected: ranks must make the same calls in the same order with the same hidden "
            "size and dtype"
        )
    return (
        f"it passed a shape of row bytes {found_low(operation)}, scale bytes {operation >> 32}, top-k "
        f"{found_low(kind)}, experts {kind >> 32}; this rank has {found_low(found)}, {found >> 32}, "
        f"{found_low(expected)}, {expected >> 32}"
    )


def found_low(value: int) -> int:
    """The low 32 bits of a detail word, where two numbers share one."""
    return value & 0xFFFFFFFF
