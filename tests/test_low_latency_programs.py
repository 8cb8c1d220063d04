"""Random programs of low-latency calls on both paths, with warps of one lane and of 32."""

from __future__ import annotations

import pytest

from ranks import RankPool


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(4, 40))])
@pytest.mark.parametrize(("path", "lanes"), [("direct", "32"), ("direct", "1"), ("packed", "32")])
def test_random_program(pool: RankPool, path: str, lanes: str, seed: int) -> None:
    options = {"UCCL_EP_LOW_LATENCY_PATH": path, "UCCL_EP_HOST_LANES": lanes, "UCCL_EP_TIMEOUT_S": "20"}
    pool.run(
        "low_latency_programs:run", ranks=(3, 2, 4, 1)[seed % 4], options=options, timeout_s=100,
        arguments={"seed": seed, "steps": 30},
    )  # fmt: skip
