"""The reference against worked examples, and the gloo baseline against the reference."""

from __future__ import annotations

import pytest
import torch

import cases
import closed_form
from ranks import CaseFailure, Context, RankPool, check_equal
from uccl_ep import reference
from uccl_ep.baseline import GlooExpertParallel


def test_layout_counts_a_token_once_per_rank() -> None:
    # 2 ranks, 4 experts: 0, 1 on rank 0 and 2, 3 on rank 1.
    layout = reference.layout(torch.tensor([[0, 1], [1, 2], [-1, 3], [-1, -1]]), 4, 2)
    assert layout.num_tokens_per_rank.tolist() == [2, 2]
    assert layout.num_tokens_per_expert.tolist() == [1, 2, 1, 1]
    assert layout.is_token_in_rank.tolist() == [[True, False], [True, True], [False, True], [False, False]]


def test_dispatch_worked_example() -> None:
    xs = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0]])]
    ids = [torch.tensor([[0, 3], [2, -1]]), torch.tensor([[3, 1]])]
    w = [torch.tensor([[0.5, 0.25], [1.0, 9.0]]), torch.tensor([[0.75, 0.125]])]
    got = reference.dispatch(1, xs, ids, 4, topk_weights=w, expert_alignment=2)
    assert got.x.tolist() == [[1.0], [2.0], [3.0]]
    assert got.topk_idx.tolist() == [[-1, 1], [0, -1], [1, -1]]
    assert got.topk_weights is not None and got.topk_weights.tolist() == [[0, 0.25], [1.0, 0], [0.75, 0]]
    assert got.num_tokens_per_expert == [2, 2]
    assert (got.source_rank.tolist(), got.source_index.tolist()) == ([0, 0, 1], [0, 1, 0])
    got = reference.dispatch(0, xs, ids, 4, num_worst_tokens=4)
    assert got.topk_idx.tolist() == [[0, -1], [-1, 1], [-1, -1], [-1, -1]]
    assert got.num_tokens_per_expert == []


def test_combine_sums_in_rank_order_after_the_bias() -> None:
    ids = [torch.tensor([[0, 1, 2]])]  # one token to three ranks
    ids = [*ids, torch.empty(0, 3, dtype=torch.int64), torch.empty(0, 3, dtype=torch.int64)]
    ys = [torch.tensor([[2.0**24]]), torch.tensor([[1.0]]), torch.tensor([[1.0]])]
    assert reference.combine(0, ys, ids, 3)[0].item() == 2.0**24  # (2^24 + 1) + 1, each lost
    assert reference.combine(0, ys[::-1], ids, 3)[0].item() == 2.0**24 + 2
    bias = [torch.tensor([[1.0]]), torch.tensor([[1.0]])]
    assert reference.combine(0, ys, ids, 3, bias=bias)[0].item() == 2.0**24 + 4  # 2 + 2^24, then two ties


def test_low_latency_worked_example() -> None:
    xs = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0]])]
    ids = [torch.tensor([[0, 1], [0, -1]]), torch.tensor([[1, 0]])]
    got = reference.ll_dispatch(0, xs, ids, 2, 4)
    assert got.count.tolist() == [3, 2]
    assert got.x[0, :3].flatten().tolist() == [1, 2, 3] and got.x[1, :2].flatten().tolist() == [1, 3]
    assert reference.ll_positions(1, ids, 4).tolist() == [[1, 2]]
    ys = [got.x * 10, torch.zeros(2, 4, 1)]
    w = torch.tensor([[0.5, 2.0]])
    assert reference.ll_combine(1, ys, ids, w, 4).tolist() == [[75.0]]


@pytest.mark.parametrize("hidden", [64, 128, 100, 384])
def test_fp8_scales(hidden: int) -> None:
    x = closed_form.rows(9, hidden, rank=0, seed=1, dtype=torch.bfloat16)
    x[3] = 0
    q, scale = reference.quantize_fp8(x)
    assert scale.shape == (9, -(-hidden // 128))
    assert q.float().abs().amax() == 448 and scale[3].allclose(torch.tensor(1e-4 / 448))
    back = reference.dequantize_fp8(q, scale)
    assert ((back - x.float()).abs() <= scale.repeat_interleave(128, 1)[:, :hidden] * 16.001).all()
    q2, powers = reference.quantize_fp8(x, round_scale=True)
    assert (torch.frexp(powers)[0] == 0.5).all() and (powers >= scale * 0.999).all() and (powers < scale * 2.01).all()
    q3, packed = reference.quantize_fp8(x, use_ue8m0=True)
    assert packed.dtype == torch.int32 and packed.shape == (9, -(-hidden // 512))
    assert torch.equal(q2.view(torch.uint8), q3.view(torch.uint8))
    assert torch.equal(reference.dequantize_fp8(q3, packed), reference.dequantize_fp8(q2, powers))


def test_closed_form_data_tell_orders_and_experts_apart() -> None:
    rows = [closed_form.rows(64, 256, rank=r, seed=3, dtype=torch.bfloat16).float() for r in range(4)]
    forward = ((rows[0] + rows[1]) + rows[2]) + rows[3]
    backward = ((rows[3] + rows[2]) + rows[1]) + rows[0]
    assert (forward != backward).float().mean() > 0.01
    x, ids = rows[0].bfloat16(), torch.tensor([[0]]).expand(64, 1)
    a, b = (closed_form.apply_experts(x, ids + e, None, 0) for e in (0, 1))
    assert (a != b).float().mean() > 0.95
    flat = torch.cat(rows)
    assert len({tuple(r.tolist()) for r in flat}) == 256


def baseline_case(ctx: Context, *, hidden: int, experts: int, topk: int, tokens: list[int], routing: str) -> None:
    ep = GlooExpertParallel(ctx.group)
    rank, n, local = ctx.rank, ctx.num_ranks, experts // ctx.num_ranks
    inputs = cases.make_inputs(n, tokens, hidden=hidden, experts=experts, topk=topk, routing=routing, seed=5)
    assert inputs.weights is not None
    x, ids, w = inputs.xs[rank], inputs.ids[rank], inputs.weights[rank]
    recv = ep.dispatch(x, ids, experts, w)
    want = reference.dispatch(rank, inputs.xs, inputs.ids, experts, topk_weights=inputs.weights)
    cases.check_dispatch(ctx, want, recv)
    y = closed_form.apply_experts(recv[0], recv[1], recv[2], rank * local)
    combined, _ = cases.expected_combine(ctx, inputs, experts, [])
    check_equal("combined", ep.combine(y, recv[4]), combined)
    most = max(tokens) + 1
    for use_fp8 in (False, True):
        got, count, handle = ep.low_latency_dispatch(x, ids, most, experts, use_fp8)
        ll = reference.ll_dispatch(rank, inputs.xs, inputs.ids, most, experts, use_fp8=use_fp8)
        used = ll.source_rank >= 0
        check_equal("count", count, ll.count)
        check_equal("low-latency recv", (got[0] if isinstance(got, tuple) else got)[used], ll.x[used])
        if isinstance(got, tuple) and ll.scales is not None:
            check_equal("scales", got[1][used], ll.scales[used])
    ll = reference.ll_dispatch(rank, inputs.xs, inputs.ids, most, experts)
    y = closed_form.apply_ll_experts(ll.x, rank * local)
    terms = torch.stack([cases.ll_expert(x, ids[:, k].long()) for k in range(topk)], 1)
    check_equal("low-latency combined", ep.low_latency_combine(y, ids, w, handle),
                reference.ll_combine_terms(terms, ids, w))  # fmt: skip
    # The reference by whole outputs agrees with the reference by terms.
    ys = [closed_form.apply_ll_experts(reference.ll_dispatch(d, inputs.xs, inputs.ids, most, experts).x, d * local)
          for d in range(n)]  # fmt: skip
    check_equal("reference", reference.ll_combine(rank, ys, inputs.ids, w, experts),
                reference.ll_combine_terms(terms, ids, w))  # fmt: skip


@pytest.mark.parametrize("routing", closed_form.ROUTINGS)
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_baseline_equals_the_reference(pool: RankPool, ranks: int, routing: str) -> None:
    tokens = closed_form.token_counts("rotate", ranks, ranks, most=40)
    arguments = {"hidden": 100, "experts": 24, "topk": 4, "tokens": tokens, "routing": routing}
    pool.run(baseline_case, ranks=ranks, arguments=arguments)


def failing_case(ctx: Context, who: int, how: str) -> None:
    if ctx.rank == who and how == "die":
        import os

        os._exit(3)
    x = torch.zeros(4, 4)
    if ctx.rank >= who:
        x[2, 1] = 5
    check_equal("x", x, torch.zeros(4, 4))


def rank_after_barrier(ctx: Context) -> int:
    ctx.barrier()
    return ctx.rank


def test_report_shows_every_failing_rank(pool: RankPool) -> None:
    with pytest.raises(CaseFailure) as failure:
        pool.run(failing_case, ranks=4, arguments={"who": 2, "how": "differ"})
    text = str(failure.value)
    assert "rank 2: x differs first at (2, 1): got 5.0, want 0.0" in text and "rank 3: x differs" in text
    assert "rank 1" not in text
    with pytest.raises(CaseFailure, match="rank 1: the process died"):
        pool.run(failing_case, ranks=4, arguments={"who": 1, "how": "die"})
    assert pool.run(rank_after_barrier, ranks=3) == [0, 1, 2]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_positions_are_where_rows_lie_also_of_experts_named_twice(num_ranks: int) -> None:
    g = torch.Generator().manual_seed(num_ranks)
    tokens, topk, local = 7, 5, 3
    ids = [torch.randint(-1, local * num_ranks, (tokens, topk), generator=g) for _ in range(num_ranks)]
    xs = [(torch.arange(tokens) + 100 * rank).float()[:, None] for rank in range(num_ranks)]
    assert any(int(row.ge(0).sum()) > len(set(row[row >= 0].tolist())) for each in ids for row in each)
    received = [reference.ll_dispatch(d, xs, ids, tokens * topk, local * num_ranks) for d in range(num_ranks)]
    for rank in range(num_ranks):
        places = reference.ll_positions(rank, ids, local * num_ranks)
        taken = set()
        for t in range(tokens):
            for k in range(topk):
                expert, place = int(ids[rank][t, k]), int(places[t, k])
                assert (expert < 0) == (place < 0)
                if expert >= 0:
                    assert received[expert // local].x[expert % local, place, 0] == xs[rank][t, 0]
                    taken.add((expert, place))
        assert len(taken) == int((ids[rank] >= 0).sum()), "two picks of one row"
