"""The engine between the channel and a transport, and what ranks know about each other's failures.

`Engine` runs a proxy thread per lane. `Verdicts` writes and reads which rank failed; `PeerMonitor`
notices that a process of this host is gone. All three are native; ``core/native/src`` has them.
"""

from __future__ import annotations

from ._native import Engine, NullTransport, PeerMonitor, Phase, Reason, SignalKind, Verdict, Verdicts

__all__ = [
    "Engine",
    "NullTransport",
    "PeerMonitor",
    "Phase",
    "Reason",
    "SignalKind",
    "Verdict",
    "Verdicts",
]
