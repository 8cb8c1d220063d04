"""``uccl-ep bench proxied``: every rank a domain of its own, so that all rows go through proxies and a transport.

Beside each half, in the same run, the three steps that its bytes take, each measured alone, on all ranks at once: from
device memory into pinned host memory, through the transport between host windows (pieces, lanes and threads those of
the proxies, without kernels; of shm the CPU's copy), and from pinned host memory into device memory. ``steps in a row``
is their sum. Of low latency also how long the receiving half waits for a rank, at most. High throughput, whose steps
overlap, is compared with the transport alone. A ratio over 1 means that ours takes less; the aims are 0.67 against the
steps and 0.83 against the transport. On CPUs the steps beside the transport
are copies within host memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from uccl_ep_core.argument_types import at_least

from ..plain_text import plain
from . import profile
from .ep import GPU_HIGH_THROUGHPUT, GPU_LOW_LATENCY, device_of
from .records import Record, add_output_options, machine, put_out
from .spawn import run_ranks
from .workload import Case

COPIES = 10  # between two looks at the clock
LEAST_BYTES = 32 << 20  # that a measurement of the transport moves, so that starting its threads does not count
MOST_ROUNDS = 400

INTO, THROUGH, OUT_OF = "device to host", "transport alone", "host to device"
SUM, OURS, WAITS = "steps in a row", "uccl_ep", "uccl_ep, of which waits for a rank"


@dataclasses.dataclass(frozen=True)
class Crossing:
    """What a half moves between domains.

    Attributes:
        leaving, coming: bytes of rows of this rank.
        each: most bytes from any rank to another.
    """

    leaving: int
    coming: int
    each: int


def crossings(case: Case, num_ranks: int, rank: int) -> dict[str, Crossing]:
    """By the name of the half. Low latency brings a row home for each pick, all else moves one for each rank."""
    import torch

    from .workload import inputs

    rows = torch.zeros(num_ranks, num_ranks, dtype=torch.int64)  # [from, to]
    picks = torch.zeros_like(rows)
    for source in range(num_ranks):
        owner = inputs(case, source)[1] // (case.experts // num_ranks)
        for peer in range(num_ranks):
            rows[source, peer] = (owner == peer).any(1).sum()
            picks[source, peer] = (owner == peer).sum()
    home = (picks if case.low_latency else rows).T
    wide, cast = 2 * case.hidden, case.hidden + 4 * -(-case.hidden // 128)
    found = {}
    for half, table, nbytes in (("dispatch fp8", rows, cast), ("dispatch bf16", rows, wide),
                                ("combine bf16", home, wide)):  # fmt: skip
        away = table.clone().fill_diagonal_(0)
        found[half] = Crossing(
            int(away[rank].sum()) * nbytes, int(away[:, rank].sum()) * nbytes, int(away.max()) * nbytes
        )
    return found


def measure(
    rank: int,
    num_ranks: int,
    cases: Sequence[Case],
    iterations: int,
    options: Mapping[str, Any],
    device: str,
    report: Callable[[Any], None],
) -> tuple[dict[str, Any], list[dict[tuple[str, str], list[float]]]]:
    """One rank's part: facts of the group; and for each case, by half and what was timed, the slowest rank's us."""
    import torch
    import torch.distributed as dist

    from uccl_ep import Buffer

    from .clocks import TIMED_CALLS, clock_of
    from .gpu_systems import ExpertParallel, Run
    from .raw_transport import Cut, RawTransport
    from .workload import Data

    group = dist.group.WORLD
    clock: Any = clock_of(device, group, rank, num_ranks)
    run_facts = Run(cases, num_ranks, group, clock.device, 0, clock.synchronize)
    low_latency_bytes = max(case.low_latency_bytes(num_ranks) for case in cases)
    buffer = Buffer(group, num_rdma_bytes=low_latency_bytes, low_latency_mode=low_latency_bytes > 0,
                    device=clock.device, options={**options, "domain_size": 1})  # fmt: skip
    communicator = buffer._communicator
    threads = int(communicator.num_proxies)
    facts = {"transport": communicator.describe()["transport"]["name"], "threads": threads,
             "staged": communicator.staged}  # fmt: skip
    selection, peers = communicator._transport_selection, [peer for peer in range(num_ranks) if peer != rank]
    moved = [crossings(case, num_ranks, rank) for case in cases]
    widest = max(half.each for halves in moved for half in halves.values())
    raw = RawTransport(selection.plugin, selection.device, selection.options, communicator.backend, rank, peers,
                       threads, widest, group, communicator.numa)  # fmt: skip
    results = []
    for case, halves in zip(cases, moved, strict=True):
        ours = ExpertParallel(OURS, case, Data(case, rank, num_ranks), buffer, run_facts)
        ours.check()
        times: dict[tuple[str, str], list[float]] = {}
        for half, call in ours.calls().items():
            crossing, parts = halves[half], int(communicator.layout.ll_parts)
            piece = -(-crossing.each // parts) if case.low_latency else int(communicator.slot_bytes)
            cut = Cut(crossing.each, max(64, -(-piece // 64) * 64))
            rounds = min(MOST_ROUNDS, max(COPIES, LEAST_BYTES // max(1, crossing.each)))
            most = max(1, crossing.leaving, crossing.coming)
            here = torch.empty(most, dtype=torch.uint8, device=clock.device)
            there = torch.empty(most, dtype=torch.uint8, pin_memory=device == "cuda")

            def copies(target: torch.Tensor, source: torch.Tensor, nbytes: int) -> Callable[[], None]:
                def some() -> None:
                    for _ in range(COPIES):
                        target[:nbytes].copy_(source[:nbytes], non_blocking=True)

                return some

            timed: dict[str, tuple[Callable[[], Any], int]] = {
                INTO: (copies(there, here, crossing.leaving), COPIES),
                OUT_OF: (copies(here, there, crossing.coming), COPIES),
                OURS: (clock.graph(call), TIMED_CALLS) if clock.graphs else (call, 1),
            }
            for _ in range(2):  # the first replay uploads the graph
                for once, _ in timed.values():
                    clock.microseconds(once)
                raw.microseconds(cut, rounds)
            for _ in range(iterations):
                for name, (once, within) in timed.items():
                    times.setdefault((half, name), []).append(clock.microseconds(once) / within)
                clock.synchronize()
                times.setdefault((half, THROUGH), []).append(raw.microseconds(cut, rounds))
            if case.low_latency:
                cost = torch.zeros(num_ranks, dtype=torch.int64, device=clock.device)
                once, within = with_costs(ours, half, cost), 1
                if clock.graphs:
                    once, within = clock.graph(once), TIMED_CALLS
                clock.microseconds(once)
                cost.zero_()
                for _ in range(iterations):
                    clock.microseconds(once)
                times[half, WAITS] = [float(cost.max()) / 1e3 / within / iterations]
            times[half, "bytes"] = [float(max(crossing.leaving, crossing.coming))]
            report((case.mode, half))
        ours.check()
        slowest = {}
        for key, values in times.items():
            row = torch.tensor(values, dtype=torch.float64)
            dist.all_reduce(row, dist.ReduceOp.MAX, group=group)
            slowest[key] = row.tolist()
        results.append(slowest)
        del ours
    clock.synchronize()
    raw.close()
    buffer.destroy()
    return facts, results


def with_costs(ours: Any, half: str, cost: Any) -> Callable[[], Any]:
    """A low-latency half that adds to ``cost``, int64 [num_ranks], the ns that it waits for each rank."""
    case, buffer = ours.case, ours.buffer
    if half == "combine bf16":
        return lambda: buffer.low_latency_combine(
            ours.y, ours.idx, ours.weights, ours.handle, combine_wait_recv_cost_stats=cost
        )

    def dispatch() -> None:
        ours.handle = buffer.low_latency_dispatch(
            ours.x, ours.idx, case.max_tokens, case.experts, use_fp8=half == "dispatch fp8",
            dispatch_wait_recv_cost_stats=cost,
        )[2]  # fmt: skip

    return dispatch


def records_of(
    case: Case, times: Mapping[tuple[str, str], list[float]], facts: Mapping[str, Any], num_ranks: int, where: str
) -> list[Record]:
    """The records of one case; each half's time with its ratio to the steps in a row, and to the transport alone."""
    staged = "windows in host memory" if facts["staged"] else "windows in device memory"
    title = f"{case.title(num_ranks, 1)}; {facts['transport']}, {facts['threads']} proxies, {staged}"
    found = []
    for half in dict.fromkeys(half for half, _ in times):
        us = {name: statistics.median(times[half, name]) for name in (INTO, THROUGH, OUT_OF, OURS)}
        steps = (INTO, THROUGH, OUT_OF) if facts["staged"] else (THROUGH,)
        us[SUM] = sum(us[step] for step in steps)

        def record(name: str, unit: str = "us", value: float | None = None, baseline: str = "", half: str = half,
                   us: Mapping[str, float] = us) -> Record:  # fmt: skip
            ratio = us[baseline] / us[name] if baseline else 1.0
            return Record("proxied", title, f"{half}, {name}", us[name] if value is None else value, unit,
                          f"{half}, {baseline}" if baseline else "", ratio, machine=where)  # fmt: skip

        found += [record(OURS, baseline=SUM), record(OURS, baseline=THROUGH)]
        found += [record(name) for name in (*steps, SUM)]
        if (half, WAITS) in times:
            found.append(record(WAITS, value=statistics.median(times[half, WAITS])))
        nbytes = times[half, "bytes"][0]
        found.append(record("bytes that leave or come", "MB", nbytes / 1e6))
        rates = {name: nbytes / us[name] / 1e3 for name in (OURS, THROUGH)}
        found += [record(f"rate, {name}", "GB/s", rate) for name, rate in rates.items()]
    return found


def run(
    cases: Sequence[Case],
    *,
    ranks: int = 2,
    iterations: int = 20,
    options: Mapping[str, Any] | None = None,
    device: str = "cuda",
    on_event: Callable[[int, Any], None] | None = None,
) -> list[Record]:
    """Runs the benchmark on ``ranks`` processes of this host.

    Args:
        cases: what to run.
        options: of the buffer, as for `uccl_ep.Buffer`.
        device: "cuda", or "cpu" for the host backend.
        on_event: called with (rank, (mode, half)) as halves are done.

    Raises:
        RuntimeError: a rank failed, or delivered other bytes than the reference.
    """
    results = run_ranks(measure, ranks, tuple(cases), iterations, dict(options or {}), device, on_event=on_event)
    facts, every = results[0]
    where = machine()
    if device == "cuda":
        import torch

        where = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, {where}"
    return [r for case, times in zip(cases, every, strict=True) for r in records_of(case, times, facts, ranks, where)]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description=plain(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["low-latency", "high-throughput", "both"], default="both")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where tensors are")
    parser.add_argument("--ranks", type=at_least(2), default=2, help="processes to start (default 2)")
    parser.add_argument("--transport", default="shm", help="the transport's name (default shm)")
    parser.add_argument("--num-proxies", type=at_least(1), default=4, help="proxy threads a rank (default 4)")
    parser.add_argument("--iterations", type=at_least(1), default=20, help="timed rounds (default 20)")
    for name, what in (("tokens", "tokens per rank"), ("hidden", "elements of a token")):
        parser.add_argument(f"--{name}", type=at_least(1), help=f"{what} (default: the mode's)")
    add_output_options(parser, "times")
    profile.add_option(parser)
    given = parser.parse_args(arguments)
    device = device_of(parser, given.device)
    modes = {"low-latency": GPU_LOW_LATENCY, "high-throughput": GPU_HIGH_THROUGHPUT}
    changes = {n: getattr(given, n) for n in ("tokens", "hidden") if getattr(given, n) is not None}
    if "tokens" in changes:
        changes["most"] = 0
    chosen = [case for mode, of_mode in modes.items() if given.mode in (mode, "both") for case in of_mode]
    cases = list(dict.fromkeys(dataclasses.replace(case, **changes) for case in chosen))
    cases = [dataclasses.replace(case, experts=-(-case.experts // given.ranks) * given.ranks) for case in cases]

    def on_event(rank: int, event: Any) -> None:
        if rank == 0:
            print(f"timed: {event[0]}, {event[1]}", flush=True)

    options = {"transport": given.transport, "num_proxies": given.num_proxies}
    found = run(
        cases, ranks=given.ranks, iterations=given.iterations, options=options, device=device, on_event=on_event
    )
    put_out(given, found, "uccl_ep through proxies, against the steps that its bytes take")
    profile.put_out(given, cases, given.ranks, {**options, "domain_size": 1}, device)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
