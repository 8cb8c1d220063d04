"""What a buffer holds, and the order in which it is given back."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

from uccl_ep_core import _native
from uccl_ep_core.errors import BufferClosedError, EPError
from uccl_ep_core.gpu_backend import GpuBackend, Window
from uccl_ep_core.transport import Transport

STOP_S = 2.0  # what was pushed leaves within this time, or not at all
END_CALLS_S = 10.0  # kernels look at the abort word every few microseconds


def _keep_for_ever(things: object) -> None:
    """Never freed, not even when the interpreter ends: a thread that nobody can end may still use them."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(things))


class _Use:
    """The ``with`` of `Resources.used`. Every call enters it, so it is one object, and no generator."""

    __slots__ = ("_resources",)

    def __init__(self, resources: Resources) -> None:
        self._resources = resources

    def __enter__(self) -> None:
        resources, thread = self._resources, threading.get_ident()
        with resources._lock:
            if resources.closed:
                raise BufferClosedError("this buffer was destroyed: create a new one")
            resources._users[thread] = resources._users.get(thread, 0) + 1

    def __exit__(self, *error: object) -> None:
        resources, thread = self._resources, threading.get_ident()
        with resources._lock:
            left = resources._users[thread] - 1
            if left:
                resources._users[thread] = left
            else:
                del resources._users[thread]
            if resources.closed:
                resources._ended.notify_all()


class Resources:
    """What must be released, in order, exactly once, also when the process just exits."""

    def __init__(self) -> None:
        self.windows: list[Window] = []
        self.transport: Transport | None = None
        self.engine: Any = None
        self.tracing: Any = None
        self.monitor: Any = None
        self.verdicts: Any = None
        self.backend: GpuBackend | None = None
        self.rank = 0
        self.closed = False
        self.process = os.getpid()
        self._users: dict[int, int] = {}  # calls in progress by thread
        self._lock = threading.RLock()  # entered again where a signal handler closes the buffer
        self._ended = threading.Condition(self._lock)  # told of while `close` waits
        self._use = _Use(self)

    def used(self) -> _Use:
        """While a call needs the windows: `close`, in another thread, waits for its end."""
        return self._use

    def _end_calls(self) -> None:
        """End the calls of other threads: kernels that run would go on in memory that is gone."""
        with self._ended:
            self.closed = True
            others = set(self._users) - {threading.get_ident()}
            if others and self.verdicts is not None:
                self.verdicts.report(self.rank, int(_native.Reason.CLOSED), 0)
            if not self._ended.wait_for(lambda: not set(self._users) - {threading.get_ident()}, END_CALLS_S):
                raise EPError(f"a call of another thread did not end within {END_CALLS_S} s: its memory is kept")

    def close(self) -> None:
        """Give everything back.

        Raises:
            EPError: a call of another thread, or a proxy in a function of the transport, did not end in time. What it
                may still use stays allocated; all else is given back, and the process can go on.
        """
        if os.getpid() != self.process:
            return  # a fork holds a copy of the addresses only; threads and peers are its parent's
        self._end_calls()
        if self.verdicts is not None:
            self.verdicts.close()  # peers that still wait for this rank learn that it left on purpose
            self.verdicts = None
        engine, self.engine = self.engine, None
        if self.tracing is not None:
            self.tracing.finish(engine)
            self.tracing = None
        ended = engine is None or engine.stop(STOP_S)
        if self.monitor is not None:
            self.monitor.stop()
            self.monitor = None
        if not ended:
            _keep_for_ever((engine, self.transport, self.windows, self.backend))
            self.transport, self.windows, self.backend = None, [], None
            raise EPError(f"{engine.stop_error}; its thread is left behind, and the buffer's memory stays allocated")
        if self.transport is not None:
            self.transport.close()
            self.transport = None
        while self.windows:
            self.windows.pop().close()
        if self.backend is not None:
            self.backend.close()
            self.backend = None
