"""Groups that go on without a rank (``enable_shrink``): the others' low-latency results stay exact."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable
from typing import Any

import pytest
import torch

import cases
from ranks import Context, RankPool, check_equal
from uccl_ep import reference
from uccl_ep_core.errors import PeerFailure

EXPERTS, TOPK, HIDDEN, MOST = 12, 4, 64, 32
LAST_OF_A_DEAD_RANK = 30  # step of a stream that a rank which is to be killed does not outlive
TOPOLOGIES = [(4, 0), (4, 1), (4, 2)]  # ranks, ranks of a domain: 0 is all


class Step:
    """One dispatch and combine of a rank, and what must come of it where some ranks are left out."""

    def __init__(self, ctx: Context, seed: int) -> None:
        self.ctx, self.seed = ctx, seed
        tokens = [5 + (seed + 3 * r) % 20 for r in range(ctx.num_ranks)]
        self.inputs = cases.make_inputs(ctx.num_ranks, tokens, hidden=HIDDEN, experts=EXPERTS, topk=TOPK, seed=seed)

    def ids_without(self, rank: int, left_out: Iterable[int]) -> torch.Tensor:
        ids = self.inputs.ids[rank]
        for other in left_out:
            ids = torch.where(ids // (EXPERTS // self.ctx.num_ranks) == other, -1, ids)
        return ids

    def dispatch(self, buffer: Any) -> Any:
        rank = self.ctx.rank
        return buffer.low_latency_dispatch(
            self.inputs.xs[rank], self.inputs.ids[rank], MOST, EXPERTS, use_fp8=False, return_recv_hook=True
        )

    def finish(self, buffer: Any, flight: Any, without: set[int], combine_without: set[int] | None = None) -> None:
        """Receive, check, combine, check. ``combine_without``: ranks that were left out only after the dispatch."""
        ctx, rank, inputs = self.ctx, self.ctx.rank, self.inputs
        received, count, handle, _, hook = flight
        hook()
        xs, ids = list(inputs.xs), [self.ids_without(r, without) for r in range(ctx.num_ranks)]
        for other in without:
            xs[other], ids[other] = xs[other][:0], ids[other][:0]
        want = reference.ll_dispatch(rank, xs, ids, MOST, EXPERTS)
        check_equal(f"recv_count, step {self.seed}", count, want.count)
        used = want.source_rank >= 0
        check_equal(f"recv_x, step {self.seed}", received[used], want.x[used])
        y = torch.full(want.x.shape, float("nan"), dtype=want.x.dtype)
        local = EXPERTS // ctx.num_ranks
        y[used] = cases.ll_expert(received[used], torch.arange(local)[:, None].expand_as(used)[used] + rank * local)
        out, _, hook = buffer.low_latency_combine(
            y, inputs.ids[rank], inputs.weights[rank], handle, return_recv_hook=True
        )
        hook()
        mine = self.ids_without(rank, without if combine_without is None else combine_without)
        terms = torch.stack([cases.ll_expert(inputs.xs[rank], mine[:, k]) for k in range(TOPK)], 1)
        check_equal(f"combined_x, step {self.seed}", out, reference.ll_combine_terms(terms, mine, inputs.weights[rank]))

    def run(self, buffer: Any, without: set[int]) -> None:
        self.finish(buffer, self.dispatch(buffer), without)


def masked(buffer: Any, num_ranks: int) -> set[int]:
    status = torch.full((num_ranks,), 7, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    assert set(status.tolist()) <= {0, 1}, status
    return set(status.nonzero().flatten().tolist())


def goes_on(ctx: Context, dead: list[int], told: bool, steps: int) -> float:
    """Ranks ``dead`` end between two operations; the others are told which, or find out."""
    buffer = ctx.new_buffer(enable_shrink=True)
    for seed in range(3):
        Step(ctx, seed).run(buffer, set())
    cases.high_throughput(ctx, tokens=[9] * ctx.num_ranks, buffer=buffer)
    ctx.barrier()
    if ctx.rank in dead:
        os.kill(os.getpid(), 9)
    if told:
        for rank in dead:
            buffer.low_latency_update_mask_buffer(rank, True)
    started = time.monotonic()
    for seed in range(3, 3 + steps):
        Step(ctx, seed).run(buffer, set(dead))
    took_s = time.monotonic() - started
    check_equal("masked ranks", masked(buffer, ctx.num_ranks), set(dead))
    buffer.check()
    buffer.destroy()
    return took_s


@pytest.mark.parametrize(("ranks", "domain"), TOPOLOGIES)
@pytest.mark.parametrize(("dead", "told"), [([2], True), ([1, 3], False)])
def test_goes_on_without_dead_ranks(pool: RankPool, ranks: int, domain: int, told: bool, dead: list[int]) -> None:
    reports = pool.run(
        goes_on, ranks=ranks, domain=domain, options={"UCCL_EP_TIMEOUT_S": "60"}, may_die=tuple(dead),
        arguments={"dead": dead, "told": told, "steps": 20},
    )  # fmt: skip
    assert all(reports[rank] < 20 for rank in range(ranks) if rank not in dead), reports  # a wait may take 60 s


def high_throughput_with_a_dead_rank(ctx: Context, dead: int) -> tuple[int, str]:
    """It needs every rank, and says which is missing."""
    buffer = ctx.new_buffer(enable_shrink=True)
    cases.high_throughput(ctx, tokens=[9] * ctx.num_ranks, buffer=buffer)
    ctx.barrier()
    if ctx.rank == dead:
        os.kill(os.getpid(), 9)
    with pytest.raises(PeerFailure) as caught:
        cases.high_throughput(ctx, tokens=[9] * ctx.num_ranks, buffer=buffer)
    buffer.destroy()
    return caught.value.rank, caught.value.reason


@pytest.mark.parametrize(("ranks", "domain"), TOPOLOGIES)
def test_high_throughput_with_a_dead_rank(pool: RankPool, ranks: int, domain: int) -> None:
    options = {"UCCL_EP_TIMEOUT_S": "60"}
    reports = pool.run(
        high_throughput_with_a_dead_rank, ranks=ranks, domain=domain, options=options, may_die=(1,),
        arguments={"dead": 1},
    )  # fmt: skip
    assert [reports[rank] for rank in range(ranks) if rank != 1] == [(1, "dead")] * (ranks - 1), reports


@pytest.mark.parametrize(("plan", "lanes", "proxies"), [
    ("native", "1", "1"), ("counted", "1", "3"), ("fenced", "1", "1"), ("native", "32", "3"),
])  # fmt: skip
def test_goes_on_in_every_plan(pool: RankPool, plan: str, lanes: str, proxies: str) -> None:
    options = {
        "UCCL_EP_TIMEOUT_S": "60", "UCCL_EP_PLAN": plan, "UCCL_EP_TRANSPORT": "shm", "UCCL_EP_HOST_LANES": lanes,
        "UCCL_EP_NUM_PROXIES": proxies, "UCCL_EP_NUM_CHANNELS": proxies, "UCCL_EP_HOST_THREADS": proxies,
    }  # fmt: skip
    pool.run(
        goes_on, ranks=3, domain=1, options=options, may_die=(0,), arguments={"dead": [0], "told": False, "steps": 20}
    )


def dies_inside(ctx: Context, dead: int) -> None:
    """It has sent its tokens, and ends: they arrive everywhere, and its experts give nothing back."""
    buffer = ctx.new_buffer(enable_shrink=True)
    for seed in range(3):
        Step(ctx, seed).run(buffer, set())
    step = Step(ctx, 3)
    flight = step.dispatch(buffer)
    ctx.barrier()
    if ctx.rank == dead:
        os.kill(os.getpid(), 9)
    step.finish(buffer, flight, set(), {dead})
    for seed in range(4, 24):
        Step(ctx, seed).run(buffer, {dead})
    check_equal("masked ranks", masked(buffer, ctx.num_ranks), {dead})
    buffer.destroy()


@pytest.mark.parametrize("threads", ["1", "3"])
def test_dies_between_dispatch_and_combine(pool: RankPool, threads: str) -> None:
    options = {"UCCL_EP_TIMEOUT_S": "60", "UCCL_EP_HOST_THREADS": threads}
    pool.run(dies_inside, ranks=4, options=options, may_die=(1,), arguments={"dead": 1})


def killed_anywhere(ctx: Context, dead: int, steps: int) -> list[int]:
    """A kill in the midst of a stream of operations: none fails, and once a rank knows, results are exact again."""
    buffer = ctx.new_buffer(enable_shrink=True)
    ctx.barrier()
    known_at, checked = 0, 0
    for seed in range(steps):
        if ctx.rank == dead and seed == 10:  # somewhere in the next operations
            threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if ctx.rank == dead and seed == LAST_OF_A_DEAD_RANK:
            signal.pause()  # on a busy machine the kill may come late, but the others' share of the steps is certain
        step = Step(ctx, seed % 50)
        flight = step.dispatch(buffer)
        if known_at and seed > known_at + 2:  # others may have found out an operation later
            step.finish(buffer, flight, {dead})
            checked += 1
            continue
        received, _, handle, _, hook = flight
        hook()
        # Whoever knows already checks what my experts return.
        local = EXPERTS // ctx.num_ranks
        expert = torch.arange(local)[:, None].expand(received.shape[:2]) + ctx.rank * local
        y = cases.ll_expert(received.flatten(0, 1), expert.flatten()).view_as(received)
        buffer.low_latency_combine(y, step.inputs.ids[ctx.rank], step.inputs.weights[ctx.rank], handle)
        if not known_at and masked(buffer, ctx.num_ranks):
            known_at = seed
    result = sorted(masked(buffer, ctx.num_ranks))
    buffer.destroy()
    return [checked, *result]


@pytest.mark.parametrize(("ranks", "domain"), TOPOLOGIES)
def test_killed_in_a_stream_of_operations(pool: RankPool, ranks: int, domain: int) -> None:
    reports = pool.run(
        killed_anywhere, ranks=ranks, domain=domain, options={"UCCL_EP_TIMEOUT_S": "60"}, may_die=(3,),
        arguments={"dead": 3, "steps": LAST_OF_A_DEAD_RANK + 30},
    )  # fmt: skip
    for report in reports[:3]:
        assert report[1:] == [3] and report[0] >= 20, reports


def late(ctx: Context, who: int) -> None:
    """A rank that is later than the time-out is left out, and finds itself alone; nobody fails."""
    buffer = ctx.new_buffer(enable_shrink=True)
    Step(ctx, 0).run(buffer, set())
    ctx.barrier()
    if ctx.rank != who:
        for seed in range(1, 4):
            Step(ctx, seed).run(buffer, {who})
        check_equal("masked ranks", masked(buffer, ctx.num_ranks), {who})
        ctx.barrier()
    else:
        ctx.barrier()
        others = set(range(ctx.num_ranks)) - {who}
        step = Step(ctx, 1)
        flight = step.dispatch(buffer)
        step.finish(buffer, flight, set(), others)  # they had sent before they gave it up
        for seed in range(2, 5):
            Step(ctx, seed).run(buffer, others)
        check_equal("masked ranks", masked(buffer, ctx.num_ranks), others)
    ctx.barrier()
    buffer.destroy()


@pytest.mark.parametrize(("domain", "threads"), [(0, "1"), (1, "3")])
def test_late_rank_is_left_out(pool: RankPool, domain: int, threads: str) -> None:
    """With several blocks and a transport, those that wait for the block that waits are not out of time before it."""
    options = {"UCCL_EP_TIMEOUT_S": "3", "UCCL_EP_HOST_THREADS": threads, "UCCL_EP_NUM_PROXIES": threads}
    pool.run(late, ranks=3, domain=domain, options=options, arguments={"who": 1})


def masks(ctx: Context) -> None:
    """Ranks that all leave each other out alike, and take each other in again after as many calls."""
    buffer = ctx.new_buffer(enable_shrink=True)
    Step(ctx, 0).run(buffer, set())
    halves = [{0, 1}, {2, 3}]
    others = halves[ctx.rank < 2]
    for rank in others:
        buffer.low_latency_update_mask_buffer(rank, True)
    check_equal("masked ranks", masked(buffer, ctx.num_ranks), others)
    for seed in range(1, 6):
        Step(ctx, seed).run(buffer, others)
    buffer.low_latency_clean_mask_buffer()
    check_equal("masked ranks", masked(buffer, ctx.num_ranks), set())
    for seed in range(6, 12):
        Step(ctx, seed).run(buffer, set())
    ctx.barrier()
    buffer.destroy()


@pytest.mark.parametrize("domain", [0, 1])
def test_mask_calls(pool: RankPool, domain: int) -> None:
    pool.run(masks, ranks=4, domain=domain)


def differing(ctx: Context) -> str:
    with pytest.raises(Exception, match="enable_shrink differs between ranks") as caught:
        ctx.new_buffer(enable_shrink=ctx.rank == 0)
    ctx.barrier()
    return str(caught.value)


def test_enable_shrink_differs(pool: RankPool) -> None:
    pool.run(differing, ranks=2)
