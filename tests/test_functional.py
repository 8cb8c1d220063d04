"""`uccl_ep.functional`: gradients, operators and compilation of an MoE block, on several ranks."""

from __future__ import annotations

from typing import Any

import pytest

import functional_cases
from ranks import RankPool


@pytest.mark.parametrize(
    ("ranks", "domain", "arguments"),
    [
        (1, 0, {}),
        (2, 0, {"worst": True, "alignment": 4}),
        (3, 0, {"alignment": 8, "idle_rank": 1}),
        (4, 2, {}),
        (4, 2, {"worst": True, "dtype": "float32", "alignment": 4, "idle_rank": 0}),
        (4, 0, {"dtype": "bfloat16", "weights_dtype": "float32", "num_topk": 1, "dropped": False}),
        (2, 1, {"dtype": "bfloat16", "weights_dtype": "bfloat16", "num_topk": 2, "num_experts": 4}),
        (2, 0, {"dtype": "float32", "weights_dtype": "float64"}),
    ],
    ids=str,
)
def test_gradients_are_those_of_one_rank(pool: RankPool, ranks: int, domain: int, arguments: dict[str, Any]) -> None:
    pool.run(functional_cases.gradients, ranks=ranks, domain=domain, arguments=arguments)


@pytest.mark.parametrize("worst", [False, True])
def test_gradcheck_in_float64(pool: RankPool, worst: bool) -> None:
    arguments = {"worst": worst, "second_order": worst}
    pool.run(functional_cases.finite_differences, ranks=3, domain=1, arguments=arguments)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradient_of_weights_alone(pool: RankPool, dtype: str) -> None:
    pool.run(functional_cases.weights_alone, ranks=3, arguments={"dtype": dtype})


def test_tail_of_the_worst_case(pool: RankPool) -> None:
    pool.run(functional_cases.tail_of_worst_case, ranks=2)


def test_operators_keep_their_promises(pool: RankPool) -> None:
    pool.run(functional_cases.operators_keep_their_promises, ranks=2)


@pytest.mark.parametrize("worst", [False, True])
def test_compiles_without_a_graph_break(pool: RankPool, worst: bool) -> None:
    """Traced and differentiated by torch.compile; the code generator is in tests/frameworks, since it takes long."""
    pool.run(functional_cases.compiled, ranks=2, arguments={"backend": "aot_eager", "worst": worst}, timeout_s=120)


def test_refusals(pool: RankPool) -> None:
    pool.run(functional_cases.refused, ranks=2)
