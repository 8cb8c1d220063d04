"""Blocks, warps and shared memory of the low-latency kernels."""

from __future__ import annotations

from uccl_ep_core.errors import ArgumentError

from ..communicator import Communicator

WARPS_PER_BLOCK = 12


def full_grid(communicator: Communicator) -> dict[str, int]:
    """All blocks that run at once."""
    limits = communicator.backend.limits
    warps = 1 if limits.warp_size == 1 else min(WARPS_PER_BLOCK, limits.max_warps_per_block)
    return {"num_blocks": limits.max_blocks, "warps": warps}


def dispatch_grid(
    communicator: Communicator, num_tokens: int, num_topk: int, num_experts: int
) -> tuple[dict[str, int], int, int]:
    """The grid of the send half, the runs of tokens that its warps place, and its bytes of shared memory.

    Raises:
        ArgumentError: the device has too little shared memory for so many experts.
    """
    grid, limits = full_grid(communicator), communicator.backend.limits
    keys = num_experts + communicator.num_ranks
    entries = -(-num_tokens // grid["num_blocks"]) * num_topk
    # LowLatencyPlacing of core/kernels/ll_dispatch.hpp
    fixed = 8 * communicator.num_ranks + 4 * (keys + num_experts + 4 * entries)
    num_chunks = min(grid["warps"], (limits.max_shared_bytes - fixed) // (2 * keys))
    if num_chunks < 1:
        raise ArgumentError(
            f"{num_experts} experts and {num_tokens} tokens need {fixed + 2 * keys} bytes of shared memory, and a "
            f"block has {limits.max_shared_bytes}: use dispatch(), or fewer tokens"
        )
    return grid, num_chunks, fixed + 2 * keys * num_chunks
