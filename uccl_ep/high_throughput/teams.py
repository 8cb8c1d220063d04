"""Blocks, warps and shared memory of the high-throughput kernels."""

from __future__ import annotations

import functools

from uccl_ep_core._native import kernels
from uccl_ep_core.errors import ArgumentError

from ..communicator import Communicator
from ..team_grids import Room, TeamGrid, Work


def dispatch_grid(communicator: Communicator) -> TeamGrid:
    """The grid of a dispatch.

    Raises:
        ArgumentError: roles that wait for each other do not run at once.
    """
    work = communicator.dispatch_work
    grid = _dispatch_grid(work, communicator.num_channels, communicator.team_room)
    _check_runs_at_once(communicator, grid, work.roles)
    return grid


def combine_grid(communicator: Communicator) -> tuple[TeamGrid, int]:
    """The grid of a combine and its bytes of shared memory, fewer warps where more would not fit.

    Raises:
        ArgumentError: as `dispatch_grid`.
    """
    work = communicator.combine_work
    grid, shared_bytes = _combine_grid(work, communicator.num_channels, communicator.team_room, communicator.num_ranks)
    _check_runs_at_once(communicator, grid, work.roles)
    return grid, shared_bytes


# Every call asks, and it is always the same few.
@functools.lru_cache(maxsize=64)
def _dispatch_grid(work: Work, channels: int, room: Room) -> TeamGrid:
    return TeamGrid.of(work, channels, room)


@functools.lru_cache(maxsize=64)
def _combine_grid(work: Work, channels: int, room: Room, num_ranks: int) -> tuple[TeamGrid, int]:
    def shared_bytes(team_warps: int) -> int:
        return int(kernels.combine_progress_bytes(team_warps, num_ranks))

    most = room.limits.max_shared_bytes
    grid = TeamGrid.of(work, channels, room, lambda team_warps: shared_bytes(team_warps) <= most)
    return grid, shared_bytes(grid.team_warps[0])


def _check_runs_at_once(communicator: Communicator, grid: TeamGrid, roles: int) -> None:
    channels, most_blocks = communicator.num_channels, communicator.most_blocks
    if grid.num_blocks <= most_blocks:
        return
    limit = "num_sms allows" if most_blocks < communicator.backend.limits.max_blocks else "the device runs"
    raise ArgumentError(
        f"{channels} channels with {roles} roles need {grid.num_blocks} blocks at once, but {limit} {most_blocks}: set "
        f"num_channels (UCCL_EP_NUM_CHANNELS) to at most {max(1, most_blocks // (grid.num_blocks // channels))}"
    )
