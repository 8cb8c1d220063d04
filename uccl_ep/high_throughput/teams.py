"""Blocks, warps and shared memory of the high-throughput kernels."""

from __future__ import annotations

import dataclasses

from uccl_ep_core._native import kernels
from uccl_ep_core.errors import ArgumentError

from ..communicator import Communicator
from ..grids import MEETING_WARPS


@dataclasses.dataclass(frozen=True)
class TeamGrid:
    """A grid in which every role of every channel that others wait for has a team.

    A team is a block where there are blocks for all, else a warp.
    """

    num_blocks: int
    warps: int
    team_warps: int

    @classmethod
    def of(
        cls, communicator: Communicator, roles: int, most_warps: int = MEETING_WARPS, waiting: int | None = None
    ) -> TeamGrid:
        """The grid for as many roles of each channel.

        Args:
            waiting: how many of them wait for each other, the first ones; None: all. The others get blocks of their
                own only where there are enough.

        Raises:
            ArgumentError: they do not run at once.
        """
        limits, channels, most_blocks = communicator.backend.limits, communicator.num_channels, communicator.most_blocks
        for teams in (roles, waiting or roles):
            if 1 < teams * channels <= most_blocks:
                warps = max(1, min(most_warps, limits.max_warps_per_block))
                return cls(teams * channels, warps, warps)
        warps = min(roles, limits.max_warps_per_block)
        blocks_per_channel = -(-roles // warps)
        blocks = blocks_per_channel * channels
        if blocks > most_blocks:
            limit = "num_sms allows" if most_blocks < limits.max_blocks else "the device runs"
            raise ArgumentError(
                f"{channels} channels with {roles} roles need {blocks} blocks at once, but {limit} {most_blocks}: set "
                f"num_channels (UCCL_EP_NUM_CHANNELS) to at most {max(1, most_blocks // blocks_per_channel)}"
            )
        return cls(blocks, warps, 1)


def dispatch_grid(communicator: Communicator) -> TeamGrid:
    """The grid of a dispatch."""
    return TeamGrid.of(communicator, communicator.dispatch_roles, waiting=communicator.waiting_dispatch_roles)


def combine_grid(communicator: Communicator) -> tuple[TeamGrid, int]:
    """The grid of a combine and its bytes of shared memory, fewer warps where more would not fit."""
    roles = kernels.combine_roles(communicator.num_ranks)
    for most_warps in range(MEETING_WARPS, 0, -1):
        grid = TeamGrid.of(communicator, roles, most_warps)
        shared_bytes = kernels.combine_progress_bytes(grid.team_warps, communicator.num_ranks)
        if shared_bytes <= communicator.backend.limits.max_shared_bytes:
            break
    return grid, shared_bytes
