"""Cases over `uccl_ep.functional`: an MoE block on several ranks, against the same block on one.

All values are small integers and quarters, so that every sum is exact in every dtype and any order: gradients must be
equal, not close.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ranks import Context, check_equal
from uccl_ep import functional

HIDDEN, INNER = 4, 3


def integers(shape: tuple[int, ...], seed: int, dtype: torch.dtype, limit: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-limit, limit + 1, shape, generator=generator).to(dtype)


def routing(num_tokens: int, num_topk: int, num_experts: int, seed: int, dropped: bool) -> Tensor:
    """Different experts for each token, some of them -1; nobody uses the last expert."""
    generator = torch.Generator().manual_seed(seed)
    idx = torch.rand(num_tokens, num_experts - 1, generator=generator).argsort(1)[:, :num_topk]
    return idx.masked_fill(torch.rand(idx.shape, generator=generator) < 0.25, -1) if dropped else idx


def experts(rows: Tensor, counts: list[int], first: Tensor, second: Tensor) -> Tensor:
    """Each expert's two matrices with a square between them, over its rows; what is behind the last stays 0."""
    ends = torch.tensor(counts).cumsum(0).tolist()
    parts = [
        ((rows[end - count : end] @ first[e]).square() / 4) @ second[e]
        for e, (count, end) in enumerate(zip(counts, ends, strict=True))
    ]
    behind = rows[sum(counts) :] * 0
    return torch.cat([*parts, behind])


def block(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    first: Tensor,
    second: Tensor,
    buffer: Any,
    num_experts: int,
    num_worst_tokens: int = 0,
    alignment: int = 1,
    max_rows: int = 0,
) -> Tensor:
    tokens = functional.dispatch(x, topk_idx, topk_weights, buffer, num_experts, num_worst_tokens)
    rows = functional.sort_by_expert(
        tokens.x, tokens.topk_idx, tokens.topk_weights, first.shape[0], alignment, max_rows
    )
    y = experts(rows.x, rows.counts.tolist(), first, second) * rows.weights.unsqueeze(1).to(x.dtype)
    return functional.combine(functional.unsort(y, rows), tokens.routes, buffer)


def reference(x: Tensor, topk_idx: Tensor, topk_weights: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """The block on one rank, one token and expert after another."""
    out = []
    for t in range(x.shape[0]):
        total = x[t] * 0
        for k, e in enumerate(topk_idx[t].tolist()):
            if e >= 0:
                total = total + ((x[t] @ first[e]).square() / 4) @ second[e] * topk_weights[t, k].to(x.dtype)
        out.append(total)
    return torch.stack(out) if out else x * 0 + topk_weights.sum() * 0


def gradients(
    ctx: Context,
    dtype: str = "float64",
    weights_dtype: str = "",
    num_topk: int = 3,
    num_experts: int = 12,
    dropped: bool = True,
    worst: bool = False,
    alignment: int = 1,
    idle_rank: int | None = None,
) -> None:
    """Output, and gradients of tokens, of top-k weights and of every expert, equal to those of one rank."""
    kind, weights_kind = getattr(torch, dtype), getattr(torch, weights_dtype or dtype)
    num_tokens = [3 + 2 * rank if rank != idle_rank else 0 for rank in range(ctx.num_ranks)]
    x, idx, weights, upstream = [], [], [], []
    for rank, count in enumerate(num_tokens):
        x.append(integers((count, HIDDEN), 10 + rank, kind).requires_grad_())
        idx.append(routing(count, num_topk, num_experts, 20 + rank, dropped))
        weights.append((integers((count, num_topk), 30 + rank, weights_kind) / 4).requires_grad_())
        upstream.append(integers((count, HIDDEN), 40 + rank, kind, 1))
    first = integers((num_experts, HIDDEN, INNER), 50, kind, 1).requires_grad_()
    second = integers((num_experts, INNER, HIDDEN), 51, kind, 1).requires_grad_()
    local = num_experts // ctx.num_ranks
    mine = slice(ctx.rank * local, (ctx.rank + 1) * local)
    own = [t.detach().clone().requires_grad_() for t in (x[ctx.rank], weights[ctx.rank], first[mine], second[mine])]
    most = sum(num_tokens) + 3
    options: dict[str, Any] = {"alignment": alignment}
    if worst:
        options |= {"num_worst_tokens": most, "max_rows": most * min(num_topk, local) + local * (alignment - 1)}

    out = block(own[0], idx[ctx.rank], own[1], own[2], own[3], ctx.buffer(), num_experts, **options)
    out.backward(upstream[ctx.rank])

    wanted = [reference(x_r, idx_r, w_r, first, second) for x_r, idx_r, w_r in zip(x, idx, weights, strict=True)]
    torch.autograd.backward(wanted, upstream)
    check_equal("output", out, wanted[ctx.rank])
    check_equal("gradient of x", own[0].grad, x[ctx.rank].grad)
    check_equal("gradient of topk_weights", own[1].grad, weights[ctx.rank].grad)
    assert first.grad is not None and second.grad is not None
    check_equal("gradient of the first matrices", own[2].grad, first.grad[mine])
    check_equal("gradient of the second matrices", own[3].grad, second.grad[mine])


def finite_differences(ctx: Context, worst: bool, second_order: bool = False) -> None:
    """gradcheck in float64. All ranks run it at once, with equally many tokens and so equally many calls."""
    num_experts, num_topk, count = 2 * ctx.num_ranks, 2, 2
    generator = torch.Generator().manual_seed(ctx.rank)
    x = torch.randn(count, HIDDEN, dtype=torch.float64, generator=generator, requires_grad=True)
    weights = torch.rand(count, num_topk, dtype=torch.float64, generator=generator, requires_grad=True)
    idx = routing(count, num_topk, num_experts, 60 + ctx.rank, dropped=True)
    matrices = torch.Generator().manual_seed(70 + ctx.rank)
    first = torch.randn(2, HIDDEN, INNER, dtype=torch.float64, generator=matrices)
    second = torch.randn(2, INNER, HIDDEN, dtype=torch.float64, generator=matrices)
    most = count * ctx.num_ranks

    def function(x: Tensor, weights: Tensor) -> Tensor:
        return block(x, idx, weights, first, second, ctx.buffer(), num_experts, most if worst else 0)

    assert torch.autograd.gradcheck(function, (x, weights))
    if second_order:
        assert torch.autograd.gradgradcheck(function, (x, weights))


def weights_alone(ctx: Context, dtype: str) -> None:
    """Received weights as a result of their own: whatever is computed where the index is -1 has no gradient."""
    num_experts, count = 2 * ctx.num_ranks, 6
    idx = routing(count, 2, num_experts, ctx.rank, dropped=True)
    x = integers((count, HIDDEN), ctx.rank, torch.float32).requires_grad_()
    weights = torch.rand(count, 2).to(getattr(torch, dtype)).requires_grad_()
    tokens = functional.dispatch(x, idx, weights, ctx.buffer(), num_experts)
    assert (tokens.topk_idx < 0).any() and not tokens.topk_weights[tokens.topk_idx < 0].any()
    (tokens.topk_weights.sum() * 3).backward()
    check_equal("gradient of topk_weights", weights.grad, (idx >= 0).to(weights.dtype) * 3)
    check_equal("gradient of x", x.grad, torch.zeros_like(x))


def tail_of_worst_case(ctx: Context) -> None:
    """Rows behind those that arrived are 0, forward and backward, whatever the memory held before."""
    num_experts, count = 2 * ctx.num_ranks, 2
    most = count * ctx.num_ranks + 300
    for step in range(3):
        dirty = torch.full((most, HIDDEN), torch.nan)
        del dirty
        idx = routing(count, 2, num_experts, ctx.rank + step, dropped=True)
        x = torch.ones(count, HIDDEN, requires_grad=True)
        tokens = functional.dispatch(x, idx, torch.ones(count, 2), ctx.buffer(), num_experts, most)
        arrived = int((tokens.topk_idx >= 0).any(1).sum())
        check_equal("rows", tokens.x, (torch.arange(most) < arrived).float().unsqueeze(1).expand(-1, HIDDEN))
        leaf = tokens.x.detach().requires_grad_()
        dirty = torch.full((most, HIDDEN), torch.nan)
        del dirty
        functional.combine(leaf, tokens.routes, ctx.buffer()).sum().backward()
        check_equal("gradient", leaf.grad, tokens.x)


def operators_keep_their_promises(ctx: Context) -> None:
    """`torch.library.opcheck`: schema, shapes under fake tensors, registration of autograd, tracing."""
    from uccl_ep.functional import operators

    name = functional.register(ctx.buffer())
    num_experts = 2 * ctx.num_ranks
    idx = routing(3, 2, num_experts, ctx.rank, dropped=True)
    x = integers((3, HIDDEN), ctx.rank, torch.float32).requires_grad_()
    weights = torch.rand(3, 2, requires_grad=True)
    for worst in (0, 3 * ctx.num_ranks):
        torch.library.opcheck(operators.dispatch_operator, (x, idx, weights, name, num_experts, worst))
    tokens = functional.dispatch(x, idx, weights, name, num_experts)
    recv = tokens.x.detach().requires_grad_()
    recv_weights = tokens.topk_weights.detach().requires_grad_()
    routes = (*tokens.routes[:2], name, num_experts)
    torch.library.opcheck(operators.dispatch_again_operator, (x, *routes, recv.shape[0]))
    torch.library.opcheck(operators.combine_operator, (recv, *routes, recv.shape[0]))
    torch.library.opcheck(operators.combine_with_weights_operator, (recv, recv_weights, *routes))


def compiled(ctx: Context, backend: str, worst: bool) -> None:
    """The block under torch.compile(fullgraph=True), twice with other data and other counts, against the reference."""
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    torch._dynamo.reset()
    num_experts, num_topk = 2 * ctx.num_ranks, 2
    first = integers((2, HIDDEN, INNER), 50 + ctx.rank, torch.float32, 1).requires_grad_()
    second = integers((2, INNER, HIDDEN), 60 + ctx.rank, torch.float32, 1).requires_grad_()
    buffer = ctx.buffer()

    def layer(x: Tensor, idx: Tensor, weights: Tensor, num_worst_tokens: int, max_rows: int) -> Tensor:
        tokens = functional.dispatch(torch.relu(x), idx, weights, buffer, num_experts, num_worst_tokens)
        rows = functional.sort_by_expert(tokens.x, tokens.topk_idx, tokens.topk_weights, 2, 4, max_rows)
        # Every expert over every row, and its own rows kept: shapes that a compiler knows.
        expert = torch.bucketize(torch.arange(rows.x.shape[0]), rows.counts.cumsum(0), right=True)
        chosen = torch.nn.functional.one_hot(expert, 3)[:, :2].to(x.dtype).repeat_interleave(INNER, 1)
        inner = rows.x @ first.transpose(0, 1).reshape(HIDDEN, 2 * INNER)
        y = (inner.square() / 4 * chosen) @ second.reshape(2 * INNER, HIDDEN) * rows.weights.unsqueeze(1)
        return functional.combine(functional.unsort(y, rows), tokens.routes, buffer) + x

    fast: Callable[..., Tensor] = torch.compile(layer, fullgraph=True, backend=backend)
    for step in range(2):
        count = 4 + 3 * step  # the same on all ranks, as in training; what arrives differs
        most = count * ctx.num_ranks if worst else 0
        results = []
        for function in (layer, fast):
            x = integers((count, HIDDEN), 10 * step + ctx.rank, torch.float32).requires_grad_()
            weights = (integers((count, num_topk), 20 * step + ctx.rank, torch.float32) / 4).requires_grad_()
            idx = routing(count, num_topk, num_experts, 30 * step + ctx.rank, dropped=True)
            first.grad = second.grad = None
            out = function(x, idx, weights, most, 2 * most + 2 * 3 if worst else 0)
            out.backward(integers((count, HIDDEN), 40 * step + ctx.rank, torch.float32, 1))
            assert first.grad is not None and second.grad is not None
            results.append([out, x.grad, weights.grad, first.grad, second.grad])
        for what, got, want in zip(("output", "x", "weights", "first", "second"), *reversed(results), strict=True):
            check_equal(f"step {step}, {what}", got, want)
    dist.barrier(ctx.group)


def refused(ctx: Context) -> None:
    """Errors are raised before any rank communicates, and name what would do."""
    buffer = ctx.buffer()
    name = functional.register(buffer)
    assert functional.register(buffer) == name == functional.register(buffer, name)
    idx, weights, x = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), torch.ones(2, HIDDEN)
    for call, words in (
        (lambda: functional.dispatch(x, idx, weights.int(), buffer, ctx.num_ranks), "use bfloat16, float16, float32"),
        (lambda: functional.dispatch(x, idx, weights[:1], buffer, ctx.num_ranks), r"float64 \[2, 1\]"),
        (lambda: functional.dispatch(x, idx, weights, "nobody", ctx.num_ranks), f"registered as 'nobody'.*{name}"),
        (lambda: functional.dispatch(x, idx, weights, None, ctx.num_ranks), "give a uccl_ep.Buffer"),
        (lambda: functional.register(buffer, "other"), f"registered as '{name}' already"),
        (lambda: functional.sort_by_expert(x, idx[:1], weights, 1), "give"),
        (lambda: functional.sort_by_expert(x, idx, weights, 1, 0), "use at least"),
        (lambda: functional.sort_by_expert(x, idx, weights, 1, 4, 3), "max_rows = 3, but 4 rows are needed"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    tokens = functional.dispatch(x, idx, weights, buffer, ctx.num_ranks)
    rows = functional.sort_by_expert(tokens.x, tokens.topk_idx, tokens.topk_weights, 1)
    with pytest.raises(ValueError, match="the rows that sort_by_expert made"):
        functional.unsort(torch.ones(99, HIDDEN), rows)
    wrong = tokens.routes._replace(rows=tokens.routes.rows[:, :1])
    with pytest.raises(ValueError, match="use the buffer that made them"):
        functional.combine(tokens.x, wrong, buffer)
    num_rows = tokens.x.shape[0]
    # Otherwise the kernel would read what is behind x, or leave rows out.
    for rows_given in {0, num_rows + 1, 2 * num_rows} - {num_rows}:
        with pytest.raises(ValueError, match=rf"give \[{num_rows}, hidden\].*unsort"):
            functional.combine(torch.ones(rows_given, HIDDEN), tokens.routes, buffer)
    functional.combine(tokens.x, tokens.routes, buffer)
