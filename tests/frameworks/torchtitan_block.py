"""One MoE block on every rank, as torchtitan's primitives are asked to compute it, and the plain statement of it.

Values are small integers and quarters, so that every sum is exact in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functional_cases import HIDDEN, INNER, integers, reference, routing
from ranks import Context, check_equal

Truth = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def on_cpu(deepep: Any) -> Any:
    """The module of primitives, whose operators exist for GPUs alone, made to run on a CPU."""
    deepep._lib.impl("dispatch", deepep._dispatch_op_impl, "CPU")
    deepep._lib.impl("combine", deepep._combine_op_impl, "CPU")
    return deepep


class Block:
    """The experts of all ranks.

    Attributes:
        local: experts of each rank.
        first, second: matrices of all experts.
    """

    def __init__(self, ctx: Context, num_topk: int) -> None:
        self.ctx, self.num_topk = ctx, num_topk
        self.local, self.num_experts = 4, 4 * ctx.num_ranks
        self.first = integers((self.num_experts, HIDDEN, INNER), 50, torch.float32, 1).requires_grad_()
        self.second = integers((self.num_experts, INNER, HIDDEN), 51, torch.float32, 1).requires_grad_()

    def step(self, number: int) -> Step:
        return Step(self, number)


class Step:
    """Tokens of all ranks, their picks, and what comes back from behind the block.

    Attributes:
        counts: tokens of each rank.
        x, idx, scores, upstream: of all ranks; some scores are 0, which drops the pick.
        own: this rank's x, scores and matrices, whose gradients the primitives are to find.
    """

    def __init__(self, block: Block, number: int) -> None:
        ranks, topk = range(block.ctx.num_ranks), block.num_topk
        self.block = block
        self.counts = [4 + 3 * r + number for r in ranks]
        shapes = list(enumerate(self.counts))
        self.x = [integers((n, HIDDEN), 10 * number + r, torch.float32).requires_grad_() for r, n in shapes]
        self.idx = [routing(n, topk, block.num_experts, 20 * number + r, dropped=False) for r, n in shapes]
        self.scores = [
            (integers((n, topk), 30 * number + r, torch.float32).abs() / 2).requires_grad_() for r, n in shapes
        ]
        self.upstream = [integers((n, HIDDEN), 40 * number + r, torch.float32, 1) for r, n in shapes]
        rank = block.ctx.rank
        self.mine = slice(rank * block.local, (rank + 1) * block.local)
        given = (self.x[rank], self.scores[rank], block.first[self.mine], block.second[self.mine])
        self.own = [tensor.detach().clone().requires_grad_() for tensor in given]

    def check(self, out: Tensor, truth: Truth = reference) -> Tensor:
        """Compare ``out``, and the gradients of ``own``, with those of ``truth``; returns the right output.

        Args:
            truth: what the block computes, of x, picks that are kept, scores, and the matrices.
        """
        block, rank = self.block, self.block.ctx.rank
        out.backward(self.upstream[rank])
        kept = [idx.masked_fill(s.detach() == 0, -1) for idx, s in zip(self.idx, self.scores, strict=True)]
        assert all((k < 0).any() and (k >= 0).any() for k in kept)
        block.first.grad = block.second.grad = None
        wanted = [truth(*values, block.first, block.second) for values in zip(self.x, kept, self.scores, strict=True)]
        torch.autograd.backward(wanted, self.upstream)
        assert block.first.grad is not None and block.second.grad is not None
        check_equal("output", out, wanted[rank])
        check_equal("gradient of x", self.own[0].grad, self.x[rank].grad)
        check_equal("gradient of scores", self.own[1].grad, self.scores[rank].grad)
        check_equal("gradient of the first matrices", self.own[2].grad, block.first.grad[self.mine])
        check_equal("gradient of the second matrices", self.own[3].grad, block.second.grad[self.mine])
        return wanted[rank].detach()
