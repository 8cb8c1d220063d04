"""`ElasticBuffer` over a pairwise matrix, bit for bit equal to the reference; and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import elastic_cases
from ranks import RankPool
from test_matrix import matrix, run
from uccl_ep import reference_v2

ELASTIC: dict[str, list[Any]] = {
    "topology": [(1, 0), (2, 0), (3, 0), (4, 0), (4, 2), (6, 3)],
    "hidden": [64, 100, 2048],
    "topk": [1, 2, 6, 8],
    "experts": [12, 36, 60],
    "tokens": ["rotate0", "rotate2", "even", "first", "idle", "zero"],
    "routing": ["random", "holes", "one_rank", "nothing", "starved"],
    "dtype": ["bf16", "fp8"],
    "index": ["int64", "int32"],
    "weights": [True, False],
    "bias": [0, 1, 2],
    "alignment": [1, 128],
    "expand": [False, True],
    "padding": [False, True],
    "cpu_sync": [True, False],
    "hybrid": [True, False],
    "multiple": [True, False],
    "deterministic": [False, True],
    "tma": [False, True],
    "copy": [True, False],
    "stream": ["sync", "async", "event", "full"],
}


def legal(row: dict[str, Any]) -> bool:
    return row["experts"] % row["topology"][0] == 0 and row["topk"] <= row["experts"]


@pytest.mark.parametrize(("row", "seed"), matrix(ELASTIC, legal, seed=5))
def test_elastic(pool: RankPool, row: dict[str, Any], seed: int) -> None:
    run(pool, elastic_cases.elastic, row, seed)


@pytest.mark.parametrize("dtype", ["fp16", "fp32", "fp64"])
def test_other_types(pool: RankPool, dtype: str) -> None:
    for expand in (False, True):
        arguments = {"tokens": [9, 0, 30, 1], "dtype": dtype, "expand": expand, "bias": 1, "multiple": not expand}
        pool.run(elastic_cases.elastic, ranks=4, domain=2, arguments=arguments)


def test_rounding_worked_example() -> None:
    """Experts 0 to 3 on rank 0, 4 to 7 on rank 1; bf16 keeps 8 bits, so 256 + 1 is a tie that rounds to even."""
    ids = torch.tensor([[0, 4, 1]])
    terms = torch.tensor([[[1.0], [256.0], [0.75]]]).bfloat16()
    # Rank 0: 1 + 0.75 = 1.75 stands at k = 2, behind rank 1's at k = 1: 256 + 1.75 = 257.75 -> 258.
    assert reference_v2.combine(terms, ids, 8, 2).item() == 258
    # One domain of both: 257.75 is rounded to 258 before the bias of 1 comes in: 259 -> 260 (ties to even).
    bias = [torch.tensor([[1.0]]).bfloat16()]
    assert reference_v2.combine(terms, ids, 8, 2, bias=bias, ranks_per_domain=2).item() == 260
    # Without, the sum in float32 is 1 + 256 + 1.75 = 258.75 -> 258.
    assert reference_v2.combine(terms, ids, 8, 2, bias=bias).item() == 258
    # -1 is no term, and the order is that of each rank's largest k: 2^24 + 1 is 2^24 in float32.
    ids = torch.tensor([[4, 0, -1, 5]])
    terms = torch.tensor([[[1.0], [2.0**24], [9.0], [1.0]]])
    assert reference_v2.combine(terms, ids, 8, 2).item() == 2.0**24 + 2
    assert reference_v2.combine(terms, ids, 8, 2, reduce_in_rank=False).item() == 2.0**24
