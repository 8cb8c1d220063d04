"""Grids of the high-throughput kernels, in which teams of warps work the roles of channels, and how many channels suit.

Roles wait for each other, so all of them must run at once. Where that leaves a choice it is made by what a slot costs
each role (`RoleCost`), in microseconds: all warps of a multiprocessor move its rows in `rows_us`, a team of fewer warps
takes as much longer, and then it hands the slot over, in which it moves nothing. So teams that share a block hide each
other's handing over, and a role that has more to do with a slot gets more of the warps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from uccl_ep_core._native import kernels
from uccl_ep_core.gpu_backend import KernelLimits

from .grids import MEETING_WARPS

BLOCK_TEAMS = 3
"""Most teams of several warps that a block of a GPU has, unless the option ``block_teams`` says otherwise."""


@dataclasses.dataclass(frozen=True)
class RoleCost:
    """What a slot of 352 KiB costs a role on a multiprocessor of an H200.

    Attributes:
        rows_us: all its warps copy or sum the slot's rows.
        hand_over_us: the last copies, a barrier, and a release to the peer.
    """

    rows_us: float
    hand_over_us: float = 5.0

    def of(self, warps: int, share: float) -> float:
        """By a team of `share` of the `warps` of a multiprocessor."""
        return self.rows_us * warps / share + self.hand_over_us


# From the time stamps in docs/performance.md, "What bounds high throughput". Copies into a peer's window take longer
# than those out of the own one, and rows that lie apart longer than those that lie together.
SEND = RoleCost(8.0)
RECEIVE = RoleCost(5.0)
KEEP = RoleCost(7.0, hand_over_us=0.0)
FORWARD = RoleCost(8.0)
SUM_ROW_US = 5.5
"""Of a sum, for each row that it reads: it takes a slot from every rank at a time, my own rows among them."""


@dataclasses.dataclass(frozen=True)
class Work:
    """The roles of one channel in a kernel.

    Attributes:
        kinds: how many roles of what cost, in their order.
        waiting: those that wait for each other, the first ones. The rest, one or none, may share the team of the first.
    """

    kinds: tuple[tuple[int, RoleCost], ...]
    waiting: int

    @property
    def roles(self) -> int:
        """All of them."""
        return sum(count for count, _ in self.kinds)

    @classmethod
    def of_dispatch(cls, num_ranks: int, ranks_per_domain: int) -> Work:
        """As core/kernels/roles.hpp has them: receivers, senders, forwarders, and last the rows that stay."""
        other_domains = num_ranks // ranks_per_domain - 1
        senders = ranks_per_domain - 1 + other_domains
        receivers = num_ranks - 1 - other_domains  # rows of the other ranks at my place come in through a forwarder
        kinds = ((receivers, RECEIVE), (senders, SEND), (other_domains, FORWARD), (1, KEEP))
        return cls(kinds, max(1, receivers + senders + other_domains))

    @classmethod
    def of_combine(cls, num_ranks: int) -> Work:
        """The first role sums; the others send."""
        return cls(((1, RoleCost(SUM_ROW_US * num_ranks)), (num_ranks - 1, SEND)), num_ranks)

    def without_sharing(self) -> Work:
        """Every role has a team of its own."""
        return dataclasses.replace(self, waiting=self.roles)

    def of_team(self, first: int, end: int, shared: bool) -> list[RoleCost]:
        """The different costs of roles [first, end); the first role's also has the last one's, where `shared`."""
        costs: list[RoleCost] = []
        begin = 0
        for count, cost in self.kinds:
            if begin < end and first < begin + count:
                costs.append(cost)
            begin += count
        if shared and first == 0:
            last = self.kinds[-1][1]
            costs[0] = RoleCost(costs[0].rows_us + last.rows_us, costs[0].hand_over_us + last.hand_over_us)
        return costs


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
        num_blocks: of the launch, a multiple of the channels.
        team_warps: warps of each team of a block, in their order.
        cost_us: what a slot of its slowest role costs.
    """

    num_blocks: int
    team_warps: tuple[int, ...]
    cost_us: float

    @property
    def warps(self) -> int:
        """Of a block."""
        return sum(self.team_warps)

    @property
    def team_ends(self) -> int:
        """How kernels are told of the teams of several warps; 0: each warp is one."""
        if max(self.team_warps) == 1:
            return 0
        return sum(sum(self.team_warps[: i + 1]) << 8 * i for i in range(len(self.team_warps)))

    @classmethod
    def of(
        cls, work: Work, channels: int, room: Room, fits: Callable[[int], bool] = lambda team_warps: True
    ) -> TeamGrid:
        """The cheapest grid of teams of several warps, or where none runs at once, one in which a warp is a team.

        Args:
            fits: whether the memory of a block holds what a first team of so many warps keeps there.

        Returns:
            A grid that may be larger than `room` has blocks, where no other is possible.
        """
        several = min(_of_several_warps(work, channels, room, fits), key=lambda grid: grid.cost_us, default=None)
        return several or _of_one(work, channels, room)


def _of_several_warps(work: Work, channels: int, room: Room, fits: Callable[[int], bool]) -> Iterator[TeamGrid]:
    least = min(2, room.warps)
    most_first = room.warps
    while most_first > least and not fits(most_first):
        most_first -= 1
    if not fits(most_first):
        return
    for teams in range(1, min(room.block_teams, room.warps // least, kernels.MOST_TEAMS) + 1):
        for with_team in {work.roles, work.waiting}:
            blocks = -(-with_team // teams)
            # A lone block of one team is a thread of the host backend, which more warps make no faster.
            if blocks * channels > room.blocks or (blocks * channels == 1 and room.block_teams == 1):
                continue
            shared = blocks * teams < work.roles
            end = work.waiting if shared else work.roles
            costs = [work.of_team(team * blocks, min((team + 1) * blocks, end), shared) for team in range(teams)]
            yield TeamGrid(blocks * channels, *_divided(costs, room.warps, least, most_first))


def _divided(costs: Sequence[list[RoleCost]], warps: int, least: int, most_first: int) -> tuple[tuple[int, ...], float]:
    """The warps of a block, divided so that its slowest team takes least, and what that one takes."""
    shares = [least] * len(costs)

    def cost(team: int) -> float:
        return max((role.of(warps, shares[team]) for role in costs[team]), default=0.0)

    for _ in range(warps - sum(shares)):
        slower = [team for team in range(len(costs)) if team != 0 or shares[0] < most_first]
        if slower:
            shares[max(slower, key=cost)] += 1
    return tuple(shares), max(cost(team) for team in range(len(costs)))


def _of_one(work: Work, channels: int, room: Room) -> TeamGrid:
    warps = min(work.roles, room.limits.max_warps_per_block)
    cost = max(role.of(room.warps, 1) for role in work.of_team(0, work.roles, shared=False))
    return TeamGrid(-(-work.roles // warps) * channels, (1,) * warps, cost)


def suitable_channels(dispatch: Work, combine: Work, room: Room, most: int) -> int:
    """As many channels, `most` at most, as make a dispatch and a combine take the least time together.

    The more there are, the fewer tokens each carries. Of counts that are as good, the least: each channel has its own
    slots.
    """

    def time(channels: int) -> float:
        grids = [TeamGrid.of(work, channels, room) for work in (dispatch, combine)]
        if any(grid.num_blocks > room.blocks or grid.team_ends == 0 for grid in grids):
            return float("inf")
        return sum(grid.cost_us for grid in grids) / channels

    best = min(range(1, most + 1), key=time)
    if time(best) < float("inf"):
        return best
    return max(1, min(most, room.blocks // _of_one(dispatch, 1, room).num_blocks))
