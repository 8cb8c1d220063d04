"""What the ranks do in the tests of reported faults: inputs that others got wrong."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

import cases
import closed_form
from ranks import Context, check_equal
from uccl_ep import reference
from uccl_ep_core.errors import ArgumentError


def both_modes(ctx: Context, *, most: int = 0, **arguments: Any) -> None:
    """The same arguments in high-throughput and in low-latency mode."""
    cases.high_throughput(ctx, **arguments)
    cases.low_latency(ctx, most=most or max(1, *arguments["tokens"]), **arguments)


def all_streams(ctx: Context) -> None:
    for seed, stream in enumerate(("sync", "async", "event", "full")):
        for cached in (False, True):
            tokens = closed_form.token_counts("rotate", ctx.num_ranks, seed, most=40)
            cases.high_throughput(ctx, tokens=tokens, stream=stream, cached=cached, bias=2, seed=seed)


def backward_of_a_starved_rank(ctx: Context) -> None:
    """Backward of dispatch is combine, backward of combine is dispatch with the handle; also with 0 rows."""
    buffer, rank, n = ctx.buffer(), ctx.rank, ctx.num_ranks
    experts = closed_form.few_experts(ctx.num_ranks)
    tokens = [9 + r for r in range(n)]
    inputs = cases.make_inputs(n, tokens, hidden=64, experts=experts, topk=4, routing="starved", dtype="fp32", seed=8)
    assert inputs.weights is not None
    layout = buffer.get_dispatch_layout(inputs.ids[rank], experts)
    recv_x, recv_idx, recv_w, counts, handle, _ = buffer.dispatch(
        inputs.xs[rank], topk_idx=inputs.ids[rank], topk_weights=inputs.weights[rank], num_tokens_per_rank=layout[0],
        is_token_in_rank=layout[3], num_tokens_per_expert=layout[2],
    )  # fmt: skip
    if rank == n - 1:
        check_equal("shapes on the starved rank", (list(recv_x.shape), counts), ([0, 64], [0] * (experts // n)))
    buffer.combine(closed_form.apply_experts(recv_x, recv_idx, recv_w, rank * experts // n), handle)
    # Backward: a gradient for each rank's tokens goes out with the handle, and comes home.
    grads = [closed_form.rows(t, 64, rank=r, seed=8, dtype=torch.float32, salt=4) for r, t in enumerate(tokens)]
    grad_recv = buffer.dispatch(grads[rank], handle=handle)[0]
    want = reference.dispatch(rank, grads, inputs.ids, experts)
    check_equal("gradient of the expert outputs", grad_recv, want.x)
    grad_x, grad_w, _ = buffer.combine(grad_recv, handle, topk_weights=recv_w)
    in_rank = reference.layout(inputs.ids[rank], experts, n).is_token_in_rank
    segments = [grads[rank][in_rank[:, d]] for d in range(n)]
    check_equal("gradient of x", grad_x, reference.combine_segments(segments, in_rank))
    check_equal("gradient of the weights", grad_w,
                torch.where(inputs.ids[rank] >= 0, inputs.weights[rank], 0.0))  # fmt: skip


def deterministic_mode(ctx: Context) -> None:
    """torch fills fresh memory with NaN in this mode; nothing of it may reach a result."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        for seed, routing in enumerate(("random", "holes", "starved")):
            both_modes(ctx, tokens=[17 + r for r in range(ctx.num_ranks)], routing=routing, seed=seed)
    finally:
        torch.use_deterministic_algorithms(False)


def huge(ctx: Context, rows: int) -> None:
    """More than 2^31 bytes and elements arrive on one rank; bytes, so that the machine can hold it."""
    buffer, rank, n, hidden = ctx.buffer(), ctx.rank, ctx.num_ranks, 8192
    pattern = closed_form.rows(64, hidden, rank=0, seed=3, dtype=torch.uint8)
    x = pattern.repeat(-(-rows // 64), 1)[:rows]
    x[:, 0] = rank
    x[:, 1:9] = torch.arange(rows)[:, None].contiguous().view(torch.uint8)
    ids = torch.zeros(rows, 1, dtype=torch.int64)
    layout = buffer.get_dispatch_layout(ids, n)
    recv, *_ = buffer.dispatch(x, topk_idx=ids, num_tokens_per_rank=layout[0], is_token_in_rank=layout[3],
                               num_tokens_per_expert=layout[2])  # fmt: skip
    check_equal("rows", recv.shape[0], rows * n if rank == 0 else 0)
    if rank == 0:
        assert recv.numel() > 2**31
        for source in range(n):
            x[:, 0] = source
            check_equal(f"rows of rank {source}", recv[source * rows : (source + 1) * rows], x)


def worst_case_too_small(ctx: Context, who: int) -> None:
    """Known only when the counts are in: that rank raises with the number that would do, and the others go on."""
    experts = closed_form.few_experts(ctx.num_ranks)
    made = cases.make_inputs(ctx.num_ranks, [6] * ctx.num_ranks, hidden=64, experts=experts, topk=4)
    enough = reference.dispatch(ctx.rank, made.xs, made.ids, experts).x.shape[0]
    buffer, ids = ctx.buffer(), made.ids[ctx.rank]
    layout = buffer.get_dispatch_layout(ids, experts)
    arguments = {"topk_idx": ids, "num_tokens_per_rank": layout[0], "is_token_in_rank": layout[3],
                 "num_tokens_per_expert": layout[2]}  # fmt: skip
    if ctx.rank == who:
        try:
            buffer.dispatch(made.xs[ctx.rank], num_worst_tokens=enough - 1, **arguments)
        except ArgumentError as error:
            check_equal("the value that would do is named", str(enough) in str(error), True)
        else:
            raise AssertionError("fewer rows than arrive were accepted")
    else:
        buffer.dispatch(made.xs[ctx.rank], num_worst_tokens=enough, **arguments)
    both_modes(ctx, tokens=[5 + r for r in range(ctx.num_ranks)], seed=22)


def split_batch(ctx: Context) -> None:
    """A batch in two halves, of which some are empty, both in flight at once."""
    buffer, n = ctx.buffer(), ctx.num_ranks
    tokens = [[0 if r % 2 else 11 for r in range(n)], [5 if r % 2 else 0 for r in range(n)]]
    flights = [start(buffer, ctx, t, seed=s) for s, t in enumerate(tokens)]
    for s, t in enumerate(tokens):
        finish(buffer, ctx, t, flights[s], seed=s)


def start(buffer: Any, ctx: Context, tokens: list[int], seed: int) -> Any:
    """Dispatch of a standard case; its result goes to ``finish``."""
    experts = closed_form.few_experts(ctx.num_ranks)
    inputs = cases.make_inputs(ctx.num_ranks, tokens, hidden=64, experts=experts, topk=4, seed=seed)
    ids, w = inputs.ids[ctx.rank], inputs.weights[ctx.rank]  # type: ignore[index]
    layout = buffer.get_dispatch_layout(ids, experts)
    result = buffer.dispatch(
        inputs.xs[ctx.rank], topk_idx=ids, topk_weights=w, num_tokens_per_rank=layout[0], is_token_in_rank=layout[3],
        num_tokens_per_expert=layout[2], async_finish=True,
    )  # fmt: skip
    return inputs, result


def finish(buffer: Any, ctx: Context, tokens: list[int], flight: Any, seed: int) -> None:
    inputs, result = flight
    experts = closed_form.few_experts(ctx.num_ranks)
    cases.wait(result[5])
    want = reference.dispatch(ctx.rank, inputs.xs, inputs.ids, experts, topk_weights=inputs.weights)
    cases.check_dispatch(ctx, want, result)
    y = closed_form.apply_experts(result[0], result[1], result[2], ctx.rank * experts // ctx.num_ranks)
    combined, _, event = buffer.combine(y, result[4], async_finish=True)
    cases.wait(event)
    check_equal(f"combined_x, seed {seed}", combined, cases.expected_combine(ctx, inputs, experts, [])[0])


def only_rank_0_picks(ctx: Context, most: int, rounds: int) -> None:
    """All ranks have tokens, but the picks of all but rank 0 are -1."""
    buffer, n, rank = ctx.buffer(), ctx.num_ranks, ctx.rank
    experts = closed_form.few_experts(ctx.num_ranks)
    for seed in range(rounds):
        made = cases.make_inputs(n, [most] * n, hidden=64, experts=experts, topk=4, seed=seed)
        assert made.weights is not None
        ids = [made.ids[0]] + [torch.full_like(i, -1) for i in made.ids[1:]]
        recv, count, handle, _, hook = buffer.low_latency_dispatch(
            made.xs[rank], ids[rank], most, experts, use_fp8=False, return_recv_hook=True
        )
        hook()
        want = reference.ll_dispatch(rank, made.xs, ids, most, experts)
        check_equal("recv_count", count, want.count)
        used = want.source_rank >= 0
        check_equal("recv_x", recv[used], want.x[used])
        combined, _, hook = buffer.low_latency_combine(
            closed_form.apply_ll_experts(want.x, rank * (experts // n)), ids[rank], made.weights[rank], handle,
            return_recv_hook=True,
        )  # fmt: skip
        hook()
        terms = torch.stack([cases.ll_expert(made.xs[rank], ids[rank][:, k]) for k in range(4)], 1)
        check_equal("combined_x", combined, reference.ll_combine_terms(
            terms, ids[rank], made.weights[rank], handle.rounding, experts // n))  # fmt: skip


def fingerprint(ctx: Context) -> str:
    """Digest of what one step returns."""

    buffer, rank = ctx.buffer(), ctx.rank
    made = cases.make_inputs(ctx.num_ranks, [31 + r for r in range(ctx.num_ranks)], hidden=100, experts=24, topk=6)
    layout = buffer.get_dispatch_layout(made.ids[rank], 24)
    recv_x, recv_idx, _, _, handle, _ = buffer.dispatch(
        made.xs[rank], topk_idx=made.ids[rank], num_tokens_per_rank=layout[0], is_token_in_rank=layout[3],
        num_tokens_per_expert=layout[2],
    )  # fmt: skip
    y = closed_form.apply_experts(recv_x, recv_idx, None, rank * 24 // ctx.num_ranks)
    combined, _, _ = buffer.combine(y, handle)
    digest = hashlib.sha256()
    for t in (recv_x, recv_idx, combined):
        digest.update(t.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
