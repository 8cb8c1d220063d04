"""transformers' Qwen3-MoE, tiny and random, through its registry of experts functions."""

from __future__ import annotations

from typing import Any

import pytest

from ranks import RankPool
from versions import needs

pytestmark = needs("transformers")


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        (1, {"num_topk": 4}),
        (2, {}),
        (2, {"dtype": "bfloat16", "shard": True}),
        (4, {"shard": True}),
        (4, {"dtype": "bfloat16"}),
        (2, {"local": "grouped_mm", "exact": False, "num_topk": 4}),
        (4, {"local": "grouped_mm", "exact": False, "num_topk": 4, "shard": True}),
        (2, {"local": "batched_mm", "exact": False, "num_topk": 3, "shard": True}),
    ],
    ids=str,
)
def test_logits_are_those_of_the_eager_experts(four: RankPool, ranks: int, arguments: dict[str, Any]) -> None:
    four.run("transformers_ranks:logits", ranks=ranks, arguments=arguments, timeout_s=120)


@pytest.mark.parametrize("local", ["eager", "grouped_mm"])
def test_gradients_are_those_of_the_eager_experts(four: RankPool, local: str) -> None:
    four.run("transformers_ranks:training_step", ranks=2, arguments={"local": local}, timeout_s=120)


@pytest.mark.parametrize("ranks", [2, 3])
def test_refusals(four: RankPool, ranks: int) -> None:
    four.run("transformers_ranks:refusals", ranks=ranks, timeout_s=120)
