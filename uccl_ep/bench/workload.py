"""A case of the ep benchmark as one rank runs it: random inputs, experts that differ, ours, gloo and memcpy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from uccl_ep import Buffer, reference
from uccl_ep.baseline import GlooExpertParallel
from uccl_ep.low_latency.capacity import TOPK_RESERVED


@dataclasses.dataclass(frozen=True)
class Case:
    """One workload: ``mode`` is "low latency" or "high throughput".

    ``skewed``: every fourth token picks expert 0, and no other does; otherwise all experts are equally likely.
    ``most``: tokens a rank that low latency provides for, where that is more than ``tokens``.
    """

    mode: str
    tokens: int
    hidden: int
    topk: int
    experts: int
    skewed: bool = False
    most: int = 0

    @property
    def max_tokens(self) -> int:
        return max(self.tokens, self.most)

    @property
    def low_latency(self) -> bool:
        return self.mode == "low latency"

    def low_latency_bytes(self, num_ranks: int) -> int:
        """What a buffer needs for it in low-latency mode; the size hint is for a top-k up to 16."""
        if not self.low_latency:
            return 0
        hint = Buffer.get_low_latency_rdma_size_hint(self.max_tokens, self.hidden, num_ranks, self.experts)
        return hint * -(-self.topk // TOPK_RESERVED)

    def title(self, num_ranks: int, domain_size: int) -> str:
        where = f"{num_ranks} ranks"
        if domain_size and domain_size < num_ranks:
            where += f" in domains of {domain_size}"
        routing = ", a quarter to one expert" if self.skewed else ""
        most = f" (at most {self.most})" if self.most > self.tokens else ""
        shape = f"{self.tokens} tokens{most} of {self.hidden} bf16, top-{self.topk} of {self.experts}{routing}"
        return f"{self.mode}: {shape}, {where}"


def inputs(case: Case, rank: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Random tokens, distinct experts and weights of rank ``rank``; every rank can compute every rank's."""
    g = torch.Generator().manual_seed(seed * 1000 + rank)
    x = torch.randn(case.tokens, case.hidden, generator=g).bfloat16()
    scores = torch.rand(case.tokens, case.experts, generator=g)
    if case.skewed:
        scores[:, 0] = 0
        scores[::4, 0] = 2
    weights, idx = scores.topk(case.topk, dim=1)
    return x, idx, weights / weights.sum(1, keepdim=True)


def experts_of(recv: Tensor, local_idx: Tensor, first: int) -> Tensor:
    """High throughput: each row under its local experts, sum of x * (1 + e/16) + e; no two experts agree."""
    picked = local_idx >= 0
    expert = torch.where(picked, local_idx + first, 0).float()
    scale = torch.zeros(recv.shape[0])
    shift = torch.zeros(recv.shape[0])
    for k in range(local_idx.shape[1]):
        scale += torch.where(picked[:, k], 1 + expert[:, k] / 16, 0)
        shift += expert[:, k]
    return (recv.float() * scale[:, None] + shift[:, None]).bfloat16()


def expert_rows(x: Tensor, expert: Tensor) -> Tensor:
    """Low latency: each row under one expert."""
    e = expert.float()[:, None]
    return (x.float() * (1 + e / 16) + e).bfloat16()


class Data:
    """What a rank sends and what it must get, on the CPU.

    Attributes:
        x, idx, weights: of this rank.
        want_x: received rows; low latency: those at ``used``, [local experts, rows] bool.
        want_idx, want_weights: received with them (high throughput).
        y: what the experts made of the received rows, in the shape that combine takes.
        want_sums: what combine must return, by the order of its sum; high throughput has but one.
        in_rank: bool [tokens, ranks].
        received_from: rows that each rank's tokens make here, a token once.
        received_rows: rows that the rank usefully receives in dispatch and in combine.
    """

    def __init__(self, case: Case, rank: int, num_ranks: int, seed: int = 0) -> None:
        everyone = [inputs(case, r, seed) for r in range(num_ranks)]
        self.x, self.idx, self.weights = everyone[rank]
        xs, ids = [e[0] for e in everyone], [e[1] for e in everyone]
        num_local = case.experts // num_ranks
        first = rank * num_local
        self.in_rank = reference.layout(self.idx, case.experts, num_ranks).is_token_in_rank
        self.received_from = [int(reference.rows_for_rank(i, rank, case.experts, num_ranks).numel()) for i in ids]
        self.used = self.want_idx = self.want_weights = None
        if case.low_latency:
            want = reference.ll_dispatch(rank, xs, ids, case.max_tokens, case.experts)
            self.used = want.source_rank >= 0
            expert = torch.arange(first, first + num_local)[:, None].expand_as(self.used)
            self.want_x = want.x[self.used]
            self.y = torch.zeros_like(want.x)
            self.y[self.used] = expert_rows(self.want_x, expert[self.used])
            terms = torch.stack([expert_rows(self.x, self.idx[:, k]) for k in range(case.topk)], 1)
            self.want_sums = {
                rounding: reference.ll_combine_terms(terms, self.idx, self.weights, rounding, num_local)
                for rounding in ("increasing k", "by rank")
            }
            self.received_rows = self.want_x.shape[0] + case.tokens * case.topk
        else:
            received = reference.dispatch(rank, xs, ids, case.experts, topk_weights=[e[2] for e in everyone])
            self.want_x, self.want_idx, self.want_weights = received.x, received.topk_idx, received.topk_weights
            self.y = experts_of(received.x, received.topk_idx, first)
            segments = [
                experts_of(
                    self.x[self.in_rank[:, d]],
                    reference.local_topk(self.idx, d, case.experts, num_ranks)[self.in_rank[:, d]],
                    d * num_local,
                )
                for d in range(num_ranks)
            ]
            self.want_sums = {"by rank": reference.combine_segments(segments, self.in_rank)}
            self.received_rows = received.x.shape[0] + int(self.in_rank.sum())

    def want_combined(self, handle: Any) -> Tensor:
        """What a combine with a handle of any system gives; one that names no order sums in increasing k."""
        rounding = getattr(handle, "rounding", "increasing k")
        return self.want_sums[rounding if rounding in self.want_sums else "by rank"]


class Workload:
    """Everything that the timed loop touches, made beforehand."""

    def __init__(self, case: Case, buffer: Any, group: Any, seed: int = 0) -> None:
        self.case, self.buffer = case, buffer
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.gloo = GlooExpertParallel(group, reuse_outputs=True)
        self.data = Data(case, self.rank, self.num_ranks, seed)
        # Useful payload bytes that this rank receives in dispatch and in combine.
        self.received_bytes = self.data.received_rows * case.hidden * 2
        self.source = torch.randint(0, 255, (self.received_bytes,), dtype=torch.uint8)
        self.target = torch.zeros_like(self.source)

    # ---- the three systems; each returns what it delivered, for the checks ----

    def dispatch_ours(self) -> tuple[Any, Any]:
        case, buffer = self.case, self.buffer
        if case.low_latency:
            recv, count, handle, _, hook = buffer.low_latency_dispatch(
                self.data.x, self.data.idx, case.max_tokens, case.experts, use_fp8=False, return_recv_hook=True
            )
            hook()
            return handle, (recv, count)
        layout = buffer.get_dispatch_layout(self.data.idx, case.experts)
        result = buffer.dispatch(
            self.data.x,
            topk_idx=self.data.idx,
            topk_weights=self.data.weights,
            num_tokens_per_rank=layout[0],
            num_tokens_per_rdma_rank=layout[1],
            num_tokens_per_expert=layout[2],
            is_token_in_rank=layout[3],
        )
        return result[4], result[:3]

    def combine_ours(self, handle: Any) -> Tensor:
        if self.case.low_latency:
            out, _, hook = self.buffer.low_latency_combine(
                self.data.y, self.data.idx, self.data.weights, handle, return_recv_hook=True
            )
            hook()
            return out
        return self.buffer.combine(self.data.y, handle)[0]

    def dispatch_gloo(self) -> tuple[Any, Any]:
        case = self.case
        if case.low_latency:
            recv, count, handle = self.gloo.low_latency_dispatch(
                self.data.x, self.data.idx, case.max_tokens, case.experts
            )
            return handle, (recv, count)
        result = self.gloo.dispatch(self.data.x, self.data.idx, case.experts, self.data.weights)
        return result[4], result[:3]

    def combine_gloo(self, handle: Any) -> Tensor:
        if self.case.low_latency:
            return self.gloo.low_latency_combine(self.data.y, self.data.idx, self.data.weights, handle)
        return self.gloo.combine(self.data.y, handle)

    def memcpy(self) -> None:
        self.target.copy_(self.source)

    def systems(self) -> dict[str, tuple[Callable[[], tuple[Any, Any]], Callable[[Any], Tensor]]]:
        return {
            "uccl_ep": (self.dispatch_ours, self.combine_ours),
            "gloo": (self.dispatch_gloo, self.combine_gloo),
        }

    def both(self, name: str) -> Tensor:
        """Dispatch and combine by the system of that name."""
        dispatch, combine = self.systems()[name]
        return combine(dispatch()[0])

    def check(self) -> None:
        """Both systems deliver every byte that the reference says.

        Raises:
            RuntimeError: one does not; names it, and the rank.
        """
        for name, (dispatch, combine) in self.systems().items():
            handle, got = dispatch()
            if self.case.low_latency:
                same = torch.equal(got[0][self.data.used], self.data.want_x)
            else:
                assert self.data.want_weights is not None and self.data.want_idx is not None
                same = torch.equal(got[0], self.data.want_x) and torch.equal(got[1], self.data.want_idx)
                same = same and torch.equal(got[2], self.data.want_weights)
            if not same:
                raise RuntimeError(f"{name} dispatched other bytes than the reference (rank {self.rank})")
            if not torch.equal(combine(handle), self.data.want_combined(handle)):
                raise RuntimeError(f"{name} combined to other bits than the reference (rank {self.rank})")
