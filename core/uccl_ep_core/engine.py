"""The engine between the channel and a transport, and what ranks know about each other's failures.

`Engine` runs a proxy thread per lane. `Verdicts` writes and reads which rank failed; `PeerMonitor`
notices that a process of this host is gone. All three are native; ``core/native/src`` has them.
"""

from __future__ import annotations

from ._native import Engine, NullTransport, PeerMonitor, Phase, Reason, SignalKind, Verdict, Verdicts
from .errors import PeerFailure

__all__ = [
    "Engine",
    "NullTransport",
    "PeerMonitor",
    "Phase",
    "Reason",
    "SignalKind",
    "Verdict",
    "Verdicts",
    "peer_failure",
]

_REASONS = {
    Reason.TIMEOUT: "did not signal in time",
    Reason.DEAD: "is dead",
    Reason.MISMATCH: "is in another operation",
    Reason.TRANSPORT: "could not be reached through the transport",
    Reason.BAD_COMMAND: "pushed a command that was refused",
    Reason.PROTOCOL: "broke the ordering protocol",
    Reason.CLOSED: "closed its buffer",
}


def words(member: Reason | Phase) -> str:
    """A member's name as people write it."""
    return str(member.name).lower().replace("_", " ")


def peer_failure(verdict: Verdict, detail: str = "") -> PeerFailure:
    """The exception of a verdict.

    Args:
        verdict: what `Verdicts.agree` returned.
        detail: more words, e.g. ``Engine.error()``.
    """
    elapsed_s = verdict.elapsed_ns * 1e-9
    message = (
        f"rank {verdict.culprit} {_REASONS.get(verdict.reason, 'failed')} "
        f"(phase {words(verdict.phase)}, operation {verdict.operation}, signal {verdict.signal}: "
        f"expected {verdict.expected}, seen {verdict.seen}; noticed by rank {verdict.reporter}"
        + (f" after {elapsed_s:.3f} s)" if verdict.elapsed_ns else ")")
        + (f"; {detail}" if detail else "")
    )
    return PeerFailure(
        message,
        rank=verdict.culprit,
        reason=words(verdict.reason),
        phase=words(verdict.phase),
        reporter=verdict.reporter,
        signal=verdict.signal,
        expected=verdict.expected,
        seen=verdict.seen,
        operation=verdict.operation,
        elapsed_s=elapsed_s,
    )
