"""How many blocks and warps kernels get."""

from __future__ import annotations

import pytest

from uccl_ep.grids import LOCAL_WARPS, MEETING_WARPS, STAGED_BLOCKS, full_grid, low_latency_grid
from uccl_ep_core.gpu_backend import KernelLimits

GPU = KernelLimits(max_blocks=132, max_warps_per_block=16, warp_size=32)
CPU = KernelLimits(max_blocks=2, max_warps_per_block=12, warp_size=1)


@pytest.mark.parametrize("staged", [False, True])
def test_windows_in_host_memory_take_few_blocks(staged: bool) -> None:
    assert low_latency_grid(GPU, staged) == {"num_blocks": STAGED_BLOCKS if staged else 132, "warps": MEETING_WARPS}
    assert low_latency_grid(CPU, staged) == {"num_blocks": 2, "warps": 1}


def test_no_more_warps_than_a_block_has() -> None:
    assert full_grid(GPU, LOCAL_WARPS)["warps"] == LOCAL_WARPS
    assert full_grid(KernelLimits(max_blocks=4, max_warps_per_block=6, warp_size=64), LOCAL_WARPS)["warps"] == 6
