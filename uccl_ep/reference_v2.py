"""What the v2 calls have to return, in plain PyTorch; see `uccl_ep.reference` for shapes and habits.

Nothing here shares a line with the library's own order of terms: `reduce_groups` states the rule by definition.

Rounding of `combine`, on terms [T, K, H] of the payload type:

1. within a rank: the terms of one rank are added in increasing k in float32 and rounded; the sum stands at the
   rank's largest k;
2. within a scale-up domain, only where asked for: the same again over the ranks of a domain;
3. at last: float32 from the sum of the biases (or 0), what still stands is added in increasing k, and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import reference
from .reference import accumulator_dtype


@dataclass(frozen=True)
class Dispatched:
    """What a rank receives; N rows in (source rank, source index) order, or E expanded ones by local expert."""

    x: Tensor  # [N or E, H]; padding between experts is zero here, and undefined unless zero padding was asked for
    scales: Tensor | None  # [N or E, scale columns]
    topk_idx: Tensor | None  # [N, K] local ids, -1 elsewhere; None when expanded
    topk_weights: Tensor | None  # float32 [N, K], 0 where topk_idx is -1; expanded: [E]
    metadata: (
        Tensor  # int32 [N, K + 2]: source token of the whole group, its ordinal from there, row of each pick or -1
    )
    counts: list[int]  # [L], unaligned
    psum_experts: Tensor  # int32 [L]
    psum_scaleup_ranks: Tensor  # int32 [scale-up ranks]


def align(count: int, alignment: int) -> int:
    """``count`` rounded up to a multiple of ``alignment``."""
    return -(-count // alignment) * alignment


def dispatch(
    rank: int,
    xs: Sequence[Tensor],
    topk_idxs: Sequence[Tensor],
    num_experts: int,
    num_max_tokens_per_rank: int,
    *,
    topk_weights: Sequence[Tensor] | None = None,
    scales: Sequence[Tensor] | None = None,
    expert_alignment: int = 1,
    expand: bool = False,
    num_scaleup_ranks: int = 0,
) -> Dispatched:
    """What ``rank`` receives. ``num_scaleup_ranks`` 0: all ranks are one domain."""
    num_ranks = len(xs)
    scaleup = num_scaleup_ranks or num_ranks
    flat = reference.dispatch(rank, xs, topk_idxs, num_experts, topk_weights=topk_weights, scales=scales)
    counts = flat.num_tokens_per_expert
    rows, num_topk = flat.topk_idx.shape
    metadata = torch.full((rows, num_topk + 2), -1, dtype=torch.int32)
    metadata[:, 0] = flat.source_rank * num_max_tokens_per_rank + flat.source_index
    starts, psum, end = [], [], 0
    for count in counts:
        starts.append(end)
        psum.append(end + count if expand else end + align(count, expert_alignment))
        end += align(count, expert_alignment)
    x, out_scales, weights = flat.x, flat.scales, flat.topk_weights
    if expand:
        x = flat.x.new_zeros((end, flat.x.shape[1]))
        out_scales = None if flat.scales is None else flat.scales.new_zeros((end, flat.scales.shape[1]))
        weights = None if flat.topk_weights is None else torch.zeros(end)
    filled = list(starts)
    ordinal = [0] * num_ranks
    for row in range(rows):
        source = int(flat.source_rank[row])
        metadata[row, 1] = ordinal[source]
        ordinal[source] += 1
        for k, expert in enumerate(flat.topk_idx[row].tolist()):
            if expert < 0:
                continue
            if not expand:
                metadata[row, 2 + k] = row
                continue
            slot = filled[expert]
            filled[expert] += 1
            metadata[row, 2 + k] = slot
            x[slot] = flat.x[row]
            if out_scales is not None and flat.scales is not None:
                out_scales[slot] = flat.scales[row]
            if weights is not None and flat.topk_weights is not None:
                weights[slot] = flat.topk_weights[row, k]
    received = torch.zeros(scaleup, dtype=torch.int64)
    for source in range(num_ranks):
        received[source % scaleup] += ordinal[source]
    return Dispatched(
        x,
        out_scales,
        None if expand else flat.topk_idx,
        weights,
        metadata,
        counts,
        torch.tensor(psum, dtype=torch.int32),
        received.cumsum(0).to(torch.int32),
    )


def reduce_groups(terms: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Add up the terms [T, K, H] of each group [T, K] (-1: none) in increasing k, in float32, and round.

    Returns the sums, each at the largest k of its group, and bool [T, K] where one stands.
    """
    num_topk = terms.shape[1]
    sums, stands = torch.zeros_like(terms), groups >= 0
    for k in range(num_topk):
        total = torch.zeros(terms.shape[0], terms.shape[2], dtype=accumulator_dtype(terms.dtype))
        for j in range(k + 1):
            same = (groups[:, j] == groups[:, k]) & (groups[:, k] >= 0)
            total = torch.where(same[:, None], total + terms[:, j].to(total.dtype), total)
        for later in range(k + 1, num_topk):
            stands[:, k] &= groups[:, later] != groups[:, k]
        sums[:, k] = torch.where(stands[:, k, None], total, 0).to(terms.dtype)
    return sums, stands


def combine(
    terms: Tensor,
    topk_idx: Tensor,
    num_experts: int,
    num_ranks: int,
    *,
    bias: Sequence[Tensor] = (),
    reduce_in_rank: bool = True,
    ranks_per_domain: int = 0,
) -> Tensor:
    """What one rank gets back, given the expert outputs ``terms`` [T, K, H] of its tokens' picks.

    ``ranks_per_domain`` 0: without the step within a domain.
    """
    per_rank = num_experts // num_ranks
    ids = topk_idx.long()
    stands = ids >= 0
    ranks = torch.where(stands, ids // per_rank, -1)
    if reduce_in_rank:
        terms, stands = reduce_groups(terms, ranks)
    if ranks_per_domain:
        domains = torch.where(stands, ranks // ranks_per_domain, -1)
        terms, stands = reduce_groups(terms, domains)
    total = torch.zeros(terms.shape[0], terms.shape[2], dtype=accumulator_dtype(terms.dtype))
    for one in bias:
        total = total + one.to(total.dtype)
    for k in range(terms.shape[1]):
        total = torch.where(stands[:, k, None], total + terms[:, k].to(total.dtype), total)
    return total.to(terms.dtype)
