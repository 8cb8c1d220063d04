"""Expert parallelism from ``torch.distributed.all_to_all_single`` alone: what the benchmarks compare with.

An honest opponent: a token is sent once per destination rank, packs are vectorised, nothing loops over tokens in
Python, payloads land where they are wanted without a second copy, and both modes deliver the same layouts, to the
last bit, as ``uccl_ep.Buffer``. It works on CPU tensors in any process group that has ``all_to_all_single``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from uccl_ep import reference

_BLOCK = 128  # tokens reduced at a time


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
    """Dispatch and combine over ``group``, in both modes.

    Args:
        group: any process group with ``all_to_all_single`` on CPU tensors.
        reuse_outputs: large outputs stay valid only until the next call of the same kind; spares the page faults of
            fresh memory, which cost more than copying into it. Temporaries are always reused.
    """

    def __init__(self, group: dist.ProcessGroup, reuse_outputs: bool = False) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self.reuse_outputs = reuse_outputs
        self._memory: dict[str, Tensor] = {}

    def _scratch(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor in memory that is kept under ``name`` and grows as needed; its values are undefined."""
        nbytes = math.prod(shape) * dtype.itemsize
        if name not in self._memory or self._memory[name].numel() < nbytes:
            self._memory[name] = torch.empty(nbytes, dtype=torch.uint8)
        return self._memory[name][:nbytes].view(dtype).view(shape)

    def _output(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._scratch(name, shape, dtype) if self.reuse_outputs else torch.empty(shape, dtype=dtype)

    def _take(self, name: str, t: Tensor, rows: Tensor) -> Tensor:
        """Rows of ``t``, packed in memory kept under ``name``."""
        out = self._scratch(name, (rows.numel(), t.shape[1]), t.dtype)
        if t.dtype == torch.float8_e4m3fn:  # index_select does not know it: bytes
            torch.index_select(t.view(torch.uint8), 0, rows, out=out.view(torch.uint8))
        else:
            torch.index_select(t, 0, rows, out=out)
        return out

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

        recv_x = self._output("recv_x", (num_recv, x.shape[1]), x.dtype)
        self._exchange(self._take("send", x, tokens), send_counts, recv_x, recv_counts)
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
        rows, hidden = handle.sent_tokens.numel(), x.shape[1]
        home = self._scratch("home", (rows + 1, hidden), x.dtype)
        home[rows] = 0  # what a token adds for ranks that it did not go to
        self._exchange(x.contiguous(), handle.recv_counts, home[:rows], handle.sent_counts)
        # A token comes home at most once per rank: its row in each rank's segment, or the row of zeros.
        place = torch.full((self.num_ranks, handle.num_tokens), rows, dtype=torch.int64)
        start = 0
        for rank, count in enumerate(handle.sent_counts):
            place[rank, handle.sent_tokens[start : start + count]] = torch.arange(start, start + count)
            start += count
        out = self._output("combined", (handle.num_tokens, hidden), x.dtype)
        wide = reference.accumulator_dtype(x.dtype)
        for block in range(0, handle.num_tokens, _BLOCK):  # temporaries stay in the cache
            part = slice(block, block + _BLOCK)
            acc = torch.index_select(home, 0, place[0, part]).to(wide)
            for rank in range(1, self.num_ranks):
                acc += torch.index_select(home, 0, place[rank, part])
            out[part] = acc
        return out

    # ---- low latency ----

    def low_latency_dispatch(
        self, x: Tensor, topk_idx: Tensor, num_max_tokens: int, num_experts: int, use_fp8: bool = False
    ) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor, _LowLatencyHandle]:
        """``(recv or (recv, scales), count, handle)``; recv is [L, R * M, H]."""
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
        recv_rows = self._scratch("ll_recv", (sum(recv_counts), x.shape[1]), payload.dtype)
        self._exchange(self._take("send", payload, tokens), send_counts, recv_rows, recv_counts)

        picks = (recv_meta >= 0).nonzero()  # (source, 1 + place, k)
        experts = recv_meta[picks[:, 0], picks[:, 1], picks[:, 2]].long()
        starts = torch.tensor([0, *recv_counts]).cumsum(0)
        rows = starts[picks[:, 0]] + picks[:, 1] - 1
        order = torch.argsort(experts, stable=True)
        counts = torch.bincount(experts, minlength=num_local)
        sorted_experts = experts[order]
        position = torch.arange(order.numel()) - (counts.cumsum(0) - counts)[sorted_experts]
        out = self._output("ll_out", (num_local, width, payload.shape[1]), payload.dtype)
        sorted_rows = rows[order]
        _expand(recv_rows, sorted_rows, counts.tolist(), out)
        result: Tensor | tuple[Tensor, Tensor] = out
        if scales is not None:
            recv_scales = torch.empty(sum(recv_counts), scales.shape[1], dtype=scales.dtype)
            self._exchange(self._take("scales", scales, tokens), send_counts, recv_scales, recv_counts)
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
        hidden, picks = y.shape[2], sum(handle.sent_counts)
        home = self._scratch("home", (picks + 1, hidden), y.dtype)
        home[picks] = 0
        rows = self._take("send", y.view(-1, hidden), handle.expanded)
        self._exchange(rows, handle.recv_counts, home[:picks], handle.sent_counts)
        place = torch.where(handle.home >= 0, handle.home, picks)
        weights = topk_weights.float()
        out = self._output("ll_combined", (topk_idx.shape[0], hidden), y.dtype)
        for block in range(0, topk_idx.shape[0], _BLOCK):
            part = slice(block, block + _BLOCK)
            acc = torch.zeros(out[part].shape)
            for k in range(topk_idx.shape[1]):
                acc += torch.index_select(home, 0, place[part, k]).float().mul_(weights[part, k, None])
            out[part] = acc
        return out


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
