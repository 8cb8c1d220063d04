"""megatron-core's MoELayer with the flex dispatcher and its deepep backend, which is uccl_ep, against allgather."""

from __future__ import annotations

from typing import Any

import pytest

from ranks import RankPool
from versions import needs

pytestmark = needs("megatron-core")


@pytest.mark.parametrize(
    "arguments",
    [
        {"expert_parallel_size": 2, "dtype": "float32", "num_topk": 4},
        {"expert_parallel_size": 2, "dtype": "bfloat16", "num_topk": 4, "drop": True},
        {"expert_parallel_size": 2, "dtype": "bfloat16", "num_topk": 3, "idle_rank": 0},
        {"expert_parallel_size": 4, "dtype": "float32"},
        {"expert_parallel_size": 4, "dtype": "bfloat16"},
        {"expert_parallel_size": 4, "dtype": "float32", "drop": True},
        {"expert_parallel_size": 4, "dtype": "float32", "idle_rank": 2},
        {"expert_parallel_size": 4, "dtype": "bfloat16", "drop": True, "idle_rank": 3},
    ],
    ids=lambda arguments: "-".join(str(value) for value in arguments.values()),
)
@pytest.mark.parametrize("domain", [0, 1])
def test_moe_layer_is_that_of_the_allgather_dispatcher(four: RankPool, domain: int, arguments: dict[str, Any]) -> None:
    """Bit for bit, forward and backward. Two EP groups side by side where their size is 2.

    At most two ranks hold experts of a token in these cases, so that sums have the same rounding in any order.
    """
    four.run("megatron_ranks:moe_layer", ranks=4, domain=domain, arguments=arguments, timeout_s=200)


def test_gpt_keeps_its_loss(four: RankPool) -> None:
    """50 steps: the same loss at every step, and it falls."""
    arguments = {"expert_parallel_size": 4, "dtype": "float32"}
    losses = four.run("megatron_ranks:train_gpt", ranks=4, arguments=arguments, timeout_s=240)
    for of_rank in losses:
        assert len(of_rank) == 50 and of_rank[-1] < of_rank[0] - 1
