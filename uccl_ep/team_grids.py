"""Grids of the high-throughput kernels, in which teams of warps work the roles of channels, and how many channels suit.

Roles wait for each other, so all of them must run at once. Where that leaves a choice it is made by what a slot costs,
in microseconds: all warps of a multiprocessor fill one in `FILL_US`, a team of fewer warps takes as much longer, and
then it hands the slot over, in which it moves nothing. So teams that share a block hide each other's handing over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from uccl_ep_core._native import kernels
from uccl_ep_core.gpu_backend import KernelLimits

from .grids import MEETING_WARPS

FILL_US = 8.0
"""A slot of 256 KiB, by a multiprocessor of an H200."""
HAND_OVER_US = 5.0
"""The last copies of a slot, a barrier, and a release to the peer, there."""
BLOCK_TEAMS = 3
"""Most teams of several warps that a block of a GPU has, unless the option ``block_teams`` says otherwise."""


@dataclasses.dataclass(frozen=True)
class Work:
    """The roles of one channel in a kernel.

    Attributes:
        roles: all of them.
        waiting: those that wait for each other, the first ones. The rest, one or none, may share the team of the first.
        first: rows that the first role moves, in those of another.
    """

    roles: int
    waiting: int
    first: float

    @classmethod
    def of_dispatch(cls, num_ranks: int, ranks_per_domain: int) -> Work:
        roles = int(kernels.dispatch_roles(num_ranks, ranks_per_domain))
        return cls(roles, max(1, roles - 1), 1.0)

    @classmethod
    def of_combine(cls, num_ranks: int) -> Work:
        """The first role sums: of each token it reads a row of every rank, at most, and writes one."""
        roles = int(kernels.combine_roles(num_ranks))
        return cls(roles, roles, (num_ranks + 1) / 2)

    def without_sharing(self) -> Work:
        """Every role has a team of its own."""
        return dataclasses.replace(self, waiting=self.roles)


@dataclasses.dataclass(frozen=True)
class Room:
    """What a grid may take.

    Attributes:
        blocks: that run at once, one a multiprocessor.
        limits: of the device.
        block_teams: most teams of several warps in one block.
    """

    blocks: int
    limits: KernelLimits
    block_teams: int = 1

    @property
    def warps(self) -> int:
        """Of a block whose warps work together."""
        return max(1, min(MEETING_WARPS, self.limits.max_warps_per_block))


@dataclasses.dataclass(frozen=True)
class TeamGrid:
    """A grid in which every role of every channel that others wait for has a team.

    Attributes:
        num_blocks, warps: of the launch; a multiple of the channels.
        team_warps: warps of a team, which divide those of the block.
        cost_us: what a slot of its slowest role costs.
    """

    num_blocks: int
    warps: int
    team_warps: int
    cost_us: float

    @classmethod
    def of(
        cls, work: Work, channels: int, room: Room, fits: Callable[[int], bool] = lambda team_warps: True
    ) -> TeamGrid:
        """The cheapest grid of teams of several warps, or where none runs at once, one in which a warp is a team.

        Args:
            fits: whether the memory of a block holds what a team of so many warps keeps there.

        Returns:
            A grid that may be larger than `room` has blocks, where no other is possible.
        """
        several = min(_of_several_warps(work, channels, room, fits), key=lambda grid: grid.cost_us, default=None)
        return several or _of_one(work, channels, room)


def _of_several_warps(work: Work, channels: int, room: Room, fits: Callable[[int], bool]) -> Iterator[TeamGrid]:
    for teams in range(1, room.block_teams + 1):
        if room.warps % teams:
            continue
        team_warps = room.warps // teams
        while team_warps > 1 and not fits(team_warps):
            team_warps -= 1
        if team_warps == 1 and room.warps > 1:
            continue
        for with_team in {work.roles, work.waiting}:
            blocks = -(-with_team // teams) * channels
            # A lone block of one team is a thread of the host backend, which more warps make no faster.
            if blocks > room.blocks or (blocks == 1 and room.block_teams == 1):
                continue
            own = -(-with_team // teams) * teams >= work.roles
            slowest = max(1.0, work.first + (0 if own else 1))
            cost = slowest * (FILL_US * room.warps / team_warps + HAND_OVER_US)
            yield TeamGrid(blocks, teams * team_warps, team_warps, cost)


def _of_one(work: Work, channels: int, room: Room) -> TeamGrid:
    warps = min(work.roles, room.limits.max_warps_per_block)
    cost = max(1.0, work.first) * (FILL_US * room.warps + HAND_OVER_US)
    return TeamGrid(-(-work.roles // warps) * channels, warps, 1, cost)


def suitable_channels(dispatch: Work, combine: Work, room: Room, most: int) -> int:
    """As many channels, `most` at most, as make a dispatch and a combine take the least time together.

    The more there are, the fewer tokens each carries. Of counts that are as good, the least: each channel has its own
    slots.
    """

    def time(channels: int) -> float:
        grids = [TeamGrid.of(work, channels, room) for work in (dispatch, combine)]
        if any(grid.num_blocks > room.blocks or grid.team_warps == 1 for grid in grids):
            return float("inf")
        return sum(grid.cost_us for grid in grids) / channels

    best = min(range(1, most + 1), key=time)
    if time(best) < float("inf"):
        return best
    return max(1, min(most, room.blocks // _of_one(dispatch, 1, room).num_blocks))
