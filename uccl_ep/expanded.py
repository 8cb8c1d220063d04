"""The expanded layout of v2: one row for each pick, grouped by local expert, each expert's block aligned.

Local work; nothing here communicates or waits for a device.
"""

from __future__ import annotations

import dataclasses

import torch

from uccl_ep_core._native import kernels
from uccl_ep_core.kernel_parameters import FoldParameters, GatherParameters

from .communicator import Communicator
from .tensors import check_reducible, pointer, round_up

Biases = tuple[torch.Tensor | None, torch.Tensor | None]


@dataclasses.dataclass(frozen=True, eq=False)
class Expansion:
    """Where the picks of received rows stand in the expanded layout.

    Attributes:
        slots: int32 [rows, topk], the expanded row of each pick, -1 for picks of other ranks.
        source_rows: int32 [expanded rows], the received row that each came from, -1 for padding.
        pick: int64 [expanded rows], the column of ``slots`` that each came from, 0 for padding.
        starts, counts: int32 [local experts], first expanded row and rows of each, unaligned.
    """

    slots: torch.Tensor
    source_rows: torch.Tensor
    pick: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor

    @property
    def num_rows(self) -> int:
        return self.source_rows.shape[0]


def block_ends(counts: torch.Tensor, alignment: int) -> torch.Tensor:
    """int32 [local experts]: the end of each expert's aligned block."""
    aligned = (counts + (alignment - 1)) // alignment * alignment
    return aligned.cumsum(0).to(torch.int32)


def most_rows(num_rows: int, num_topk: int, num_local_experts: int, alignment: int) -> int:
    """Expanded rows that suffice for ``num_rows`` received ones."""
    picks = num_rows * min(num_topk, num_local_experts)
    return round_up(picks + num_local_experts * (alignment - 1), alignment)


def expansion(local_idx: torch.Tensor, counts: torch.Tensor, alignment: int, num_rows: int) -> Expansion:
    """Number the picks of received rows expert by expert, in the order of the rows.

    Args:
        local_idx: [rows, topk] local expert ids, -1 elsewhere.
        counts: int32 [local experts], picks of each.
        num_rows: expanded rows, at least the end of the last block.
    """
    num_local_experts, num_topk = counts.shape[0], local_idx.shape[1]
    ends = block_ends(counts, alignment)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    experts = local_idx.long().flatten()
    here = experts >= 0
    order = torch.where(here, experts, num_local_experts).argsort(stable=True)
    before = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).long()  # picks of lower experts, unaligned
    ordered = torch.where(here, experts, num_local_experts)[order]
    place = torch.arange(ordered.shape[0], device=ordered.device) - before[ordered]
    first = torch.cat([starts, starts.new_zeros(1)]).long()[ordered]
    slot = torch.where(ordered < num_local_experts, first + place, -1)
    slot = torch.where(slot < num_rows, slot, -1)  # a pick named twice, where only distinct ones have room
    slots = torch.empty_like(slot).scatter_(0, order, slot)
    target = torch.where(slots >= 0, slots, num_rows)  # picks of other ranks go to a row that is cut off
    numbers = torch.arange(slots.shape[0], device=slots.device)
    inverse = numbers.new_full((num_rows + 1,), -1).scatter_(0, target, numbers)[:num_rows]
    width = max(1, num_topk)
    return Expansion(
        slots=slots.view(local_idx.shape).to(torch.int32),
        source_rows=torch.where(inverse >= 0, inverse // width, -1).to(torch.int32),
        pick=torch.where(inverse >= 0, inverse % width, 0),
        starts=starts,
        counts=counts,
    )


def gather(
    communicator: Communicator, tensor: torch.Tensor, source_rows: torch.Tensor, zero_padding: bool
) -> torch.Tensor:
    """``tensor[source_rows]`` of a contiguous matrix; rows of -1 are undefined unless ``zero_padding``.

    Args:
        source_rows: int32 [rows], -1 for padding.
    """
    out = communicator.backend.empty((source_rows.shape[0], tensor.shape[1]), tensor.dtype)
    if out.numel():
        parameters = GatherParameters(
            x=pointer(tensor),
            out=pointer(out),
            source_rows=pointer(source_rows),
            num_rows=out.shape[0],
            row_bytes=tensor.shape[1] * tensor.element_size(),
            zero_padding=int(zero_padding),
        )
        communicator.launch("uccl_ep_gather", parameters, **communicator.local_grid())
    return out


def expand_weights(weights: torch.Tensor, layout: Expansion) -> torch.Tensor:
    """float32 [rows, topk] as [expanded rows]; 0 for padding."""
    if weights.numel() == 0:
        return weights.new_zeros(layout.num_rows)
    flat = layout.source_rows.clamp(min=0).long() * weights.shape[1] + layout.pick
    return torch.where(layout.source_rows >= 0, weights.flatten()[flat], 0)


def fold_weights(weights: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """float32 [expanded rows] as [rows, topk]; 0 for picks of other ranks."""
    if weights.numel() == 0:
        return weights.new_zeros(slots.shape)
    return torch.where(slots >= 0, weights[slots.clamp(min=0)], 0)


def fold(
    communicator: Communicator, x: torch.Tensor, slots: torch.Tensor, biases: Biases = (None, None)
) -> torch.Tensor:
    """Sum rows of ``x``: biases, then in increasing k, in float32 (float64 for float64), rounded once.

    Args:
        x: [any, hidden] bf16, fp16, fp32 or fp64, contiguous.
        slots: int32 [rows, topk], the row of each term, -1 for none.
        biases: [rows, hidden] like ``x``, contiguous.
    """
    out = communicator.backend.empty((slots.shape[0], x.shape[1]), x.dtype)
    if out.numel():
        grid = communicator.local_grid()
        parameters = FoldParameters(
            x=pointer(x),
            out=pointer(out),
            slots=pointer(slots),
            bias=(pointer(biases[0]), pointer(biases[1])),
            num_rows=out.shape[0],
            num_terms=slots.shape[1],
            payload_type=int(check_reducible("x", x)),
            hidden=x.shape[1],
            row_bytes=x.shape[1] * x.element_size(),
        )
        shared_bytes = kernels.fold_terms_bytes(grid["warps"], slots.shape[1])
        communicator.launch("uccl_ep_fold", parameters, shared_bytes=shared_bytes, **grid)
    return out


def picks_in_order(layout: Expansion, num_rows: int) -> torch.Tensor:
    """int32 [num_rows]: expanded rows in the order (received row, k), and -1 behind the last."""
    slots = layout.slots.flatten()
    here = slots >= 0
    target = torch.where(here, here.long().cumsum(0) - 1, num_rows)
    return slots.new_full((num_rows + 1,), -1).scatter_(0, target, slots)[:num_rows]
