"""Blocks, warps and shared memory of the high-throughput kernels."""

from __future__ import annotations

import dataclasses

from uccl_ep_core._native import kernels
from uccl_ep_core.errors import ArgumentError

from ..communicator import Communicator
from ..grids import MEETING_WARPS


@dataclasses.dataclass(frozen=True)
class TeamGrid:
    """A grid in which every role of every channel has a team: roles wait for each other.

    A team is a block where there are blocks for all, else a warp.
    """

    num_blocks: int
    warps: int
    team_warps: int

    @classmethod
    def of(cls, communicator: Communicator, roles: int, most_warps: int = MEETING_WARPS) -> TeamGrid:
        """The grid for as many roles of each channel.

        Raises:
            ArgumentError: they do not run at once.
        """
        limits, channels = communicator.backend.limits, communicator.num_channels
        if 1 < roles * channels <= limits.max_blocks:
            warps = max(1, min(most_warps, limits.max_warps_per_block))
            return cls(roles * channels, warps, warps)
        warps = min(roles, limits.max_warps_per_block)
        blocks_per_channel = -(-roles // warps)
        blocks = blocks_per_channel * channels
        if blocks > limits.max_blocks:
            raise ArgumentError(
                f"{channels} channels with {roles} roles need {blocks} blocks at once, but the device "
                f"runs {limits.max_blocks}: set num_channels (UCCL_EP_NUM_CHANNELS) to at most "
                f"{max(1, limits.max_blocks // blocks_per_channel)}"
            )
        return cls(blocks, warps, 1)


def combine_grid(communicator: Communicator) -> tuple[TeamGrid, int]:
    """The grid of a combine and its bytes of shared memory, fewer warps where more would not fit."""
    roles = kernels.combine_roles(communicator.num_ranks)
    for most_warps in range(MEETING_WARPS, 0, -1):
        grid = TeamGrid.of(communicator, roles, most_warps)
        shared_bytes = kernels.combine_progress_bytes(grid.team_warps, communicator.num_ranks)
        if shared_bytes <= communicator.backend.limits.max_shared_bytes:
            break
    return grid, shared_bytes
