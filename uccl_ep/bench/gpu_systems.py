"""What the GPU benchmark compares: ours, an all-to-all of the same rows, DeepEP; each as calls by name of the half."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import uccl_ep
from uccl_ep import reference

from .clocks import Call
from .workload import Case, Data


class ExpertParallel:
    """A buffer with the interface of DeepEP v1, so both ours and its own; high throughput with a cached handle."""

    def __init__(self, name: str, case: Case, data: Data, buffer: Any, device: torch.device) -> None:
        self.name, self.case, self.data, self.buffer = name, case, data, buffer
        self.x, self.idx, self.weights, self.y = (t.to(device) for t in (data.x, data.idx, data.weights, data.y))
        self.x8, self.scales = (t.to(device) for t in reference.quantize_fp8(data.x))
        self.handle: Any = None
        if case.low_latency:
            self.dispatch_low_latency(use_fp8=False)
        else:
            self.dispatch_with_layout()

    def dispatch_with_layout(self) -> tuple[Any, ...]:
        """A dispatch that learns the counts; keeps its handle."""
        per_rank, per_domain, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(self.idx, self.case.experts)
        result: tuple[Any, ...] = self.buffer.dispatch(
            self.x,
            topk_idx=self.idx,
            topk_weights=self.weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_domain,
            num_tokens_per_expert=per_expert,
            is_token_in_rank=in_rank,
        )
        self.handle = result[4]
        return result

    def dispatch_low_latency(self, use_fp8: bool) -> tuple[Any, Tensor]:
        case = self.case
        x, count, self.handle, _, _ = self.buffer.low_latency_dispatch(
            self.x, self.idx, case.max_tokens, case.experts, use_fp8=use_fp8
        )
        return x, count

    def combine(self) -> Tensor:
        if self.case.low_latency:
            combined: Tensor = self.buffer.low_latency_combine(self.y, self.idx, self.weights, self.handle)[0]
        else:
            combined = self.buffer.combine(self.y, self.handle)[0]
        return combined

    def calls(self) -> dict[str, Call]:
        if self.case.low_latency:
            return {
                "dispatch fp8": lambda: self.dispatch_low_latency(use_fp8=True),
                "dispatch bf16": lambda: self.dispatch_low_latency(use_fp8=False),
                "combine bf16": self.combine,
            }
        return {
            "dispatch fp8": lambda: self.buffer.dispatch((self.x8, self.scales), handle=self.handle),
            "dispatch bf16": lambda: self.buffer.dispatch(self.x, handle=self.handle),
            "combine bf16": self.combine,
        }

    def check(self) -> None:
        """Raises RuntimeError that names the half whose bytes are not the reference's."""
        data, calls = self.data, self.calls()
        rows: Any = data.used if data.used is not None else slice(None)
        for half in ("dispatch fp8", "dispatch bf16"):
            received = calls[half]()[0]
            tensors = received if isinstance(received, tuple) else (received,)
            want = reference.quantize_fp8(data.want_x) if half == "dispatch fp8" else (data.want_x,)
            for a, b in zip(tensors, want, strict=True):
                self._compare(half, a.cpu()[rows], b)
        if not self.case.low_latency:
            result = self.dispatch_with_layout()
            self._compare("received picks", result[1].cpu(), data.want_idx)
            self._compare("received weights", result[2].cpu(), data.want_weights)
        self._compare("combine bf16", calls["combine bf16"]().cpu(), data.want_combined)

    def _compare(self, what: str, got: Tensor, want: Any) -> None:
        if not torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)):
            raise RuntimeError(f"{what} of {self.case.mode} has other bytes than the reference")


class AllToAll:
    """One all_to_all_single of the rows that cross, a token once a rank, without packing or reducing them."""

    def __init__(self, case: Case, data: Data, group: Any, device: torch.device) -> None:
        self.name = f"{dist.get_backend(group)} all_to_all"
        self.group, self.send, self.receive = group, data.in_rank.sum(0).tolist(), data.received_from
        self.source = torch.randn(sum(self.send), case.hidden).bfloat16().to(device)
        self.target = torch.empty(sum(self.receive), case.hidden, device=device, dtype=torch.bfloat16)

    def dispatch(self) -> None:
        dist.all_to_all_single(self.target, self.source, self.receive, self.send, group=self.group)

    def combine(self) -> None:
        dist.all_to_all_single(self.source, self.target, self.send, self.receive, group=self.group)

    def calls(self) -> dict[str, Call]:
        return {"dispatch bf16": self.dispatch, "combine bf16": self.combine}


def deepep_buffer(cases: Sequence[Case], num_ranks: int) -> tuple[Any, str] | None:
    """DeepEP's buffer for all cases at its default of 24 multiprocessors, and its name with the version.

    None where it cannot be imported, or the module of that name is this library's.
    """
    try:
        import deep_ep
    except ImportError:
        return None
    if uccl_ep.Buffer is deep_ep.Buffer:
        return None
    packages = importlib.metadata.packages_distributions().get("deep_ep", [])
    low = [c for c in cases if c.low_latency]
    hints = [deep_ep.Buffer.get_low_latency_rdma_size_hint(c.max_tokens, c.hidden, num_ranks, c.experts) for c in low]
    buffer = deep_ep.Buffer(
        dist.new_group(backend="nccl"),
        1 << 30,
        max(hints, default=0),
        low_latency_mode=bool(low),
        num_qps_per_rank=max((c.experts // num_ranks for c in low), default=1),
    )
    deep_ep.Buffer.set_num_sms(24)
    return buffer, " ".join(["DeepEP", *(importlib.metadata.version(package) for package in packages[:1])])
