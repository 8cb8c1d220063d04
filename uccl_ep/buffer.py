"""`Buffer`: the DeepEP v1 interface, as a thin adapter over a communicator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from uccl_ep_core.errors import ArgumentError
from uccl_ep_core.options import GENERAL_OPTIONS

from . import high_throughput
from .bootstrap import make_bootstrap
from .buffer_low_latency import LowLatencyCalls
from .communicator import Communicator
from .events import EventHandle, EventOverlap
from .group_buffer import Payload, default_device, event_if, join_payload, split_payload, two_biases, wait_for
from .low_latency.mode import LowLatency
from .tensors import check_sizes, round_up
from .tuning import Config


class Buffer(LowLatencyCalls):
    """Expert-parallel communication among the ranks of a group.

    Collective: every rank of the group creates it, and makes the same calls in the same order. Tensors live
    on the device of the GPU backend (CPU tensors with the host backend).

    Args:
        group: a torch.distributed process group (gloo and NCCL both work); None: ``comm``, else the world.
        num_nvl_bytes, num_rdma_bytes: as for DeepEP. Tokens stream through bounded slots, so the
            high-throughput mode works at any size; the low-latency mode lives in ``num_rdma_bytes``, see
            `get_low_latency_rdma_size_hint`.
        low_latency_mode: provide the low-latency mode too.
        num_qps_per_rank: a hint, without effect on results.
        allow_nvlink_for_low_latency_mode, allow_mnnvl, use_fabric, is_intranode: hints; domains are found by trying.
        explicitly_destroy: `destroy` is the caller's duty (it may be called in any case).
        enable_shrink: low-latency operations go on without a rank that is gone, that is later than ``timeout_s``,
            or that `low_latency_update_mask_buffer` names: its tokens do not arrive, and its experts add nothing.
            High-throughput operations need every rank, and raise `PeerFailure` when one is gone.
        comm: an mpi4py communicator, used where ``group`` is None.
        future_arguments: arguments that only other versions of the interface have: left aside where they ask for
            nothing (False, 0, None), refused where they ask for something.
        device: where tensors are; None: the current GPU where torch has one, else the CPU.
        options: configuration for this buffer, above environment and files, e.g.
            ``{"transport": "libfabric", "timeout_s": 30, "shm": {"plan": "counted"}}``.

    Raises:
        ConfigurationError, BackendUnavailableError, CapabilityError, TransportError: on every rank alike.
    """

    num_sms: ClassVar[int] = 20
    _most_sms: ClassVar[int] = 0  # what set_num_sms was given

    def __init__(
        self,
        group: Any = None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        use_fabric: bool = False,
        is_intranode: bool = False,
        *,
        device: torch.device | str | None = None,
        options: Mapping[str, Any] | None = None,
        **future_arguments: Any,
    ) -> None:
        for name, value in future_arguments.items():
            if value:
                raise ArgumentError(f"Buffer knows no argument {name} (it was {value!r}): leave it out")
        check_sizes(num_nvl_bytes=num_nvl_bytes, num_rdma_bytes=num_rdma_bytes)
        if low_latency_mode and num_rdma_bytes == 0:
            raise ArgumentError(
                "low_latency_mode needs num_rdma_bytes: use Buffer.get_low_latency_rdma_size_hint("
                "num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)"
            )
        self.group = group
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        if device is None:
            device = default_device()
        bootstrap = make_bootstrap(group, comm)
        self.rank = bootstrap.rank
        self.group_size = bootstrap.num_ranks
        self._communicator = Communicator(
            bootstrap,
            torch.device(device),
            num_rdma_bytes if low_latency_mode else 0,
            {"num_sms": Buffer._most_sms, **(options or {})} if Buffer._most_sms else options,
            {"enable_shrink": bool(enable_shrink)},
            bool(enable_shrink),
        )
        self._low_latency = LowLatency(self._communicator)
        if enable_shrink:
            self._low_latency.mask = torch.zeros(self.group_size, dtype=torch.int32, device=device)

    # ---- facts ----

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether kernels use what compute capability 9.0 added; they are compiled for the device at hand."""
        return bool(torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9)

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """How many multiprocessors high-throughput kernels of buffers that are created from now on take at most; even.

        Never called: all. The option ``num_sms`` of a buffer goes before it. Results never depend on it.
        """
        check_sizes(num_sms=new_num_sms)
        most = int(GENERAL_OPTIONS["num_sms"].maximum or 0)
        if not 0 < new_num_sms <= most or new_num_sms % 2:
            raise ArgumentError(
                f"num_sms = {new_num_sms}: must be even and positive, {most} at most, "
                f"use {min(most, max(2, new_num_sms // 2 * 2))}"
            )
        Buffer.num_sms = Buffer._most_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event of what torch's current stream holds now."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Tuning hints for any number of ranks."""
        return Config(num_sms=Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """Tuning hints for any number of ranks."""
        return Config(num_sms=Buffer.num_sms)

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: torch.Size | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> torch.Tensor:
        """Scratch memory of the size that was asked for at construction, seen as a tensor.

        The library's own windows are not exposed: writing them would break messages in flight.
        """
        self._communicator.ensure_open()
        nbytes = self.num_rdma_bytes if use_rdma_buffer else self.num_nvl_bytes
        if not hasattr(self, "_scratch"):
            self._scratch: dict[bool, torch.Tensor] = {}
        if use_rdma_buffer not in self._scratch:
            self._scratch[use_rdma_buffer] = self._communicator.backend.empty((nbytes,), torch.uint8)
        if offset % dtype.itemsize or not 0 <= offset <= nbytes:
            raise ArgumentError(f"offset {offset} must be a multiple of {dtype.itemsize} within {nbytes} bytes")
        tail = self._scratch[use_rdma_buffer][offset : offset + (nbytes - offset) // dtype.itemsize * dtype.itemsize]
        tensor = tail.view(dtype)
        if size is None:
            return tensor
        if size.numel() > tensor.numel():
            raise ArgumentError(f"{size.numel()} elements do not fit: at most {tensor.numel()}")
        return tensor[: size.numel()].view(size)

    # ---- high throughput ----

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Where tokens go: a local computation.

        Args:
            topk_idx: int32 or int64 [num_tokens, topk], -1 for none.

        Returns:
            int32 [num_ranks] tokens per rank, int32 [num_domains] tokens per domain (None with one domain),
            int32 [num_experts] tokens per expert, bool [num_tokens, num_ranks], and an event.
        """
        self._communicator.ensure_usable()
        wait_for(previous_event)
        layout = high_throughput.get_layout(self._communicator, topk_idx, num_experts)
        event = event_if(async_finish)
        return (
            layout.num_tokens_per_rank,
            layout.num_tokens_per_domain,
            layout.num_tokens_per_expert,
            layout.is_token_in_rank,
            event,
        )

    def dispatch(
        self,
        x: Payload,
        handle: high_throughput.DispatchHandle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[
        Payload,
        torch.Tensor | None,
        torch.Tensor | None,
        list[int] | None,
        high_throughput.DispatchHandle,
        EventOverlap,
    ]:
        """Send each token once to every rank that holds one of its experts.

        Args:
            x: [num_tokens, hidden] of any dtype, or (x, scales [num_tokens, columns]).
            handle: route as an earlier dispatch did; then layout and top-k arguments are left out.
            is_token_in_rank, num_tokens_per_expert: from `get_dispatch_layout`.
            topk_idx, topk_weights: travel with the tokens; int32 or int64, and float32.
            expert_alignment: the returned counts are rounded up to a multiple of it.
            num_worst_tokens: make outputs this long, with index -1 behind the rows that arrived, and an
                empty count list.

        Returns:
            (received x or (x, scales), local expert indices with -1 elsewhere, weights with 0 there, rows per
            local expert, handle, event). Rows lie in the order (source rank, token index there). With a handle,
            the second to fourth are None.
        """
        wait_for(previous_event)
        payload, scales = split_payload(x, "scales")
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                raise ArgumentError("a cached dispatch carries no topk_idx or topk_weights: leave out them or handle")
            rows = high_throughput.check_handle(self._communicator, handle).num_rows
            if num_worst_tokens not in (0, rows):
                raise ArgumentError(
                    f"num_worst_tokens = {num_worst_tokens}, but the handle's dispatch returned {rows} rows: leave it "
                    f"out, or pass {rows}"
                )
            cached = high_throughput.dispatch_cached(self._communicator, handle, payload, scales)
            return join_payload(cached.x, cached.scales), None, None, None, cached.handle, event_if(async_finish)
        if is_token_in_rank is None or num_tokens_per_expert is None:
            raise ArgumentError(
                "dispatch needs either handle=, or is_token_in_rank= and num_tokens_per_expert= as from "
                "get_dispatch_layout(topk_idx, num_experts)"
            )
        if expert_alignment < 1:
            raise ArgumentError(f"expert_alignment = {expert_alignment}: must be at least 1")
        result = high_throughput.dispatch(
            self._communicator,
            payload,
            scales,
            topk_idx,
            topk_weights,
            is_token_in_rank,
            num_tokens_per_expert,
            num_worst_tokens,
        )
        counts = [round_up(rows, expert_alignment) for rows in result.expert_rows or []]
        return (
            join_payload(result.x, result.scales),
            result.topk_idx,
            result.topk_weights,
            counts,
            result.handle,
            event_if(async_finish),
        )

    def combine(
        self,
        x: torch.Tensor,
        handle: high_throughput.DispatchHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor | None, torch.Tensor | None] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Bring rows home and sum them: no weights are applied.

        Accumulates in float32 (float64 for float64), biases first, then ranks in rank order, and rounds once.

        Args:
            x: [rows received, hidden] bf16, fp16, fp32 or fp64.
            topk_weights: float32 [rows received, topk], summed likewise.
            bias: one or two tensors [num_tokens, hidden].

        Returns:
            (out [num_tokens, hidden], summed weights or None, event).
        """
        wait_for(previous_event)
        out, weights = high_throughput.combine(self._communicator, handle, x, topk_weights, two_biases(bias))
        return out, weights, event_if(async_finish)

    internode_dispatch = dispatch
    internode_combine = combine
