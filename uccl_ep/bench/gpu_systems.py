"""What the GPU benchmark compares: ours, an all-to-all of the same rows, DeepEP; each as calls by name of the half."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

import uccl_ep
from uccl_ep import reference

from .clocks import Call
from .spawn import LeaveOut
from .workload import Case, Data


class Unavailable(Exception):
    """A system cannot be had here; says why."""


class System(Protocol):
    """Something that moves the rows of a case, made for that case."""

    name: str

    def calls(self) -> dict[str, Call]:
        """By the name of the half; a system may lack some."""


Factory = Callable[[Case, Data], System]
Opener = Callable[["Run"], Factory]


@dataclasses.dataclass(frozen=True)
class Run:
    """What systems are opened for.

    Attributes:
        group: of all ranks, for CPU tensors.
        gpus: GPUs of this process; 0 where tensors are on the CPU.
        synchronize: all ranks are here, and nothing runs.
    """

    cases: Sequence[Case]
    num_ranks: int
    group: Any
    device: torch.device
    gpus: int
    synchronize: Callable[[], None]

    def nccl_group(self) -> Any:
        if self.num_ranks > self.gpus:
            raise Unavailable(f"{self.num_ranks} ranks share {self.gpus} GPUs: NCCL makes no group of such")
        return dist.new_group(backend="nccl")


class ExpertParallel:
    """A buffer with the interface of DeepEP v1, so both ours and its own; high throughput with a cached handle."""

    def __init__(self, name: str, case: Case, data: Data, buffer: Any, run: Run) -> None:
        device = run.device
        self.name, self.case, self.data, self.buffer = name, case, data, buffer
        self.x, self.idx, self.weights, self.y = (t.to(device) for t in (data.x, data.idx, data.weights, data.y))
        self.x8, self.scales = (t.to(device) for t in reference.quantize_fp8(data.x))
        self.handle: Any = None
        if case.low_latency:
            # Signals of another shape, or of the other mode, may lie where this one has its own.
            run.synchronize()
            buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.experts)
            run.synchronize()
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
            want = self._want_fp8 if half == "dispatch fp8" else (data.want_x,)
            for a, b in zip(tensors, want, strict=True):
                self._compare(half, a.cpu()[rows], b)
        if not self.case.low_latency:
            result = self.dispatch_with_layout()
            self._compare("received picks", result[1].cpu(), data.want_idx)
            self._compare("received weights", result[2].cpu(), data.want_weights)
        self._compare("combine bf16", calls["combine bf16"]().cpu(), data.want_combined(self.handle))

    @functools.cached_property
    def _want_fp8(self) -> tuple[Tensor, Tensor]:
        return reference.quantize_fp8(self.data.want_x)

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


def all_to_all(run: Run) -> Factory:
    """The all-to-all of torch: NCCL's on GPUs, gloo's on CPUs."""
    group = run.nccl_group() if run.gpus else run.group
    return lambda case, data: AllToAll(case, data, group, run.device)


def deepep(run: Run) -> Factory:
    """DeepEP at its default of 24 multiprocessors, one buffer for all cases; named with its version."""
    try:
        import deep_ep
    except Exception as error:  # whatever a library that does not fit this machine raises
        raise Unavailable(f"cannot be imported: {type(error).__name__}: {error}") from error
    if uccl_ep.Buffer is deep_ep.Buffer:
        raise Unavailable("the module deep_ep is this library's own")
    packages = importlib.metadata.packages_distributions().get("deep_ep", [])
    name = " ".join(["DeepEP", *(importlib.metadata.version(package) for package in packages[:1])])
    low = [case for case in run.cases if case.low_latency]
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint
    hints = [hint(c.max_tokens, c.hidden, run.num_ranks, c.experts) for c in low]
    buffer = deep_ep.Buffer(
        run.nccl_group(),
        1 << 30,
        max(hints, default=0),
        low_latency_mode=bool(low),
        num_qps_per_rank=max((c.experts // run.num_ranks for c in low), default=1),
    )
    deep_ep.Buffer.set_num_sms(24)
    return lambda case, data: ExpertParallel(name, case, data, buffer, run)


RIVALS: Mapping[str, Opener] = {"all_to_all": all_to_all, "DeepEP": deepep}
"""What ours is compared with, each opened once a run; a module-level function, since ranks are other processes."""


class Meeting:
    """Where ranks agree on which rivals take part, in a file: a collective would wait for who is inside a rival.

    Args:
        path: of a file that is not there yet, the same on all ranks.
        patience_s: how long others may take with a rival, once this rank is through.
    """

    def __init__(self, path: str, rank: int, num_ranks: int, patience_s: float) -> None:
        self._store = dist.FileStore(path, num_ranks)
        self._rank, self._num_ranks, self._patience_s = rank, num_ranks, patience_s
        self._attempts = 0

    def attempt(self, name: str, call: Callable[[], Any]) -> tuple[Any, str]:
        """What ``call`` gives, and "": or None, and the words of the first rank on which it was refused. Collective.

        A rival that cannot serve a case says so before it communicates, and the run goes on without it. Where it says
        so on some ranks only, the others wait inside it for them, and nothing brings them back.

        Raises:
            LeaveOut: some did not come.
        """
        result, words = None, ""
        try:
            result = call()
        except Exception as error:
            said = " ".join(str(error).split()) or type(error).__name__
            words = said if isinstance(error, Unavailable) else f"{type(error).__name__}: {said}"
        self._attempts += 1
        keys = [f"{self._attempts}/{rank}" for rank in range(self._num_ranks)]
        self._store.set(keys[self._rank], words)
        try:
            # Longer where there is nothing to say: what a rank that refused has to say should be heard first.
            self._store.wait(keys, timedelta(seconds=self._patience_s if words else 2 * self._patience_s))
        except RuntimeError:
            here = f"refused on rank {self._rank}, while others wait for it: {words}"
            late = f"a rank did not come back from it in {2 * self._patience_s:g} s"
            raise LeaveOut(name, here if words else late) from None
        refused = next((said for said in (self._store.get(key).decode() for key in keys) if said), "")
        return (None, refused) if refused else (result, "")
