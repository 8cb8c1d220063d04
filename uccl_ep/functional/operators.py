"""The operators ``torch.ops.uccl_ep.*``, with what torch.compile and autograd need to know of them.

All are functions of their tensors: what a dispatch decided comes out as tensors and goes into the others, so nothing
hidden connects two calls, and a compiler may keep, recompute or save them as it does with any operator.

Collective operators depend on each other through their tensors, and only so keep their order in a compiled graph;
where two are independent, ranks keep the same order as long as they compile the same graph.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from uccl_ep_core.errors import ArgumentError

from .. import high_throughput
from ..communicator import Communicator
from ..high_throughput import DispatchHandle
from ..tensors import check_tensor, check_topk_idx
from .buffers import communicator_of

Tensor = torch.Tensor
WEIGHTS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Schemas are written out: releases of torch differ in which annotations they can read.
ROUTES = "Tensor is_token_in_rank, Tensor rows, str buffer, SymInt num_experts"
COUNTED = 4  # rows of Routes.rows before the offsets: send, send by rail, receive, receive by rail


@torch.library.custom_op(
    "uccl_ep::dispatch",
    mutates_args=(),
    schema="(Tensor x, Tensor topk_idx, Tensor topk_weights, str buffer, SymInt num_experts, SymInt num_worst_tokens) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def dispatch_operator(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, buffer: str, num_experts: int, num_worst_tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(x, topk_idx, topk_weights, is_token_in_rank, rows); see `uccl_ep.functional.dispatch`."""
    communicator = communicator_of(buffer)
    topk_idx = check_topk_idx(topk_idx, communicator.backend.torch_device, num_experts)
    check_tensor("topk_weights", topk_weights)
    if topk_weights.dtype not in WEIGHTS or topk_weights.shape != topk_idx.shape:
        raise ArgumentError(
            f"topk_weights is {topk_weights.dtype} {list(topk_weights.shape)}: use bfloat16, float16, float32 or "
            f"float64 {list(topk_idx.shape)}"
        )
    layout = high_throughput.get_layout(communicator, topk_idx, num_experts)
    # The library carries weights as float32, which holds all but float64; that travels as a tensor beside x.
    double = topk_weights.dtype == torch.float64
    result = high_throughput.dispatch(
        communicator,
        x,
        topk_weights if double else None,
        topk_idx,
        None if double else topk_weights.float(),
        layout.is_token_in_rank,
        layout.num_tokens_per_expert,
        num_worst_tokens,
    )
    assert result.topk_idx is not None
    weights = result.scales if double else result.topk_weights
    assert weights is not None
    weights = weights.to(topk_weights.dtype)
    handle = result.handle
    out = result.x
    if double:
        weights = weights.masked_fill(result.topk_idx < 0, 0)
    if num_worst_tokens:
        out[handle.num_received :] = 0  # 0 times what memory held could be NaN in the gradients of the experts
    return out, result.topk_idx, weights, handle.is_token_in_rank, _pack(handle)


@torch.library.custom_op(
    "uccl_ep::dispatch_again", mutates_args=(), schema=f"(Tensor x, {ROUTES}, SymInt num_rows) -> Tensor"
)
def dispatch_again_operator(
    x: Tensor, is_token_in_rank: Tensor, rows: Tensor, buffer: str, num_experts: int, num_rows: int
) -> Tensor:
    """Other payload along the routes of an earlier dispatch with ``num_rows`` rows of output; 0 behind what arrives."""
    communicator = communicator_of(buffer)
    handle = _unpack(communicator, is_token_in_rank, rows, num_experts, num_rows)
    out = high_throughput.dispatch_cached(communicator, handle, x.contiguous(), None).x
    behind = torch.arange(num_rows, device=out.device) >= handle.receive_offset[-1]
    return out.masked_fill_(behind.unsqueeze(1), 0)


@torch.library.custom_op("uccl_ep::combine", mutates_args=(), schema=f"(Tensor x, {ROUTES}, SymInt num_rows) -> Tensor")
def combine_operator(
    x: Tensor, is_token_in_rank: Tensor, rows: Tensor, buffer: str, num_experts: int, num_rows: int
) -> Tensor:
    """Sum of the rows of each token, in rank order; see `uccl_ep.functional.combine`.

    Args:
        num_rows: of the dispatch; here, since only an operator can compare it with x under torch.compile.
    """
    communicator = communicator_of(buffer)
    if check_tensor("x", x).dim() != 2 or x.shape[0] != num_rows:
        raise ArgumentError(
            f"x is {list(x.shape)}: give [{num_rows}, hidden], a row for each that dispatch returned (unsort makes "
            "them of rows by expert)"
        )
    handle = _unpack(communicator, is_token_in_rank, rows, num_experts, x.shape[0])
    return high_throughput.combine(communicator, handle, x.contiguous())[0]


@torch.library.custom_op(
    "uccl_ep::combine_with_weights", mutates_args=(), schema=f"(Tensor x, Tensor weights, {ROUTES}) -> (Tensor, Tensor)"
)
def combine_with_weights_operator(
    x: Tensor, weights: Tensor, is_token_in_rank: Tensor, rows: Tensor, buffer: str, num_experts: int
) -> tuple[Tensor, Tensor]:
    """Rows and the weights beside them, [rows, topk] of any floating dtype, summed likewise in one pass."""
    communicator = communicator_of(buffer)
    handle = _unpack(communicator, is_token_in_rank, rows, num_experts, x.shape[0])
    x, weights = x.contiguous(), weights.contiguous()
    if weights.dtype == torch.float64:
        out, _ = high_throughput.combine(communicator, handle, x)
        return out, high_throughput.combine(communicator, handle, weights)[0]
    out, summed = high_throughput.combine(communicator, handle, x, weights.float())
    assert summed is not None
    return out, summed.to(weights.dtype)


def _pack(handle: DispatchHandle) -> Tensor:
    """A dispatch's counts and offsets as one tensor (an operator may not return views of one another)."""
    width = handle.receive_offset.numel()
    rows = torch.zeros((COUNTED + 1, width), dtype=torch.int32, device=handle.receive_offset.device)
    parts = (handle.send_rows, handle.rail_send_rows, handle.receive_rows, handle.rail_rows, handle.receive_offset)
    for row, part in zip(rows, parts, strict=True):
        row[: part.numel()] = part
    return rows


def _unpack(
    communicator: Communicator, is_token_in_rank: Tensor, rows: Tensor, num_experts: int, num_rows: int
) -> DispatchHandle:
    ranks, domains = communicator.num_ranks, communicator.num_domains
    channels = communicator.num_channels
    if rows.shape != (COUNTED + 1, ranks * channels + 1):
        raise ArgumentError(
            f"these routes are {list(rows.shape)}, not {[COUNTED + 1, ranks * channels + 1]}: use the buffer that "
            "made them"
        )
    return DispatchHandle(
        owner=weakref.ref(communicator),
        num_tokens=is_token_in_rank.shape[0],
        num_received=num_rows,  # at least as many as arrived; their exact number is on the device
        num_rows=num_rows,
        num_experts=num_experts,
        is_token_in_rank=is_token_in_rank,
        send_rows=rows[0, : ranks * channels],
        rail_send_rows=rows[1, : domains * channels],
        receive_rows=rows[2, : ranks * channels],
        rail_rows=rows[3, : domains * channels],
        receive_offset=rows[4],
        receive_source=torch.empty(num_rows, dtype=torch.int32, device=rows.device),
    )


# ---- shapes, for torch.compile ----


@dispatch_operator.register_fake
def _(x: Tensor, topk_idx: Tensor, topk_weights: Tensor, buffer: str, num_experts: int, num_worst_tokens: int) -> Any:
    communicator = communicator_of(buffer)
    rows = num_worst_tokens or torch.library.get_ctx().new_dynamic_size()
    width = communicator.num_ranks * communicator.num_channels + 1
    return (
        x.new_empty((rows, x.shape[1])),
        topk_idx.new_empty((rows, topk_idx.shape[1])),
        topk_weights.new_empty((rows, topk_idx.shape[1])),
        topk_idx.new_empty((x.shape[0], communicator.num_ranks), dtype=torch.bool),
        topk_idx.new_empty((COUNTED + 1, width), dtype=torch.int32),
    )


@dispatch_again_operator.register_fake
def _(x: Tensor, is_token_in_rank: Tensor, rows: Tensor, buffer: str, num_experts: int, num_rows: int) -> Tensor:
    return x.new_empty((num_rows, x.shape[1]))


@combine_operator.register_fake
def _(x: Tensor, is_token_in_rank: Tensor, rows: Tensor, buffer: str, num_experts: int, num_rows: int) -> Tensor:
    return x.new_empty((is_token_in_rank.shape[0], x.shape[1]))


@combine_with_weights_operator.register_fake
def _(x: Tensor, weights: Tensor, is_token_in_rank: Tensor, rows: Tensor, buffer: str, num_experts: int) -> Any:
    tokens = is_token_in_rank.shape[0]
    return x.new_empty((tokens, x.shape[1])), weights.new_empty((tokens, weights.shape[1]))


# ---- gradients ----


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, _, ctx.buffer, ctx.num_experts, _ = inputs
    _, topk_idx, _, is_token_in_rank, rows = output
    ctx.save_for_backward(topk_idx, is_token_in_rank, rows)


def _dispatch_backward(ctx: Any, grad_x: Tensor, _idx: Any, grad_weights: Tensor, _in_rank: Any, _rows: Any) -> Any:
    topk_idx, is_token_in_rank, rows = ctx.saved_tensors
    # A weight of an expert elsewhere arrives as a constant 0, whatever was computed with it.
    grad_weights = grad_weights.masked_fill(topk_idx < 0, 0)
    routes = (is_token_in_rank, rows, ctx.buffer, ctx.num_experts)
    grad_x, grad_weights = combine_with_weights_operator(grad_x, grad_weights, *routes)
    return grad_x, None, grad_weights, None, None, None


def _save_dispatch_again(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, is_token_in_rank, rows, ctx.buffer, ctx.num_experts, _ = inputs
    ctx.save_for_backward(is_token_in_rank, rows)


def _dispatch_again_backward(ctx: Any, grad: Tensor) -> Any:
    routes = (*ctx.saved_tensors, ctx.buffer, ctx.num_experts, grad.shape[0])
    return combine_operator(grad, *routes), None, None, None, None, None


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, is_token_in_rank, rows, ctx.buffer, ctx.num_experts, ctx.num_rows = inputs
    ctx.save_for_backward(is_token_in_rank, rows)


def _save_combine_with_weights(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, _, is_token_in_rank, rows, ctx.buffer, ctx.num_experts = inputs
    ctx.num_rows = x.shape[0]
    ctx.save_for_backward(is_token_in_rank, rows)


def _combine_backward(ctx: Any, *grads: Tensor) -> Any:
    routes = (*ctx.saved_tensors, ctx.buffer, ctx.num_experts, ctx.num_rows)
    others = [None] * (6 - len(grads))  # both operators take six arguments
    return *(dispatch_again_operator(grad, *routes) for grad in grads), *others


dispatch_operator.register_autograd(_dispatch_backward, setup_context=_save_dispatch)
dispatch_again_operator.register_autograd(_dispatch_again_backward, setup_context=_save_dispatch_again)
combine_operator.register_autograd(_combine_backward, setup_context=_save_combine)
combine_with_weights_operator.register_autograd(_combine_backward, setup_context=_save_combine_with_weights)
