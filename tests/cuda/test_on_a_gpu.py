"""Dispatch and combine on real GPUs (CUDA, or ROCm under torch's same name), exact. Skipped where there is none.

Several ranks may share a GPU, so any machine with one can run all of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import on_gpu

from ranks import RankPool

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")

RANKS = max(2, min(4, torch.cuda.device_count()))


@pytest.fixture(scope="module")
def gpu_pool() -> Iterator[RankPool]:
    pool = RankPool(4, {"PYTHONPATH": str(Path(__file__).parent)})
    try:
        yield pool
    finally:
        pool.stop()


def run(
    pool: RankPool,
    function: str,
    *,
    ranks: int = RANKS,
    domain: int = 0,
    limit_s: float = 0,
    may_die: tuple[int, ...] = (),
    num_sms: int = 0,
    **arguments: Any,
) -> list[Any]:
    """``function``, "module:name" of the common suite, on buffers of GPUs."""
    wanted = {"UCCL_EP_TIMEOUT_S": limit_s, "UCCL_EP_NUM_SMS": num_sms}
    return pool.run(
        on_gpu.case, ranks=ranks, domain=domain, timeout_s=180, may_die=may_die,
        options={name: str(value) for name, value in wanted.items() if value},
        arguments={"function": function, "arguments": arguments},
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp8"])
@pytest.mark.parametrize(("ranks", "domain"), [(RANKS, 0), (2, 1), (4, 2)])
def test_high_throughput(gpu_pool: RankPool, ranks: int, domain: int, dtype: str) -> None:
    run(
        gpu_pool, "cases:high_throughput", ranks=ranks, domain=domain, dtype=dtype, tokens=[97, 0, 256, 31][:ranks],
        hidden=1024, experts=16, topk=4, bias=1, cached=True,
    )  # fmt: skip


@pytest.mark.parametrize("hidden", [64, 100, 2880, 7168])
def test_high_throughput_of_any_hidden_size(gpu_pool: RankPool, hidden: int) -> None:
    run(gpu_pool, "cases:high_throughput", tokens=[65] * RANKS, hidden=hidden, experts=16, topk=8)


# Teams that share a block: three in a dispatch and two in a combine at 2 ranks, other divisions at 4 in two domains.
@pytest.mark.parametrize("num_sms", [1, 4, 24])
@pytest.mark.parametrize(("ranks", "domain"), [(RANKS, 0), (4, 2)])
def test_high_throughput_on_few_multiprocessors(gpu_pool: RankPool, ranks: int, domain: int, num_sms: int) -> None:
    run(
        gpu_pool, "cases:high_throughput", ranks=ranks, domain=domain, num_sms=num_sms, dtype="fp8",
        tokens=[997, 0, 256, 31][:ranks], hidden=2048, experts=16, topk=4, bias=1, cached=True, routing="holes",
    )  # fmt: skip


def test_high_throughput_of_real_shape(gpu_pool: RankPool) -> None:
    run(gpu_pool, "cases:high_throughput", tokens=[4096] * RANKS, hidden=7168, experts=256, topk=8)


@pytest.mark.parametrize("multiple", [True, False])
@pytest.mark.parametrize(("expand", "cpu_sync"), [(False, True), (False, False), (True, True), (True, False)])
@pytest.mark.parametrize(("ranks", "domain"), [(RANKS, 0), (4, 2)])
def test_elastic(gpu_pool: RankPool, ranks: int, domain: int, expand: bool, cpu_sync: bool, multiple: bool) -> None:
    run(
        gpu_pool, "on_gpu:elastic", ranks=ranks, domain=domain, tokens=[97, 0, 256, 31][:ranks], hidden=1024,
        experts=16, topk=4, bias=2, alignment=128, padding=True, dtype="fp8" if cpu_sync else "bf16", routing="holes",
        expand=expand, cpu_sync=cpu_sync, multiple=multiple, stream="full",
    )  # fmt: skip


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("cast", ["none", "fp8", "round", "ue8m0"])
@pytest.mark.parametrize(("ranks", "domain"), [(RANKS, 0), (2, 1), (4, 2)])
def test_low_latency(gpu_pool: RankPool, ranks: int, domain: int, cast: str, hook: bool) -> None:
    run(
        gpu_pool, "cases:low_latency", ranks=ranks, domain=domain, cast=cast, tokens=[32, 0, 7, 1][:ranks], most=32,
        hidden=2048, experts=16, topk=4, hook=hook, zero_copy=not hook,
    )  # fmt: skip


def test_low_latency_of_real_shape(gpu_pool: RankPool) -> None:
    run(gpu_pool, "cases:low_latency", cast="fp8", tokens=[128] * RANKS, most=128, hidden=7168, experts=288, topk=8)


def test_graphs_interleave_with_eager_calls(gpu_pool: RankPool) -> None:
    run(gpu_pool, "on_gpu:graphs", rounds=40)


@pytest.mark.parametrize("mode", ["high_throughput", "low_latency"])
@pytest.mark.parametrize(("ranks", "domain"), [(RANKS, 0), (4, 2)])
def test_random_delays(gpu_pool: RankPool, ranks: int, domain: int, mode: str) -> None:
    run(gpu_pool, "stream_cases:stress", ranks=ranks, domain=domain, pairs=500, mode=mode, seed=11)


@pytest.mark.parametrize("mode", ["high_throughput", "low_latency"])
@pytest.mark.parametrize("when", ["before", "inside", "after"])
@pytest.mark.parametrize(("ranks", "domain"), [(RANKS, 0), (4, 2)])
def test_a_killed_rank_is_named(gpu_pool: RankPool, ranks: int, domain: int, when: str, mode: str) -> None:
    reports = run(
        gpu_pool, "death_cases:one_rank_dies", ranks=ranks, domain=domain, limit_s=4, may_die=(1,), who=1, when=when,
        mode=mode,
    )  # fmt: skip
    assert {report["rank"] for report in reports if report is not None} == {1}
    run(gpu_pool, "cases:high_throughput", ranks=ranks, domain=domain, tokens=[5] * ranks)  # the GPUs are usable


@pytest.mark.parametrize("mode", ["high_throughput", "cached_dispatch", "low_latency"])
@pytest.mark.parametrize(("ranks", "domain"), [(RANKS, 0), (4, 2)])
def test_a_rank_that_does_not_come_is_named(gpu_pool: RankPool, ranks: int, domain: int, mode: str) -> None:
    reports = run(gpu_pool, "death_cases:too_late_rank", ranks=ranks, domain=domain, limit_s=1.5, who=1, mode=mode)
    assert {report["rank"] for report in reports} == {1}


def test_a_late_rank_is_waited_for(gpu_pool: RankPool) -> None:
    run(gpu_pool, "death_cases:late_rank", limit_s=4, who=1, delay_s=1.0)
