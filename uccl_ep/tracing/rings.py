"""The rings into which traced kernels record spans, in device memory: one for each warp of each block."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from uccl_ep_core.gpu_backend import GpuBackend
from uccl_ep_core.kernel_parameters import SpanRecord, SpanTable

from .names import KERNEL

MOST_WARPS = 256
"""Of a block that have a ring. A block of a GPU has fewer; of more, which the host backend can have, the first do."""

_RECORD = np.dtype(
    [("start", "<u8"), ("end", "<u8"), ("activity", "<u4"), ("detail", "<u4"), ("warps", "<u4"), ("reserved", "<u4")]
)
_BYTES_ALIGNED = 64


@dataclasses.dataclass(frozen=True)
class WarpSpans:
    """What one warp did in one launch of a kernel; times in ns of the device's clock.

    Attributes:
        warps: that record in this launch.
        spans: arrays ``start``, ``end``, ``activity``, ``detail``, in the order in which they ended.
    """

    block: int
    warp: int
    kernel: int
    start: int
    end: int
    warps: int
    spans: Any


class SpanRings:
    """The rings of one rank.

    Args:
        capacity: spans of a ring, a power of two; the newest are kept.
    """

    def __init__(self, backend: GpuBackend, capacity: int) -> None:
        limits = backend.limits
        self._backend, self._capacity = backend, capacity
        self._warps = min(limits.max_warps_per_block, MOST_WARPS)
        self._tracks = limits.max_blocks * self._warps
        self._records_at = -(-4 * self._tracks // _BYTES_ALIGNED) * _BYTES_ALIGNED
        self._row_bytes = self._tracks * _RECORD.itemsize
        self.window = backend.allocate_device_memory(self._records_at + capacity * self._row_bytes)
        self._seen = np.zeros(self._tracks, np.uint32)

    def table(self) -> SpanTable:
        """What kernels are told of them."""
        return SpanTable(
            counts=self.window.device_pointer,
            records=self.window.device_pointer + self._records_at,
            warps=self._warps,
            tracks=self._tracks,
            capacity=self._capacity,
        )

    def read(self) -> tuple[list[WarpSpans], int]:
        """What was recorded since the last time, of launches that a ring still holds in full; and how many spans of
        others are gone. No kernel runs."""
        counts = np.frombuffer(self._backend.copy_from_device(self.window, 4 * self._tracks), np.uint32)
        new = counts - self._seen  # modulo 2^32, as they are counted
        self._seen = counts
        if not new.any():
            return [], 0
        rows = min(int(counts.max()), self._capacity)
        data = self._backend.copy_from_device(self.window, rows * self._row_bytes, self._records_at)
        records = np.frombuffer(data, _RECORD).reshape(rows, self._tracks)
        found: list[WarpSpans] = []
        lost = 0
        for track in np.flatnonzero(new):
            kept = min(int(new[track]), self._capacity)
            ring = records[(int(counts[track]) - kept + np.arange(kept)) % self._capacity, track]
            launches, gone = self._launches_of(int(track), ring, whole=kept == new[track])
            found += launches
            lost += int(new[track]) - kept + gone
        return found, lost

    def _launches_of(self, track: int, ring: Any, whole: bool) -> tuple[list[WarpSpans], int]:
        """One track cut into launches: the span of the kernel is the last that its warp records. Where older spans were
        written over, the first launch lacks some and is left out."""
        ends = np.flatnonzero(ring["activity"] == KERNEL)
        found = []
        first = 0
        for number, end in enumerate(ends):
            if whole or number > 0:
                kernel = ring[end]
                found.append(
                    WarpSpans(
                        *divmod(track, self._warps),
                        int(kernel["detail"]),
                        int(kernel["start"]),
                        int(kernel["end"]),
                        int(kernel["warps"]),
                        ring[first:end],
                    )
                )
            first = int(end) + 1
        return found, len(ring) - sum(len(launch.spans) + 1 for launch in found)


assert _RECORD.itemsize == SpanRecord.activity.offset + 16
