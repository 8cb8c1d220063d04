"""Warps of a block, by what they do; and the grid of all blocks that run at once."""

from __future__ import annotations

from uccl_ep_core._native import kernels
from uccl_ep_core.gpu_backend import KernelLimits

LOCAL_WARPS = 8
"""Of a block whose warps do not wait for each other."""
MEETING_WARPS = 12
"""Of a block whose warps work together or wait for other ranks: a team, or all of a low-latency kernel."""

STAGED_BLOCKS = 16
"""Of a low-latency kernel whose windows lie in host memory. Every block reads the heads of all messages, there over the
bus at a microsecond each; 4 multiprocessors of an H200 already fill it (52 of 55 GB/s), and 16 with reads to spare."""


def full_grid(limits: KernelLimits, most_warps: int) -> dict[str, int]:
    """All blocks that run at once, of at most so many warps; on a device whose warps are one lane wide, of one."""
    warps = 1 if limits.warp_size == 1 else min(most_warps, limits.max_warps_per_block)
    return {"num_blocks": limits.max_blocks, "warps": warps}


def low_latency_grid(limits: KernelLimits, staged: bool) -> dict[str, int]:
    """The grid of a low-latency kernel; ``staged``: the data window lies in host memory, for a transport."""
    grid = full_grid(limits, MEETING_WARPS)
    most = STAGED_BLOCKS if staged else int(kernels.PACKED_BLOCKS)  # which have a counter each
    return {**grid, "num_blocks": min(grid["num_blocks"], most)}
