"""Every exception the library raises.

Errors are part of the API: a message says what was wrong, where the bad value came from, and the
value that would have worked. Errors about arguments are raised before any rank communicates.
"""

from __future__ import annotations


class EPError(RuntimeError):
    """Base of all errors of this library."""


class ConfigurationError(EPError, ValueError):
    """An unknown plugin, option or value; names the nearest valid one and the value's origin."""


class BackendUnavailableError(EPError):
    """A plugin was asked for that cannot be used on this machine; says why, and the remedy."""


class CapabilityError(EPError):
    """A transport lacks a promise that every ordering plan needs, or a limit is exceeded."""


class ArgumentError(EPError, ValueError):
    """A call's argument cannot be served; raised on the calling rank before any communication."""


class HandleError(ArgumentError):
    """A handle that has expired, or that belongs to another buffer."""


class BufferClosedError(EPError):
    """The buffer was destroyed, or an earlier failure closed it (then `__cause__` is that failure)."""


class TransportError(EPError):
    """A transport failed to open, connect or move data; names the device and the peer."""


class PeerFailure(EPError):
    """A rank died, was later than the time-out, or is in another operation than this one.

    All surviving ranks raise this with the same ``rank``.

    Attributes:
        rank: the rank at fault, in the numbering of the buffer's group.
        reason: ``"timeout"``, ``"dead"``, ``"mismatch"``, ``"transport"``, ``"bad command"``,
            ``"protocol"``, ``"closed"`` or ``"interrupted"``.
        phase: what the reporting rank was doing, e.g. ``"dispatch"``.
        reporter: the rank that noticed.
        signal: index of the signal that was waited for.
        expected: the value of that signal that was waited for (messages, counted from 1).
        seen: its value at the time.
        operation: sequence number of the reporter's operation (the epoch).
        elapsed_s: how long the reporter had waited, in seconds.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        reason: str,
        phase: str = "",
        reporter: int = -1,
        signal: int = 0,
        expected: int = 0,
        seen: int = 0,
        operation: int = 0,
        elapsed_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.reason = reason
        self.phase = phase
        self.reporter = reporter
        self.signal = signal
        self.expected = expected
        self.seen = seen
        self.operation = operation
        self.elapsed_s = elapsed_s
