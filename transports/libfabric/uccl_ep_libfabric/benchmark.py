"""Loops for ``uccl-ep bench transport``: through the table, and straight on libfabric."""

from __future__ import annotations

from typing import Any

from uccl_ep_core.errors import TransportError

from .library import Library, native

BATCH = 32  # writes handed to one call, as a proxy under load does


class Loops:
    """Lane 0 of one connected transport with one rail; `uccl_ep.bench.transport.Loops` says what each does."""

    def __init__(self, context: Any, library: Library) -> None:
        self.bare_name = f"libfabric {library.version[0]}.{library.version[1]}"
        self._context = context
        self._lib = native().lib

    def send(self, peer: int, nbytes: int, count: int, window: int, timeout_s: float) -> None:
        table = self._lib.fab_operations(self._context)
        _check(self._lib.fab_bench_send(table, 0, peer, nbytes, count, window, BATCH, timeout_s))

    def receive(self, count: int, timeout_s: float) -> None:
        _check(self._lib.fab_bench_receive(self._lib.fab_operations(self._context), 0, count, timeout_s))

    def bare_send(self, peer: int, nbytes: int, count: int, window: int, timeout_s: float) -> None:
        _check(self._lib.fab_bench_bare_send(self._context, 0, peer, nbytes, count, window, timeout_s))

    def bare_receive(self, count: int, timeout_s: float) -> None:
        _check(self._lib.fab_bench_bare_receive(self._context, 0, count, timeout_s))


def _check(seconds: float) -> None:
    if seconds < 0:
        raise TransportError(f"libfabric: a benchmark loop failed with status {int(seconds)} (a negative errno)")
