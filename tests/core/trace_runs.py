"""Runs that leave traces behind, for the tests that read them."""

from __future__ import annotations

from pathlib import Path

import engine_ranks
from uccl_ep_core import _native
from uccl_ep_shm import ShmTransport


def two_ranks(folder: Path, plan: str, messages: int) -> None:
    """Rank 0 sends rank 1 messages of a write each, one after another; both leave ``trace.RANK.json`` in the folder."""
    both = [engine_ranks.Rank(rank, 2, ShmTransport.open(None, {})) for rank in range(2)]
    addresses = [rank.transport.address() for rank in both]
    for rank in both:
        rank.connect(addresses, plan, 1, options={"trace": str(folder / "trace.json")})
    sender, receiver = both
    signal = sender.layout.signal_index(_native.SignalKind.DIRECT_DATA, 0, 0)
    for value in range(1, messages + 1):
        sender.push(0, peer=1, local_offset=0, remote_offset=0, bytes=64, signal=signal, value=value)
        receiver.wait_signal(signal, value)
    for rank in both:
        assert rank.engine is not None and rank.engine.stop(10.0)
    for rank in both:
        rank.close()
