"""Output tensors on memory that is kept: fresh pages of the system cost more than the copy into them."""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
import weakref
from collections.abc import Sequence

import torch

SMALLEST_BYTES = 1 << 18
"""Below this, torch's own allocation is as quick."""


class OutputPool:
    """Blocks of memory that go to callers as tensors and come back when the last view is gone.

    Args:
        keep_bytes: most memory kept for later; what comes back beyond it returns to the system.
    """

    def __init__(self, keep_bytes: int = 1 << 30) -> None:
        self._keep_bytes = keep_bytes
        self._kept_bytes = 0
        self._free: dict[int, list[mmap.mmap]] = {}
        self._leases: dict[int, weakref.ref[memoryview]] = {}
        self._lock = threading.RLock()  # a lease may end inside `empty`, when the collector runs

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised contiguous tensor."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < SMALLEST_BYTES:
            return torch.empty(tuple(shape), dtype=dtype)
        size = _bucket(nbytes)
        with self._lock:
            kept = self._free.get(size)
            block = kept.pop() if kept else None
            if block is not None:
                self._kept_bytes -= size
        if block is None:
            block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # a kernel without huge pages: slower, as right
                    block.madvise(mmap.MADV_HUGEPAGE)
        lease = memoryview(block)
        key = id(lease)
        with self._lock:
            self._leases[key] = weakref.ref(lease, lambda _: self._returned(key, size, block))
        # The tensor's storage keeps the lease alive; views of the tensor share the storage.
        return torch.frombuffer(lease, dtype=torch.uint8, count=nbytes).view(dtype).view(tuple(shape))

    def _returned(self, key: int, size: int, block: mmap.mmap) -> None:
        with self._lock:
            self._leases.pop(key, None)
            if self._kept_bytes + size <= self._keep_bytes:
                self._kept_bytes += size
                self._free.setdefault(size, []).append(block)


def _bucket(nbytes: int) -> int:
    """Round up to an eighth of the power of two below, so that at most an eighth is wasted and sizes recur."""
    step = max(1 << 12, 1 << (nbytes.bit_length() - 4))
    return (nbytes + step - 1) // step * step
