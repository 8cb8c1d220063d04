"""``python -m uccl_ep.demo``: tokens travel between 4 processes and come back, checked byte for byte and timed.

Twice: first as two domains of two ranks, so that tokens pass kernels, command channel, proxies and a transport; then
as one domain, in which kernels store straight into each other's memory. Experts differ per expert, so a token that
went to the wrong one would show. The opponent is an EP of ``torch.distributed.all_to_all_single`` (gloo), in the
same run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .bench.records import machine
from .bench.spawn import run_ranks
from .bench.workload import Case
from .plain_text import plain

RANKS = 4
TOPOLOGIES = {"two domains of 2": 2, "one domain of 4": 0}
CASES = (
    Case("high throughput", tokens=1024, hidden=2048, topk=8, experts=64),
    Case("low latency", tokens=64, hidden=7168, topk=8, experts=64),
)


def rank_main(rank: int, num_ranks: int, checks: int, rounds: int, report: Callable[[Any], None]) -> dict[str, Any]:
    """One rank: for each topology and mode ``checks`` checked passes, each of other data, and ``rounds`` timed ones."""
    return {title: run_topology(size, title, num_ranks, checks, rounds, report) for title, size in TOPOLOGIES.items()}


def run_topology(
    domain_size: int, title: str, num_ranks: int, checks: int, rounds: int, report: Callable[[Any], None]
) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from uccl_ep import Buffer

    from .bench.workload import Workload

    group = dist.group.WORLD
    hint = max(Buffer.get_low_latency_rdma_size_hint(c.tokens, c.hidden, num_ranks, c.experts) for c in CASES)
    buffer = Buffer(group, num_rdma_bytes=hint, low_latency_mode=True, options={"domain_size": domain_size})
    report(("described", title, buffer.describe()))
    times: dict[str, dict[str, float]] = {}
    checked = 0
    for case in CASES:
        for seed in range(checks):
            work = Workload(case, buffer, group, seed)
            work.check()
            checked += work.received_bytes
            report(("step", title, case.mode))
        seconds: dict[str, list[float]] = {"uccl_ep": [], "gloo": [], "memcpy": []}
        calls: dict[str, Callable[[], Any]] = {name: partial(work.both, name) for name in work.systems()}
        calls["memcpy"] = work.memcpy
        for _ in range(rounds):
            for name, call in calls.items():
                dist.barrier(group)
                started = time.perf_counter()
                call()
                dist.barrier(group)
                seconds[name].append(time.perf_counter() - started)
            report(("step", title, case.mode))
        work.check()
        times[case.mode] = {}
        for name, values in seconds.items():
            slowest = torch.tensor(values, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
            times[case.mode][name] = statistics.median(slowest.tolist()) * 1e3
    engine = buffer.stats().get("engine", {})
    buffer.destroy()
    dist.barrier(group)
    result = {"times": times, "checked": checked, "engine": engine}
    report(("finished", title, result))
    return result


def describe(console: Console, described: dict[str, Any]) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    names = {"gpu_backend": "GPU backend", "transport": "transport", "plan": "ordering plan"}
    for key, label in names.items():
        entry = described[key]
        table.add_row(label, entry["name"] or "not needed", entry["reason"])
    domains = described["domains"]
    table.add_row("domains", f"{domains['num_domains']} x {domains['ranks_per_domain']} ranks", domains["reason"])
    console.print(table)


def follow(console: Console, checks: int, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Starts the ranks, shows what they report, and returns each topology's results by rank."""
    results: dict[str, list[dict[str, Any]]] = {title: [] for title in TOPOLOGIES}
    columns = (TextColumn("  {task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
               TimeElapsedColumn())  # fmt: skip
    with Progress(*columns, console=console, transient=True) as progress:
        starting = progress.add_task(f"starting {RANKS} processes", total=None)
        bars: dict[str, Any] = {}

        def on_event(rank: int, event: Any) -> None:
            kind, title, value = event
            if kind == "finished":
                results[title].append(value)
                if len(results[title]) == RANKS:
                    for bar in bars.values():
                        progress.remove_task(bar)
                    bars.clear()
                    conclude(console, results[title])
            elif rank == 0 and kind == "described":
                progress.update(starting, visible=False)
                console.rule(f"[bold]{RANKS} processes as {title}", align="left")
                describe(console, value)
                for case in CASES:
                    bars[case.mode] = progress.add_task(f"{case.mode}: check, time", total=checks + rounds)
            elif rank == 0 and kind == "step":
                progress.advance(bars[value])

        run_ranks(rank_main, RANKS, checks, rounds, on_event=on_event, timeout_s=600)
    return results


def conclude(console: Console, results: list[dict[str, Any]]) -> None:
    checked = sum(r["checked"] for r in results)
    console.print(
        f"  [green]every byte equals the reference[/]: {checked / 1e6:,.0f} MB compared, experts differ per expert"
    )
    moved = sum(r["engine"].get("bytes", 0) for r in results)
    if moved:
        commands = sum(r["engine"].get("commands", 0) for r in results)
        writes = sum(r["engine"].get("writes", 0) for r in results)
        console.print(
            f"  through channel, proxies and transport: {commands:,} commands, {writes:,} writes, {moved / 1e6:,.0f} MB"
        )
    for mode, times in results[0]["times"].items():
        console.print(
            f"  {mode}: dispatch + combine [bold]{times['uccl_ep']:.1f} ms[/], gloo {times['gloo']:.1f} ms "
            f"([bold]{times['gloo'] / times['uccl_ep']:.1f}x[/] faster), "
            f"memcpy of the same bytes {times['memcpy']:.1f} ms"
        )


def plot(path: Path, results: dict[str, list[dict[str, Any]]]) -> None:
    """Bars per mode: ours in either topology, gloo, and memcpy of the received bytes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(CASES), figsize=(11, 4.2), layout="constrained")
    for ax, case in zip(axes, CASES, strict=True):
        labels, values, colors, texts = [], [], [], []
        for title, result in results.items():  # each against the gloo of its own run
            times = result[0]["times"][case.mode]
            for name, label, color in (("gloo", "gloo", "#b8b8b8"), ("uccl_ep", "uccl_ep", "#1f6f8b")):
                labels.append(f"{label}\n{title}")
                values.append(times[name])
                colors.append(color)
                texts.append(
                    f"{times[name]:.1f} ms" + (f"\n{times['gloo'] / times[name]:.1f}x" if name == "uccl_ep" else "")
                )
        labels.append("memcpy of the\nsame bytes")
        values.append(statistics.mean(r[0]["times"][case.mode]["memcpy"] for r in results.values()))
        colors.append("#e3e3e3")
        texts.append(f"{values[-1]:.1f} ms")
        bars = ax.bar(labels, values, color=colors, width=0.66)
        ax.bar_label(bars, texts, padding=3, fontsize=10)
        ax.set_title(
            f"{case.mode}: {case.tokens} tokens of {case.hidden} bf16,\ntop-{case.topk} of {case.experts} experts",
            fontsize=10, loc="left",
        )  # fmt: skip
        ax.margins(y=0.18)
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(axis="x", length=0, labelsize=9)
        ax.set_ylabel("dispatch + combine, ms (median)")
    figure.suptitle(f"{RANKS} processes on {machine()}; shorter is better", fontsize=11, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=plain(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--checks", type=int, default=3, help="checked passes per mode, each with other data (default 3)"
    )
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds per mode (default 10)")
    parser.add_argument(
        "--plot", default="out/demo.png", metavar="FILE", help="where the plot goes (default %(default)s)"
    )
    given = parser.parse_args(arguments)
    if given.checks < 1 or given.rounds < 1:
        parser.error("--checks and --rounds must be at least 1")
    console = Console()
    started = time.monotonic()
    try:
        results = follow(console, given.checks, given.rounds)
    except RuntimeError as error:
        console.print(f"[red]the demo failed[/]: {error}", highlight=False)
        return 1
    path = Path(given.plot).resolve()
    try:
        plot(path, results)
        console.print(f"plot: {path}", soft_wrap=True)
    except ModuleNotFoundError:
        console.print("no plot: matplotlib is not installed (pip install 'uccl_ep[plot]')")
    console.print(f"done in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
