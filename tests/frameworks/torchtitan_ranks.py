"""Cases over torchtitan's deepep primitives, with uccl_ep as deep_ep, against a plain statement of the block."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import uccl_ep
from functional_cases import HIDDEN, experts, reference
from ranks import Context, buffer_environment, environment
from torchtitan_block import Block, on_cpu


@functools.cache
def primitives() -> Any:
    """torchtitan.distributed.deepep."""
    uccl_ep.install_as_deep_ep()
    from torchtitan.distributed.deepep import deepep

    assert deepep.Buffer is uccl_ep.Buffer
    return on_cpu(deepep)


def block(ctx: Context, score_before_experts: bool, num_topk: int = 3, steps: int = 2) -> None:
    """Output, and gradients of tokens, scores and experts; some scores are 0, which drops the pick."""
    deepep = primitives()
    deepep._buffer = None  # it would be that of an earlier case on some ranks, and missing on others
    with environment(buffer_environment(ctx.domain, ctx.options)):
        deepep.get_buffer(ctx.group, deepep.get_hidden_bytes(torch.empty(0, HIDDEN)))
    block = Block(ctx, num_topk)
    for number in range(steps):
        step = block.step(number)
        x, scores, first, second = step.own
        rows, rows_per_expert, state = deepep.dispatch_tokens(
            x, step.idx[ctx.rank], scores, block.local, block.num_experts, ctx.group, score_before_experts
        )
        out = deepep.combine_tokens(experts(rows, rows_per_expert.tolist(), first, second), state)
        deepep.sync_combine()
        step.check(out, scored_before if score_before_experts else reference)
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
