"""The two ways of low-latency rows: which one a call takes, and a buffer that goes from one to the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cases
import closed_form
from ranks import Context, RankPool
from stream_cases import LowLatencyPair, finish_low_latency, start_low_latency
from uccl_ep import Buffer
from uccl_ep.low_latency.path import DIRECT_PICKS
from uccl_ep_core.errors import PeerFailure

FEW, TOPK = 40, 4


def many(num_ranks: int) -> int:
    """Tokens a rank whose picks are too many for the direct path."""
    return DIRECT_PICKS // (num_ranks * TOPK) + 1


def new_buffer(ctx: Context) -> Any:
    n, experts = ctx.num_ranks, closed_form.few_experts(ctx.num_ranks)
    hint = Buffer.get_low_latency_rdma_size_hint(many(n), 64, n, experts)
    return ctx.new_buffer(low_latency_mode=True, num_rdma_bytes=hint)


def back_and_forth(ctx: Context, sequence: str, together: bool) -> list[str]:
    """``sequence``: f for few tokens, m for many; ``together``: sent two at a time before they are taken in."""
    n, buffer = ctx.num_ranks, new_buffer(ctx)
    pairs = {}
    for kind, most in (("f", FEW), ("m", many(n))):
        tokens = [most - 3 * rank for rank in range(n)]
        pairs[kind] = LowLatencyPair(ctx, tokens, seed=len(pairs), most=most, routing="holes")
    roundings = []
    for first, second in zip(sequence[::2], sequence[1::2], strict=True):
        flights = []
        for kind in (first, second):
            flights.append((pairs[kind], start_low_latency(ctx, buffer, pairs[kind])))
            if not together:
                finish_low_latency(ctx, buffer, *flights.pop())
        for pair, flight in flights:
            finish_low_latency(ctx, buffer, pair, flight)
            roundings.append(flight[2].rounding)
    buffer.destroy()
    return roundings


@pytest.mark.parametrize("together", [False, True])
def test_back_and_forth(pool: RankPool, together: bool) -> None:
    sequence = "ffmmfmmffmmf"
    for roundings in pool.run(
        back_and_forth, ranks=3, arguments={"sequence": sequence, "together": together}, timeout_s=120
    ):
        names = {"f": "by rank", "m": "increasing k"}
        assert roundings == ([names[kind] for kind in sequence] if together else [])


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("cast", ["none", "ue8m0"])
def test_packed_within_a_domain(pool: RankPool, cast: str, hook: bool) -> None:
    pool.run(
        "cases:low_latency", ranks=3, options={"UCCL_EP_LOW_LATENCY_PATH": "packed"},
        arguments={"tokens": [20, 0, 32], "most": 32, "cast": cast, "hook": hook, "routing": "holes"},
    )  # fmt: skip


def packed_counts(ctx: Context) -> dict[str, int]:
    buffer = ctx.new_buffer()
    cases.low_latency(ctx, tokens=[5] * ctx.num_ranks, most=8, buffer=buffer)
    launches: dict[str, int] = buffer._communicator.stats()["launches"]
    buffer.destroy()
    return launches


@pytest.mark.parametrize(("domain", "options", "direct"), [
    (0, {}, True), (0, {"UCCL_EP_LOW_LATENCY_PATH": "packed"}, False), (1, {}, False),
])  # fmt: skip
def test_which_one(pool: RankPool, domain: int, options: dict[str, str], direct: bool) -> None:
    for launches in pool.run(packed_counts, ranks=2, domain=domain, options=options):
        assert any("direct" in name for name in launches) == direct, launches
        assert any(name.startswith("uccl_ep_ll_dispatch") for name in launches) != direct, launches


def different_ways(ctx: Context) -> tuple[int, str]:
    """Rank 1 provides for more tokens than go directly: nobody finds the other's rows."""
    n, buffer = ctx.num_ranks, new_buffer(ctx)
    most = many(n) if ctx.rank == 1 else FEW
    ids = torch.arange(TOPK * 3).view(3, TOPK) % closed_form.few_experts(n)
    try:
        buffer.low_latency_dispatch(torch.ones(3, 64, dtype=torch.bfloat16), ids, most, closed_form.few_experts(n))
    except PeerFailure as error:
        return error.rank, str(error)
    finally:
        buffer.destroy()
        ctx.barrier()
    raise AssertionError("ranks that went different ways delivered something")


def test_ranks_that_go_different_ways_raise(pool: RankPool) -> None:
    reports = pool.run(different_ways, ranks=3, options={"UCCL_EP_TIMEOUT_S": "2"})
    assert len({culprit for culprit, _ in reports}) == 1, reports
