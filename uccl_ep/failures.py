"""From a verdict in shared memory to the exception that every surviving rank raises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from uccl_ep_core.errors import PeerFailure
from uccl_ep_core.kernel_parameters import Quantization

from .tensors import NUMBERED

REASONS = ("none", "timeout", "dead", "mismatch", "transport", "bad command", "protocol", "closed", "interrupted")
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
    differs = reason == "mismatch" and verdict.signal & DIFFERENCE == DIFFERENCE
    signal = 0 if differs else verdict.signal
    counts = f"operation {verdict.operation}, signal {signal}: expected {verdict.expected}, seen {verdict.seen}"
    waited = (
        f"it did not signal within {elapsed_s:.3f} s"
        if verdict.elapsed_ns
        else f"rank {verdict.reporter} still waited for it when the time of another rank was up"
    )
    tail = {
        "timeout": f"{waited}; is it late, stuck, or in fewer calls than the others? (a longer wait: timeout_s)",
        # With words of the transport, that is what gave it up; the process itself may live.
        "dead": "it cannot be reached any more" if words else "its process is gone",
        "mismatch": _difference(verdict) if differs else _mismatch(detail),
        "closed": "it destroyed its buffer while others still waited for it",
        "interrupted": "a signal handler of its process raised (Ctrl-C raises KeyboardInterrupt)",
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
        signal=signal,
        expected=verdict.expected,
        seen=verdict.seen,
        operation=verdict.operation,
        elapsed_s=elapsed_s,
    )


def _mismatch(detail: tuple[int, ...]) -> str:
    if len(detail) != 4 or not any(detail):
        return "it is in another operation, or passed another shape, than the rank that noticed"
    first, kind, found, expected = detail
    return (
        f"its message is of operation {first} ({_named(OPERATIONS, kind)}) with rows of {found} bytes; rows of "
        f"{expected} bytes were expected: ranks must make the same calls in the same order with the same hidden "
        "size and dtype"
    )


def _difference(verdict: Any) -> str:
    what, theirs, mine = verdict.signal & 0xFF, verdict.seen, verdict.expected
    if what == EXPERT_ROWS:
        return (
            f"its topk_idx names one expert {theirs} times, and num_max_dispatch_tokens_per_rank = {mine} rows fit: "
            "let a token name an expert once, with -1 in place of the others"
        )
    if what == EXPERT_INDEX:
        index = theirs - (1 << 64 if theirs >> 63 else 0)
        return f"its topk_idx holds {index}: indices are 0 to {mine - 1}, or -1 for none"
    name, shown = DIFFERENCES.get(what, (f"field {what}", str))
    return f"its {name} is {shown(theirs)}, that of rank {verdict.reporter} {shown(mine)}: ranks must pass the same"


def _named(table: Mapping[int, str], number: int) -> str:
    return table.get(number, f"unknown ({number})")


def _dtype(code: int) -> str:
    payload, scales = code & 0xFF, code >> 8
    words = _named(DTYPES, payload)
    return words + (f" with scales of {_named(DTYPES, scales)}" if scales else "")


def _quantization(code: int) -> str:
    return _named(
        {
            Quantization.NONE: "use_fp8=False",
            Quantization.FLOAT8: "use_fp8=True",
            Quantization.FLOAT8_POWER_OF_TWO: "use_fp8=True, round_scale=True",
            Quantization.FLOAT8_EXPONENT: "use_fp8=True, round_scale=True, use_ue8m0=True",
        },
        code,
    )


DTYPES = {int(code): str(dtype).removeprefix("torch.") for dtype, code in NUMBERED.items()} | {0: "another type"}
# kDifference and enum class Difference of core/kernels/parameters.hpp.
DIFFERENCE = 0xFFFFFF00
EXPERT_ROWS = 8
EXPERT_INDEX = 11
DIFFERENCES: Mapping[int, tuple[str, Callable[[int], str]]] = {
    1: ("dtype", _dtype),
    2: ("row size in bytes (hidden size)", str),
    3: ("row size of scales in bytes", str),
    4: ("top-k (0: none travels)", str),
    5: ("num_experts", str),
    6: ("num_max_dispatch_tokens_per_rank", str),
    7: ("cast", _quantization),
    9: ("num_max_tokens_per_rank (0: sizes by counts, as Buffer)", str),
    10: ("low-latency path (0: packed, 1: direct)", str),
}
