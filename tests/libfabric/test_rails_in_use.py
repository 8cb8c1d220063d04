"""A rail of one rank dies under dispatch and combine, in the middle of writes: every step stays exact. With all rails
of a rank gone, every rank gets an error, which names rank and rail where the loss was noticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import rail_cases
from variants import NETWORK, VARIANTS, Variant

from ranks import RankPool

WHO = 1
STEPS, AFTER = 16, 4
ATTEMPTS = 8
WAYS = [(variant, "endpoint") for variant in VARIANTS] + [(variant, "connections") for variant in NETWORK]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    ranks = RankPool(4)
    try:
        yield ranks
    finally:
        ranks.stop()


def run(
    pool: RankPool, variant: Variant, ranks: int, how: str, rails: list[int], timeout_s: float
) -> list[dict[str, Any]]:
    own = {**variant.options, "rails": 2, "stripe_bytes": 16384, "lanes": 1}
    options = {f"UCCL_EP_LIBFABRIC_{name.upper()}": str(value) for name, value in own.items()}
    return pool.run(
        rail_cases.lost_rails,
        ranks=ranks,
        domain=1,
        options={**options, "UCCL_EP_TRANSPORT": "libfabric", "UCCL_EP_TIMEOUT_S": str(timeout_s)},
        arguments={"who": WHO, "how": how, "rails": rails, "steps": STEPS, "after": AFTER},
        timeout_s=60,
    )


def check_errors(found: list[dict[str, Any]], timeout_s: float) -> None:
    for it in found:
        assert it["error"] is not None, found
        assert WHO in (it["error"]["rank"], it["error"]["reporter"]), found
        assert it["seconds"] < timeout_s + 10.0, found


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("variant", "how"), WAYS, ids=str)
def test_a_rail_lost_under_dispatch_and_combine(pool: RankPool, variant: Variant, how: str, ranks: int) -> None:
    """Until a loss has found writes under way, which then went over the other rail, as chance has it."""
    for _ in range(ATTEMPTS):
        found = run(pool, variant, ranks, how, [1], 30.0)
        assert all(it["error"] is None and it["steps"] == STEPS and it["failed"] == 0 for it in found), found
        assert all(it["split"] > 0 for it in found), found
        if how == "endpoint":  # a connection that was cut with nothing under way is made again, and no rail is lost
            assert found[WHO]["rails_lost"] == ranks - 1, found
        if sum(it["moved"] for it in found) > 0:
            return
    raise AssertionError(f"no write was under way in any of {ATTEMPTS} losses: {found}")


@pytest.mark.parametrize(("variant", "how"), [(NETWORK[0], "endpoint"), (NETWORK[1], "connections")], ids=str)
def test_all_rails_lost_under_dispatch_and_combine(pool: RankPool, variant: Variant, how: str) -> None:
    """Every rank raises. Connections that were cut may also come back in time: then all steps of all are exact."""
    timeout_s = 4.0
    found = run(pool, variant, 4, how, [0, 1], timeout_s)
    if how == "connections" and all(it["error"] is None for it in found):
        assert all(it["steps"] == STEPS for it in found), found
    else:
        check_errors(found, timeout_s)
        assert any("rail " in it["error"]["message"] for it in found), found  # the words of one that noticed
