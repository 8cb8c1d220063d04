"""Random programs of low-latency calls on both paths, with warps of one lane and of 32, in one domain and over
transports that keep order, or none."""

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


SHM = {"UCCL_EP_TRANSPORT": "shm"}
OVER = {  # the environment, ranks, ranks a domain
    "shm": (SHM, 3, 1),
    "domains of 2": (SHM, 4, 2),
    "3 proxies": ({**SHM, "UCCL_EP_NUM_PROXIES": "3"}, 2, 1),
    "srd": ({"UCCL_EP_TRANSPORT": "sim", "UCCL_EP_SIM_PROFILE": "srd"}, 3, 1),
    "iwarp": ({"UCCL_EP_TRANSPORT": "sim", "UCCL_EP_SIM_PROFILE": "iwarp"}, 2, 1),
}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 20))])
@pytest.mark.parametrize("lanes", [1, 32])
@pytest.mark.parametrize("over", OVER)
def test_random_program_over_a_transport(pool: RankPool, over: str, lanes: int, seed: int) -> None:
    environment, ranks, domain = OVER[over]
    options = {**environment, "UCCL_EP_HOST_LANES": str(lanes), "UCCL_EP_TIMEOUT_S": "30"}
    pool.run(
        "low_latency_programs:run", ranks=ranks, domain=domain, options=options, timeout_s=100,
        arguments={"seed": seed, "steps": 30},
    )  # fmt: skip
