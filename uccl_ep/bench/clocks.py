"""One call's time: between two events of a GPU's stream, or in the wall clock; and a call as a captured graph."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Call = Callable[[], Any]
CALLS_OF_A_GRAPH = 10
"""Many: in a model's graph an operation stands among hundreds of kernels, and a graph of few would time its own launch.
Even: a library that alternates between two buffers on the host (DeepEP's low latency) would replay one call into the
same buffer again and again, on signals that the last replay left, and so does not do what it does otherwise."""
REPLAYS = 10
"""Between two events: ranks leave the barrier some 50 us apart, and who comes first waits in its first call."""
TIMED_CALLS = CALLS_OF_A_GRAPH * REPLAYS


class WallClock:
    """For calls that are done when they return."""

    device = torch.device("cpu")
    graphs = False

    def __init__(self, group: Any) -> None:
        self._group = group

    def synchronize(self) -> None:
        """All ranks are here, and nothing runs."""
        dist.barrier(self._group)

    def microseconds(self, call: Call) -> float:
        """Of a call, from the moment that all ranks are here."""
        self.synchronize()
        started = time.perf_counter()
        call()
        return (time.perf_counter() - started) * 1e6


class EventClock:
    """For calls that enqueue work on the current stream of a GPU."""

    graphs = True

    def __init__(self, group: Any, ordinal: int) -> None:
        self._group = group
        self.device = torch.device("cuda", ordinal)
        torch.cuda.set_device(self.device)

    def synchronize(self) -> None:
        torch.cuda.synchronize()
        dist.barrier(self._group)

    def microseconds(self, call: Call) -> float:
        self.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    def graph(self, call: Call) -> Call:
        """`TIMED_CALLS` such calls, captured to be replayed: what they cost without the CPU's part. Every rank captures
        at once."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(side)
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(CALLS_OF_A_GRAPH):
                call()
        dist.barrier(self._group)

        def replay() -> None:
            for _ in range(REPLAYS):
                graph.replay()

        return replay

    def kernels_microseconds(self, call: Call, repeats: int) -> float:
        """Sum of the times of all kernels of one call, as the profiler sees them; a wait for a peer counts in it."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(repeats):
                self.synchronize()
                call()
            torch.cuda.synchronize()
        return sum(float(event.device_time_total) for event in profiler.key_averages()) / repeats


Clock = WallClock | EventClock


def clock_of(device: str, group: Any, rank: int, num_ranks: int) -> Clock:
    """The clock of a rank of a benchmark on "cpu" or "cuda"; a GPU's rank also gets CPU threads for the reference."""
    if device != "cuda":
        return WallClock(group)
    torch.set_num_threads(max(4, len(os.sched_getaffinity(0)) // num_ranks))
    return EventClock(group, rank % torch.cuda.device_count())
