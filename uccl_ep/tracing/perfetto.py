"""Launches as events of the trace event format, which Perfetto opens; core/native/src/trace.cpp writes the file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .launches import Launch, Nested, nested
from .names import NOBODY
from .rings import MOST_WARPS, WarpSpans

FIRST_THREAD = 1000  # in the trace; proxies have the numbers from 0 on


def events_of(launches: Iterable[Launch], rank: int, host_ns: Callable[[int], int]) -> str:
    """JSON objects with commas between them: a track for each warp that did more than begin and end.

    Args:
        host_ns: turns a time of the device into one of the host; never makes a later one an earlier one.
    """
    tracks: dict[int, str] = {}
    events: list[dict[str, Any]] = []
    for launch in launches:
        for warp in launch.warps:
            if not len(warp.spans) and warp.warp:
                continue
            thread = FIRST_THREAD + warp.block * MOST_WARPS + warp.warp
            tracks[thread] = f"block {warp.block}, warp {warp.warp}"
            events += (
                {"ph": "X", "cat": "kernel", "name": name, "pid": rank, "tid": thread, **_times(start, end, host_ns)}
                | ({} if peer == NOBODY else {"args": {"peer": peer}})
                for name, start, end, peer in _spans_of(launch, warp)
            )
    named = [
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}}
        for thread, name in sorted(tracks.items())
    ]
    process = {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    return ",\n".join(json.dumps(event, separators=(",", ":")) for event in [process, *named, *events])


def _spans_of(launch: Launch, warp: WarpSpans) -> Iterator[tuple[str, int, int, int]]:
    """Name, start, end and rank at the other end of all spans, each behind the one that holds it."""

    def all_of(spans: Iterable[Nested]) -> Iterator[tuple[str, int, int, int]]:
        for span in spans:
            yield span.name, span.start, span.end, span.peer
            yield from all_of(span.inside)

    yield launch.kernel, warp.start, warp.end, NOBODY
    yield from all_of(nested(warp))


def _times(start: int, end: int, host_ns: Callable[[int], int]) -> dict[str, float]:
    begin = host_ns(start)
    return {"ts": _microseconds(begin), "dur": _microseconds(host_ns(end) - begin)}


def _microseconds(ns: int) -> float:
    # A reader cuts or rounds to whole ns. With a quarter more both give the same, so that what ends together does so.
    return (ns + 0.25) / 1e3
