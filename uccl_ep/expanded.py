"""The expanded layout of v2: one row for each pick, grouped by local expert, each expert's block aligned.

Local work on tensors of any device; nothing here communicates or waits for a device.
"""

from __future__ import annotations

import dataclasses

import torch

from .tensors import round_up

CHUNK_ROWS = 2048  # rows whose float32 sums are held at a time


@dataclasses.dataclass(frozen=True, eq=False)
class Expansion:
    """Where the picks of received rows stand in the expanded layout.

    Attributes:
        slots: int64 [rows, topk], the expanded row of each pick, -1 for picks of other ranks.
        source_rows: int64 [expanded rows], the received row that each came from, -1 for padding.
        pick: int64 [expanded rows], the column of ``slots`` that each came from, 0 for padding.
        starts, counts: int32 [local experts], first expanded row and rows of each, unaligned.
        most_picks: no row has more picks here.
    """

    slots: torch.Tensor
    source_rows: torch.Tensor
    pick: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    most_picks: int

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


def expansion(
    local_idx: torch.Tensor, counts: torch.Tensor, alignment: int, num_rows: int, most_picks: int
) -> Expansion:
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
        slots=slots.view(local_idx.shape),
        source_rows=torch.where(inverse >= 0, inverse // width, -1),
        pick=torch.where(inverse >= 0, inverse % width, 0),
        starts=starts,
        counts=counts,
        most_picks=most_picks,
    )


def take_rows(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``tensor[rows]`` for a contiguous matrix of any dtype; rows of -1 hold anything."""
    if tensor.shape[0] == 0 or tensor.shape[1] == 0:
        return tensor.new_zeros((rows.shape[0], tensor.shape[1]))
    as_bytes = tensor.view(torch.uint8)  # not every dtype can be indexed everywhere
    return as_bytes.index_select(0, rows.clamp(min=0)).view(tensor.dtype)


def expand(tensor: torch.Tensor, layout: Expansion, zero_padding: bool) -> torch.Tensor:
    """Received rows [rows, columns] as expanded ones; padding is undefined unless ``zero_padding``."""
    taken = take_rows(tensor, layout.source_rows)
    if zero_padding and taken.numel():
        taken.view(torch.uint8).masked_fill_(layout.source_rows[:, None] < 0, 0)
    return taken


def expand_weights(weights: torch.Tensor, layout: Expansion) -> torch.Tensor:
    """float32 [rows, topk] as [expanded rows]; 0 for padding."""
    if weights.numel() == 0:
        return weights.new_zeros(layout.num_rows)
    flat = (layout.source_rows.clamp(min=0) * weights.shape[1] + layout.pick).long()
    return torch.where(layout.source_rows >= 0, weights.flatten()[flat], 0)


def fold_weights(weights: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """float32 [expanded rows] as [rows, topk]; 0 for picks of other ranks."""
    if weights.numel() == 0:
        return weights.new_zeros(slots.shape)
    return torch.where(slots >= 0, weights[slots.clamp(min=0)], 0)


def fold(x: torch.Tensor, layout: Expansion) -> torch.Tensor:
    """Sum the expanded rows of each received row in increasing k, in float32 (float64 for float64), and round."""
    rows = layout.slots.shape[0]
    out = x.new_zeros((rows, x.shape[1]))
    if x.numel() == 0 or layout.slots.shape[1] == 0:
        return out
    # The picks of this rank first, in increasing k: few columns hold most rows.
    picked = layout.slots >= 0
    columns = (~picked).to(torch.uint8).argsort(dim=1, stable=True)[:, : layout.most_picks]
    slots = layout.slots.gather(1, columns)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    for begin in range(0, rows, CHUNK_ROWS):
        chunk = slots[begin : begin + CHUNK_ROWS]
        total = torch.zeros((chunk.shape[0], x.shape[1]), dtype=wide, device=x.device)
        for k in range(chunk.shape[1]):
            term = x.index_select(0, chunk[:, k].clamp(min=0)).to(wide)
            total = torch.where(chunk[:, k, None] >= 0, total + term, total)
        out[begin : begin + CHUNK_ROWS] = total
    return out


def picks_in_order(layout: Expansion, num_rows: int) -> torch.Tensor:
    """int64 [num_rows]: expanded rows in the order (received row, k), and 0 behind the last."""
    slots = layout.slots.flatten()
    here = slots >= 0
    target = torch.where(here, here.long().cumsum(0) - 1, num_rows)
    return slots.new_zeros(num_rows + 1).scatter_(0, target, slots.clamp(min=0))[:num_rows]


def sum_picks(
    y: torch.Tensor, picked: torch.Tensor, biases: tuple[torch.Tensor | None, torch.Tensor | None]
) -> torch.Tensor:
    """Biases, then the terms [tokens, topk, hidden] that were picked, in increasing k, in float32, rounded once."""
    wide = torch.float64 if y.dtype == torch.float64 else torch.float32
    out = y.new_empty((y.shape[0], y.shape[2]))
    for begin in range(0, y.shape[0], CHUNK_ROWS):
        end = begin + CHUNK_ROWS
        total = torch.zeros((y[begin:end].shape[0], y.shape[2]), dtype=wide, device=y.device)
        for bias in biases:
            if bias is not None:
                total = total + bias[begin:end].to(wide)
        for k in range(y.shape[1]):
            total = torch.where(picked[begin:end, k, None], total + y[begin:end, k].to(wide), total)
        out[begin:end] = total
    return out
