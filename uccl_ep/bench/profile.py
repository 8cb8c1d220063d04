"""What bounds a case: the kernels' own record of what they do and when (option ``--profile`` of the benchmarks).

A buffer of its own, whose kernels record spans, after the timed run; on GPUs that is another build of them, somewhat
slower. Each half runs as in the benchmark: replays of its graph on GPUs, calls one after another on CPUs. The newest
launches that the rings hold are summed up.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from uccl_ep_core.argument_types import output_file

from .spawn import run_ranks, under_torchrun
from .workload import Case

CPU_SPANS = 4096  # of a warp: a lone lane takes some tokens a round, where a block of a GPU takes dozens
CALLS = 10  # without graphs


def measure(
    rank: int,
    num_ranks: int,
    cases: Sequence[Case],
    options: Mapping[str, Any],
    device: str,
    report: Callable[[Any], None],
) -> list[dict[str, Any]]:
    """One rank's part: for each case and half what `uccl_ep.tracing.Profile` holds, and its text."""
    import torch.distributed as dist

    from uccl_ep import Buffer

    from .clocks import clock_of
    from .gpu_systems import ExpertParallel, Run
    from .workload import Data

    group = dist.group.WORLD
    clock: Any = clock_of(device, group, rank, num_ranks)
    run_facts = Run(cases, num_ranks, group, clock.device, 0, clock.synchronize)
    low_latency_bytes = max(case.low_latency_bytes(num_ranks) for case in cases)
    traced = {**options, "trace_kernels": True, **({} if clock.graphs else {"trace_kernel_spans": CPU_SPANS})}
    buffer = Buffer(group, num_rdma_bytes=low_latency_bytes, low_latency_mode=low_latency_bytes > 0,
                    device=clock.device, options=traced)  # fmt: skip
    found = []
    for case in cases:
        ours = ExpertParallel("uccl_ep", case, Data(case, rank, num_ranks), buffer, run_facts)
        ours.check()
        for half, call in ours.calls().items():

            def calls(call: Callable[[], Any] = call) -> None:
                for _ in range(CALLS):
                    call()

            once = clock.graph(call) if clock.graphs else calls
            for _ in range(2):  # the first replay uploads the graph
                clock.synchronize()
                buffer.profile()
                clock.synchronize()
                once()
            clock.synchronize()
            profile = buffer.profile()
            title = {"case": case.title(num_ranks, int(options.get("domain_size", 0))), "half": half, "rank": rank}
            found.append({**title, **profile.as_dict(), "text": str(profile)})
            report((case.mode, half))
        del ours
    clock.synchronize()
    buffer.destroy()
    return found


def add_option(parser: argparse.ArgumentParser) -> None:
    """``--profile``, which `put_out` goes by."""
    parser.add_argument(
        "--profile", metavar="FILE", nargs="?", const="", type=_file,
        help="then say what bounds each half, by what kernels record of themselves; FILE gets all ranks' as JSON",
    )  # fmt: skip


def _file(text: str) -> str:
    return output_file(text) if text else text


def refuse_under_torchrun(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    if given.profile is not None and under_torchrun():
        parser.error("--profile starts ranks of its own: run it without torchrun")


def put_out(
    given: argparse.Namespace, cases: Sequence[Case], ranks: int, options: Mapping[str, Any], device: str
) -> None:
    """Run and print, where it was asked for: a table for each case and half, of rank 0."""
    if given.profile is None:
        return
    every = run_ranks(measure, ranks, tuple(cases), dict(options), device)
    for found in every[0]:
        print(f"\n{found['case']}\n{found['half']}, rank 0, times in us\n{found.pop('text')}")
    if given.profile:
        rows = [{k: v for k, v in found.items() if k != "text"} for of_rank in every for found in of_rank]
        Path(given.profile).write_text(json.dumps(rows, indent=1) + "\n")
        print(f"profile: {given.profile}")
