"""Dispatch and combine on GPUs, against an all-to-all of the same rows and DeepEP, in one run.

Two boundaries for every system: events around a call, input preparation included, and events around replays of its
captured graph, which leave the CPU's part out. Systems take turns; each iteration counts its slowest rank; a figure is
the median over iterations. Beside them the sum of the kernels' times, the CPU time of a call (proxies included), and
the GPU memory that a rank holds. A system that cannot be had, or refuses a case, is left out of it, and its words are a
record. Every byte of ours is compared with the reference before the timed run and after it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from uccl_ep import Buffer

from .clocks import TIMED_CALLS, Call, Clock, EventClock, clock_of
from .gpu_systems import RIVALS, ExpertParallel, Factory, Meeting, Opener, Run, System
from .records import Record, machine
from .spawn import LeaveOut, run_ranks
from .workload import Case, Data

CALLS = 10  # whose CPU time is measured together; these are even for the reason that timed_in_turns() gives
WARM_UP = 6
PROFILED = 10
PATIENCE_S = 60.0


Key = tuple[str, str, str]  # (half, boundary, system)
Times = dict[Key, list[float]]
Timed = tuple[Key, Call, int]  # what it is called, what is timed, and how many calls that makes
Notes = dict[str, str]  # why a system was left out, by its name


def measure(
    rank: int,
    num_ranks: int,
    cases: Sequence[Case],
    iterations: int,
    options: Mapping[str, Any],
    device: str,
    rivals: Mapping[str, Opener],
    profiled: int,
    place: str,
    patience_s: float,
    report: Callable[[Any], None],
) -> list[tuple[Times, Notes]]:
    """One rank's part: for each case the slowest rank of every iteration, and which systems were left out."""
    group = dist.group.WORLD
    clock = clock_of(device, group, rank, num_ranks)
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    run = Run(cases, num_ranks, group, clock.device, gpus, clock.synchronize)
    meeting = Meeting(place, rank, num_ranks, patience_s)
    opened = {name: meeting.attempt(name, partial(rival, run)) for name, rival in rivals.items()}
    low_latency_bytes = max(case.low_latency_bytes(num_ranks) for case in cases)
    buffer = Buffer(
        group,
        num_rdma_bytes=low_latency_bytes,
        low_latency_mode=low_latency_bytes > 0,
        device=clock.device,
        options=options,
    )
    results = []
    for case in cases:
        data = Data(case, rank, num_ranks)
        ours = ExpertParallel("uccl_ep", case, data, buffer, run)
        for _ in range(2):
            ours.check()
        systems: list[System] = [ours]
        notes: Notes = {name: words for name, (_, words) in opened.items() if words}
        for name, (factory, _) in opened.items():
            if name in notes:
                continue
            system, words = meeting.attempt(name, partial(tried, factory, case, data))
            if words:
                notes[name] = words
            else:
                systems.append(system)
        clock.synchronize()
        times: Times = {}
        for half in ours.calls():
            timed: list[Timed] = []
            for system in systems:
                call = system.calls().get(half)
                if call is None:
                    continue
                for _ in range(WARM_UP):
                    call()
                timed.append(((half, "call", system.name), call, 1))
                if isinstance(clock, EventClock):
                    timed.append(((half, "graph replay", system.name), clock.graph(call), TIMED_CALLS))
                    if profiled:
                        kernels = clock.kernels_microseconds(call, profiled)
                        times[half, "kernels", system.name] = [kernels]
                before = time.process_time()
                for _ in range(CALLS):
                    call()
                clock.synchronize()
                times[half, "CPU time of a call", system.name] = [(time.process_time() - before) * 1e6 / CALLS]
            timed_in_turns(clock, timed, 1)  # the first replay uploads the graph
            times.update(timed_in_turns(clock, timed, iterations))
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
        results.append((slowest, notes))
        del ours, systems, timed, data
    clock.synchronize()
    buffer.destroy()
    return results


def timed_in_turns(clock: Clock, timed: Sequence[Timed], iterations: int) -> Times:
    """Times of each of them in every iteration; another one begins each time.

    A call alone is made twice and timed once: a library that alternates between two buffers on the host (see
    `clocks.CALLS_OF_A_GRAPH`) is then where the captured graph expects it. Else a replay begins in the buffer that was
    used last, finds its signals raised, waits for nobody, and the other rank, late by a call, takes back what has
    come to it: so DeepEP 1.2.1 at low latency hangs.
    """
    times: Times = {}
    for i in range(iterations):
        turn = i % max(1, len(timed))
        for key, call, calls in [*timed[turn:], *timed[:turn]]:
            times.setdefault(key, []).append(clock.microseconds(call) / calls)
            if calls % 2:
                call()
    return times


def tried(factory: Factory, case: Case, data: Data) -> System:
    """A system for a case, which has made each of its calls once."""
    system = factory(case, data)
    for call in system.calls().values():
        call()
    return system


def records_of(case: Case, times: Times, notes: Notes, title: str, where: str) -> list[Record]:
    """The records of one case; each of ours with its ratio to every other system."""
    found = [
        Record("ep", title, f"left out: {system}", 0.0, "", machine=where, note=words)
        for system, words in notes.items()
    ]
    for (half, boundary, system), values in times.items():
        value = statistics.median(values)
        unit = "MiB" if half == "memory" else "us CPU" if boundary.startswith("CPU") else "us"
        others = [key[2] for key in times if key[:2] == (half, boundary) and key[2] != system]
        metric = f"{half}, {boundary}, {system}" if half != "memory" else f"{boundary}, {system}"
        if system != "uccl_ep" or not others:
            found.append(Record("ep", title, metric, value, unit, machine=where))
        for other in others if system == "uccl_ep" else []:
            base = statistics.median(times[half, boundary, other])
            found.append(
                Record("ep", title, metric, value, unit, f"{half}, {boundary}, {other}", base / value, machine=where)
            )
    return found


def run(
    cases: Sequence[Case],
    *,
    ranks: int,
    domain_size: int = 0,
    iterations: int = 20,
    options: Mapping[str, Any] | None = None,
    num_sms: int = 0,
    device: str = "cuda",
    rivals: Mapping[str, Opener] = RIVALS,
    profiled: int = PROFILED,
    patience_s: float = PATIENCE_S,
    on_event: Callable[[int, Any], None] | None = None,
) -> list[Record]:
    """Runs the benchmark on ``ranks`` processes of this host, which share GPUs where there are fewer.

    Args:
        cases: what to run.
        ranks: processes to start.
        domain_size: most ranks of a scale-up domain, 0 for all that reach each other.
        iterations: timed rounds, each of every system.
        options: of our buffer, as for `uccl_ep.Buffer`.
        num_sms: multiprocessors that our high-throughput kernels take at most; 0: all.
        device: "cuda"; "cpu" runs the same benchmark on the host backend, without graphs, to test it.
        rivals: what ours is compared with, see `gpu_systems.RIVALS`.
        profiled: calls under the profiler, which takes about a second for each half and system; 0: no kernel times.
        patience_s: how long ranks wait for those that are inside a rival that has refused on others.
        on_event: called with (rank, (mode, half)) as halves are done.

    Raises:
        RuntimeError: a rank failed, or delivered other bytes than the reference.
    """
    limits = {"domain_size": domain_size, "num_sms": num_sms}
    chosen = {**{name: value for name, value in limits.items() if value}, **(options or {})}
    env = {"NVSHMEM_REMOTE_TRANSPORT": "none", "OMP_NUM_THREADS": "4"}  # the former for DeepEP on one host
    left, left_out = dict(rivals), Notes()
    with tempfile.TemporaryDirectory(prefix="uccl_ep_") as folder:
        while True:
            place = f"{folder}/{len(left)}"
            arguments = (tuple(cases), iterations, chosen, device, left, profiled, place, patience_s)
            try:
                every = run_ranks(measure, ranks, *arguments, env=env, on_event=on_event)[0]
                break
            except LeaveOut as apart:  # one fewer each time
                left_out[apart.system] = apart.words
                del left[apart.system]
    where = machine()
    if device == "cuda":
        where = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, {where}"
    found = []
    for case, (times, notes) in zip(cases, every, strict=True):
        title = case.title(ranks, domain_size) + (f", at most {num_sms} SMs" if num_sms else "")
        found += records_of(case, times, {**left_out, **notes}, title, where)
    return found
