"""Traced kernels of one buffer: where they record, what was read back of it, and where that goes."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

from uccl_ep_core import _native
from uccl_ep_core.errors import ArgumentError, EPError
from uccl_ep_core.gpu_backend import GpuBackend, Window
from uccl_ep_core.kernel_parameters import SpanTable

from .clocks import WINDOW_BYTES, DeviceClock, HostClock
from .launches import Launch, launches_of
from .perfetto import events_of
from .profile import Profile, summed_up
from .rings import SpanRings

logger = logging.getLogger("uccl_ep")

MOST_SPANS = 1 << 20  # that are kept for the trace, the newest: 150 MB of file
STOP_S = 10.0  # what runs when a buffer is closed ends within this time, or is not in the trace


class KernelTracing:
    """The traced kernels of one buffer.

    Args:
        path: the option ``trace``; "": what is read serves `profile` alone.
        capacity: the option ``trace_kernel_spans``.
    """

    def __init__(self, backend: GpuBackend, rank: int, path: str, capacity: int) -> None:
        self._backend, self._rank, self._path = backend, rank, path
        self._rings = SpanRings(backend, capacity)
        self.windows: list[Window] = [self._rings.window]
        self._clock: HostClock | DeviceClock = HostClock()
        if backend.torch_device.type != "cpu":
            self.windows.append(backend.allocate_host_window(WINDOW_BYTES))
            self._clock = DeviceClock(backend, self.windows[-1])
        self._for_profile: list[Launch] = []
        self._for_trace: deque[Launch] = deque()
        self._kept_spans = 0
        self._lost_by_profile = self._lost_by_trace = 0

    def table(self) -> SpanTable:
        """What kernels are told."""
        return self._rings.table()

    def profile(self, timeout_s: float) -> Profile:
        """Sums of all launches since the last one.

        Raises:
            ArgumentError: a graph is being captured.
            EPError: a kernel still runs after ``timeout_s``.
        """
        if self._backend.is_capturing():
            raise ArgumentError("profile() waits for kernels, which a capture forbids: call it after a replay")
        self._read(timeout_s)
        result = summed_up(self._for_profile, self._lost_by_profile)
        self._for_profile, self._lost_by_profile = [], 0
        return result

    def _read(self, timeout_s: float) -> None:
        backend = self._backend
        for stream in (None, backend.communication_stream()):
            if not backend.synchronize(stream, timeout_s):
                raise EPError(f"kernels did not end within {timeout_s:g} s, so what they recorded cannot be read")
        self._clock.compare()
        recorded, lost = self._rings.read()
        launches, cut_off = launches_of(recorded)
        self._for_profile += launches
        self._lost_by_profile += lost + cut_off
        self._lost_by_trace += lost + cut_off
        if not self._path:
            return
        self._for_trace += launches
        self._kept_spans += sum(launch.num_spans for launch in launches)
        while self._kept_spans > MOST_SPANS:
            gone = self._for_trace.popleft().num_spans
            self._kept_spans -= gone
            self._lost_by_trace += gone

    def finish(self, engine: Any) -> None:
        """Put what kernels did into the trace: into the file that ``engine`` writes when it stops, or, where there is
        none, into one without proxies. Never raises: a buffer is closed in any case."""
        if not self._path:
            return
        try:
            self._read(STOP_S)
        except Exception as error:
            logger.warning("the last kernels are not in the trace %s: %s", self._path, error)
        json = events_of(self._for_trace, self._rank, self._clock.host_ns)
        if self._lost_by_trace:
            logger.warning(
                "%d spans of kernels are not in the trace %s: the newest are kept (trace_kernel_spans)",
                self._lost_by_trace,
                self._path,
            )
        if engine is not None:
            engine.add_to_trace(json, self._lost_by_trace, self._clock.error_ns)
        elif words := _native.write_trace(self._path, self._rank, json, self._lost_by_trace, self._clock.error_ns):
            logger.warning("%s", words)
