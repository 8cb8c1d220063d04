"""`ElasticBuffer`: the expert-parallel part of the DeepEP v2 interface, as a thin adapter over a communicator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from uccl_ep_core.errors import ArgumentError, HandleError

from . import elastic_combine, high_throughput
from .bootstrap import make_bootstrap
from .communicator import Communicator
from .elastic_dispatch import (
    DispatchRequest,
    Reduction,
    check_expert_statistics,
    check_same,
    dispatch_along,
    dispatch_new,
    expand_rows,
)
from .ep_handle import EPHandle
from .events import EventHandle, EventOverlap
from .group_buffer import (
    AnyEvent,
    GroupBuffer,
    Payload,
    default_device,
    event_if,
    join_payload,
    split_payload,
    two_biases,
    wait_for,
)
from .tensors import check_sizes, column_major, round_up

SIZE_ALIGNMENT = 2 << 20  # bytes; DeepEP's sizes are multiples of it
CPU_TIMEOUT_S, GPU_TIMEOUT_S = 300, 100  # the interface's defaults


class ElasticBuffer(GroupBuffer):
    """Expert-parallel communication among the ranks of a group: `dispatch` and `combine` with handles.

    Collective: every rank of the group creates it with equal arguments, and makes the same calls in the same order.
    What DeepEP's class of this name does besides (Engram, pipeline and all-gather calls) is not expert parallelism
    and not here: those names do not exist, so callers that probe for them find out.

    Args:
        group: a torch.distributed process group (gloo and NCCL both work); None: ``comm``, else the world.
        num_bytes: recorded as `num_bytes`; None: what `get_buffer_size_hint` says. Tokens stream through bounded
            slots, so any size works.
        num_cpu_bytes: of Engram storage; refused unless 0.
        num_max_tokens_per_rank: default of `dispatch`.
        hidden, num_topk, use_fp8_dispatch: for the size hint.
        deterministic: outputs are deterministic in any case.
        allow_hybrid_mode: with several scale-up domains, `combine` sums inside a domain before it sums domains.
        allow_multiple_reduction: a rank's expanded rows, and a domain's, are rounded before they are summed further.
        prefer_overlap_with_compute, sl_idx, num_allocated_qps: hints without effect on results; a transport's
            service level and lanes are options of the transport.
        num_cpu_timeout_secs, num_gpu_timeout_secs: limit of every wait, where they differ from the interface's
            defaults (the smaller one, if both do); else the option ``timeout_s`` counts.
        explicitly_destroy: `destroy` is the caller's duty (it may be called in any case).
        comm: an mpi4py communicator, used where ``group`` is None.
        device: where tensors are; None: the current GPU where torch has one, else the CPU.
        options: configuration for this buffer, above environment and files.

    Attributes:
        group, num_bytes, num_max_tokens_per_rank, allow_hybrid_mode, allow_multiple_reduction, deterministic,
        prefer_overlap_with_compute, num_allocated_qps: as given.
        rank_idx, num_ranks, scaleout_rank_idx, scaleup_rank_idx, num_scaleout_ranks, num_scaleup_ranks: the place of
            this rank, in the domains of `get_logical_domain_size`.
        num_rdma_ranks, num_nvlink_ranks: as `get_physical_domain_size`.

    Raises:
        ConfigurationError, BackendUnavailableError, CapabilityError, TransportError: on every rank alike.
    """

    def __init__(
        self,
        group: Any = None,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = CPU_TIMEOUT_S,
        num_gpu_timeout_secs: int = GPU_TIMEOUT_S,
        explicitly_destroy: bool = False,
        *,
        comm: Any = None,
        device: torch.device | str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if num_cpu_bytes:
            raise ArgumentError(f"num_cpu_bytes = {num_cpu_bytes}: it is for Engram storage, which is not here; pass 0")
        check_sizes(
            num_bytes=num_bytes or 0, num_max_tokens_per_rank=num_max_tokens_per_rank, hidden=hidden, num_topk=num_topk
        )
        chosen = [num_cpu_timeout_secs] if num_cpu_timeout_secs != CPU_TIMEOUT_S else []
        chosen += [num_gpu_timeout_secs] if num_gpu_timeout_secs != GPU_TIMEOUT_S else []
        overrides: dict[str, Any] = {"timeout_s": float(min(chosen))} if chosen else {}
        overrides |= options or {}
        if device is None:
            device = default_device()
        bootstrap = make_bootstrap(group, comm)
        self.group = group
        self.rank_idx = bootstrap.rank
        self.num_ranks = bootstrap.num_ranks
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.deterministic = deterministic
        self.allow_hybrid_mode = allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.num_allocated_qps = num_allocated_qps
        self.explicitly_destroy = explicitly_destroy
        if num_bytes is None:
            num_bytes = _size_hint(self.num_ranks, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch)
        self.num_bytes = num_bytes
        mine = {
            "num_max_tokens_per_rank": num_max_tokens_per_rank,
            "allow_hybrid_mode": bool(allow_hybrid_mode),
            "allow_multiple_reduction": bool(allow_multiple_reduction),
        }
        self._communicator = Communicator(bootstrap, torch.device(device), 0, overrides, mine)
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx = self.rank_idx // self.num_scaleup_ranks
        self.scaleup_rank_idx = self.rank_idx % self.num_scaleup_ranks

    # ---- facts ----

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes of the largest output of a dispatch of these shapes, a multiple of 2 MiB. Not collective.

        A buffer of any size works; the hint lets callers compare sizes, and grows with every argument.
        """
        num_ranks = make_bootstrap(group).num_ranks
        return _size_hint(num_ranks, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch)

    def get_physical_domain_size(self) -> tuple[int, int]:
        """(scale-up domains, ranks of each): ranks of one domain load and store each other's memory."""
        return self._communicator.num_domains, self._communicator.ranks_per_domain

    def get_logical_domain_size(self) -> tuple[int, int]:
        """The domains that the interface speaks of: the physical ones in hybrid mode, else one of all ranks."""
        return self.get_physical_domain_size() if self.allow_hybrid_mode else (1, self.num_ranks)

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """Multiprocessors that a dispatch of this buffer keeps busy, rounded up to even.

        The options ``num_sms`` and ``num_channels`` decide it, whatever the arguments are.
        """
        return round_up(high_throughput.dispatch_grid(self._communicator).num_blocks, 2)

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Lanes of the transport in use: one for each proxy thread, or 1 where none is needed."""
        check_sizes(num_sms=num_sms)
        return max(1, self._communicator.windows.num_rings and self._communicator.num_proxies)

    @staticmethod
    def capture() -> EventHandle:
        """An event of what torch's current stream holds now."""
        return EventHandle()

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Wait until every rank is here.

        Args:
            use_comm_stream, sequential: hints; the barrier is one kernel on the current stream.
            with_cpu_sync: the host waits for the device as well, before and after.
        """
        for step in range(2):
            if with_cpu_sync and torch.cuda.is_available():
                torch.cuda.synchronize()
            if step == 0:
                self._communicator.barrier()

    # ---- dispatch ----

    def dispatch(
        self,
        x: Payload,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: AnyEvent | None = None,
        previous_event_before_epilogue: AnyEvent | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Payload, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]:
        """Send each token once to every rank that holds one of its experts. Collective.

        Args:
            x: [num_tokens, hidden] of any dtype, or (x, scale factors [num_tokens, columns] of any strides).
            topk_idx: int32 or int64 [num_tokens, topk], -1 for none.
            topk_weights: float32 like topk_idx; also with a handle.
            cumulative_local_expert_recv_stats: int32 [local experts], raised by the rows of each.
            num_experts, num_max_tokens_per_rank, expert_alignment: equal on all ranks; with a handle, its own.
            num_sms, num_qps, allocate_on_comm_stream: hints without effect on results.
            previous_event, previous_event_before_epilogue: waited for before the send, and before local work on
                what was received.
            async_with_compute_stream: return an event, which the caller waits for.
            handle: route as an earlier dispatch did.
            do_handle_copy: the handle keeps a copy of topk_idx, not the tensor itself.
            do_cpu_sync: wait for the counts, so that outputs have exactly the rows that arrive; False: they have as
                many as could arrive, with index -1 behind the last. None: True without a handle.
            do_expand: one row for each pick, by local expert, each expert's block aligned to expert_alignment.
            do_zero_padding: fill expanded rows that hold no token with 0.
            use_tma_aligned_col_major_sf: scale factors column by column, columns 16 bytes aligned.

        Returns:
            (received x or (x, scale factors), local expert ids [rows, topk] with -1 elsewhere or None when expanded,
            weights [rows, topk] with 0 there, or [rows] when expanded, or None where none were given, handle, event).

        Raises:
            ArgumentError: before any communication.
        """
        check_sizes(num_sms=num_sms, num_qps=num_qps)
        wait_for(previous_event)
        payload, scales = split_payload(x, "scale factors")
        if do_zero_padding and not do_expand:
            raise ArgumentError("do_zero_padding needs do_expand=True: only expanded rows have padding")
        if handle is not None:
            self._check_handle(handle)
            check_same(handle, topk_idx, num_experts, num_max_tokens_per_rank, expert_alignment, do_cpu_sync, do_expand)
            device, local_experts = self._communicator.backend.torch_device, handle.num_experts // self.num_ranks
            check_expert_statistics(cumulative_local_expert_recv_stats, device, local_experts)
            received = dispatch_along(self._communicator, handle.routes, payload, scales, topk_weights)
        else:
            if topk_idx is None or num_experts is None:
                raise ArgumentError("dispatch needs topk_idx= and num_experts=, or handle= of an earlier dispatch")
            request = DispatchRequest(
                x=payload,
                scales=scales,
                topk_idx=topk_idx,
                topk_weights=topk_weights,
                statistics=cumulative_local_expert_recv_stats,
                num_experts=num_experts,
                max_tokens=self.num_max_tokens_per_rank if num_max_tokens_per_rank is None else num_max_tokens_per_rank,
                alignment=1 if expert_alignment is None else expert_alignment,
                num_sms=num_sms or round_up(high_throughput.dispatch_grid(self._communicator).num_blocks, 2),
                do_handle_copy=do_handle_copy,
                do_cpu_sync=do_cpu_sync is None or bool(do_cpu_sync),
                do_expand=do_expand,
            )
            handle, received = dispatch_new(self._communicator, self._reduction(), request)
        wait_for(previous_event_before_epilogue)
        if cumulative_local_expert_recv_stats is not None:
            cumulative_local_expert_recv_stats += handle.num_unaligned_recv_tokens_per_expert
        recv_idx = None if do_expand else handle.routes.local_idx.clone()
        if do_expand and handle.routes.expansion is not None:
            received = expand_rows(self._communicator, received, handle.routes.expansion, do_zero_padding)
        recv_scales = received.scales
        if recv_scales is not None and use_tma_aligned_col_major_sf:
            recv_scales = column_major(recv_scales)
        recv_x = join_payload(received.x, recv_scales)
        return recv_x, recv_idx, received.topk_weights, handle, event_if(async_with_compute_stream)

    def _reduction(self) -> Reduction:
        return Reduction(
            num_scaleout_ranks=self.num_scaleout_ranks,
            num_scaleup_ranks=self.num_scaleup_ranks,
            multiple=self.allow_multiple_reduction,
            deterministic=self.deterministic,
        )

    def _check_handle(self, handle: object) -> EPHandle:
        if not isinstance(handle, EPHandle):
            raise HandleError(f"a handle from ElasticBuffer.dispatch() is needed, not {type(handle).__name__}")
        high_throughput.check_handle(self._communicator, handle.routes.rows)
        return handle

    # ---- combine ----

    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor | None, torch.Tensor | None] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: AnyEvent | None = None,
        previous_event_before_epilogue: AnyEvent | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Bring rows home and sum them: no weights are applied. Collective.

        Sums run in float32 (float64 for float64) and in increasing k, biases first, with the roundings of
        `uccl_ep.rounding`: a rank's rows are rounded when they leave it, those of a domain when they leave that (hybrid
        mode with several domains), the result at last. Without ``allow_multiple_reduction`` expanded rows come home
        one by one, and there is one rounding.

        Args:
            x: [rows as dispatch returned them, hidden] bf16, fp16, fp32 or fp64.
            topk_weights: float32 [rows, topk], or [rows] when expanded; each comes back to the pick it belongs to.
            bias: one or two tensors [num_tokens, hidden].
            num_sms, num_qps, allocate_on_comm_stream: hints without effect on results.
            previous_event, previous_event_before_epilogue: waited for before the send.
            async_with_compute_stream: return an event, which the caller waits for.

        Returns:
            (out [num_tokens, hidden], weights [num_tokens, topk] or None, event).
        """
        check_sizes(num_sms=num_sms, num_qps=num_qps)
        wait_for(previous_event)
        wait_for(previous_event_before_epilogue)
        routes = self._check_handle(handle).routes
        out, weights = elastic_combine.combine(self._communicator, routes, x, topk_weights, two_biases(bias))
        return out, weights, event_if(async_with_compute_stream)


def _size_hint(num_ranks: int, max_tokens: int, hidden: int, num_topk: int, use_fp8: bool) -> int:
    row = hidden + 4 * -(-hidden // 128) if use_fp8 else 2 * hidden
    return round_up(max(1, num_ranks * max_tokens * (max(row, 2 * hidden) + 12 * num_topk + 8)), SIZE_ALIGNMENT)
