"""What every call has to return, in plain PyTorch.

Nothing here communicates: each function takes the inputs of *all* ranks of the group, as lists indexed by
rank, and returns what one rank must see. With inputs that every rank can compute by a closed form, each rank
checks itself. All results are exact; compare with ``torch.equal``.

Shapes: R ranks, E experts, L = E / R experts of one rank, T tokens of a rank (may differ per rank, may be 0),
K picks per token, H hidden, N rows received, M the most tokens per rank that low latency was asked for.
Expert ``e`` lives on rank ``e // L``. An index of -1 picks nothing.

Rounding (part of the contract): sums run in float32 (float64 for a float64 payload), in the order each
function states, and are rounded to the payload type once, at the end. No multiply-add is fused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

FP8_GROUP = 128  # channels that share a scale; the last group of a row may be shorter
FP8_MAX = 448.0  # largest finite float8_e4m3fn
FP8_MIN_AMAX = 1e-4  # keeps the scale of an all-zero group finite


class Layout(NamedTuple):
    """What ``get_dispatch_layout`` returns, without the event and the count per domain."""

    num_tokens_per_rank: Tensor  # int32 [R]; a token counts once per rank, however many of its experts it has
    num_tokens_per_expert: Tensor  # int32 [E]; a token counts once per expert
    is_token_in_rank: Tensor  # bool [T, R]


@dataclass(frozen=True)
class Dispatched:
    """What a rank receives from a high-throughput dispatch; rows in (source rank, source index) order."""

    x: Tensor  # [N, H]
    scales: Tensor | None  # [N, scale columns]
    topk_idx: Tensor  # [N, K], local expert ids, -1 where the pick lives on another rank
    topk_weights: Tensor | None  # float32 [N, K], 0 where topk_idx is -1
    num_tokens_per_expert: list[int]  # [L], rounded up to the alignment; empty where num_worst_tokens was given
    source_rank: Tensor  # int64 [N]
    source_index: Tensor  # int64 [N]


@dataclass(frozen=True)
class LowLatencyDispatched:
    """What a rank receives from a low-latency dispatch.

    Rows of expert ``e`` are packed from 0 in (source rank, source index) order; those from ``count[e]`` on
    are not part of the result (here they are zero).
    """

    x: Tensor  # [L, R * M, H], payload or float8_e4m3fn
    scales: Tensor | None  # column-major [L, R * M, groups] float32, or [.., ceil(groups / 4)] int32 for ue8m0
    count: Tensor  # int32 [L]
    source_rank: Tensor  # int64 [L, R * M], -1 in unused rows
    source_index: Tensor  # int64 [L, R * M], -1 in unused rows


def accumulator_dtype(payload: torch.dtype) -> torch.dtype:
    """The type in which sums of ``payload`` run."""
    return torch.float64 if payload == torch.float64 else torch.float32


def layout(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Layout:
    """Which ranks and experts each of one rank's tokens goes to."""
    num_local = num_experts // num_ranks
    ids = topk_idx.long()
    picked = ids >= 0
    ranks = torch.where(picked, ids // num_local, num_ranks)
    in_rank = torch.zeros(ids.shape[0], num_ranks + 1, dtype=torch.bool)
    in_rank.scatter_(1, ranks, True)
    in_expert = torch.zeros(ids.shape[0], num_experts + 1, dtype=torch.bool)
    in_expert.scatter_(1, torch.where(picked, ids, num_experts), True)
    return Layout(
        in_rank[:, :num_ranks].sum(0, dtype=torch.int32),
        in_expert[:, :num_experts].sum(0, dtype=torch.int32),
        in_rank[:, :num_ranks].contiguous(),
    )


def local_topk(topk_idx: Tensor, rank: int, num_experts: int, num_ranks: int) -> Tensor:
    """Global expert ids as rank ``rank`` names them: local ids, -1 for experts of other ranks."""
    num_local = num_experts // num_ranks
    local = topk_idx - rank * num_local
    return torch.where((topk_idx >= 0) & (local >= 0) & (local < num_local), local, -1).to(topk_idx.dtype)


def rows_for_rank(topk_idx: Tensor, rank: int, num_experts: int, num_ranks: int) -> Tensor:
    """Indices of the tokens of one source that rank ``rank`` receives, in increasing order."""
    return (local_topk(topk_idx, rank, num_experts, num_ranks) >= 0).any(1).nonzero().flatten()


def dispatch(
    rank: int,
    xs: Sequence[Tensor],
    topk_idxs: Sequence[Tensor],
    num_experts: int,
    *,
    topk_weights: Sequence[Tensor] | None = None,
    scales: Sequence[Tensor] | None = None,
    expert_alignment: int = 1,
    num_worst_tokens: int = 0,
) -> Dispatched:
    """What ``rank`` receives from ``dispatch``. With ``num_worst_tokens`` the outputs have that many rows, of
    which those past the received ones have index -1 and otherwise no meaning (here zero)."""
    num_ranks = len(xs)
    num_local = num_experts // num_ranks
    rows = [rows_for_rank(ids, rank, num_experts, num_ranks) for ids in topk_idxs]
    local = [local_topk(ids[r], rank, num_experts, num_ranks) for ids, r in zip(topk_idxs, rows, strict=True)]
    x = torch.cat([a[r] for a, r in zip(xs, rows, strict=True)])
    idx = torch.cat(local)
    out_scales = None if scales is None else torch.cat([a[r] for a, r in zip(scales, rows, strict=True)])
    out_weights = None
    if topk_weights is not None:
        out_weights = torch.cat([a[r] for a, r in zip(topk_weights, rows, strict=True)])
        out_weights = torch.where(idx >= 0, out_weights, torch.zeros_like(out_weights))
    hits = idx.long().flatten()
    counts = torch.bincount(hits[hits >= 0], minlength=num_local).tolist()
    counts = [-(-c // expert_alignment) * expert_alignment for c in counts]
    if num_worst_tokens:
        counts = []
        x, idx = _pad_rows(x, num_worst_tokens, 0), _pad_rows(idx, num_worst_tokens, -1)
        out_scales = None if out_scales is None else _pad_rows(out_scales, num_worst_tokens, 0)
        out_weights = None if out_weights is None else _pad_rows(out_weights, num_worst_tokens, 0)
    source = torch.cat([torch.full_like(r, s) for s, r in enumerate(rows)])
    return Dispatched(x, out_scales, idx, out_weights, counts, source, torch.cat(rows))


def _pad_rows(t: Tensor, rows: int, value: int) -> Tensor:
    padded = t.new_zeros((rows, *t.shape[1:])) if value == 0 else t.new_full((rows, *t.shape[1:]), value)
    padded[: t.shape[0]] = t
    return padded


def combine(
    rank: int,
    ys: Sequence[Tensor],
    topk_idxs: Sequence[Tensor],
    num_experts: int,
    *,
    topk_weights: Sequence[Tensor] | None = None,
    bias: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor | None]:
    """What ``rank`` gets back from ``combine``, given what every rank put in for the rows it received.

    ``ys[d]`` and ``topk_weights[d]`` have one row per row that rank ``d`` received; ``bias`` is this rank's own.
    """
    num_ranks = len(topk_idxs)
    segments, weights = [], []
    for d in range(num_ranks):
        counts = [rows_for_rank(ids, d, num_experts, num_ranks).numel() for ids in topk_idxs[: rank + 1]]
        rows = slice(sum(counts[:-1]), sum(counts))
        segments.append(ys[d][rows])
        if topk_weights is not None:
            weights.append(topk_weights[d][rows])
    in_rank = layout(topk_idxs[rank], num_experts, num_ranks).is_token_in_rank
    combined = combine_segments(segments, in_rank, bias)
    return combined, combine_segments(weights, in_rank) if topk_weights is not None else None


def combine_segments(segments: Sequence[Tensor], is_token_in_rank: Tensor, bias: Sequence[Tensor] = ()) -> Tensor:
    """The unweighted sum of what comes home: bias first, in order, then ranks in rank order.

    ``segments[d]`` holds the rows that rank ``d`` sends back, one per token with ``is_token_in_rank[:, d]``, in
    the order of the tokens. A token that went nowhere sums to its biases, or to 0.
    """
    dtype = segments[0].dtype
    acc = torch.zeros(is_token_in_rank.shape[0], segments[0].shape[1], dtype=accumulator_dtype(dtype))
    for b in bias:
        acc += b.to(acc.dtype)
    for d, rows in enumerate(segments):
        where = is_token_in_rank[:, d].nonzero().flatten()
        acc[where] = acc[where] + rows.to(acc.dtype)
    return acc.to(dtype)


def quantize_fp8(x: Tensor, *, round_scale: bool = False, use_ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """``(q, scales)`` of rows of ``x``, in groups of 128 channels: ``x`` is about ``q * scale``.

    amax = max(abs(x)) of the group, at least 1e-4. The scale is amax / 448, and q = x * (448 / amax) in float32,
    rounded to e4m3. ``round_scale`` takes the next power of two not below, and ``use_ue8m0`` stores its biased
    exponent alone, four groups to an int32, the first group in the lowest byte.

    A group with a NaN is NaN altogether, and so is its scale. One with an infinity has an infinite scale, under which
    all of it is NaN, as infinity times 0. No power of two is either: there both have an infinite scale (255 as a
    biased exponent, which is NaN in OCP's E8M0), and q is NaN.
    """
    rows, hidden = x.shape
    groups = -(-hidden // FP8_GROUP)
    wide = torch.zeros(rows, groups * FP8_GROUP, dtype=torch.float32)
    wide[:, :hidden] = x.float()
    wide = wide.view(rows, groups, FP8_GROUP)
    amax = wide.abs().amax(2).clamp(min=FP8_MIN_AMAX)
    largest = torch.full_like(amax, FP8_MAX)
    scale = amax / largest
    inverse = largest / amax  # not FP8_MAX / amax: torch makes that reciprocal(amax) * FP8_MAX, which rounds twice
    if round_scale or use_ue8m0:
        mantissa, exponent = torch.frexp(scale)  # scale = mantissa * 2^exponent, mantissa in [0.5, 1)
        exponent = exponent - (mantissa == 0.5).int()
        scale = torch.ldexp(torch.ones_like(scale), exponent)
        inverse = torch.ldexp(torch.ones_like(scale), -exponent)
        no_number = ~amax.isfinite()  # has no exponent either
        scale[no_number], inverse[no_number] = torch.inf, torch.nan
    q = (wide * inverse[:, :, None]).to(torch.float8_e4m3fn).view(rows, groups * FP8_GROUP)[:, :hidden].contiguous()
    return q, pack_ue8m0(scale) if use_ue8m0 else scale


def pack_ue8m0(scale: Tensor) -> Tensor:
    """Powers of two [rows, groups] as int32 [rows, ceil(groups / 4)] of four biased exponents each."""
    rows, groups = scale.shape
    exponents = torch.zeros(rows, -(-groups // 4) * 4, dtype=torch.uint8)
    exponents[:, :groups] = (scale.view(torch.int32) >> 23).to(torch.uint8)
    return exponents.view(torch.int32)


def dequantize_fp8(q: Tensor, scales: Tensor) -> Tensor:
    """float32 values of ``q`` [rows, H] under ``scales`` (float32, or packed ue8m0 exponents in int32)."""
    rows, hidden = q.shape
    if scales.dtype == torch.int32:
        scales = (scales.contiguous().view(torch.uint8).to(torch.int32) << 23).view(torch.float32)
    groups = -(-hidden // FP8_GROUP)
    per_channel = scales[:, :groups].repeat_interleave(FP8_GROUP, dim=1)[:, :hidden]
    return q.float() * per_channel


def column_major(scales: Tensor) -> Tensor:
    """The same [L, rows, columns], with rows next to each other in memory."""
    return scales.transpose(1, 2).contiguous().transpose(1, 2)


def ll_dispatch(
    rank: int,
    xs: Sequence[Tensor],
    topk_idxs: Sequence[Tensor],
    num_max_tokens: int,
    num_experts: int,
    *,
    use_fp8: bool = False,
    round_scale: bool = False,
    use_ue8m0: bool = False,
) -> LowLatencyDispatched:
    """What ``rank`` receives from ``low_latency_dispatch``."""
    num_ranks, hidden = len(xs), xs[0].shape[1]
    num_local, width = num_experts // num_ranks, num_ranks * num_max_tokens
    source_rank = torch.full((num_local, width), -1, dtype=torch.int64)
    source_index = torch.full((num_local, width), -1, dtype=torch.int64)
    count = torch.zeros(num_local, dtype=torch.int32)
    scales: Tensor | None = None
    if use_fp8:
        pairs = [quantize_fp8(x, round_scale=round_scale, use_ue8m0=use_ue8m0) for x in xs]
        payload, sent_scales = [p[0] for p in pairs], [p[1] for p in pairs]
        scales = torch.zeros(num_local, width, sent_scales[0].shape[1], dtype=sent_scales[0].dtype)
    else:
        payload, sent_scales = list(xs), []
    x = torch.zeros(num_local, width, hidden, dtype=torch.uint8 if use_fp8 else payload[0].dtype)
    for source, ids in enumerate(topk_idxs):
        local = local_topk(ids, rank, num_experts, num_ranks).long()
        tokens = torch.arange(ids.shape[0])[:, None].expand_as(local)[local >= 0]
        experts = local[local >= 0]
        order = torch.argsort(experts, stable=True)  # stable: tokens stay in increasing order within an expert
        tokens, experts = tokens[order], experts[order]
        added = torch.bincount(experts, minlength=num_local)
        rows = torch.arange(experts.numel()) - (added.cumsum(0) - added)[experts] + count[experts]
        sent = payload[source].view(torch.uint8) if use_fp8 else payload[source]
        x[experts, rows] = sent[tokens]
        if scales is not None:
            scales[experts, rows] = sent_scales[source][tokens]
        source_rank[experts, rows] = source
        source_index[experts, rows] = tokens
        count += added.to(torch.int32)
    return LowLatencyDispatched(
        x.view(torch.float8_e4m3fn) if use_fp8 else x,
        None if scales is None else column_major(scales),
        count,
        source_rank,
        source_index,
    )


def ll_positions(rank: int, topk_idxs: Sequence[Tensor], num_experts: int) -> Tensor:
    """int64 [T, K]: the row, within its expert, of each pick of ``rank``; -1 where the pick is -1."""
    before = torch.zeros(num_experts, dtype=torch.int64)
    for ids in topk_idxs[:rank]:
        picks = ids.long().flatten()
        before += torch.bincount(picks[picks >= 0], minlength=num_experts)
    ids = topk_idxs[rank].long()
    picks = torch.where(ids >= 0, ids, num_experts).flatten()
    added = torch.bincount(picks, minlength=num_experts + 1)
    order = torch.argsort(picks, stable=True)  # an expert's rows in the order of tokens, and of k within a token
    earlier = torch.empty_like(picks)
    earlier[order] = torch.arange(picks.numel()) - (added.cumsum(0) - added)[picks[order]]
    return torch.where(ids >= 0, earlier.view(ids.shape) + before[ids.clamp(min=0)], -1)


def ll_combine(
    rank: int,
    ys: Sequence[Tensor],
    topk_idxs: Sequence[Tensor],
    topk_weights: Tensor,
    num_experts: int,
) -> Tensor:
    """What ``rank`` gets back from ``low_latency_combine``; ``ys[d]`` is rank d's [L, R * M, H]."""
    num_local = num_experts // len(ys)
    ids = topk_idxs[rank].long()
    positions = ll_positions(rank, topk_idxs, num_experts)
    terms = torch.zeros(*ids.shape, ys[0].shape[2], dtype=ys[0].dtype)
    for d, y in enumerate(ys):
        here = (ids >= 0) & (ids // num_local == d)
        terms[here] = y[ids[here] - d * num_local, positions[here]]
    return ll_combine_terms(terms, topk_idxs[rank], topk_weights)


def ll_combine_terms(
    terms: Tensor, topk_idx: Tensor, topk_weights: Tensor, rounding: str = "increasing k", experts_per_rank: int = 0
) -> Tensor:
    """Weighted sum of ``terms`` [T, K, H] over picks that are not -1: multiply, then add; rounded once.

    Args:
        rounding: in increasing k, or "by rank": each rank's terms in increasing k, then those sums in the order of
            ranks; as a handle's ``rounding`` says.
        experts_per_rank: for "by rank".
    """
    acc = torch.zeros(terms.shape[0], terms.shape[2], dtype=accumulator_dtype(terms.dtype))
    weights = topk_weights.to(acc.dtype)

    def add(to: Tensor, taken: Tensor) -> None:
        for k in range(terms.shape[1]):
            where = taken[:, k].nonzero().flatten()
            to[where] = to[where] + terms[where, k].to(acc.dtype) * weights[where, k, None]

    if rounding == "increasing k":
        add(acc, topk_idx >= 0)
        return acc.to(terms.dtype)
    owners = torch.where(topk_idx >= 0, topk_idx // experts_per_rank, -1)
    for rank in owners[owners >= 0].unique().tolist():  # in increasing order
        of_rank = torch.zeros_like(acc)
        add(of_rank, owners == rank)
        where = (owners == rank).any(1)
        acc[where] = acc[where] + of_rank[where]
    return acc.to(terms.dtype)
