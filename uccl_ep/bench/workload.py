"""A case of the ep benchmark as one rank runs it: random inputs, experts that differ, ours, gloo and memcpy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from uccl_ep import reference
from uccl_ep.baseline import GlooExpertParallel


@dataclasses.dataclass(frozen=True)
class Case:
    """One workload: ``mode`` is "low latency" or "high throughput"."""

    mode: str
    tokens: int
    hidden: int
    topk: int
    experts: int

    @property
    def low_latency(self) -> bool:
        return self.mode == "low latency"

    def title(self, num_ranks: int, domain_size: int) -> str:
        where = f"{num_ranks} ranks"
        if domain_size and domain_size < num_ranks:
            where += f" in domains of {domain_size}"
        return f"{self.mode}: {self.tokens} tokens of {self.hidden} bf16, top-{self.topk} of {self.experts}, {where}"


def inputs(case: Case, rank: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Random tokens, distinct experts and weights of rank ``rank``; every rank can compute every rank's."""
    g = torch.Generator().manual_seed(seed * 1000 + rank)
    x = torch.randn(case.tokens, case.hidden, generator=g).bfloat16()
    scores = torch.rand(case.tokens, case.experts, generator=g)
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


class Workload:
    """Everything that the timed loop touches, made beforehand."""

    def __init__(self, case: Case, buffer: Any, group: Any, seed: int = 0) -> None:
        self.case, self.buffer = case, buffer
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.gloo = GlooExpertParallel(group, reuse_outputs=True)
        everyone = [inputs(case, r, seed) for r in range(self.num_ranks)]
        self.x, self.idx, self.weights = everyone[self.rank]
        xs, ids = [e[0] for e in everyone], [e[1] for e in everyone]
        num_local = case.experts // self.num_ranks
        first = self.rank * num_local
        if case.low_latency:
            want = reference.ll_dispatch(self.rank, xs, ids, case.tokens, case.experts)
            self.used = want.source_rank >= 0
            expert = torch.arange(first, first + num_local)[:, None].expand_as(self.used)
            self.want_x = want.x[self.used]
            self.y = torch.zeros_like(want.x)
            self.y[self.used] = expert_rows(self.want_x, expert[self.used])
            terms = torch.stack([expert_rows(self.x, self.idx[:, k]) for k in range(case.topk)], 1)
            self.want_combined = reference.ll_combine_terms(terms, self.idx, self.weights)
            rows = self.want_x.shape[0] + case.tokens * case.topk
        else:
            received = reference.dispatch(self.rank, xs, ids, case.experts, topk_weights=[e[2] for e in everyone])
            self.want_x, self.want_idx, self.want_weights = received.x, received.topk_idx, received.topk_weights
            self.y = experts_of(received.x, received.topk_idx, first)
            in_rank = reference.layout(self.idx, case.experts, self.num_ranks).is_token_in_rank
            segments = [
                experts_of(
                    self.x[in_rank[:, d]],
                    reference.local_topk(self.idx, d, case.experts, self.num_ranks)[in_rank[:, d]],
                    d * num_local,
                )
                for d in range(self.num_ranks)
            ]
            self.want_combined = reference.combine_segments(segments, in_rank)
            rows = received.x.shape[0] + int(in_rank.sum())
        # Useful payload bytes that this rank receives in dispatch and in combine.
        self.received_bytes = rows * case.hidden * 2
        self.source = torch.randint(0, 255, (self.received_bytes,), dtype=torch.uint8)
        self.target = torch.zeros_like(self.source)

    # ---- the three systems; each returns what it delivered, for the checks ----

    def dispatch_ours(self) -> tuple[Any, Any]:
        case, buffer = self.case, self.buffer
        if case.low_latency:
            recv, count, handle, _, hook = buffer.low_latency_dispatch(
                self.x, self.idx, case.tokens, case.experts, use_fp8=False, return_recv_hook=True
            )
            hook()
            return handle, (recv, count)
        layout = buffer.get_dispatch_layout(self.idx, case.experts)
        result = buffer.dispatch(
            self.x,
            topk_idx=self.idx,
            topk_weights=self.weights,
            num_tokens_per_rank=layout[0],
            num_tokens_per_rdma_rank=layout[1],
            num_tokens_per_expert=layout[2],
            is_token_in_rank=layout[3],
        )
        return result[4], result[:3]

    def combine_ours(self, handle: Any) -> Tensor:
        if self.case.low_latency:
            out, _, hook = self.buffer.low_latency_combine(
                self.y, self.idx, self.weights, handle, return_recv_hook=True
            )
            hook()
            return out
        return self.buffer.combine(self.y, handle)[0]

    def dispatch_gloo(self) -> tuple[Any, Any]:
        case = self.case
        if case.low_latency:
            recv, count, handle = self.gloo.low_latency_dispatch(self.x, self.idx, case.tokens, case.experts)
            return handle, (recv, count)
        result = self.gloo.dispatch(self.x, self.idx, case.experts, self.weights)
        return result[4], result[:3]

    def combine_gloo(self, handle: Any) -> Tensor:
        if self.case.low_latency:
            return self.gloo.low_latency_combine(self.y, self.idx, self.weights, handle)
        return self.gloo.combine(self.y, handle)

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
                same = torch.equal(got[0][self.used], self.want_x)
            else:
                assert self.want_weights is not None
                same = torch.equal(got[0], self.want_x) and torch.equal(got[1], self.want_idx)
                same = same and torch.equal(got[2], self.want_weights)
            if not same:
                raise RuntimeError(f"{name} dispatched other bytes than the reference (rank {self.rank})")
            if not torch.equal(combine(handle), self.want_combined):
                raise RuntimeError(f"{name} combined to other bits than the reference (rank {self.rank})")
