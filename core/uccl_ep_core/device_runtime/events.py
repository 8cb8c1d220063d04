"""Events of a driver, and waiting for one with a limit."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

from ..gpu_backend import Event
from .driver import Driver

_BACKOFF_S = 50e-6
_EAGER_POLLS = 200


def poll(done: Callable[[], bool], timeout_s: float) -> bool:
    """Ask until it is so or the time is up. A driver's own blocking wait has no limit, so none is used."""
    deadline = time.monotonic() + timeout_s
    polls = 0
    while not done():
        if time.monotonic() > deadline:
            return False
        polls += 1
        time.sleep(0 if polls < _EAGER_POLLS else _BACKOFF_S)
    return True


class RuntimeEvent(Event):
    """A point in a stream of one device; its native event is freed with this object."""

    def __init__(self, driver: Driver, ordinal: int, current_stream: Callable[[], int]) -> None:
        self._driver = driver
        self._ordinal = ordinal
        self._current_stream = current_stream
        with driver.active(ordinal):
            self.handle = driver.create_event()
        # Not at exit: the driver may be gone by then, and takes its events with it.
        weakref.finalize(self, _destroy, driver, ordinal, self.handle).atexit = False

    def record(self, stream: int) -> None:
        with self._driver.active(self._ordinal):
            self._driver.record_event(self.handle, stream)

    def wait(self, stream: int | None = None) -> None:
        with self._driver.active(self._ordinal):
            self._driver.wait_event(self._current_stream() if stream is None else stream, self.handle)

    def synchronize(self, timeout_s: float) -> bool:
        with self._driver.active(self._ordinal):
            return poll(lambda: self._driver.event_done(self.handle), timeout_s)


def _destroy(driver: Driver, ordinal: int, handle: int) -> None:
    with driver.active(ordinal):
        driver.destroy_event(handle)
