"""Dispatch and combine in both modes over a pairwise matrix, bit for bit equal to the reference.

Pairwise: every pair of values of two parameters that is legal occurs in some case. ``make test`` runs the default
matrix; ``make test-full`` adds matrices of other seeds, and of low-latency outputs of up to 256 MB a rank. With
``--sample`` each single value still occurs, but not each pair.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest

import cases
import closed_form
from pairwise import pairwise, sample
from ranks import RankPool

# (ranks, ranks per scale-up domain; 0: one domain)
TOPOLOGIES = [(1, 0), (2, 0), (3, 0), (4, 0), (6, 0), (2, 1), (4, 2), (6, 3), (6, 2)]
HIDDEN = [64, 100, 1536, 2048, 2880, 7168]
TOPK = [1, 2, 4, 6, 8, 10, 12]
EXPERTS = [8, 12, 36, 64, 160, 256, 288, 512, 510]
TOKENS = ["rotate0", "rotate1", "rotate2", "rotate3", "rotate4", "even", "first", "idle", "zero"]

HIGH_THROUGHPUT: dict[str, list[Any]] = {
    "topology": TOPOLOGIES,
    "hidden": HIDDEN,
    "topk": TOPK,
    "experts": EXPERTS,
    "tokens": TOKENS,
    "routing": list(closed_form.ROUTINGS),
    "dtype": ["bf16", "fp16", "fp32", "fp64", "fp8", "uint8"],
    "index": ["int64", "int32"],
    "weights": [True, False],
    "bias": [0, 1, 2],
    "cached": [False, True],
    "contiguous": [True, False],
    "alignment": [1, 128],
    "worst": [False, True],
    "stream": ["sync", "async", "event", "full"],
}

LOW_LATENCY: dict[str, list[Any]] = {
    "topology": TOPOLOGIES,
    "hidden": HIDDEN,
    "topk": TOPK,
    "experts": EXPERTS,
    "most": [1, 8, 128, 1000],
    "tokens": TOKENS,
    "routing": list(closed_form.ROUTINGS),
    "index": ["int64", "int32"],
    "dtype": ["bf16", "fp16", "fp32"],
    "cast": ["none", "fp8", "round", "ue8m0"],
    "hook": [True, False],
    "zero_copy": [False, True],
    "out": [False, True],
    "contiguous": [True, False],
}


def legal(row: dict[str, Any]) -> bool:
    return row["experts"] % row["topology"][0] == 0 and row["topk"] <= row["experts"]


def legal_low_latency(row: dict[str, Any], most_bytes: int) -> bool:
    """``most_bytes`` bounds the output of a rank. get_next_low_latency_combine_buffer is bf16, as in DeepEP."""
    nbytes = row["experts"] * row["most"] * row["hidden"] * cases.DTYPES[row["dtype"]].itemsize
    return legal(row) and nbytes <= most_bytes and (row["dtype"] == "bf16" or not row["zero_copy"])


def token_counts(row: dict[str, Any], seed: int) -> list[int]:
    kind, ranks, most = row["tokens"], row["topology"][0], row.get("most", 1000)
    if kind.startswith("rotate"):
        return closed_form.token_counts("rotate", ranks, int(kind[6:]), most)
    return closed_form.token_counts(kind, ranks, seed, most)


def name(row: dict[str, Any]) -> str:
    ranks, domain = row["topology"]
    rest = [f"{k}={v}" for k, v in row.items() if k != "topology"]
    return f"{ranks}x{domain or ranks}-" + "-".join(rest)


def matrix(parameters: dict[str, list[Any]], rule: Any, seed: int) -> list[Any]:
    """Cases as pytest parameters, sorted by topology so that buffers are kept from case to case."""
    rows = pairwise(parameters, rule, seed=seed)
    rows.sort(key=lambda row: row["topology"])
    return [pytest.param(row, seed + i, id=name(row)) for i, row in enumerate(rows)]


def run(pool: RankPool, case: Any, row: dict[str, Any], seed: int) -> None:
    arguments = {k: v for k, v in row.items() if k != "topology"}
    arguments |= {"tokens": token_counts(row, seed), "seed": seed}
    ranks, domain = row["topology"]
    pool.run(case, ranks=ranks, domain=domain, arguments=arguments, timeout_s=120)


HIGH_THROUGHPUT_CASES = matrix(HIGH_THROUGHPUT, legal, seed=1)
LOW_LATENCY_CASES = matrix(LOW_LATENCY, lambda row: legal_low_latency(row, 48 << 20), seed=2)


@pytest.mark.parametrize(("row", "seed"), HIGH_THROUGHPUT_CASES)
def test_high_throughput(pool: RankPool, row: dict[str, Any], seed: int) -> None:
    run(pool, cases.high_throughput, row, seed)


@pytest.mark.parametrize(("row", "seed"), LOW_LATENCY_CASES)
def test_low_latency(pool: RankPool, row: dict[str, Any], seed: int) -> None:
    run(pool, cases.low_latency, row, seed)


def full_matrix() -> list[Any]:
    rows = [("high_throughput", c) for s in (101, 102, 103) for c in matrix(HIGH_THROUGHPUT, legal, seed=s * 1000)]
    for s in (104, 105):
        cases_of_seed = matrix(LOW_LATENCY, lambda row: legal_low_latency(row, 256 << 20), seed=s * 1000)
        rows += [("low_latency", c) for c in cases_of_seed]
    return [pytest.param(mode, *c.values, id=f"{c.values[1]}-{mode}-{c.id}") for mode, c in rows]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The larger matrix takes seconds to generate: only where it is asked for."""
    if metafunc.definition.name == "test_full_matrix":
        wanted = "full" in (metafunc.config.getoption("-m") or "")
        metafunc.parametrize(("mode", "row", "seed"), full_matrix() if wanted else [("high_throughput", {}, 0)])


@pytest.mark.full
def test_full_matrix(pool: RankPool, mode: str, row: dict[str, Any], seed: int) -> None:
    run(pool, getattr(cases, mode), row, seed)


def test_every_legal_pair_occurs() -> None:
    """The generator against brute force, on parameters small enough for that."""
    parameters = {"a": [0, 1, 2], "b": [0, 1], "c": [0, 1, 2, 3], "d": [False, True]}

    def rule(row: dict[str, Any]) -> bool:
        return row["a"] + row["b"] <= row["c"] and (row["d"] or row["b"] == 0)

    def pairs(rows: list[dict[str, Any]]) -> set[Any]:
        return {p for row in rows for p in itertools.combinations(row.items(), 2)}

    everything = [dict(zip(parameters, values, strict=True)) for values in itertools.product(*parameters.values())]
    found = pairwise(parameters, rule, seed=3)
    assert all(rule(row) for row in found)
    assert pairs(found) == pairs([row for row in everything if rule(row)])
    assert found == pairwise(parameters, rule, seed=3)
    assert len(found) < len([row for row in everything if rule(row)])


@pytest.mark.parametrize("times", [1, 4])
@pytest.mark.parametrize("rows", [HIGH_THROUGHPUT_CASES, LOW_LATENCY_CASES], ids=["high_throughput", "low_latency"])
def test_a_sample_has_every_value(rows: list[Any], times: int) -> None:
    everything = [case.values[0] for case in rows]
    chosen = [everything[i] for i in sample(everything, times)]
    assert len(chosen) < len(everything) / 2
    for parameter in everything[0]:
        there = Counter(row[parameter] for row in everything)
        assert {v: min(n, times) for v, n in Counter(row[parameter] for row in chosen).items()} == {
            v: min(n, times) for v, n in there.items()
        }, parameter
