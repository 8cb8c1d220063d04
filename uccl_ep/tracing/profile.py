"""Sums over what kernels recorded: what bounds them."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from .launches import Launch, nested

WHOLE = "whole kernel"
_COLUMNS = ("launches", "warps", "spans", "us of a warp", "begins", "ends, mean", "last")


@dataclasses.dataclass(frozen=True)
class Row:
    """What the warps of a kernel did of one kind. Times in us, means over launches.

    Attributes:
        kernel: its name.
        activity: what they did, behind the activities that it is part of: ``"sends / copies"``.
        launches: in which anybody did it.
        warps: that did it, of a launch.
        spans: of a warp, how often it did.
        warp_us: of a warp, all of them together. What is inside of a span counts in both.
        first_start_us: when the first warp began, from the beginning of the kernel.
        mean_end_us: when a warp had done it for the last time, the mean over warps.
        last_end_us: when the last one had.
    """

    kernel: str
    activity: str
    launches: int
    warps: float
    spans: float
    warp_us: float
    first_start_us: float
    mean_end_us: float
    last_end_us: float


@dataclasses.dataclass(frozen=True)
class Profile:
    """What the kernels of one rank did.

    Attributes:
        rows: by kernel, in the order in which things began.
        launches: of kernels that were summed up.
        lost: spans that were recorded, and written over or cut off before they were read.
    """

    rows: tuple[Row, ...]
    launches: int
    lost: int

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = []
        for kernel in dict.fromkeys(row.kernel for row in self.rows):
            rows = [row for row in self.rows if row.kernel == kernel]
            width = max(len(kernel), *(len(_indented(row.activity)) for row in rows))
            lines.append("  ".join([kernel.ljust(width), *(column.rjust(12) for column in _COLUMNS)]))
            for row in rows:
                numbers = (row.warp_us, row.first_start_us, row.mean_end_us, row.last_end_us)
                cells = [str(row.launches), f"{row.warps:.0f}", f"{row.spans:.1f}", *(f"{us:.1f}" for us in numbers)]
                lines.append("  ".join([_indented(row.activity).ljust(width), *(cell.rjust(12) for cell in cells)]))
            lines.append("")
        if self.lost:
            lines.append(
                f"{self.lost} older spans are gone: rings keep the newest (trace_kernel_spans), so read more often, or "
                "let each warp keep more"
            )
        return "\n".join(lines).rstrip() or "no kernel was traced since the last profile"


def _indented(activity: str) -> str:
    *outer, last = activity.split(" / ")
    return "  " * (1 + len(outer)) + last


@dataclasses.dataclass
class _Sum:
    """Of one activity, over launches; ns."""

    launches: int = 0
    warps: int = 0
    spans: float = 0.0
    warp_ns: float = 0.0
    first_start: float = 0.0
    mean_end: float = 0.0
    last_end: float = 0.0

    def add(self, warps: dict[tuple[int, int], list[tuple[int, int]]], start: int) -> None:
        """A launch: (start, end) of each span, by warp."""
        ends = [max(end for _, end in spans) for spans in warps.values()]
        self.launches += 1
        self.warps += len(warps)
        self.spans += sum(map(len, warps.values())) / len(warps)
        self.warp_ns += sum(end - begin for spans in warps.values() for begin, end in spans) / len(warps)
        self.first_start += min(begin for spans in warps.values() for begin, _ in spans) - start
        self.mean_end += sum(ends) / len(ends) - start
        self.last_end += max(ends) - start

    def row(self, kernel: str, activity: str) -> Row:
        n = self.launches
        us = (self.warp_ns, self.first_start, self.mean_end, self.last_end)
        return Row(kernel, activity, n, self.warps / n, self.spans / n, *(ns / n / 1e3 for ns in us))


def summed_up(launches: Sequence[Launch], lost: int = 0) -> Profile:
    """The sums of some launches."""
    sums: dict[str, dict[tuple[str, ...], _Sum]] = defaultdict(lambda: defaultdict(_Sum))
    for launch in launches:
        of_launch: dict[tuple[str, ...], dict[tuple[int, int], list[tuple[int, int]]]] = {}
        for warp in launch.warps:
            place = warp.block, warp.warp
            of_launch.setdefault((), {})[place] = [(warp.start, warp.end)]
            for outermost in nested(warp):
                for path, span in outermost.with_paths():
                    of_launch.setdefault(path, {}).setdefault(place, []).append((span.start, span.end))
        for path, warps in of_launch.items():
            sums[launch.kernel][path].add(warps, launch.start)
    rows = []
    for kernel, activities in sums.items():
        for path in _in_order(activities):
            rows.append(activities[path].row(kernel, " / ".join(path) or WHOLE))
    return Profile(tuple(rows), len(launches), lost)


def _in_order(activities: dict[tuple[str, ...], _Sum]) -> list[tuple[str, ...]]:
    """Each behind the one that holds it, and those beside each other as they began."""

    def key(path: tuple[str, ...]) -> list[tuple[float, str]]:
        parts = [path[: i + 1] for i in range(len(path))]
        return [(activities[part].first_start / activities[part].launches, part[-1]) for part in parts]

    return sorted(activities, key=key)
