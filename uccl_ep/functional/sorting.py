"""Received tokens sorted by expert, as grouped matrix products want them, and back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from uccl_ep_core.errors import ArgumentError

Tensor = torch.Tensor


class SortedRows(NamedTuple):
    """One row for each (received token, local expert) pair, sorted by expert, in token order within an expert.

    Attributes:
        x: [rows, hidden]; rows of padding are 0.
        weights: [rows], the top-k weight of each pair, 0 for padding.
        counts: int32 [num_local_experts], rows of each expert with its padding; ``counts.cumsum(0)`` are its ends.
        tokens: int64 [rows], the received token in each row, -1 for padding.
        places: int64 [num_tokens, topk], the row of each pair, -1 for none.
    """

    x: Tensor
    weights: Tensor
    counts: Tensor
    tokens: Tensor
    places: Tensor


def sort_by_expert(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, num_local_experts: int, alignment: int = 1, max_rows: int = 0
) -> SortedRows:
    """Copy each received token to each of its local experts. Local; differentiable.

    Args:
        x: [num_tokens, hidden], as from `dispatch`.
        topk_idx: [num_tokens, topk] local expert indices, -1 for none.
        topk_weights: [num_tokens, topk].
        alignment: each expert's rows are padded to a multiple of it.
        max_rows: make the output this many rows long; what is behind the last expert is padding that no count has.
            num_tokens * min(topk, num_local_experts) + num_local_experts * (alignment - 1) hold whatever arrives,
            and need no look at the data. 0: as many as there are.

    Raises:
        ArgumentError: an argument of the wrong shape, or ``max_rows`` is too small for the data.
    """
    if topk_idx.dim() != 2 or topk_weights.shape != topk_idx.shape or x.dim() != 2 or x.shape[0] != topk_idx.shape[0]:
        raise ArgumentError(
            f"x {list(x.shape)}, topk_idx {list(topk_idx.shape)} and topk_weights {list(topk_weights.shape)}: give "
            "[num_tokens, hidden], and twice [num_tokens, topk]"
        )
    if num_local_experts < 1 or alignment < 1 or max_rows < 0:
        raise ArgumentError(
            f"num_local_experts = {num_local_experts}, alignment = {alignment}, max_rows = {max_rows}: use at least "
            "1, 1 and 0"
        )
    tokens, pairs, places, counts = order_operator(topk_idx, num_local_experts, alignment, max_rows)
    weights = spread_operator(topk_weights.reshape(-1, 1), pairs, places.reshape(-1, 1))
    return SortedRows(spread_operator(x, tokens, places), weights.squeeze(1), counts, tokens, places)


def unsort(y: Tensor, rows: SortedRows) -> Tensor:
    """Sum each token's rows, in increasing k, in float32 (float64 for float64), rounded once. Local; differentiable.

    Args:
        y: [rows, hidden], the experts' outputs for ``rows.x``, weighted as the caller likes.

    Returns:
        [num_tokens, hidden] of y's dtype; 0 for a token without an expert.
    """
    if y.dim() != 2 or y.shape[0] != rows.x.shape[0]:
        raise ArgumentError(
            f"y is {list(y.shape)}: give [{rows.x.shape[0]}, hidden], the rows that sort_by_expert made"
        )
    return sum_operator(y, rows.tokens, rows.places)


@torch.library.custom_op(
    "uccl_ep::order_by_expert",
    mutates_args=(),
    schema="(Tensor topk_idx, SymInt num_local_experts, SymInt alignment, SymInt max_rows) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
def order_operator(
    topk_idx: Tensor, num_local_experts: int, alignment: int, max_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """int64 [rows] the token in each row, and the pair (token * topk + k), -1 for padding; int64 [num_tokens, topk] the
    row of each pair, -1 for none; int32 [num_local_experts] rows of each expert."""
    num_tokens, num_topk = topk_idx.shape
    device = topk_idx.device
    flat = topk_idx.reshape(-1).long()
    expert = torch.where(flat < 0, num_local_experts, flat)  # pairs of no expert come last
    order = expert.argsort(stable=True)
    pairs_of = torch.zeros(num_local_experts + 1, dtype=torch.int64, device=device)
    pairs_of.scatter_add_(0, expert, torch.ones_like(expert))
    pairs_of[-1] = 0
    counts = (pairs_of + alignment - 1) // alignment * alignment
    rows = max_rows
    if max_rows < num_tokens * min(num_topk, num_local_experts) + num_local_experts * (alignment - 1):
        needed = int(counts.sum())
        rows = max_rows or needed
        if needed > rows:
            raise ArgumentError(f"max_rows = {max_rows}, but {needed} rows are needed: use at least that")
    # The row of a pair: where its expert begins, and its number among the pairs of that expert.
    shift = counts.cumsum(0) - counts - (pairs_of.cumsum(0) - pairs_of)
    by_expert = expert[order]
    row = shift[by_expert] + torch.arange(len(order), device=device)
    row.masked_fill_(by_expert == num_local_experts, -1)
    places = torch.empty_like(flat)
    places[order] = row
    pairs = torch.full((rows + 1,), -1, dtype=torch.int64, device=device)
    pairs[row] = order  # those of no expert go to the place behind the last, which -1 names
    pairs = pairs[:-1].clone()
    tokens = torch.where(pairs < 0, -1, pairs // max(1, num_topk))
    return tokens, pairs, places.view(topk_idx.shape), counts[:-1].to(torch.int32)


@torch.library.custom_op(
    "uccl_ep::spread_rows", mutates_args=(), schema="(Tensor x, Tensor tokens, Tensor places) -> Tensor"
)
def spread_operator(x: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
    """[rows, hidden]: the token in each row, 0 where ``tokens`` is -1; the transpose of `sum_operator`."""
    if x.shape[0] == 0:
        return x.new_zeros((tokens.shape[0], x.shape[1]))
    rows = x.index_select(0, tokens.clamp_min(0))
    return rows.masked_fill_((tokens < 0).unsqueeze(1), 0)


@torch.library.custom_op(
    "uccl_ep::sum_rows", mutates_args=(), schema="(Tensor y, Tensor tokens, Tensor places) -> Tensor"
)
def sum_operator(y: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
    """[num_tokens, hidden]: each token's rows summed, always in the same order; the transpose of `spread_operator`."""
    wide = torch.float64 if y.dtype == torch.float64 else torch.float32
    total = y.new_zeros((places.shape[0], y.shape[1]), dtype=wide)
    if y.shape[0] > 0:
        for place in places.unbind(1):
            total += y.index_select(0, place.clamp_min(0)).masked_fill_((place < 0).unsqueeze(1), 0)
    return total if y.dtype == wide else total.to(y.dtype)


@order_operator.register_fake
def _(topk_idx: Tensor, num_local_experts: int, alignment: int, max_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = max_rows or torch.library.get_ctx().new_dynamic_size()
    return (
        topk_idx.new_empty((rows,), dtype=torch.int64),
        topk_idx.new_empty((rows,), dtype=torch.int64),
        topk_idx.new_empty(topk_idx.shape, dtype=torch.int64),
        topk_idx.new_empty((num_local_experts,), dtype=torch.int32),
    )


@spread_operator.register_fake
def _(x: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
    return x.new_empty((tokens.shape[0], x.shape[1]))


@sum_operator.register_fake
def _(y: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
    return y.new_empty((places.shape[0], y.shape[1]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


spread_operator.register_autograd(
    lambda ctx, grad: (sum_operator(grad, *ctx.saved_tensors), None, None), setup_context=_save
)
sum_operator.register_autograd(
    lambda ctx, grad: (spread_operator(grad, *ctx.saved_tensors), None, None), setup_context=_save
)
