"""Blocks, warps and shared memory of a low-latency dispatch."""

from __future__ import annotations

from uccl_ep_core._native import kernels
from uccl_ep_core.errors import ArgumentError

from ..communicator import Communicator


def dispatch_grid(
    communicator: Communicator, num_tokens: int, num_topk: int, num_experts: int
) -> tuple[dict[str, int], int, int]:
    """The grid of the send half, the runs of tokens that its warps place, and its bytes of shared memory.

    Raises:
        ArgumentError: the device has too little shared memory for so many experts.
    """
    grid, limits = communicator.low_latency_grid(), communicator.backend.limits
    entries = -(-num_tokens // grid["num_blocks"]) * num_topk

    def placing_bytes(num_chunks: int) -> int:
        return int(kernels.low_latency_placing_bytes(num_experts, communicator.num_ranks, num_chunks, entries))

    fixed, least = placing_bytes(0), placing_bytes(1)
    num_chunks = min(grid["warps"], (limits.max_shared_bytes - fixed) // (least - fixed))
    if num_chunks < 1:
        raise ArgumentError(
            f"{num_experts} experts and {num_tokens} tokens need {least} bytes of shared memory, and a "
            f"block has {limits.max_shared_bytes}: use dispatch(), or fewer tokens"
        )
    return grid, num_chunks, placing_bytes(num_chunks)
