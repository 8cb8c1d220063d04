"""Dispatch and combine on GPUs, against an all-to-all of the same rows and DeepEP, in one run.

Two boundaries for every system: events around a call, input preparation included, and events around replays of its
captured graph, which leave the CPU's part out. Systems take turns; each iteration counts its slowest rank; a figure is
the median over iterations. Beside them the sum of the kernels' times, the CPU time of a call (proxies included), and
the GPU memory that a rank holds. Every byte of ours is compared with the reference before the timed run and after it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .records import Record
from .spawn import run_ranks
from .workload import Case

REPLAYS = 10  # of a graph between two events
WARM_UP = 5
PROFILED = 10


def measure(
    rank: int,
    num_ranks: int,
    cases: Sequence[Case],
    iterations: int,
    options: Mapping[str, Any],
    device: str,
    report: Callable[[Any], None],
) -> list[dict[tuple[str, str, str], list[float]]]:
    """One rank's part: for each case, by (half, boundary, system), the slowest rank of every iteration."""
    import torch
    import torch.distributed as dist

    from uccl_ep import Buffer

    from .clocks import Call, Clock, EventClock, WallClock
    from .gpu_systems import AllToAll, ExpertParallel, deepep_buffer
    from .workload import Data

    group = dist.group.WORLD
    clock: Clock = WallClock(group)
    if device == "cuda":
        torch.set_num_threads(4)
        clock = EventClock(group, rank % torch.cuda.device_count())
    # Ranks that share a GPU cannot form an NCCL group.
    nccl = device == "cuda" and num_ranks <= torch.cuda.device_count()
    collective = dist.new_group(backend="nccl") if nccl else group if device == "cpu" else None
    deepep = deepep_buffer(tuple(cases), num_ranks) if nccl else None
    hints = [
        Buffer.get_low_latency_rdma_size_hint(c.max_tokens, c.hidden, num_ranks, c.experts)
        for c in cases
        if c.low_latency
    ]
    buffer = Buffer(
        group,
        num_rdma_bytes=max(hints, default=0),
        low_latency_mode=bool(hints),
        device=clock.device,
        options=options,
    )
    results = []
    for case in cases:
        data = Data(case, rank, num_ranks)
        ours = ExpertParallel("uccl_ep", case, data, buffer, clock.device)
        for _ in range(2):
            ours.check()
        systems: list[Any] = [ours]
        if collective is not None:
            systems.append(AllToAll(case, data, collective, clock.device))
        if deepep is not None:
            systems.append(ExpertParallel(deepep[1], case, data, deepep[0], clock.device))
        times: dict[tuple[str, str, str], list[float]] = {}
        for half in ours.calls():
            timed: list[tuple[tuple[str, str, str], Call, int]] = []
            for system in systems:
                call = system.calls().get(half)
                if call is None:
                    continue
                for _ in range(WARM_UP):
                    call()
                timed.append(((half, "call", system.name), call, 1))
                if isinstance(clock, EventClock):
                    timed.append(((half, "graph replay", system.name), clock.graph(call), REPLAYS))
                    kernels = clock.kernels_microseconds(call, PROFILED)
                    times[half, "kernels", system.name] = [kernels]
                before = time.process_time()
                for _ in range(PROFILED):
                    call()
                clock.synchronize()
                times[half, "CPU time of a call", system.name] = [(time.process_time() - before) * 1e6 / PROFILED]
            for _, call, repeats in timed:
                clock.microseconds(call, repeats)  # the first replay uploads the graph
            for i in range(iterations):
                for key, call, repeats in timed[i % len(timed) :] + timed[: i % len(timed)]:
                    times.setdefault(key, []).append(clock.microseconds(call, repeats))
            report((case.mode, half))
        ours.check()
        if isinstance(clock, EventClock):
            free, total = torch.cuda.mem_get_info()
            times["memory", "in use on the GPU, MiB", "all systems"] = [(total - free) / 2**20]
        slowest = {}
        for key, values in times.items():
            row = torch.tensor(values, dtype=torch.float64)
            dist.all_reduce(row, dist.ReduceOp.MAX, group=group)
            slowest[key] = row.tolist()
        results.append(slowest)
        del ours, systems, timed, data
    clock.synchronize()
    buffer.destroy()
    return results


def records_of(case: Case, times: dict[tuple[str, str, str], list[float]], title: str, machine: str) -> list[Record]:
    """The records of one case; each of ours with its ratio to every other system."""
    found = []
    for (half, boundary, system), values in times.items():
        value = statistics.median(values)
        unit = "MiB" if half == "memory" else "us CPU" if boundary.startswith("CPU") else "us"
        others = [key[2] for key in times if key[:2] == (half, boundary) and key[2] != system]
        metric = f"{half}, {boundary}, {system}" if half != "memory" else f"{boundary}, {system}"
        if system != "uccl_ep" or not others:
            found.append(Record("ep", title, metric, value, unit, machine=machine))
        for other in others if system == "uccl_ep" else []:
            base = statistics.median(times[half, boundary, other])
            found.append(
                Record("ep", title, metric, value, unit, f"{half}, {boundary}, {other}", base / value, machine=machine)
            )
    return found


def run(
    cases: Sequence[Case],
    *,
    ranks: int,
    domain_size: int = 0,
    iterations: int = 20,
    options: Mapping[str, Any] | None = None,
    device: str = "cuda",
    on_event: Callable[[int, Any], None] | None = None,
) -> list[Record]:
    """Runs the benchmark on ``ranks`` processes of this host, which share GPUs where there are fewer.

    Args:
        cases: what to run.
        ranks: processes to start.
        domain_size: most ranks of a scale-up domain, 0 for all that reach each other.
        iterations: timed rounds, each of every system.
        options: of our buffer, as for `uccl_ep.Buffer`.
        device: "cuda"; "cpu" runs the same benchmark on the host backend, without graphs, to test it.
        on_event: called with (rank, (mode, half)) as halves are done.

    Raises:
        RuntimeError: a rank failed, or delivered other bytes than the reference.
    """
    import torch

    from .records import machine

    chosen = {**({"domain_size": domain_size} if domain_size else {}), **(options or {})}
    env = {"NVSHMEM_REMOTE_TRANSPORT": "none", "OMP_NUM_THREADS": "4"}  # the former for DeepEP on one host
    every = run_ranks(measure, ranks, tuple(cases), iterations, chosen, device, env=env, on_event=on_event)[0]
    where = machine()
    if device == "cuda":
        where = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, {where}"
    found = []
    for case, times in zip(cases, every, strict=True):
        found += records_of(case, times, case.title(ranks, domain_size), where)
    return found
