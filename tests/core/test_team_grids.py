"""Which grids high throughput gets: all roles that wait for each other run at once, in any group on any device."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from uccl_ep.team_grids import BLOCK_TEAMS, Room, TeamGrid, Work, suitable_channels
from uccl_ep_core._native import kernels
from uccl_ep_core.gpu_backend import KernelLimits

MOST_CHANNELS = 48


def room_of(blocks: int, block_teams: int = BLOCK_TEAMS, warps: int = 12) -> Room:
    return Room(blocks, KernelLimits(132, warps, 32, 35 << 10, 15), block_teams)


def check_roles_run_at_once(work: Work, channels: int, grid: TeamGrid, room: Room) -> None:
    """Deal the roles as the kernels do."""
    assert grid.num_blocks % channels == 0 and grid.warps <= room.limits.max_warps_per_block
    assert grid.team_ends == 0 or len(grid.team_warps) <= room.block_teams
    done: Counter[tuple[int, int]] = Counter()
    for block in range(grid.num_blocks):
        first_warp = 0
        for warps in grid.team_warps:
            dealt = {
                kernels.channel_teams(grid.team_ends, channels, block, grid.num_blocks, warp, grid.warps)
                for warp in range(first_warp, first_warp + warps)
            }
            assert len(dealt) == 1, "warps of a team in different roles"
            channel, first, count, *team = dealt.pop()
            assert team == [first_warp, warps]
            first_warp += warps
            with_team = work.roles if count >= work.roles else work.waiting
            mine = list(range(first, with_team, count))
            assert len(mine) <= 1, "a role that others wait for begins when another has ended"
            done.update((channel, role) for role in mine)
            if with_team < work.roles and first == 0:
                done[channel, work.roles - 1] += 1
    assert done == Counter(dict.fromkeys(itertools.product(range(channels), range(work.roles)), 1))


@pytest.mark.parametrize("warps", [1, 8, 12])
@pytest.mark.parametrize("block_teams", [1, 2, 3, 6])
@pytest.mark.parametrize(
    ("ranks", "domain"), [(1, 1), (2, 2), (2, 1), (3, 3), (4, 2), (8, 8), (6, 2), (16, 8), (20, 4), (64, 8), (128, 8)]
)
def test_all_roles_run_at_once(ranks: int, domain: int, block_teams: int, warps: int) -> None:
    dispatch, combine = Work.of_dispatch(ranks, domain), Work.of_combine(ranks)
    for blocks, limited in itertools.product((1, 2, 5, 24, 48, 131, 132), (False, True)):
        room = room_of(blocks, block_teams, warps)
        chosen = suitable_channels(dispatch if limited else dispatch.without_sharing(), combine, room, MOST_CHANNELS)
        assert 1 <= chosen <= MOST_CHANNELS
        for channels in {1, (chosen + 1) // 2, chosen}:  # another rank may have room for fewer, and the least counts
            for work in (dispatch, combine):
                for most_warps in (12, 5, 1):  # what a block's memory has room for
                    grid = TeamGrid.of(work, channels, room, lambda team_warps, most=most_warps: team_warps <= most)
                    if grid.num_blocks <= blocks:
                        check_roles_run_at_once(work, channels, grid, room)
                    else:  # not even with a warp for each role of one channel: refused before the launch
                        assert channels == 1 and -(-work.roles // warps) > blocks


@pytest.mark.parametrize(("ranks", "domain"), [(1, 1), (2, 2), (2, 1), (8, 4), (6, 2), (12, 4), (64, 8), (4096, 8)])
def test_roles_are_those_of_the_kernels(ranks: int, domain: int) -> None:
    assert Work.of_dispatch(ranks, domain).roles == kernels.dispatch_roles(ranks, domain)
    assert Work.of_combine(ranks).roles == kernels.combine_roles(ranks)


# (channels, blocks of dispatch and warps of its teams, likewise of combine); the first as measured on H200.
@pytest.mark.parametrize(
    ("ranks", "sms", "limited", "wanted"),
    [
        (2, 132, False, (44, (132, (12,)), (88, (12,)))),
        (2, 24, True, (24, (24, (3, 5, 4)), (24, (7, 5)))),
        (2, 48, True, (48, (48, (3, 5, 4)), (48, (7, 5)))),
        (4, 132, False, (44, (132, (3, 5, 4)), (88, (9, 3)))),
        (4, 24, True, (12, (24, (5, 4, 3)), (24, (9, 3)))),
        (8, 132, False, (26, (130, (3, 5, 4)), (104, (10, 2)))),
        (8, 24, True, (4, (20, (3, 5, 4)), (16, (10, 2)))),
    ],
)
def test_what_a_gpu_gets(
    ranks: int, sms: int, limited: bool, wanted: tuple[int, tuple[int, tuple[int, ...]], tuple[int, tuple[int, ...]]]
) -> None:
    dispatch, combine, room = Work.of_dispatch(ranks, ranks), Work.of_combine(ranks), room_of(sms)
    channels = suitable_channels(dispatch if limited else dispatch.without_sharing(), combine, room, MOST_CHANNELS)
    grids = [TeamGrid.of(work, channels, room) for work in (dispatch, combine)]
    assert (channels, *((grid.num_blocks, grid.team_warps) for grid in grids)) == wanted


@pytest.mark.parametrize(("ranks", "teams"), [(2, 3), (4, 3), (8, 2), (8, 5)])
def test_no_other_division_of_a_block_is_better(ranks: int, teams: int) -> None:
    work = Work.of_dispatch(ranks, ranks)
    blocks = -(-work.roles // teams)
    grid = TeamGrid.of(work.without_sharing(), 1, room_of(blocks, block_teams=teams))
    assert len(grid.team_warps) == teams and grid.warps == 12
    for shares in itertools.product(range(2, 13), repeat=teams):
        if sum(shares) == 12:
            slowest = max(
                cost.of(12, share)
                for team, share in enumerate(shares)
                for cost in work.of_team(team * blocks, (team + 1) * blocks, shared=False)
            )
            assert grid.cost_us <= slowest


def test_memory_limits_the_first_team_alone() -> None:
    grid = TeamGrid.of(Work.of_combine(2), 24, room_of(24), lambda team_warps: team_warps <= 4)
    assert grid.team_warps == (4, 8)


def test_whole_blocks_where_they_cannot_be_shared() -> None:
    """As on a device whose blocks have one barrier: a block a role, or a warp where there are more roles."""
    dispatch = Work.of_dispatch(8, 8)
    assert TeamGrid.of(dispatch, 1, room_of(15, block_teams=1)).team_warps == (12,)
    assert TeamGrid.of(dispatch, 1, room_of(14, block_teams=1)).team_warps == (12,)  # my own rows with a receiver's
    grid = TeamGrid.of(dispatch, 1, room_of(13, block_teams=1))
    assert (grid.num_blocks, grid.team_warps, grid.team_ends) == (2, (1,) * 12, 0)
