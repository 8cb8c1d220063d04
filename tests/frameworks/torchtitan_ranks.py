"""Cases over torchtitan's deepep primitives, with uccl_ep as deep_ep, against a plain statement of the block.

Values are small integers and quarters, so that every sum is exact in any order.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import uccl_ep
from functional_cases import HIDDEN, INNER, experts, integers, reference, routing
from ranks import Context, buffer_environment, check_equal, environment


@functools.cache
def primitives() -> Any:
    """torchtitan.distributed.deepep, whose operators exist for GPUs alone, made to run on a CPU."""
    uccl_ep.install_as_deep_ep()
    from torchtitan.distributed.deepep import deepep

    assert deepep.Buffer is uccl_ep.Buffer
    deepep._lib.impl("dispatch", deepep._dispatch_op_impl, "CPU")
    deepep._lib.impl("combine", deepep._combine_op_impl, "CPU")
    return deepep


def block(ctx: Context, score_before_experts: bool, num_topk: int = 3, steps: int = 2) -> None:
    """Output, and gradients of tokens, scores and experts; some scores are 0, which drops the pick."""
    deepep = primitives()
    deepep._buffer = None  # it would be that of an earlier case on some ranks, and missing on others
    with environment(buffer_environment(ctx.domain, ctx.options)):
        deepep.get_buffer(ctx.group, deepep.get_hidden_bytes(torch.empty(0, HIDDEN)))
    num_experts = 4 * ctx.num_ranks
    local = num_experts // ctx.num_ranks
    first = integers((num_experts, HIDDEN, INNER), 50, torch.float32, 1).requires_grad_()
    second = integers((num_experts, INNER, HIDDEN), 51, torch.float32, 1).requires_grad_()
    mine = slice(ctx.rank * local, (ctx.rank + 1) * local)
    for step in range(steps):
        counts = [4 + 3 * rank + step for rank in range(ctx.num_ranks)]
        x = [integers((n, HIDDEN), 10 * step + r, torch.float32).requires_grad_() for r, n in enumerate(counts)]
        idx = [routing(n, num_topk, num_experts, 20 * step + r, dropped=False) for r, n in enumerate(counts)]
        scores = [
            (integers((n, num_topk), 30 * step + r, torch.float32).abs() / 2).requires_grad_()
            for r, n in enumerate(counts)
        ]
        upstream = [integers((n, HIDDEN), 40 * step + r, torch.float32, 1) for r, n in enumerate(counts)]
        own = [t.detach().clone().requires_grad_() for t in (x[ctx.rank], scores[ctx.rank], first[mine], second[mine])]

        rows, rows_per_expert, state = deepep.dispatch_tokens(
            own[0], idx[ctx.rank], own[1], local, num_experts, ctx.group, score_before_experts
        )
        y = experts(rows, rows_per_expert.tolist(), own[2], own[3])
        out = deepep.combine_tokens(y, state)
        deepep.sync_combine()
        out.backward(upstream[ctx.rank])

        kept = [i.masked_fill(s.detach() == 0, -1) for i, s in zip(idx, scores, strict=True)]
        assert all((k < 0).any() and (k >= 0).any() for k in kept)
        first.grad = second.grad = None
        if score_before_experts:
            wanted = [scored_before(*values, first, second) for values in zip(x, kept, scores, strict=True)]
        else:
            wanted = [reference(*values, first, second) for values in zip(x, kept, scores, strict=True)]
        torch.autograd.backward(wanted, upstream)
        assert first.grad is not None and second.grad is not None
        check_equal("output", out, wanted[ctx.rank])
        check_equal("gradient of x", own[0].grad, x[ctx.rank].grad)
        check_equal("gradient of scores", own[1].grad, scores[ctx.rank].grad)
        check_equal("gradient of the first matrices", own[2].grad, first.grad[mine])
        check_equal("gradient of the second matrices", own[3].grad, second.grad[mine])
    assert not deepep._handle_cache, "a handle was kept after its backward"


def scored_before(x: Tensor, topk_idx: Tensor, scores: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """As `functional_cases.reference`, with the scores applied to what goes into the experts."""
    out = []
    for t in range(x.shape[0]):
        total = x[t] * 0
        for k, e in enumerate(topk_idx[t].tolist()):
            if e >= 0:
                total = total + (((x[t] * scores[t, k]) @ first[e]).square() / 4) @ second[e]
        out.append(total)
    return torch.stack(out)
