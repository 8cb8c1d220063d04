"""Expert parallelism from ``torch.distributed.all_to_all_single`` alone: what the benchmarks compare with.

An honest opponent: a token is sent once per destination rank, packs are vectorised, nothing loops over tokens in
Python, payloads land where they are wanted without a second copy, and both modes deliver the same layouts, to the
last bit, as ``uccl_ep.Buffer``. It works on CPU tensors in any process group that has ``all_to_all_single``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from uccl_ep import reference


@dataclass(frozen=True)
class _Handle:
    """Where rows of a high-throughput dispatch came from; used to send them home."""

    sent_tokens: Tensor  # int64 [rows sent], token of each row, grouped by destination
    sent_counts: list[int]  # rows per destination
    recv_counts: list[int]  # rows per source
    num_tokens: int


@dataclass(frozen=True)
class _LowLatencyHandle:
    """The picks that a rank expanded, in the order in which they go home, and where its own come back."""

    expanded: Tensor  # int64 [picks received], flat row of [L * R * M], grouped by source
    recv_counts: list[int]  # picks per source
    sent_counts: list[int]  # picks per destination
    home: Tensor  # int64 [T, K], row among the picks that come back, -1 for none


class GlooExpertParallel:
    """Dispatch and combine over ``group``, in both modes."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self._ll_out: dict[tuple[int, int, int, torch.dtype], Tensor] = {}

    def _exchange(self, send: Tensor, send_counts: list[int], recv: Tensor, recv_counts: list[int]) -> None:
        """Rows of ``send`` to their ranks; both tensors contiguous."""
        width = send[0].numel() * send.element_size() if send.shape[0] else 0
        width = width or (recv[0].numel() * recv.element_size() if recv.shape[0] else 0)
        dist.all_to_all_single(
            recv.view(torch.uint8).view(-1),
            send.view(torch.uint8).view(-1),
            [c * width for c in recv_counts],
            [c * width for c in send_counts],
            group=self.group,
        )

    # ---- high throughput ----

    def dispatch(
        self, x: Tensor, topk_idx: Tensor, num_experts: int, topk_weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None, list[int], _Handle]:
        """``(recv_x, recv_topk_idx, recv_topk_weights, tokens per local expert, handle)``."""
        num_local = num_experts // self.num_ranks
        topk = topk_idx.shape[1]
        in_rank = reference.layout(topk_idx, num_experts, self.num_ranks).is_token_in_rank
        pairs = in_rank.t().nonzero()  # (destination, token), in that order
        tokens = pairs[:, 1]
        sent = torch.bincount(pairs[:, 0], minlength=self.num_ranks)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        send_counts, recv_counts = sent.tolist(), received.tolist()
        num_recv = sum(recv_counts)

        # Indices and weights as 64-bit words of one message.
        local = topk_idx.long()[tokens] - pairs[:, :1] * num_local
        words = topk if topk_weights is None else topk + (topk + 1) // 2
        meta = torch.zeros(tokens.numel(), words, dtype=torch.int64)
        meta[:, :topk] = torch.where((topk_idx[tokens] >= 0) & (local >= 0) & (local < num_local), local, -1)
        if topk_weights is not None:
            meta.view(torch.float32)[:, 2 * topk : 3 * topk] = topk_weights[tokens]
        recv_meta = torch.empty(num_recv, words, dtype=torch.int64)
        self._exchange(meta, send_counts, recv_meta, recv_counts)

        recv_x = torch.empty(num_recv, x.shape[1], dtype=x.dtype)
        self._exchange(_take(x, tokens), send_counts, recv_x, recv_counts)
        idx = recv_meta[:, :topk]
        weights = None
        if topk_weights is not None:
            weights = torch.where(idx >= 0, recv_meta.view(torch.float32)[:, 2 * topk : 3 * topk], 0.0)
        hits = idx[idx >= 0]
        per_expert = torch.bincount(hits, minlength=num_local).tolist()
        handle = _Handle(tokens, send_counts, recv_counts, x.shape[0])
        return recv_x, idx.to(topk_idx.dtype), weights, per_expert, handle

    def combine(self, x: Tensor, handle: _Handle) -> Tensor:
        """The unweighted sum over ranks, in rank order, of the rows that went out."""
        home = torch.empty(handle.sent_tokens.numel(), x.shape[1], dtype=x.dtype)
        self._exchange(x.contiguous(), handle.recv_counts, home, handle.sent_counts)
        acc = torch.zeros(handle.num_tokens, x.shape[1], dtype=reference.accumulator_dtype(x.dtype))
        # A token comes home at most once per rank, so within one rank's segment the order does not matter.
        start = 0
        for count in handle.sent_counts:
            rows = slice(start, start + count)
            acc.index_add_(0, handle.sent_tokens[rows], home[rows].to(acc.dtype))
            start += count
        return acc.to(x.dtype)

    # ---- low latency ----

    def low_latency_dispatch(
        self, x: Tensor, topk_idx: Tensor, num_max_tokens: int, num_experts: int, use_fp8: bool = False
    ) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor, _LowLatencyHandle]:
        """``(recv or (recv, scales), count, handle)``; recv [L, R * M, H] is overwritten by the next call."""
        n, topk, num_local = self.num_ranks, topk_idx.shape[1], num_experts // self.num_ranks
        width = n * num_max_tokens
        in_rank = reference.layout(topk_idx, num_experts, n).is_token_in_rank
        pairs = in_rank.t().nonzero()
        tokens = pairs[:, 1]
        sent = torch.bincount(pairs[:, 0], minlength=n)

        # One message of fixed size per peer: the count, then the local picks of each row; no exchange of counts first.
        meta = torch.full((n, 1 + num_max_tokens, topk), -1, dtype=torch.int32)
        place = torch.arange(tokens.numel()) - (sent.cumsum(0) - sent)[pairs[:, 0]]
        local = topk_idx[tokens].int() - pairs[:, :1].int() * num_local
        meta[pairs[:, 0], place + 1] = torch.where(
            (topk_idx[tokens] >= 0) & (local >= 0) & (local < num_local), local, -1
        )
        meta[:, 0, 0] = sent.int()
        recv_meta = torch.empty_like(meta)
        dist.all_to_all_single(recv_meta.view(-1), meta.view(-1), group=self.group)
        send_counts, recv_counts = sent.tolist(), recv_meta[:, 0, 0].tolist()
        recv_meta[:, 0, 0] = -1

        payload, scales = reference.quantize_fp8(x) if use_fp8 else (x, None)
        recv_rows = torch.empty(sum(recv_counts), x.shape[1], dtype=payload.dtype)
        self._exchange(_take(payload, tokens), send_counts, recv_rows, recv_counts)

        picks = (recv_meta >= 0).nonzero()  # (source, 1 + place, k)
        experts = recv_meta[picks[:, 0], picks[:, 1], picks[:, 2]].long()
        starts = torch.tensor([0, *recv_counts]).cumsum(0)
        rows = starts[picks[:, 0]] + picks[:, 1] - 1
        order = torch.argsort(experts, stable=True)
        counts = torch.bincount(experts, minlength=num_local)
        sorted_experts = experts[order]
        position = torch.arange(order.numel()) - (counts.cumsum(0) - counts)[sorted_experts]
        out = self._out(num_local, width, payload)
        sorted_rows = rows[order]
        _expand(recv_rows, sorted_rows, counts.tolist(), out)
        result: Tensor | tuple[Tensor, Tensor] = out
        if scales is not None:
            recv_scales = torch.empty(sum(recv_counts), scales.shape[1], dtype=scales.dtype)
            self._exchange(_take(scales, tokens), send_counts, recv_scales, recv_counts)
            out_scales = torch.zeros(num_local, scales.shape[1], width).transpose(1, 2)
            out_scales[sorted_experts, position] = recv_scales[sorted_rows]
            result = (out, out_scales)

        expanded = torch.empty_like(order)
        expanded[order] = sorted_experts * width + position
        recv_picks = torch.bincount(picks[:, 0], minlength=n)
        return result, counts.int(), _LowLatencyHandle(expanded, recv_picks.tolist(), *_homes(topk_idx, num_local, n))

    def low_latency_combine(
        self, y: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: _LowLatencyHandle
    ) -> Tensor:
        """Weighted sum over picks in increasing k, multiplied and added in float32."""
        hidden = y.shape[2]
        home = torch.empty(sum(handle.sent_counts), hidden, dtype=y.dtype)
        rows = torch.index_select(y.view(-1, hidden), 0, handle.expanded)
        self._exchange(rows, handle.recv_counts, home, handle.sent_counts)
        acc = torch.zeros(topk_idx.shape[0], hidden, dtype=torch.float32)
        for k in range(topk_idx.shape[1]):
            here = handle.home[:, k]
            if (here >= 0).all():
                acc += torch.index_select(home, 0, here).float().mul_(topk_weights[:, k, None])
            else:
                where = (here >= 0).nonzero().flatten()
                acc.index_add_(0, where, home[here[where]].float().mul_(topk_weights[where, k, None]))
        return acc.to(y.dtype)

    def _out(self, num_local: int, width: int, like: Tensor) -> Tensor:
        key = (num_local, width, like.shape[1], like.dtype)
        if key not in self._ll_out:
            self._ll_out[key] = torch.empty(num_local, width, like.shape[1], dtype=like.dtype)
        return self._ll_out[key]


def _take(t: Tensor, rows: Tensor) -> Tensor:
    """Rows of ``t``; types that index_select does not know are moved as bytes."""
    if t.dtype == torch.float8_e4m3fn:
        return torch.index_select(t.view(torch.uint8), 0, rows).view(t.dtype)
    return torch.index_select(t, 0, rows)


def _expand(rows: Tensor, sorted_rows: Tensor, counts: list[int], out: Tensor) -> None:
    """Rows of expert e, packed from 0, into ``out[e]``: one gather per expert, straight to its place."""
    if rows.dtype == torch.float8_e4m3fn:
        rows, out = rows.view(torch.uint8), out.view(torch.uint8)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            torch.index_select(rows, 0, sorted_rows[start : start + count], out=out[expert, :count])
            start += count


def _homes(topk_idx: Tensor, num_local: int, num_ranks: int) -> tuple[list[int], Tensor]:
    """Picks per destination, and the row of each pick among those that come back: grouped by destination, and
    within one in the order (token, k) in which that rank saw them."""
    ids = topk_idx.long()
    flat = ids.flatten()
    destination = torch.where(flat >= 0, flat // num_local, num_ranks)
    order = torch.argsort(destination, stable=True)
    home = torch.empty_like(order)
    home[order] = torch.arange(order.numel())
    counts = torch.bincount(destination, minlength=num_ranks + 1)[:num_ranks].tolist()
    return counts, torch.where(ids >= 0, home.view_as(ids), -1)
