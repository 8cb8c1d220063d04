"""Dispatch and combine as functions that PyTorch differentiates and compiles.

    tokens = functional.dispatch(x, topk_idx, topk_weights, buffer, num_experts)
    rows = functional.sort_by_expert(tokens.x, tokens.topk_idx, tokens.topk_weights, num_local_experts)
    y = experts(rows.x, rows.counts) * rows.weights.unsqueeze(1)
    out = functional.combine(functional.unsort(y, rows), tokens.routes, buffer)

Gradients flow to ``x``, to ``topk_weights`` and through the experts; backward of dispatch is combine along the same
routes, and the other way round. `torch.compile` traces all of it without a graph break: they are operators of
`torch.library`, see `uccl_ep.functional.operators`. Where ``num_worst_tokens`` is 0 the number of received rows depends
on the data, for which ``torch._dynamo.config.capture_dynamic_output_shape_ops`` must be True.

Collective, like the calls of `Buffer`: all ranks of the group call the same functions in the same order, backward
included, so a loss must depend on the output on all ranks or on none.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from uccl_ep_core.errors import ArgumentError

from ..buffer import Buffer
from .buffers import name_of, register
from .operators import combine_operator, dispatch_operator
from .sorting import SortedRows, sort_by_expert, unsort

__all__ = ["Routes", "SortedRows", "Tokens", "combine", "dispatch", "register", "sort_by_expert", "unsort"]


class Routes(NamedTuple):
    """Where the tokens of a dispatch went, as tensors: what `combine` needs. Usable any number of times.

    Attributes:
        is_token_in_rank: bool [num_tokens, num_ranks].
        rows: int32 [5, num_ranks * num_channels + 1], counts and offsets by rank and channel.
        num_experts: of the whole group.
        num_rows: of the received tokens.
    """

    is_token_in_rank: torch.Tensor
    rows: torch.Tensor
    num_experts: int
    num_rows: int


class Tokens(NamedTuple):
    """What a rank received.

    Attributes:
        x: [rows, hidden], in the order (source rank, token index there).
        topk_idx: [rows, topk] of the dtype given; local expert indices, -1 for experts elsewhere.
        topk_weights: [rows, topk] of the dtype given, 0 where the index is -1.
        routes: for `combine`.
    """

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    routes: Routes


def dispatch(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    buffer: Buffer | str,
    num_experts: int,
    num_worst_tokens: int = 0,
) -> Tokens:
    """Send each token once to every rank that holds one of its experts. Collective; differentiable.

    Args:
        x: [num_tokens, hidden] bf16, fp16, fp32 or fp64.
        topk_idx: int32 or int64 [num_tokens, topk], -1 for none.
        topk_weights: bf16, fp16, fp32 or fp64 [num_tokens, topk].
        buffer: a `Buffer`, or the name that `register` gave it.
        num_worst_tokens: make the output this many rows long, whatever arrives: the rest is 0, with index -1. Its
            shape is then known beforehand.

    Raises:
        ArgumentError: as `Buffer.dispatch`, before any rank communicates.
    """
    out, idx, weights, in_rank, rows = dispatch_operator(
        x, topk_idx, topk_weights, _name(buffer), num_experts, num_worst_tokens
    )
    return Tokens(out, idx, weights, Routes(in_rank, rows, num_experts, out.shape[0]))


def combine(x: torch.Tensor, routes: Routes, buffer: Buffer | str) -> torch.Tensor:
    """Bring rows home and sum them by token, without weights. Collective; differentiable.

    Accumulates in float32 (float64 for float64) in rank order and rounds once.

    Args:
        x: [rows of the dispatch, hidden] bf16, fp16, fp32 or fp64.
        routes: of that dispatch.
        buffer: the same as there.

    Returns:
        [num_tokens, hidden] of x's dtype.

    Raises:
        ArgumentError: ``x`` has not the rows of the dispatch, or as `Buffer.combine`, before any rank communicates.
    """
    in_rank, rows, num_experts, num_rows = routes
    return combine_operator(x, in_rank, rows, _name(buffer), num_experts, num_rows)


def _name(buffer: Buffer | str) -> str:
    if isinstance(buffer, str):
        return buffer
    if not isinstance(buffer, Buffer):
        raise ArgumentError(f"buffer is {type(buffer).__name__}: give a uccl_ep.Buffer, or the name from register()")
    return name_of(buffer)
