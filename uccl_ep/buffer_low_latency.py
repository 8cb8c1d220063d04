"""The low-latency calls of `Buffer`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from uccl_ep_core.errors import ArgumentError
from uccl_ep_core.kernel_parameters import Quantization

from .events import EventOverlap
from .group_buffer import GroupBuffer, Payload, event_if, join_payload
from .low_latency.capacity import LowLatencyCapacity
from .low_latency.mode import LowLatency
from .tensors import check_sizes


def _refuse(**arguments: Any) -> None:
    """Refuse arguments that have no effect here, when they are set: silence would be a wrong answer."""
    for name, value in arguments.items():
        if value:
            raise ArgumentError(f"{name}={value!r} is not supported: leave it out, or pass {type(value)()!r}")


class LowLatencyCalls(GroupBuffer):
    """Dispatch and combine for few tokens; the part of `Buffer` that lives in ``num_rdma_bytes``."""

    rank: int
    group_size: int
    low_latency_mode: bool
    _low_latency: LowLatency

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes of ``num_rdma_bytes`` that suffice for these shapes, any dtype up to float32, top-k up to 16.

        It covers groups of several domains, whose rows leave from outboxes; ranks of one domain take only the part
        without them. Less does for a smaller dtype or top-k: a call that does not fit says how much it needs.
        """
        return LowLatencyCapacity.hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Nothing needs cleaning between the modes: their memory is apart, and counters are never reset."""
        self._communicator.ensure_usable()

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        use_nvfp4: bool = False,
        x_global_scale: torch.Tensor | None = None,
    ) -> tuple[Payload, torch.Tensor, Any, EventOverlap, Callable[[], None] | None]:
        """Send at most ``num_max_dispatch_tokens_per_rank`` tokens to their experts, without a host wait for counts.

        Args:
            x: [num_tokens, hidden] bf16, fp16, fp32 or fp64.
            topk_idx: int32 or int64 [num_tokens, topk], -1 for none. A token may name an expert more than once, as
                long as none is named more than ``num_max_dispatch_tokens_per_rank`` times.
            cumulative_local_expert_recv_stats: int32 [local experts], raised by what arrives.
            dispatch_wait_recv_cost_stats: int64 [num_ranks], raised by the wait for each rank.
            use_fp8: cast to float8_e4m3fn in the send, on every device, with a float32 scale for each 128 elements
                (`uccl_ep.float8.to_fnuz` for gfx942).
            round_scale: scales are powers of two; it and use_ue8m0 say nothing where there are no scales.
            use_ue8m0: scales are returned as exponents, four to an int32 (with ``round_scale``).
            return_recv_hook: return after the send half; ``hook()`` receives.

        Returns:
            (received [L, num_ranks * max, hidden] or (e4m3, scales [L, num_ranks * max, ceil(hidden / 128)]), int32 [L]
            counts, handle, event, hook or None). A result is valid until the second dispatch after it.
        """
        _refuse(use_nvfp4=use_nvfp4)
        if x_global_scale is not None:
            raise ArgumentError("x_global_scale belongs to use_nvfp4, which is not supported: leave it out")
        if use_fp8 and use_ue8m0 and not round_scale:
            raise ArgumentError("use_ue8m0 needs round_scale=True: an exponent alone holds powers of two only")
        if async_finish and return_recv_hook:
            raise ArgumentError("async_finish and return_recv_hook exclude each other: pass one of them")
        self._require_low_latency()
        quantization = Quantization.NONE
        if use_fp8:
            quantization = Quantization.FLOAT8
            if round_scale:
                quantization = Quantization.FLOAT8_EXPONENT if use_ue8m0 else Quantization.FLOAT8_POWER_OF_TWO
        received, scales, count, handle, hook = self._low_latency.dispatch(
            x,
            topk_idx,
            num_max_dispatch_tokens_per_rank,
            num_experts,
            quantization,
            cumulative_local_expert_recv_stats,
            dispatch_wait_recv_cost_stats,
            at_once=not return_recv_hook,
        )
        payload = join_payload(received, scales)
        if return_recv_hook:
            return payload, count, handle, EventOverlap(), hook
        hook()
        return payload, count, handle, event_if(async_finish), None

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Any,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
        overlap: bool = False,
        packed_recv_count: torch.Tensor | None = None,
        comp_signal: torch.Tensor | None = None,
        block_m: int = 0,
        threshold: int = 0,
        src_signals: torch.Tensor | None = None,
        src_signal_expect_value: int = 0,
        num_sms: int = 0,
    ) -> tuple[torch.Tensor, EventOverlap, Callable[[], None] | None]:
        """Bring expert outputs home and sum them with their weights.

        Multiplies and adds in float32 (float64 for float64), in the order that ``handle.rounding`` names, and rounds
        once. All ranks combine the same dispatches in the same order; rows carry no more than themselves, so that is
        not checked.

        Args:
            x: [L, num_ranks * max, hidden] expert outputs, rows as received, of the dtype of dispatch's x.
            topk_idx: this rank's own indices, as given to dispatch.
            topk_weights: float32 [num_tokens, topk]; unchanged until the hook was called.
            zero_copy: x is `get_next_low_latency_combine_buffer`'s memory, which the send reads in place.
            out: [num_tokens, hidden] to write into.
            return_recv_hook: return after the send half; ``hook()`` receives and sums.
            overlap, and the arguments behind it: single-batch overlap; refused when set, but for the hint num_sms.

        Returns:
            (out, event, hook or None).
        """
        _refuse(use_logfmt=use_logfmt, overlap=overlap, block_m=block_m, threshold=threshold)
        _refuse(src_signal_expect_value=src_signal_expect_value)
        check_sizes(num_sms=num_sms)
        for name, value in (
            ("packed_recv_count", packed_recv_count),
            ("comp_signal", comp_signal),
            ("src_signals", src_signals),
        ):
            if value is not None:
                raise ArgumentError(f"{name} belongs to overlap, which is not supported: leave it out")
        if async_finish and return_recv_hook:
            raise ArgumentError("async_finish and return_recv_hook exclude each other: pass one of them")
        self._require_low_latency()
        if zero_copy and x.data_ptr() != self.get_next_low_latency_combine_buffer(handle).data_ptr():
            raise ArgumentError(
                "zero_copy: write the expert outputs into get_next_low_latency_combine_buffer(handle) and pass that"
            )
        result, hook = self._low_latency.combine(
            x, topk_idx, topk_weights, handle, out, combine_wait_recv_cost_stats, at_once=not return_recv_hook
        )
        if return_recv_hook:
            return result, EventOverlap(), hook
        hook()
        return result, event_if(async_finish), None

    def get_next_low_latency_combine_buffer(self, handle: Any) -> torch.Tensor:
        """Memory [L, num_ranks * max, hidden] to write expert outputs into, for ``zero_copy``."""
        self._require_low_latency()
        self._communicator.ensure_usable()
        return self._low_latency.combine_buffer(handle)

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Leave a rank out of low-latency operations (or take it in again); needs ``enable_shrink``.

        Not collective, but all ranks that go on should say the same. A rank that is taken in again must have made as
        many low-latency calls as the others meanwhile, with them left out; else the next one raises `PeerFailure`.
        """
        table = self._mask()
        if not 0 <= rank_to_mask < self.group_size or rank_to_mask == self.rank:
            raise ArgumentError(f"rank {rank_to_mask} cannot be masked: use another rank of 0 to {self.group_size - 1}")
        table[rank_to_mask] = int(mask)

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Write 1 for each rank that is left out, else 0, into int32 [num_ranks]; also those that kernels left out."""
        mask_status.copy_(self._mask())

    def low_latency_clean_mask_buffer(self) -> None:
        """Take all ranks in again."""
        self._mask().zero_()

    def _mask(self) -> torch.Tensor:
        self._communicator.ensure_usable()
        if self._low_latency.mask is None:
            raise ArgumentError("no rank can be masked: create the Buffer with enable_shrink=True")
        return self._low_latency.mask

    def _require_low_latency(self) -> None:
        if not self.low_latency_mode:
            self._communicator.ensure_usable()  # says more of a buffer that was closed
            raise ArgumentError(
                "this buffer has no low-latency mode: create it with low_latency_mode=True and num_rdma_bytes="
                "Buffer.get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, "
                "num_experts)"
            )
