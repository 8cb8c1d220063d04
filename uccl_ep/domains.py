"""Which ranks form scale-up domains: those that have imported each other's memory, and proved it."""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Sequence

from uccl_ep_core.gpu_backend import GpuBackend

from .bootstrap import Bootstrap, together

_PROBE_BYTES = 4096


def reachable_ranks(bootstrap: Bootstrap, backend: GpuBackend) -> list[list[bool]]:
    """``result[a][b]``: rank a has mapped memory of rank b and read there what b wrote."""
    mark = secrets.token_bytes(16)

    def make() -> tuple[object, bytes]:
        window = backend.allocate_host_window(_PROBE_BYTES)
        ctypes.memmove(window.memory.pointer, mark, len(mark))
        return window, backend.export_window(window)

    window, handle = together(bootstrap, "probing which ranks share memory", make)
    peers = bootstrap.all_gather((handle, mark), "probing which ranks share memory")
    mine = [rank == bootstrap.rank or _can_read(backend, *peer) for rank, peer in enumerate(peers)]
    # Also keeps the window open until all have looked.
    table = bootstrap.all_gather(mine, "telling which ranks share memory")
    window.close()  # type: ignore[attr-defined]
    return table


def _can_read(backend: GpuBackend, handle: bytes, mark: bytes) -> bool:
    try:
        window = backend.import_window(handle)
    except Exception:  # any reason at all: then a transport serves this pair
        return False
    try:
        return ctypes.string_at(window.memory.pointer, len(mark)) == mark
    finally:
        window.close()


def ranks_per_domain(reachable: Sequence[Sequence[bool]], limit: int) -> int:
    """The largest size, dividing the rank count, for which every run of so many consecutive ranks reaches itself.

    Args:
        reachable: as from `reachable_ranks`.
        limit: most ranks of a domain; 0: no limit.
    """
    num_ranks = len(reachable)
    for size in range(num_ranks, 1, -1):
        if num_ranks % size or (limit and size > limit):
            continue
        domains = [range(first, first + size) for first in range(0, num_ranks, size)]
        if all(reachable[a][b] for domain in domains for a in domain for b in domain):
            return size
    return 1
