"""One test per fault that users of expert-parallel libraries have reported, by its number in the project's table.

Where each row is tested:

====================================  ==========================================================
row                                   where
====================================  ==========================================================
1, 2, 6, 8, 26, 28, 32                set-up and life of buffers: this file, and test_life.py
3, 4, 7, 13-21, 23, 27, 29, 30, 35    inputs: this file
5, 24, 25                             repetition and interleaving: test_stress.py
9, 10, 11, 12, 31                     ranks that die or are late: test_liveness.py
====================================  ==========================================================

Rows that cannot occur on CPU tensors over memory of one host, and why:

===  ==============================================================================================
22   CUDA graphs: there is no graph capture of CPU work
33   a version matrix of one NIC's drivers: no such NIC, and this library reads no version of any
34   overlap on GPU streams: CPU work has none (the arguments are accepted and checked in row 3)
===  ==============================================================================================
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import cases
import closed_form
import fault_cases
import life_cases
import wrong_calls
from ranks import RankPool

ONE_AND_SEVERAL_DOMAINS = [(4, 0), (4, 2)]


@pytest.mark.parametrize(("ranks", "domain"), ONE_AND_SEVERAL_DOMAINS)
def test_fault_03_events_and_streams(pool: RankPool, ranks: int, domain: int) -> None:
    pool.run(fault_cases.all_streams, ranks=ranks, domain=domain)


@pytest.mark.parametrize(("ranks", "domain"), ONE_AND_SEVERAL_DOMAINS)
@pytest.mark.parametrize("tokens", [[0, 5, 9, 3], [0, 0, 7, 0], [0, 0, 0, 0]])
def test_fault_04_zero_tokens(pool: RankPool, ranks: int, domain: int, tokens: list[int]) -> None:
    pool.run(fault_cases.both_modes, ranks=ranks, domain=domain, arguments={"tokens": tokens})


@pytest.mark.parametrize("ranks", [3, 5, 6])
def test_fault_07_odd_group_sizes(pool: RankPool, ranks: int) -> None:
    arguments = {"tokens": [7 + 3 * r for r in range(ranks)], "experts": 3 * ranks}
    pool.run(fault_cases.both_modes, ranks=ranks, arguments=arguments)


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "domain"), [(7, 0), (12, 0), (12, 4), (24, 0), (24, 8)])
def test_fault_07_large_group_sizes(ranks: int, domain: int) -> None:
    import os

    large = RankPool(ranks, {k: v for k, v in os.environ.items() if k.startswith("UCCL_EP_")})
    try:
        arguments = {"tokens": [7 + 3 * (r % 5) for r in range(ranks)], "experts": 2 * ranks}
        large.run(fault_cases.both_modes, ranks=ranks, domain=domain, arguments=arguments, timeout_s=300)
    finally:
        large.stop()


FRAMEWORK_CALLS: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]] = [
    ("Megatron", "Buffer", ("group", 1, 2), {}),
    (
        "vLLM",
        "Buffer",
        (),
        {
            "group": "group",
            "num_nvl_bytes": 1,
            "num_rdma_bytes": 1,
            "low_latency_mode": True,
            "num_qps_per_rank": 4,
            "allow_nvlink_for_low_latency_mode": True,
            "allow_mnnvl": False,
            "explicitly_destroy": True,
            "enable_shrink": False,
        },
    ),
    ("SGLang", "Buffer", ("group", 1, 2), {"low_latency_mode": True, "num_qps_per_rank": 4, "allow_mnnvl": False}),
    (
        "Megatron",
        "get_dispatch_layout",
        ("idx", 8),
        {"previous_event": None, "async_finish": True, "allocate_on_comm_stream": True},
    ),
    (
        "vLLM",
        "dispatch",
        (),
        {
            "x": 0,
            "handle": None,
            "num_tokens_per_rank": 0,
            "num_tokens_per_rdma_rank": 0,
            "is_token_in_rank": 0,
            "num_tokens_per_expert": 0,
            "topk_idx": 0,
            "topk_weights": 0,
            "expert_alignment": 1,
            "config": None,
            "previous_event": None,
            "async_finish": True,
            "allocate_on_comm_stream": False,
        },
    ),
    ("Primus", "dispatch", ("x",), {"num_worst_tokens": 9, "topk_idx": 0}),
    (
        "vLLM",
        "combine",
        (),
        {
            "x": 0,
            "handle": 0,
            "topk_weights": None,
            "config": None,
            "previous_event": None,
            "async_finish": True,
            "allocate_on_comm_stream": False,
        },
    ),
    (
        "vLLM",
        "low_latency_dispatch",
        ("x", "ids", 8, 16),
        {
            "use_fp8": True,
            "round_scale": False,
            "use_ue8m0": False,
            "async_finish": False,
            "return_recv_hook": True,
        },
    ),
    (
        "vLLM",
        "low_latency_combine",
        ("x", "ids", "weights", "handle"),
        {"async_finish": False, "zero_copy": False, "return_recv_hook": True, "out": None},
    ),
]


@pytest.mark.parametrize(("framework", "method", "positional", "keywords"), FRAMEWORK_CALLS)
def test_fault_08_signatures(
    framework: str, method: str, positional: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    """What frameworks pass binds to honest signatures."""
    import uccl_ep

    target = uccl_ep.Buffer if method == "Buffer" else getattr(uccl_ep.Buffer, method)
    signature = inspect.signature(target)
    kinds = {p.kind for p in signature.parameters.values()}
    assert inspect.Parameter.VAR_POSITIONAL not in kinds
    signature.bind(*(positional if method == "Buffer" else (None, *positional)), **keywords)


def test_fault_08_unknown_future_arguments(pool: RankPool) -> None:
    pool.run(life_cases.same_as_before, ranks=2, arguments={"options": {"enable_shrink": False, "use_fabric": False}})


@pytest.mark.parametrize(("ranks", "domain"), ONE_AND_SEVERAL_DOMAINS)
def test_fault_13_starved_rank_forward_and_backward(pool: RankPool, ranks: int, domain: int) -> None:
    pool.run(fault_cases.backward_of_a_starved_rank, ranks=ranks, domain=domain)


@pytest.mark.parametrize(("ranks", "domain"), ONE_AND_SEVERAL_DOMAINS)
@pytest.mark.parametrize("routing", ["one_rank", "one_expert"])
def test_fault_14_all_to_one(pool: RankPool, ranks: int, domain: int, routing: str) -> None:
    arguments = {"tokens": [300, 257, 300, 0], "routing": routing, "hidden": 256}
    pool.run(fault_cases.both_modes, ranks=ranks, domain=domain, arguments=arguments)


def test_fault_15_worst_case_receive(pool: RankPool) -> None:
    arguments = {"tokens": [2000] * 4, "routing": "one_rank", "hidden": 2048, "experts": 8, "topk": 2}
    pool.run(cases.high_throughput, ranks=4, arguments=arguments)


def test_fault_15_worst_case_given_too_small(pool: RankPool) -> None:
    pool.run(fault_cases.worst_case_too_small, ranks=3, arguments={"who": 1})


@pytest.mark.full
def test_fault_15_more_than_2_to_31_bytes(pool: RankPool) -> None:
    pool.run(fault_cases.huge, ranks=2, arguments={"rows": 140_000}, timeout_s=300)


@pytest.mark.parametrize("fill", [-1, 0])
def test_fault_16_low_latency_up_to_the_limit(pool: RankPool, fill: int) -> None:
    tokens = [8 + fill, 8, 1]
    pool.run(cases.low_latency, ranks=3, arguments={"tokens": tokens, "most": 8})


def test_fault_16_low_latency_over_the_limit(pool: RankPool) -> None:
    texts = pool.run(wrong_calls.refused, ranks=3, arguments={"who": 1, "wrong": "ll_over_the_limit"})
    assert texts[0] is texts[2] is None and texts[1]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
def test_fault_17_non_contiguous_and_fp16(pool: RankPool, dtype: str) -> None:
    arguments = {"tokens": [9, 4, 0, 13], "dtype": dtype, "contiguous": False, "cached": True, "bias": 1}
    pool.run(cases.high_throughput, ranks=4, domain=2, arguments=arguments)


@pytest.mark.parametrize("index", ["int32", "int64"])
def test_fault_18_index_types(pool: RankPool, index: str) -> None:
    pool.run(fault_cases.both_modes, ranks=3, arguments={"tokens": [9, 4, 13], "index": index, "routing": "holes"})


@pytest.mark.parametrize("wrong", ["layout_of_int16", "index_of_int16", "ll_index_of_int16"])
def test_fault_18_other_index_types_are_refused(pool: RankPool, wrong: str) -> None:
    pool.run(wrong_calls.refused, ranks=3, arguments={"who": 0, "wrong": wrong})


@pytest.mark.parametrize("hidden", [2880, 3072, 1536, 100, 8, 24, 1000])
@pytest.mark.parametrize("cast", ["none", "fp8", "round", "ue8m0"])
def test_fault_19_hidden_sizes(pool: RankPool, hidden: int, cast: str) -> None:
    arguments = {"tokens": [9, 4], "hidden": hidden, "most": 16, "cast": cast}
    pool.run(cases.low_latency, ranks=2, arguments=arguments)
    dtype = "bf16" if cast == "none" else "fp8"
    pool.run(cases.high_throughput, ranks=2, arguments={"tokens": [9, 4], "hidden": hidden, "dtype": dtype})


@pytest.mark.parametrize(("ranks", "domain"), ONE_AND_SEVERAL_DOMAINS)
@pytest.mark.parametrize("most", [256, 1024])
def test_fault_20_only_rank_0_has_tokens(pool: RankPool, ranks: int, domain: int, most: int) -> None:
    arguments = {"tokens": [most, 0, 0, 0], "most": most, "experts": 8}
    for seed in range(3):
        pool.run(cases.low_latency, ranks=ranks, domain=domain, arguments={**arguments, "seed": seed})


def test_fault_20_the_others_send_only_minus_one(pool: RankPool) -> None:
    pool.run(fault_cases.only_rank_0_picks, ranks=4, domain=2, arguments={"most": 256, "rounds": 10})


def test_fault_21_deterministic_mode(pool: RankPool) -> None:
    pool.run(fault_cases.deterministic_mode, ranks=4, domain=2)


@pytest.mark.parametrize("wrong", ["ll_combine_index_shape", "ll_combine_received_ids"])
def test_fault_23_other_ids_in_combine(pool: RankPool, wrong: str) -> None:
    pool.run(wrong_calls.refused, ranks=3, arguments={"who": 2, "wrong": wrong})


@pytest.mark.parametrize(("ranks", "domain"), [(1, 0), (2, 1), (3, 1), (4, 1), (4, 2), (6, 2), (6, 3), (6, 1)])
def test_fault_27_ranks_per_node(pool: RankPool, ranks: int, domain: int) -> None:
    arguments = {"tokens": [20 + 3 * r for r in range(ranks)], "bias": 1}
    pool.run(cases.high_throughput, ranks=ranks, domain=domain, arguments=arguments)


def test_fault_28_queue_pairs_never_change_results(pool: RankPool) -> None:
    for count in (1, 7, 24, 100):
        pool.run(life_cases.same_as_before, ranks=2, arguments={"options": {"num_qps_per_rank": count}})


def test_fault_29_very_unequal_counts(pool: RankPool) -> None:
    for tokens in ([3000, 1, 0, 17], [1, 3000, 2, 2999]):
        pool.run(cases.high_throughput, ranks=4, domain=2, arguments={"tokens": tokens})


def test_fault_30_same_bits_as_allgather(pool: RankPool) -> None:
    """The order (source rank, source index) is that of an all-gather, whatever the topology: every case is checked
    bit for bit against a reference in that order; here the topologies are also checked against each other."""
    sums = [pool.run(fault_cases.fingerprint, ranks=6, domain=domain) for domain in (0, 1, 2, 3)]
    assert sums[0] == sums[1] == sums[2] == sums[3]


@pytest.mark.parametrize(("ranks", "domain"), ONE_AND_SEVERAL_DOMAINS)
def test_fault_35_empty_half_of_a_batch(pool: RankPool, ranks: int, domain: int) -> None:
    pool.run(fault_cases.split_batch, ranks=ranks, domain=domain)


def test_every_row_of_the_table_is_tested_or_excused() -> None:
    names = "\n".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    tested = {int(n) for name in re.findall(r"def test_fault((?:_\d\d)+)_", names) for n in name[1:].split("_")}
    excused = {int(n) for n in re.findall(r"^(\d+) {3}", __doc__ or "", re.MULTILINE)}
    assert excused == {22, 33, 34}
    assert tested | excused == set(range(1, 36)), set(range(1, 36)) - tested - excused


@pytest.mark.parametrize("wrong", wrong_calls.NAMES)
def test_wrong_calls_are_refused_before_anything_is_sent(pool: RankPool, wrong: str) -> None:
    texts = pool.run(wrong_calls.refused, ranks=3, arguments={"who": closed_form.POOL % 3, "wrong": wrong})
    assert sum(t is not None for t in texts) == 1
