"""The clock of a device against that of the host, which proxies go by."""

from __future__ import annotations

import ctypes
import dataclasses
from bisect import bisect_right

from uccl_ep_core import _native
from uccl_ep_core.errors import EPError
from uccl_ep_core.gpu_backend import GpuBackend, Window
from uccl_ep_core.kernel_parameters import ClockParameters, ClockSample

ROUNDS = 32  # a way there and back takes 2 to 3 us over a bus, and the shortest of some tells the most
ROUND_LIMIT_S = 2.0
_ANSWER_AT, _SAMPLES_AT = 64, 128  # bytes into the window; each word has a cache line of its own
WINDOW_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class Anchor:
    """A moment by both clocks, ns; `error_ns` is by how much they may differ from that."""

    device_ns: int
    host_ns: int
    error_ns: int


def compare(backend: GpuBackend, window: Window) -> Anchor:
    """What both clocks say, by a kernel that asks and a thread that answers.

    Args:
        window: host memory that kernels reach, of `WINDOW_BYTES`.

    Raises:
        EPError: the kernel saw no answer in time.
    """
    samples_at = window.memory.pointer + _SAMPLES_AT
    ctypes.memset(samples_at, 0, ROUNDS * ctypes.sizeof(ClockSample))
    limit_s = ROUNDS * ROUND_LIMIT_S
    answers = _native.ClockAnswers(window.memory.pointer, window.memory.pointer + _ANSWER_AT, limit_s + 10)
    try:
        parameters = ClockParameters(
            question=window.device_pointer,
            answer=window.device_pointer + _ANSWER_AT,
            samples=window.device_pointer + _SAMPLES_AT,
            timeout_ns=int(ROUND_LIMIT_S * 1e9),
            rounds=ROUNDS,
        )
        backend.launch("uccl_ep_clock", bytes(parameters), num_blocks=1, warps_per_block=1)
        if not backend.synchronize(None, limit_s + 10):
            raise EPError(f"the kernel that compares clocks did not end within {limit_s + 10:g} s")
    finally:
        answers.stop()
    samples = [sample for sample in (ClockSample * ROUNDS).from_address(samples_at) if sample.after_ns]
    if not samples:
        raise EPError(f"the kernel that compares clocks had no answer within {ROUND_LIMIT_S} s")
    best = min(samples, key=lambda sample: int(sample.after_ns - sample.before_ns))
    half = (best.after_ns - best.before_ns) / 2
    return Anchor(best.before_ns + int(half), best.host_ns, int(half + 0.5))


class HostClock:
    """Kernels of the host backend go by the host's clock itself."""

    error_ns = 0

    def compare(self) -> None:
        """There is nothing to compare."""

    def host_ns(self, device_ns: int) -> int:
        return device_ns


class DeviceClock:
    """Turns times of a device into those of the host. Between two comparisons it follows the straight line, since the
    clocks drift apart by microseconds a second; before the first and after the last the difference stays."""

    def __init__(self, backend: GpuBackend, window: Window) -> None:
        self._backend, self._window = backend, window
        self._anchors = [compare(backend, window)]

    def compare(self) -> None:
        """Once more, now."""
        self._anchors.append(compare(self._backend, self._window))

    @property
    def error_ns(self) -> int:
        """By how much times may be off, at most, at a comparison."""
        return max(anchor.error_ns for anchor in self._anchors)

    def host_ns(self, device_ns: int) -> int:
        return follow(self._anchors, device_ns)


def follow(anchors: list[Anchor], device_ns: int) -> int:
    """The host's time for one of the device, by anchors in order of time."""
    after = bisect_right(anchors, device_ns, key=lambda anchor: anchor.device_ns)
    if after == 0 or after == len(anchors):
        nearest = anchors[max(0, after - 1)]
        return nearest.host_ns + device_ns - nearest.device_ns
    left, right = anchors[after - 1], anchors[after]
    # In integers: spans that follow each other, or lie within each other, must do so afterwards too.
    return left.host_ns + (device_ns - left.device_ns) * (right.host_ns - left.host_ns) // (
        right.device_ns - left.device_ns
    )
