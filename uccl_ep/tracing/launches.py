"""Spans of warps put together to launches of kernels, and spans within spans."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from .names import ACTIVITIES, KERNELS, ROLES
from .rings import WarpSpans


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch of a kernel, as all of its warps recorded it."""

    kernel: str
    warps: tuple[WarpSpans, ...]

    @property
    def start(self) -> int:
        return min(warp.start for warp in self.warps)

    @property
    def num_spans(self) -> int:
        return sum(len(warp.spans) + 1 for warp in self.warps)


def launches_of(recorded: Sequence[WarpSpans]) -> tuple[list[Launch], int]:
    """The launches in order of time, and how many spans belong to some that are not there in full.

    Kernels of a rank run one after another, so all warps of a launch began before any of the next; and what is lost is
    the oldest.
    """
    left = sorted(recorded, key=lambda warp: warp.start)
    found: list[Launch] = []
    while left:
        newest = left[-1]
        warps = left[-newest.warps :]
        places = {(warp.block, warp.warp) for warp in warps}
        alike = all((warp.kernel, warp.warps) == (newest.kernel, newest.warps) for warp in warps)
        if len(places) != newest.warps or not alike:
            break
        del left[-newest.warps :]
        found.append(Launch(KERNELS[newest.kernel], tuple(warps)))
    return found[::-1], sum(len(warp.spans) + 1 for warp in left)


@dataclasses.dataclass
class Nested:
    """A span with those inside it, in order; times in ns of the device's clock.

    Attributes:
        peer: the rank at the other end, or `names.NOBODY`.
    """

    activity: int
    start: int
    end: int
    peer: int
    inside: list[Nested]

    @property
    def name(self) -> str:
        return ACTIVITIES[self.activity]

    def with_paths(self, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Nested]]:
        """This span and all inside it, each behind the one that holds it, with the names from the outermost on."""
        mine = (*path, self.name)
        yield mine, self
        for span in self.inside:
            yield from span.with_paths(mine)


def nested(warp: WarpSpans) -> list[Nested]:
    """The outermost spans of a warp. A span is recorded when it ends, so behind those inside it."""
    outermost: list[Nested] = []
    columns = (warp.spans[name].tolist() for name in ("activity", "start", "end", "detail"))
    for activity, start, end, detail in zip(*columns, strict=True):
        first = len(outermost)
        while first and _lies_inside(outermost[first - 1], activity, start):
            first -= 1
        outermost[first:] = [Nested(activity, start, end, detail, outermost[first:])]
    return outermost


def _lies_inside(before: Nested, activity: int, start: int) -> bool:
    # A clock that ticks coarsely shows a step of no length at the same time as the one that follows it.
    return before.start > start or (before.start == start and (before.end > start or activity in ROLES))
