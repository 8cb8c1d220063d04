"""What the ranks do in the tests of many operations in a row: of several buffers, groups, modes and threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import cases
import closed_form
from fault_cases import finish, start
from ranks import Context, check_equal
from uccl_ep import reference


def interleaved_groups(ctx: Context, rounds: int) -> None:
    """Two groups that share ranks, and two buffers of one group, all used in turn."""
    views, ready = [], []
    for seed, members in enumerate(((0, 1, 2, 3), (1, 2, 3), (0, 1, 2, 3))):
        if ctx.rank in members:
            view = Context(members.index(ctx.rank), len(members), ctx.groups[members], 0, ctx.options, ctx.groups)
            views.append((view, view.new_buffer()))
            ready.append(prepared_pairs(view, seed))
    for i in range(rounds):
        for (view, buffer), pairs in zip(views, ready, strict=True):
            run_pair(view, buffer, pairs[i % len(pairs)])
    for _, buffer in views:
        buffer.destroy()


class Pair:
    """One dispatch and combine with everything computed beforehand, so that a loop only moves and compares."""

    def __init__(self, ctx: Context, tokens: list[int], seed: int, hidden: int, routing: str) -> None:
        n = ctx.num_ranks
        experts = self.experts = closed_form.few_experts(n)
        self.inputs = cases.make_inputs(n, tokens, hidden=hidden, experts=experts, topk=4, routing=routing, seed=seed)
        self.want = reference.dispatch(
            ctx.rank, self.inputs.xs, self.inputs.ids, experts, topk_weights=self.inputs.weights
        )
        self.y = closed_form.apply_experts(
            self.want.x, self.want.topk_idx, self.want.topk_weights, ctx.rank * (experts // n)
        )
        self.combined = cases.expected_combine(ctx, self.inputs, experts, [])[0]


def prepared_pairs(ctx: Context, seed: int, count: int = 12, hidden: int = 64) -> list[Pair]:
    kinds = ("rotate", "even", "idle", "first", "zero")
    return [
        Pair(
            ctx,
            closed_form.token_counts(kinds[i % 5], ctx.num_ranks, seed + i, most=50),
            seed + i,
            hidden,
            closed_form.ROUTINGS[i % len(closed_form.ROUTINGS)],
        )
        for i in range(count)
    ]


def run_pair(ctx: Context, buffer: Any, pair: Pair) -> None:
    rank, inputs = ctx.rank, pair.inputs
    assert inputs.weights is not None
    layout = buffer.get_dispatch_layout(inputs.ids[rank], pair.experts)
    result = buffer.dispatch(
        inputs.xs[rank], topk_idx=inputs.ids[rank], topk_weights=inputs.weights[rank], num_tokens_per_rank=layout[0],
        is_token_in_rank=layout[3], num_tokens_per_expert=layout[2],
    )  # fmt: skip
    cases.check_dispatch(ctx, pair.want, result)
    combined, _, _ = buffer.combine(pair.y, result[4])
    check_equal("combined_x", combined, pair.combined)


class LowLatencyPair:
    """The same in low-latency mode."""

    def __init__(self, ctx: Context, tokens: list[int], seed: int, most: int, routing: str) -> None:
        n, self.most = ctx.num_ranks, most
        experts = self.experts = closed_form.few_experts(n)
        self.inputs = cases.make_inputs(n, tokens, hidden=64, experts=experts, topk=4, routing=routing, seed=seed)
        self.want = reference.ll_dispatch(ctx.rank, self.inputs.xs, self.inputs.ids, most, experts)
        self.used = self.want.source_rank >= 0
        self.y = closed_form.apply_ll_experts(self.want.x, ctx.rank * (experts // n))
        ids = self.inputs.ids[ctx.rank]
        self.terms = torch.stack([cases.ll_expert(self.inputs.xs[ctx.rank], ids[:, k]) for k in range(4)], 1)
        assert self.inputs.weights is not None
        self.ids, self.weights, self.local = ids, self.inputs.weights[ctx.rank], experts // n
        self._combined: dict[str, torch.Tensor] = {}

    def combined(self, rounding: str) -> torch.Tensor:
        if rounding not in self._combined:
            self._combined[rounding] = reference.ll_combine_terms(
                self.terms, self.ids, self.weights, rounding, self.local
            )
        return self._combined[rounding]


def start_low_latency(ctx: Context, buffer: Any, pair: LowLatencyPair) -> Any:
    recv, count, handle, _, hook = buffer.low_latency_dispatch(
        pair.inputs.xs[ctx.rank],
        pair.inputs.ids[ctx.rank],
        pair.most,
        pair.experts,
        use_fp8=False,
        return_recv_hook=True,
    )
    return recv, count, handle, hook


def finish_low_latency(ctx: Context, buffer: Any, pair: LowLatencyPair, flight: Any) -> None:
    recv, count, handle, hook = flight
    hook()
    check_equal("recv_count", count, pair.want.count)
    check_equal("recv_x", recv[pair.used], pair.want.x[pair.used])
    combined, _, hook = buffer.low_latency_combine(
        pair.y, pair.inputs.ids[ctx.rank], pair.inputs.weights[ctx.rank], handle,  # type: ignore[index]
        return_recv_hook=True,
    )  # fmt: skip
    hook()
    check_equal("combined_x", combined, pair.combined(handle.rounding))


def stress(ctx: Context, pairs: int, mode: str, seed: int, longest_ms: float = 2.0) -> None:
    """``pairs`` dispatches and combines with random delays of each rank's own and no barrier between them."""
    import random

    delays = random.Random(seed * 100 + ctx.rank)
    buffer = ctx.new_buffer()
    if mode == "low_latency":
        ready: list[Any] = [
            LowLatencyPair(ctx, closed_form.token_counts(kind, ctx.num_ranks, seed + i, most=50), seed + i, 50, routing)
            for i, (kind, routing) in enumerate(
                (k, r) for k in ("rotate", "even", "idle", "first") for r in ("random", "holes", "one_rank")
            )
        ]
    else:
        ready = prepared_pairs(ctx, seed)
    order = random.Random(seed)  # the same on all ranks
    for _ in range(pairs):
        pair = ready[order.randrange(len(ready))]
        if delays.random() < 0.1:
            time.sleep(delays.random() * longest_ms / 1000)  # the random lateness under test
        if mode == "low_latency":
            finish_low_latency(ctx, buffer, pair, start_low_latency(ctx, buffer, pair))
        else:
            run_pair(ctx, buffer, pair)
    dist.barrier(ctx.group)
    buffer.destroy()


def two_in_flight(ctx: Context, rounds: int) -> None:
    """Two dispatches before the first combine, combined in both orders, in both modes."""
    buffer = ctx.new_buffer()
    n = ctx.num_ranks
    tokens = [[9 + r for r in range(n)], [30 - 3 * r for r in range(n)]]
    pairs = [LowLatencyPair(ctx, t, s, 40, "random") for s, t in enumerate(tokens)]
    for i in range(rounds):
        flights = [start(buffer, ctx, t, seed=s) for s, t in enumerate(tokens)]
        ll_flights = [start_low_latency(ctx, buffer, p) for p in pairs]
        for s in (0, 1) if i % 2 else (1, 0):
            finish(buffer, ctx, tokens[s], flights[s], seed=s)
            finish_low_latency(ctx, buffer, pairs[s], ll_flights[s])
    buffer.destroy()


def two_threads(ctx: Context, rounds: int) -> None:
    """Two micro-batches of one buffer, each in a thread of its own that takes its turn."""
    buffer = ctx.new_buffer()
    tokens = [[9 + r for r in range(ctx.num_ranks)], [0 if r else 13 for r in range(ctx.num_ranks)]]
    turn = threading.Condition()
    whose = [0]
    errors: list[BaseException] = []

    def take_turn(me: int, work: Callable[[], Any]) -> Any:
        with turn:
            if not turn.wait_for(lambda: whose[0] == me or errors, timeout=30) or errors:
                raise AssertionError("the other thread failed or is late")
            result = work()
            whose[0] = 1 - me
            turn.notify_all()
            return result

    def micro_batch(me: int) -> None:
        try:
            for _ in range(rounds):
                flight = take_turn(me, lambda: start(buffer, ctx, tokens[me], seed=me))
                take_turn(me, lambda flight=flight: finish(buffer, ctx, tokens[me], flight, seed=me))
        except BaseException as error:
            with turn:
                errors.append(error)
                turn.notify_all()

    threads = [threading.Thread(target=micro_batch, args=(me,)) for me in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    buffer.destroy()
