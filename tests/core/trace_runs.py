"""Runs that leave traces behind, for the tests that read them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import engine_ranks
from uccl_ep.tracing.launches import Launch
from uccl_ep.tracing.names import ACTIVITIES, NOBODY
from uccl_ep.tracing.perfetto import events_of
from uccl_ep.tracing.rings import WarpSpans
from uccl_ep_core import _native
from uccl_ep_shm import ShmTransport


def one_launch(start_ns: int) -> Launch:
    """A kernel of one block and two warps: the first sends, in two steps, and the second does nothing."""
    spans = np.zeros(3, [("activity", "<u4"), ("start", "<u8"), ("end", "<u8"), ("detail", "<u4")])
    for span, (name, start, end) in zip(
        spans, (("waits for room", 1, 2), ("copies", 2, 777), ("sends", 1, 777)), strict=True
    ):
        span["activity"], span["detail"] = ACTIVITIES.index(name), 1 if name == "sends" else NOBODY
        span["start"], span["end"] = start_ns + start, start_ns + end
    end_ns = start_ns + 1001
    warps = (WarpSpans(0, warp, 2, start_ns, end_ns, 2, mine) for warp, mine in enumerate((spans, spans[:0])))
    return Launch("dispatch", tuple(warps))


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
        assert rank.engine is not None
        rank.engine.add_to_trace(events_of([one_launch(5_000_000_123_457)], rank.rank, lambda ns: ns), 7, 9)
        assert rank.engine.stop(10.0)
    for rank in both:
        rank.close()
