"""Dispatch and combine in both modes over verbs, bit for bit equal to the reference, under each ordering plan.

Every rank is a scale-up domain of its own (or half the ranks are), so all that crosses goes through the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import verbs_cases
from devices import STEP, device_of

import test_matrix
from pairwise import pairwise
from ranks import RankPool

SMALL: dict[str, list[Any]] = {
    "topology": [(2, 1), (4, 1), (4, 2)],
    "hidden": [64, 100, 1024],
    "topk": [1, 2, 4, 8],
    "experts": [8, 12, 64],
    "tokens": ["rotate0", "rotate2", "even", "first", "idle", "zero"],
}


@dataclasses.dataclass(frozen=True)
class Way:
    """A kind of device and the plan on it."""

    kind: str
    plan: str

    def __str__(self) -> str:
        return f"{self.kind}-{self.plan}"


WAYS = [Way("connected", "native"), Way("connected", "counted"), Way("connected", "fenced"), Way("iwarp", "fenced")]


def rows(parameters: dict[str, list[Any]], seed: int) -> list[dict[str, Any]]:
    small = {name: SMALL.get(name, values) for name, values in parameters.items()}
    if "most" in small:
        small["most"] = [1, 8, verbs_cases.MOST_TOKENS]
    found = pairwise(small, test_matrix.legal, seed=seed)
    return sorted(found, key=lambda row: row["topology"])


HIGH_THROUGHPUT = rows(test_matrix.HIGH_THROUGHPUT, 11)
LOW_LATENCY = rows(test_matrix.LOW_LATENCY, 12)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = RankPool(4)
    try:
        yield pool
    finally:
        pool.stop()


@pytest.fixture(params=WAYS, ids=str, scope="module")
def options(request: pytest.FixtureRequest) -> dict[str, str]:
    way = request.param
    return {
        "UCCL_EP_TRANSPORT": "ibverbs",
        "UCCL_EP_IBVERBS_DEVICE": device_of(way.kind),
        "UCCL_EP_IBVERBS_PLAN": way.plan,
        "UCCL_EP_TIMEOUT_S": "240",  # all ranks and their proxies take turns on the one CPU of a guest
    }


def run(ranks: RankPool, case: Any, row: dict[str, Any], options: dict[str, str], seed: int) -> None:
    arguments = {name: value for name, value in row.items() if name != "topology"}
    arguments |= {"tokens": [min(count, 200) for count in test_matrix.token_counts(row, seed)], "seed": seed}
    num_ranks, domain = row["topology"]
    ranks.run(case, ranks=num_ranks, domain=domain, options=options, arguments=arguments, timeout_s=300)


@pytest.mark.parametrize("index", range(0, len(HIGH_THROUGHPUT), STEP))
def test_high_throughput(ranks: RankPool, options: dict[str, str], index: int) -> None:
    run(ranks, verbs_cases.high_throughput, HIGH_THROUGHPUT[index], options, index)


@pytest.mark.parametrize("index", range(0, len(LOW_LATENCY), STEP))
def test_low_latency(ranks: RankPool, options: dict[str, str], index: int) -> None:
    run(ranks, verbs_cases.low_latency, {**LOW_LATENCY[index], "dtype": "bf16"}, options, index)


def test_the_plan_and_device_in_use_are_shown(ranks: RankPool, options: dict[str, str]) -> None:
    for shown in ranks.run(verbs_cases.describe, ranks=2, domain=1, options=options):
        assert options["UCCL_EP_IBVERBS_PLAN"] in shown, shown
        assert options["UCCL_EP_IBVERBS_DEVICE"] in shown, shown
