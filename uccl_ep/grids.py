"""Warps of a block, by what they do; and the grid of all blocks that run at once."""

from __future__ import annotations

from uccl_ep_core.gpu_backend import KernelLimits

LOCAL_WARPS = 8
"""Of a block whose warps do not wait for each other."""
MEETING_WARPS = 12
"""Of a block whose warps work together or wait for other ranks: a team, or all of a low-latency kernel. No backend
compiles kernels for larger blocks."""


def full_grid(limits: KernelLimits, most_warps: int) -> dict[str, int]:
    """All blocks that run at once, of at most so many warps; on a device whose warps are one lane wide, of one."""
    warps = 1 if limits.warp_size == 1 else min(most_warps, limits.max_warps_per_block)
    return {"num_blocks": limits.max_blocks, "warps": warps}
