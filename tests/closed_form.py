"""Test data that every rank can compute for every rank, without communication.

A value is a function of (seed, rank, token, column) alone. Magnitudes spread over 2^20, so float32 sums of them
round differently in every order, and experts differ per expert, so neither a wrong order nor a wrong expert
passes unseen.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

POOL = 1 << 16  # values that rows are cut from; a row is a slice at an offset of its own
LONGEST_ROW = 8192
PER_RANK_TOKENS = (0, 1, 7, 128, 1000)

ROUTINGS = ("random", "holes", "one_rank", "one_expert", "skewed", "nothing", "starved")


def few_experts(num_ranks: int) -> int:
    """12, or the next number that so many ranks divide."""
    return -(-12 // num_ranks) * num_ranks


def _mix(values: Tensor) -> Tensor:
    """Scrambles int64 values (a 32-bit integer hash)."""
    values = (values ^ (values >> 16)) * 0x45D9F3B & 0xFFFFFFFF
    values = (values ^ (values >> 16)) * 0x45D9F3B & 0xFFFFFFFF
    return values ^ (values >> 16)


@lru_cache(maxsize=32)
def _pool(seed: int, dtype: torch.dtype) -> Tensor:
    h = _mix(torch.arange(POOL + LONGEST_ROW, dtype=torch.int64) + (seed * 7919 + 13) * 100_003)
    if dtype == torch.uint8:
        return (h & 0xFF).to(torch.uint8)
    mantissa = (h % 65_521 - 32_760).double() / 32_768
    if dtype == torch.float64:
        mantissa = mantissa + (_mix(h + 5) % 65_521).double() * 2.0**-40
    exponent = torch.ldexp(torch.ones(h.shape, dtype=torch.float64), (_mix(h + 1) % 21 - 12).int())
    return (mantissa * exponent).to(dtype)


def rows(num_tokens: int, hidden: int, *, rank: int, seed: int, dtype: torch.dtype, salt: int = 0) -> Tensor:
    """[num_tokens, hidden] of rank ``rank``; ``salt`` tells several tensors of one case apart."""
    # An odd stride: offsets of the first 8 ranks of up to 8192 tokens are all different.
    start = _mix(torch.tensor(seed * 31 + salt)).item()
    offsets = (start + (rank * 8192 + torch.arange(num_tokens, dtype=torch.int64)) * 40_503) % POOL
    windows = _pool(seed, dtype).unfold(0, hidden, 1)
    return windows[offsets] if num_tokens else torch.empty(0, hidden, dtype=dtype)


def weights(num_tokens: int, topk: int, *, rank: int, seed: int) -> Tensor:
    """float32 [num_tokens, topk] in (0, 1]."""
    h = _mix(torch.arange(num_tokens * topk, dtype=torch.int64) + (seed * 64 + rank + 1) * 1_000_003)
    return ((h % 16_381 + 1).float() / 16_381).view(num_tokens, topk)


def token_counts(kind: str, num_ranks: int, seed: int, most: int = 1000) -> list[int]:
    """Tokens of each rank. ``rotate``: 0, 1, 7, 128, 1000 in turn; ``even``; ``first``: only rank 0 has any;
    ``idle``: rank 0 has none; ``zero``: nobody has any."""
    choices = [min(c, most) for c in PER_RANK_TOKENS]
    if kind == "rotate":
        return [choices[(seed + r) % len(choices)] for r in range(num_ranks)]
    small = min(most, 60 + seed % 70)
    if kind == "even":
        return [small] * num_ranks
    if kind == "first":
        return [small] + [0] * (num_ranks - 1)
    if kind == "idle":
        return [0] + [max(1, small - r) for r in range(1, num_ranks)]
    if kind == "zero":
        return [0] * num_ranks
    raise ValueError(f"unknown kind of token counts {kind!r}")


def topk_idx(
    kind: str, num_tokens: int, topk: int, num_experts: int, num_ranks: int, *, rank: int, seed: int
) -> Tensor:
    """int64 [num_tokens, topk] of distinct experts per row, and -1.

    ``random``; ``holes``: some entries and some whole rows are -1; ``one_rank``: all to the last rank;
    ``one_expert``: all to one expert; ``skewed``: low experts are hot; ``nothing``: only -1; ``starved``: the last
    rank receives nothing.
    """
    g = torch.Generator().manual_seed(seed * 1009 + rank * 17 + 3)
    num_local = num_experts // num_ranks
    scores = torch.rand(num_tokens, num_experts, generator=g)
    if kind == "skewed":
        scores = scores - torch.arange(num_experts) * (1.5 / num_experts)
    if kind == "one_rank":
        scores[:, : num_experts - num_local] -= 2
    if kind == "starved" and num_ranks > 1:
        scores[:, num_experts - num_local :] -= 2
    order = scores.argsort(1, descending=True)[:, :topk]
    picked = scores.gather(1, order) if num_tokens else order.float()
    ids = order.clone()
    if kind in ("one_rank", "starved"):
        ids[picked <= -1] = -1  # fewer experts there than picks
    if kind == "one_expert":
        ids = torch.full_like(ids, -1)
        ids[:, seed % topk] = seed % num_experts
    if kind == "nothing":
        ids = torch.full_like(ids, -1)
    if kind == "holes":
        ids[torch.rand(num_tokens, topk, generator=g) < 0.25] = -1
        ids[torch.rand(num_tokens, generator=g) < 0.15] = -1
    return ids


def apply_experts(x: Tensor, local_idx: Tensor, local_weights: Tensor | None, first_expert: int) -> Tensor:
    """What the experts of a rank make of received rows: sum over local picks of w * (x * (1 + e/16) + e / 4096).

    Row by row and element by element, so the same bits come out for a row wherever it stands.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    scale = torch.zeros(x.shape[0], dtype=wide)
    shift = torch.zeros(x.shape[0], dtype=wide)
    for k in range(local_idx.shape[1]):
        here = local_idx[:, k] >= 0
        expert = (local_idx[:, k].long() + first_expert).to(wide)
        w = torch.ones_like(scale) if local_weights is None else local_weights[:, k].to(wide)
        scale += torch.where(here, w * (1 + expert / 16), 0)
        shift += torch.where(here, w * (expert / 4096), 0)
    return (x.to(wide) * scale[:, None] + shift[:, None]).to(x.dtype)


def apply_ll_experts(x: Tensor, first_expert: int) -> Tensor:
    """Low latency: expert by expert, x * (1 + e/16) + e / 4096, without the weights."""
    expert = torch.arange(x.shape[0], dtype=torch.float32)[:, None, None] + first_expert
    return (x.float() * (1 + expert / 16) + expert / 4096).to(x.dtype)


def non_contiguous(t: Tensor) -> Tensor:
    """The same values as a slice of something wider."""
    wide = t.new_zeros(t.shape[0], t.shape[1] + 3)
    wide[:, 1 : 1 + t.shape[1]] = t
    return wide[:, 1 : 1 + t.shape[1]]
