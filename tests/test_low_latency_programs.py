"""Random programs of low-latency calls on both paths, with warps of one lane and of 32."""

from __future__ import annotations

import pytest

from ranks import RankPool

PROGRAMS = [
    (path, lanes, seed) for seed in range(40) for path, lanes in (("direct", 32), ("direct", 1), ("packed", 32))
]


@pytest.mark.parametrize(("path", "lanes", "seed"), [
    pytest.param(*program, marks=[] if program in PROGRAMS[:10:3] or program in PROGRAMS[:3] else pytest.mark.full)
    for program in PROGRAMS
])  # fmt: skip
def test_random_program(pool: RankPool, path: str, lanes: int, seed: int) -> None:
    options = {"UCCL_EP_LOW_LATENCY_PATH": path, "UCCL_EP_HOST_LANES": str(lanes), "UCCL_EP_TIMEOUT_S": "20"}
    pool.run(
        "low_latency_programs:run", ranks=(3, 2, 4, 1)[seed % 4], options=options, timeout_s=100,
        arguments={"seed": seed, "steps": 30},
    )  # fmt: skip
