"""The one form of all results: records, as a table, a JSON file and a plot."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from uccl_ep_core.argument_types import output_file


@dataclasses.dataclass(frozen=True)
class Record:
    """One figure.

    Attributes:
        bench: which benchmark, e.g. ``"ep"``.
        case: what was run: mode, shapes, ranks.
        metric: what was measured, and of whom, e.g. ``"dispatch + combine, uccl_ep"``.
        value: the figure, in ``unit``.
        unit: e.g. ``"us"``.
        baseline: the metric, of the same case and run, that ``ratio`` compares with; "" where there is none.
        ratio: over 1 means better than the baseline; 1 where there is none.
        note: why there is no figure; ``value`` is 0 then and ``unit`` "".
    """

    bench: str
    case: str
    metric: str
    value: float
    unit: str
    baseline: str = ""
    ratio: float = 1.0
    machine: str = dataclasses.field(default_factory=lambda: machine())
    date: str = dataclasses.field(
        default_factory=lambda: datetime.datetime.now().astimezone().isoformat("T", "seconds")
    )
    note: str = ""


def machine() -> str:
    """The processor's name and how many cores this process may use."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    except OSError:
        pass
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def write_json(path: str | Path, records: Sequence[Record]) -> None:
    Path(path).write_text(json.dumps([dataclasses.asdict(r) for r in records], indent=1) + "\n")


def show(records: Sequence[Record], console: Any = None) -> None:
    """A table, one row per record, with the case as a heading."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = console or Console()
    if not console.is_terminal:
        console = Console(width=120)
    for case in dict.fromkeys(r.case for r in records):
        table = Table(title=case, title_justify="left", title_style="bold", header_style="dim")
        table.add_column("metric")
        table.add_column("value", justify="right")
        table.add_column("unit")
        table.add_column("ratio", justify="right")
        table.add_column("compared with")
        for r in (r for r in records if r.case == case):
            ratio = f"{r.ratio:.2f}x" if r.baseline else ""
            style = "" if not r.baseline else "green" if r.ratio >= 1 else "yellow"
            value = "" if r.note else f"{r.value:,.1f}"
            table.add_row(r.metric, value, r.unit, ratio, escape(r.note) or r.baseline, style=style)
        console.print(table)


def plot(path: str | Path, records: Sequence[Record], title: str, unit: str = "us") -> None:
    """Bars of all records of one unit, one panel per case; each bar carries its value. Times are drawn in ms.

    Raises:
        ModuleNotFoundError: matplotlib is not installed (``pip install uccl_ep[plot]``).
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    times = unit == "us"
    scale, name, better = (
        (1000, "ms", "milliseconds, median (shorter is better)")
        if times
        else (1, unit, f"{unit}, median (longer is better)")
    )
    cases = list(dict.fromkeys(r.case for r in records if r.unit == unit))
    rows = max(len({r.metric for r in records if r.case == c and r.unit == unit}) for c in cases)
    figure, axes = plt.subplots(
        len(cases), 1, figsize=(9, 1.1 + (0.9 + 0.36 * rows) * len(cases)), squeeze=False, layout="constrained"
    )
    for ax, case in zip(axes[:, 0], cases, strict=True):
        # One bar per metric, and what belongs together side by side: "dispatch, uccl_ep", "dispatch, gloo".
        bars_of = {r.metric: r for r in records if r.case == case and r.unit == unit}
        starts = list(dict.fromkeys(metric.partition(",")[0] for metric in bars_of))
        shown = sorted(bars_of.values(), key=lambda r: starts.index(r.metric.partition(",")[0]), reverse=True)
        colors = ["#1f6f8b" if "uccl_ep" in r.metric else "#b8b8b8" for r in shown]
        bars = ax.barh([r.metric for r in shown], [r.value / scale for r in shown], color=colors)
        ax.bar_label(bars, [f"{r.value / scale:.2f} {name}" for r in shown], padding=4, fontsize=9)
        ax.set_title(case, loc="left", fontsize=10)
        ax.margins(x=0.16)
        ax.set_xlabel(better, fontsize=9)
        ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{title}\n{records[0].machine}", fontsize=11, x=0.01, ha="left")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_file(text: str) -> str:
    """An `output_file` of a format that matplotlib, which must be installed, can write."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ModuleNotFoundError:
        raise argparse.ArgumentTypeError("matplotlib is not installed: pip install 'uccl_ep[plot]'") from None
    formats = FigureCanvasBase.get_supported_filetypes()
    suffix = Path(text).suffix.removeprefix(".").lower()
    if suffix and suffix not in formats:  # without one, matplotlib adds its own
        raise argparse.ArgumentTypeError(f"{text}: use .png or one of {', '.join(sorted(formats))}")
    return output_file(text)


def add_output_options(parser: argparse.ArgumentParser, drawn: str = "") -> None:
    """The options that `put_out` goes by: ``--json``, and ``--plot`` where there is something to draw.

    Args:
        drawn: what the plot shows, e.g. ``"times"``; "" for a benchmark without a plot.
    """
    parser.add_argument("--json", metavar="FILE", type=output_file, help="write the records to FILE")
    parser.set_defaults(plot=None)
    if drawn:
        what = f"draw the {drawn} to FILE (needs matplotlib)"
        parser.add_argument("--plot", metavar="FILE", type=plot_file, help=what)


def put_out(given: argparse.Namespace, records: Sequence[Record], title: str = "", unit: str = "us") -> None:
    """The table, and the files that were asked for.

    Args:
        given: parsed by a parser with `add_output_options`.
        title, unit: of the plot, see `plot`.
    """
    show(records)
    if given.json:
        write_json(given.json, records)
        print(f"records: {given.json}")
    if given.plot:
        plot(given.plot, records, title, unit)
        print(f"plot: {given.plot}")
