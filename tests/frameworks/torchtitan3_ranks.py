"""Cases over the primitives of torchtitan 0.3, which call ElasticBuffer, against a plain statement of the block."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch

import uccl_ep
from functional_cases import HIDDEN, experts
from ranks import Context, buffer_environment, check_equal, environment
from torchtitan_block import Block, Step, on_cpu

TOPK = 3


@functools.cache
def primitives() -> Any:
    """torchtitan/distributed/deepep/deepep.py of 0.3, by its path, since the package of that name is 0.2's."""
    uccl_ep.install_as_deep_ep()
    file = Path(os.environ["UCCL_EP_TEST_TORCHTITAN_3"]) / "torchtitan/distributed/deepep/deepep.py"
    spec = importlib.util.spec_from_file_location("torchtitan_3_deepep", file)
    assert spec is not None and spec.loader is not None
    deepep = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = deepep
    spec.loader.exec_module(deepep)
    assert deepep.ElasticBuffer is uccl_ep.ElasticBuffer
    return on_cpu(deepep)


def block(ctx: Context, steps: int = 2) -> None:
    """Training: output, and gradients of tokens, scores and experts; then inference, which waits for no counts."""
    deepep = primitives()
    deepep._buffer = None  # it would be that of an earlier case on some ranks, and missing on others
    with environment(buffer_environment(ctx.domain, ctx.options)):
        buffer = deepep.get_buffer(ctx.group, hidden=HIDDEN, num_max_tokens_per_rank=64, num_topk=TOPK)
    assert deepep.get_buffer(ctx.group, hidden=HIDDEN, num_max_tokens_per_rank=64, num_topk=TOPK) is buffer
    block = Block(ctx, TOPK)
    for number in range(steps):
        step = block.step(number)
        rows, rows_per_expert, state = dispatch(deepep, step)
        out = deepep.combine_tokens(experts(rows, rows_per_expert.tolist(), *step.own[2:]), state)
        deepep.sync_combine()
        wanted = step.check(out)
        with torch.no_grad():
            rows, rows_per_expert, state = dispatch(deepep, step, cudagraphable=True)
            assert state.cudagraphable
            check_equal("rows", len(rows), max(step.counts) * ctx.num_ranks * min(TOPK, block.local))
            y = torch.full_like(rows, float("nan"))  # rows behind the last are nobody's
            used = int(rows_per_expert.sum())
            y[:used] = experts(rows[:used], rows_per_expert.tolist(), *step.own[2:])
            out = deepep.combine_tokens(y, state)
            deepep.sync_combine()
        check_equal("output of inference", out, wanted)
    assert not deepep._handle_cache, "a handle was kept after its last use"
    buffer.destroy()


def dispatch(deepep: Any, step: Step, **arguments: Any) -> Any:
    x, scores, _, _ = step.own
    block = step.block
    return deepep.dispatch_tokens(
        x, step.idx[block.ctx.rank], scores, block.local, block.num_experts,
        num_tokens_per_rank=max(step.counts), **arguments,
    )  # fmt: skip
