"""The primitives of torchtitan 0.3, which call ElasticBuffer, forward and backward."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ranks import RankPool

pytestmark = pytest.mark.skipif(
    "UCCL_EP_TEST_TORCHTITAN_3" not in os.environ, reason="needs torchtitan 0.3.0's files: run .ci/frameworks"
)


@pytest.fixture(scope="module")
def others() -> Iterator[RankPool]:
    """Processes of their own: torchtitan 0.2 and 0.3 register operators of the same names."""
    names = [name for name in os.environ if name.startswith("UCCL_EP_")]
    ranks = RankPool(4, {name: os.environ[name] for name in names} | {"PYTHONWARNINGS": "ignore"})
    try:
        yield ranks
    finally:
        ranks.stop()


@pytest.mark.parametrize(("ranks", "domain"), [(2, 0), (4, 2)])
def test_training_and_inference(others: RankPool, ranks: int, domain: int) -> None:
    others.run("torchtitan3_ranks:block", ranks=ranks, domain=domain, timeout_s=120)
