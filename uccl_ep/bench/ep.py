"""``uccl-ep bench ep``: dispatch and combine, in one run with what they are compared with.

On CPUs: against gloo's all-to-all and against memcpy. On GPUs (``--device cuda``, the default where torch sees one):
against NCCL's all-to-all of the same rows and against DeepEP where it can be imported, by two boundaries, see
`uccl_ep.bench.gpu`.

On CPUs, what is compared is timed alternately, between two barriers, in the wall clock; each iteration counts its
slowest rank, and a figure is the median over iterations. Inputs are random, experts differ, and every byte is compared
with the reference before the timed run and after it. "memcpy" copies, on every rank at once, as many bytes as the rank
usefully receives in dispatch and combine.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from uccl_ep_core.argument_types import at_least
from uccl_ep_core.errors import ArgumentError

from ..plain_text import plain
from . import profile
from .records import Record, add_output_options, put_out
from .spawn import run_ranks, under_torchrun
from .workload import Case

LOW_LATENCY = Case("low latency", tokens=128, hidden=7168, topk=8, experts=288)
HIGH_THROUGHPUT = Case("high throughput", tokens=4096, hidden=2048, topk=8, experts=256)
RANK_BYTES = 128 << 20  # of a process that has imported torch, without any buffer

GPU_LOW_LATENCY = (dataclasses.replace(LOW_LATENCY, tokens=1, most=128), LOW_LATENCY)
GPU_HIGH_THROUGHPUT = (dataclasses.replace(HIGH_THROUGHPUT, hidden=7168),)


def measure(
    rank: int, num_ranks: int, cases: Sequence[Case], iterations: int, report: Callable[[Any], None]
) -> list[dict[str, Any]]:
    """One rank's part: for each case a dict of lists of seconds, one per iteration, of the slowest rank."""
    import torch
    import torch.distributed as dist

    from uccl_ep import Buffer

    from .workload import Workload

    group = dist.group.WORLD
    low_latency_bytes = max(case.low_latency_bytes(num_ranks) for case in cases)
    buffer = Buffer(group, num_rdma_bytes=low_latency_bytes, low_latency_mode=low_latency_bytes > 0)
    results = []
    for case in cases:
        work = Workload(case, buffer, group)
        for _ in range(2):
            work.check()
        times: dict[str, list[float]] = {}
        cpu = dict.fromkeys(work.systems(), 0.0)

        def timed(name: str, call: Callable[[], Any], times: dict[str, list[float]] = times) -> Any:
            dist.barrier(group)
            started = time.perf_counter()
            result = call()
            dist.barrier(group)
            times.setdefault(name, []).append(time.perf_counter() - started)
            return result

        for i in range(iterations):
            # Alternation; and who comes first changes, so that none always follows the same one.
            systems = list(work.systems().items())
            for name, (dispatch, combine) in systems[i % 2 :] + systems[: i % 2]:
                dist.barrier(group)
                before = time.process_time()
                timed(f"dispatch + combine, {name}", partial(work.both, name))
                cpu[name] += time.process_time() - before
                if i % 2 == 0:
                    handle, _ = timed(f"dispatch, {name}", dispatch)
                    timed(f"combine, {name}", partial(combine, handle))
            timed("memcpy of the received bytes", work.memcpy)
            report((case.mode, i + 1, iterations))
        work.check()
        slowest = {}
        for name, values in times.items():
            row = torch.tensor(values, dtype=torch.float64)
            dist.all_reduce(row, dist.ReduceOp.MAX, group=group)
            slowest[name] = row.tolist()
        total = torch.tensor(
            [cpu[name] / iterations for name in cpu] + [float(work.received_bytes)], dtype=torch.float64
        )
        dist.all_reduce(total, group=group)
        peak = torch.tensor([float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)])
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
        results.append(
            {
                "times": slowest,
                "cpu_s": dict(zip(cpu, total.tolist(), strict=False)),
                "received_bytes": total[-1].item() / num_ranks,
                "peak_kib": peak.item(),
            }
        )
    buffer.destroy()
    return results


def records_of(case: Case, result: dict[str, Any], num_ranks: int, domain_size: int) -> list[Record]:
    """The records of one case, from what `measure` returned."""
    title = case.title(num_ranks, domain_size)
    medians = {name: statistics.median(values) * 1e6 for name, values in result["times"].items()}
    ours, gloo, memcpy = "dispatch + combine, uccl_ep", "dispatch + combine, gloo", "memcpy of the received bytes"

    def record(metric: str, value: float, unit: str, baseline: str = "", ratio: float = 1.0) -> Record:
        return Record("ep", title, metric, value, unit, baseline, ratio)

    found = [
        record(ours, medians[ours], "us", gloo, medians[gloo] / medians[ours]),
        record(ours, medians[ours], "us", memcpy, medians[memcpy] / medians[ours]),
    ]
    for half in ("dispatch", "combine"):
        mine, theirs = f"{half}, uccl_ep", f"{half}, gloo"
        found.append(record(mine, medians[mine], "us", theirs, medians[theirs] / medians[mine]))
    found += [record(name, medians[name], "us") for name in medians if not name.endswith("uccl_ep")]
    nbytes = result["received_bytes"]
    found.append(record("useful bytes received by a rank", nbytes / 1e6, "MB"))
    found.append(record("rate of received bytes, uccl_ep", nbytes / medians[ours] / 1e3, "GB/s per rank"))
    cpu = result["cpu_s"]
    found.append(
        record("CPU time of all ranks, uccl_ep", cpu["uccl_ep"] * 1e6, "us CPU", "CPU time of all ranks, gloo",
               cpu["gloo"] / cpu["uccl_ep"])
    )  # fmt: skip
    found.append(record("peak memory of a rank, everything included", result["peak_kib"] / 1024, "MiB"))
    return found


def run(
    cases: Sequence[Case] = (LOW_LATENCY, HIGH_THROUGHPUT),
    *,
    ranks: int = 4,
    domain_size: int = 0,
    iterations: int = 20,
    on_event: Callable[[int, Any], None] | None = None,
) -> list[Record]:
    """Runs the benchmark on ``ranks`` processes of this host and returns its records.

    Args:
        cases: what to run.
        ranks: processes to start; under torchrun its ranks are used.
        domain_size: ranks per scale-up domain, 0 for one domain.
        iterations: timed rounds, each of every system.
        on_event: called with (rank, (mode, round, rounds)) as it goes on.
    """
    env = {"UCCL_EP_DOMAIN_SIZE": str(domain_size)} if domain_size else {}
    if under_torchrun():
        import torch.distributed as dist

        os.environ.update(env)
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        ranks = dist.get_world_size()
        results = measure(dist.get_rank(), ranks, cases, iterations, lambda event: None)
    else:
        results = run_ranks(measure, ranks, tuple(cases), iterations, env=env, on_event=on_event)[0]
    found = []
    for case, result in zip(cases, results, strict=True):
        found += records_of(case, result, ranks, domain_size)
    return found


def device_of(parser: argparse.ArgumentParser, asked: str) -> str:
    """The device that ``--device`` means, "cpu" or "cuda"; a usage error where torch sees no GPU that was asked for."""
    if asked == "cpu":
        return asked
    import torch

    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        parser.error("--device cuda: torch sees no GPU here; --device cpu runs on any machine")
    return "cuda" if available else "cpu"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description=plain(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["low-latency", "high-throughput", "both"], default="both")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where tensors are")
    parser.add_argument("--ranks", type=processes, help="processes to start (default: 4, or a GPU each)")
    parser.add_argument(
        "--domain-size", type=at_least(0), default=0, help="ranks per scale-up domain (default: all in one)"
    )
    parser.add_argument("--iterations", type=at_least(1), default=20, help="timed rounds (default 20)")
    for name, least, what in (("tokens", 0, "tokens per rank"), ("hidden", 1, "elements of a token"),
                              ("topk", 1, "picks per token"), ("experts", 1, "experts in all")):  # fmt: skip
        parser.add_argument(f"--{name}", type=at_least(least), help=f"{what} (default: the mode's)")
    parser.add_argument(
        "--num-sms", type=at_least(0), default=0,
        help="multiprocessors that our high-throughput kernels take at most (default: all; DeepEP takes 24)",
    )  # fmt: skip
    parser.add_argument("--skewed", action="store_true", help="every fourth token picks the same expert")
    add_output_options(parser, "times")
    profile.add_option(parser)
    given = parser.parse_args(arguments)
    profile.refuse_under_torchrun(parser, given)
    device = device_of(parser, given.device)
    from uccl_ep.tensors import check_experts

    changes = {n: getattr(given, n) for n in ("tokens", "hidden", "topk", "experts") if getattr(given, n) is not None}
    if "tokens" in changes:
        changes["most"] = 0
    modes: dict[str, tuple[Case, ...]] = {
        "low-latency": GPU_LOW_LATENCY if device == "cuda" else (LOW_LATENCY,),
        "high-throughput": GPU_HIGH_THROUGHPUT if device == "cuda" else (HIGH_THROUGHPUT,),
    }
    chosen = [case for mode, of_mode in modes.items() if given.mode in (mode, "both") for case in of_mode]
    ranks = ranks_of(given, device)
    cases = list(dict.fromkeys(dataclasses.replace(case, **changes, skewed=given.skewed) for case in chosen))
    if given.experts is None:  # so that any number of ranks runs without it
        cases = [dataclasses.replace(case, experts=-(-case.experts // ranks) * ranks) for case in cases]
    for case in cases:
        try:
            check_experts(case.experts, ranks)
        except ArgumentError as error:
            parser.error(f"--experts: {error}")
        if case.topk > case.experts:
            parser.error(f"--topk {case.topk} of {case.experts} experts: at most {case.experts} can be picked")
    if device == "cuda":
        return _on_gpus(given, cases, ranks)
    if given.num_sms:
        parser.error("--num-sms: there are multiprocessors on a GPU only; leave it out, or use --device cuda")

    from rich.progress import Progress

    with Progress(transient=True) as progress:
        bars = {case.mode: progress.add_task(case.mode, total=given.iterations) for case in cases}

        def on_event(rank: int, event: Any) -> None:
            if rank == 0:
                progress.update(bars[event[0]], completed=event[1])

        found = run(
            cases,
            ranks=ranks,
            domain_size=given.domain_size,
            iterations=given.iterations,
            on_event=on_event,
        )
    if int(os.environ.get("RANK", "0")) != 0:
        return 0
    put_out(given, found, "uccl_ep against gloo all_to_all_single and memcpy")
    profile.put_out(given, cases, ranks, options_of(given), device)
    return 0


def processes(text: str) -> int:
    """As many ranks as this machine has memory for."""
    ranks = at_least(1)(text)
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // RANK_BYTES
    if ranks > most:
        raise argparse.ArgumentTypeError(
            f"{ranks} processes do not fit the memory of this machine, {RANK_BYTES >> 20} MiB each: at most {most} do"
        )
    return ranks


def ranks_of(given: argparse.Namespace, device: str) -> int:
    if under_torchrun():
        return int(os.environ["WORLD_SIZE"])
    if device == "cuda" and given.ranks is None:
        import torch

        return max(2, torch.cuda.device_count())
    return given.ranks or 4


def options_of(given: argparse.Namespace) -> dict[str, int]:
    """Of our buffer, as the command line limits it."""
    limits = {"domain_size": given.domain_size, "num_sms": given.num_sms}
    return {name: value for name, value in limits.items() if value}


def _on_gpus(given: argparse.Namespace, cases: Sequence[Case], ranks: int) -> int:
    from . import gpu

    def on_event(rank: int, event: Any) -> None:
        if rank == 0:
            print(f"timed: {event[0]}, {event[1]}", flush=True)

    found = gpu.run(
        cases,
        ranks=ranks,
        domain_size=given.domain_size,
        iterations=given.iterations,
        num_sms=given.num_sms,
        on_event=on_event,
    )
    put_out(given, found, "uccl_ep against NCCL all_to_all_single and DeepEP")
    profile.put_out(given, cases, ranks, options_of(given), "cuda")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
