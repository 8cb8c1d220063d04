"""Queue pairs that fail in the middle of dispatch and combine, at random and on any rank: under every plan the run goes
on exactly. Where a queue pair cannot be replaced, every rank raises; on the rank that noticed the words name device,
peer and queue pair.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import verbs_cases
from devices import STEP, device_of

from ranks import RankPool

BLAME = re.compile(r"rank (\d+) is at fault .* as rank (\d+) noticed")


def blamed(said: list[str], device: str) -> set[int]:
    """Which ranks are blamed; every rank raised, and one that noticed has the transport's words."""
    found = [BLAME.search(it) for it in said]
    assert all(found), said
    reporters = {int(it.group(2)) for it in found if it}
    words = re.compile(rf"{device} port \d+, towards rank \d+ \(lane \d+, queue pair \d+\): completion status \d+")
    assert any(words.search(said[it]) for it in reporters), said
    return {int(it.group(1)) for it in found if it}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    ranks = RankPool(4)
    try:
        yield ranks
    finally:
        ranks.stop()


def options(device: str, plan: str, **own: object) -> dict[str, str]:
    return {
        "UCCL_EP_TRANSPORT": "ibverbs",
        "UCCL_EP_IBVERBS_DEVICE": device,
        "UCCL_EP_IBVERBS_PLAN": plan,
        "UCCL_EP_IBVERBS_TIMEOUT": "12",  # 17 ms, four times: what a peer does not acknowledge fails soon
        "UCCL_EP_IBVERBS_RETRY": "3",
        "UCCL_EP_TIMEOUT_S": "120",
        **{f"UCCL_EP_IBVERBS_{name.upper()}": str(value) for name, value in own.items()},
    }


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("plan", ["native", "counted", "fenced"])
def test_the_run_goes_on_exactly(pool: RankPool, connected_device: str, plan: str, ranks: int) -> None:
    # All ranks of a guest share one CPU: what a busy one answers late is no reason to give it up.
    settings = options(connected_device, plan, renew_timeout_s=30)
    who = [0] if ranks == 2 else [1, 2]
    found = pool.run(
        verbs_cases.broken_lanes,
        ranks=ranks,
        domain=1,
        options=settings,
        arguments={"seconds": 6.0 if STEP == 1 else 3.0, "who": who},
        timeout_s=240,
    )
    print(f"\n{plan}, {ranks} ranks: {found}")
    assert sum(it["broken"] for it in found) >= 5
    assert all(it["replaced"] >= 1 for it in found), found
    assert sum(it["retried"] for it in found) > 0, "nothing was under way when the queue pairs failed"


@pytest.mark.parametrize("way", [("iwarp", "fenced", {}), ("connected", "native", {"renew_timeout_s": 0})], ids=str)
def test_an_error_that_is_final_reaches_every_rank(pool: RankPool, way: tuple[str, str, dict[str, object]]) -> None:
    kind, plan, own = way
    device = device_of(kind)
    said = pool.run(
        verbs_cases.broken_for_good,
        ranks=4,
        domain=1,
        options=options(device, plan, **own),
        arguments={"who": 2},
        timeout_s=120,
    )
    print("\n" + "\n".join(said))
    assert blamed(said, device) <= {0, 2}, said


def test_an_error_that_comes_back_is_final(pool: RankPool, connected_device: str) -> None:
    """A rank's memory cannot be reached any more: after a few new queue pairs every rank is told so."""
    said = pool.run(
        verbs_cases.memory_taken_away,
        ranks=3,
        domain=1,
        options=options(connected_device, "counted", renew_timeout_s=30),
        arguments={"who": 1},
        timeout_s=120,
    )
    print("\n" + "\n".join(said))
    # It can tell nobody what it found, so those who lose it and it itself may blame one another.
    assert blamed(said, connected_device) <= {0, 1, 2}, said
