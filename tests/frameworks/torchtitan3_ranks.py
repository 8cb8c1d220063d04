"""Cases over the primitives of torchtitan 0.3, which call ElasticBuffer, against a plain statement of the block.

Values are small integers and quarters, so that every sum is exact in any order.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch

import uccl_ep
from functional_cases import HIDDEN, INNER, experts, integers, reference, routing
from ranks import Context, buffer_environment, check_equal, environment

TOPK = 3


@functools.cache
def primitives() -> Any:
    """torchtitan/distributed/deepep/deepep.py of 0.3, whose operators exist for GPUs alone, made to run on a CPU.

    By its path, since the package of that name is 0.2's.
    """
    uccl_ep.install_as_deep_ep()
    file = Path(os.environ["UCCL_EP_TEST_TORCHTITAN_3"]) / "torchtitan/distributed/deepep/deepep.py"
    spec = importlib.util.spec_from_file_location("torchtitan_3_deepep", file)
    assert spec is not None and spec.loader is not None
    deepep = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = deepep
    spec.loader.exec_module(deepep)
    assert deepep.ElasticBuffer is uccl_ep.ElasticBuffer
    deepep._lib.impl("dispatch", deepep._dispatch_op_impl, "CPU")
    deepep._lib.impl("combine", deepep._combine_op_impl, "CPU")
    return deepep


def block(ctx: Context, steps: int = 2) -> None:
    """Training: output, and gradients of tokens, scores and experts; then inference, which waits for no counts."""
    deepep = primitives()
    deepep._buffer = None  # it would be that of an earlier case on some ranks, and missing on others
    with environment(buffer_environment(ctx.domain, ctx.options)):
        buffer = deepep.get_buffer(ctx.group, hidden=HIDDEN, num_max_tokens_per_rank=64, num_topk=TOPK)
    assert deepep.get_buffer(ctx.group, hidden=HIDDEN, num_max_tokens_per_rank=64, num_topk=TOPK) is buffer
    num_experts = 4 * ctx.num_ranks
    local = num_experts // ctx.num_ranks
    first = integers((num_experts, HIDDEN, INNER), 50, torch.float32, 1).requires_grad_()
    second = integers((num_experts, INNER, HIDDEN), 51, torch.float32, 1).requires_grad_()
    mine = slice(ctx.rank * local, (ctx.rank + 1) * local)
    for step in range(steps):
        counts = [4 + 3 * rank + step for rank in range(ctx.num_ranks)]
        x = [integers((n, HIDDEN), 10 * step + r, torch.float32).requires_grad_() for r, n in enumerate(counts)]
        idx = [routing(n, TOPK, num_experts, 20 * step + r, dropped=False) for r, n in enumerate(counts)]
        scores = [
            (integers((n, TOPK), 30 * step + r, torch.float32).abs() / 2).requires_grad_() for r, n in enumerate(counts)
        ]
        upstream = [integers((n, HIDDEN), 40 * step + r, torch.float32, 1) for r, n in enumerate(counts)]
        own = [t.detach().clone().requires_grad_() for t in (x[ctx.rank], scores[ctx.rank], first[mine], second[mine])]

        rows, rows_per_expert, state = deepep.dispatch_tokens(
            own[0], idx[ctx.rank], own[1], local, num_experts, num_tokens_per_rank=max(counts)
        )
        out = deepep.combine_tokens(experts(rows, rows_per_expert.tolist(), own[2], own[3]), state)
        deepep.sync_combine()
        out.backward(upstream[ctx.rank])

        kept = [i.masked_fill(s.detach() == 0, -1) for i, s in zip(idx, scores, strict=True)]
        assert all((k < 0).any() and (k >= 0).any() for k in kept)
        first.grad = second.grad = None
        wanted = [reference(*values, first, second) for values in zip(x, kept, scores, strict=True)]
        torch.autograd.backward(wanted, upstream)
        assert first.grad is not None and second.grad is not None
        check_equal("output", out, wanted[ctx.rank])
        check_equal("gradient of x", own[0].grad, x[ctx.rank].grad)
        check_equal("gradient of scores", own[1].grad, scores[ctx.rank].grad)
        check_equal("gradient of the first matrices", own[2].grad, first.grad[mine])
        check_equal("gradient of the second matrices", own[3].grad, second.grad[mine])

        with torch.no_grad():
            rows, rows_per_expert, state = deepep.dispatch_tokens(
                own[0], idx[ctx.rank], own[1], local, num_experts, num_tokens_per_rank=max(counts), cudagraphable=True
            )
            assert state.cudagraphable and len(rows) == max(counts) * ctx.num_ranks * min(TOPK, local)
            y = torch.full_like(rows, float("nan"))  # rows behind the last are nobody's
            used = int(rows_per_expert.sum())
            y[:used] = experts(rows[:used], rows_per_expert.tolist(), own[2], own[3])
            out = deepep.combine_tokens(y, state)
            deepep.sync_combine()
        check_equal("output of inference", out, wanted[ctx.rank].detach())
    assert not deepep._handle_cache, "a handle was kept after its last use"
    buffer.destroy()
