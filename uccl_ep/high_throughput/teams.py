"""Blocks, warps and shared memory of the high-throughput kernels."""

from __future__ import annotations

import dataclasses

from uccl_ep_core.errors import ArgumentError

from ..communicator import Communicator

TEAM_WARPS = 12  # of a block that works one role


@dataclasses.dataclass(frozen=True)
class TeamGrid:
    """A grid in which every role of every channel has a team: roles wait for each other.

    A team is a block where there are blocks for all, else a warp.
    """

    num_blocks: int
    warps: int
    team_warps: int

    @classmethod
    def of(cls, communicator: Communicator, roles: int, most_warps: int = TEAM_WARPS) -> TeamGrid:
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
    ranks = communicator.num_ranks
    for most_warps in range(TEAM_WARPS, 0, -1):
        grid = TeamGrid.of(communicator, ranks, most_warps)
        # CombineProgress of core/kernels/combine.hpp
        tokens = 8 if grid.team_warps == 1 else grid.team_warps
        tokens = max(1, min(tokens, 2048 // ranks))
        shared_bytes = 8 * (ranks + 1) + 24 * grid.team_warps * (ranks + 2) + 4 * ranks * (2 + tokens)
        if shared_bytes <= communicator.backend.limits.max_shared_bytes:
            break
    return grid, shared_bytes
