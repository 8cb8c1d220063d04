"""`Buffer`: the DeepEP v1 interface, as a thin adapter over a communicator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from uccl_ep_core.errors import ArgumentError
from uccl_ep_core.kernel_parameters import Quantization

from . import high_throughput
from .bootstrap import make_bootstrap
from .communicator import Communicator
from .events import EventHandle, EventOverlap, communication_stream
from .low_latency.capacity import LowLatencyCapacity
from .low_latency.mode import LowLatency
from .tensors import round_up
from .tuning import Config

Payload = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def _refuse(**arguments: Any) -> None:
    """Refuse arguments that have no effect here, when they are set: silence would be a wrong answer."""
    for name, value in arguments.items():
        if value:
            raise ArgumentError(f"{name}={value!r} is not supported: leave it out, or pass {type(value)()!r}")


class Buffer:
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
        if num_nvl_bytes < 0 or num_rdma_bytes < 0:
            raise ArgumentError(f"buffer sizes must not be negative: {num_nvl_bytes} and {num_rdma_bytes} bytes")
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
            device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
        bootstrap = make_bootstrap(group, comm)
        self.rank = bootstrap.rank
        self.group_size = bootstrap.num_ranks
        self._communicator = Communicator(
            bootstrap,
            torch.device(device),
            num_rdma_bytes if low_latency_mode else 0,
            options,
            {"enable_shrink": bool(enable_shrink)},
            bool(enable_shrink),
        )
        self._low_latency = LowLatency(self._communicator)
        if enable_shrink:
            self._low_latency.mask = torch.zeros(self.group_size, dtype=torch.int32, device=device)

    # ---- facts ----

    def describe(self) -> dict[str, Any]:
        """The chosen plugins, the ordering plan and the domains, each with its reason."""
        return self._communicator.describe()

    def stats(self) -> dict[str, Any]:
        """Counts since the start: operations, kernels by name, and what the proxies did."""
        return self._communicator.stats()

    def check(self) -> None:
        """Raise the group's failure, if there is one (`PeerFailure`), or `BufferClosedError` after `destroy`."""
        self._communicator.ensure_usable()

    def destroy(self) -> None:
        """Release memory, threads and connections. Not collective; may be called twice.

        Peers that still wait for this rank get an error that says that it closed its buffer.
        """
        self._communicator.close()

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether kernels use what compute capability 9.0 added; they are compiled for the device at hand."""
        return bool(torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9)

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """A hint of how many multiprocessors to use; even."""
        if new_num_sms <= 0 or new_num_sms % 2:
            raise ArgumentError(
                f"num_sms = {new_num_sms}: must be even and positive, use {max(2, new_num_sms // 2 * 2)}"
            )
        Buffer.num_sms = new_num_sms

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

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes of ``num_rdma_bytes`` that suffice for these shapes, any dtype up to float32, top-k up to 16.

        It covers groups of several domains, whose rows leave from outboxes; ranks of one domain take only the part
        without them. Less does for a smaller dtype or top-k: a call that does not fit says how much it needs.
        """
        return LowLatencyCapacity.hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    def get_comm_stream(self) -> Any:
        """The stream communication runs on when it does not run on the current one; None on the host."""
        self._communicator.ensure_open()
        return communication_stream(self._communicator.backend)

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
        self._wait(previous_event)
        layout = high_throughput.get_layout(self._communicator, topk_idx, num_experts)
        event = self._event(async_finish)
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
        self._wait(previous_event)
        if isinstance(x, tuple) and len(x) != 2:
            raise ArgumentError(f"x is a tuple of {len(x)}: give one tensor, or (x, scales)")
        payload, scales = x if isinstance(x, tuple) else (x, None)
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
            return self._payload(cached), None, None, None, cached.handle, self._event(async_finish)
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
            self._payload(result),
            result.topk_idx,
            result.topk_weights,
            counts,
            result.handle,
            self._event(async_finish),
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
        self._wait(previous_event)
        biases = bias if isinstance(bias, tuple) else (bias, None)
        if len(biases) != 2:
            raise ArgumentError(f"bias has {len(biases)} tensors: give one, or a tuple of two")
        out, weights = high_throughput.combine(self._communicator, handle, x, topk_weights, biases)
        return out, weights, self._event(async_finish)

    internode_dispatch = dispatch
    internode_combine = combine

    # ---- low latency ----

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
        payload: Payload = received if scales is None else (received, scales)
        if return_recv_hook:
            return payload, count, handle, EventOverlap(), hook
        hook()
        return payload, count, handle, self._event(async_finish), None

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

        Multiplies and adds in float32 in increasing k, and rounds once. All ranks combine the same dispatches in the
        same order; rows carry no more than themselves, so that is not checked.

        Args:
            x: [L, num_ranks * max, hidden] expert outputs, rows as received, of the dtype of dispatch's x.
            topk_idx: this rank's own indices, as given to dispatch.
            topk_weights: float32 [num_tokens, topk].
            zero_copy: x is `get_next_low_latency_combine_buffer`'s memory, which the send reads in place.
            out: [num_tokens, hidden] to write into.
            return_recv_hook: return after the send half; ``hook()`` receives and sums.
            overlap, and the arguments behind it: single-batch overlap; refused when set, but for the hint num_sms.

        Returns:
            (out, event, hook or None).
        """
        _refuse(use_logfmt=use_logfmt, overlap=overlap, block_m=block_m, threshold=threshold)
        _refuse(src_signal_expect_value=src_signal_expect_value)
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
        if zero_copy and x.data_ptr() != self._low_latency.combine_buffer(handle).data_ptr():
            raise ArgumentError(
                "zero_copy: write the expert outputs into get_next_low_latency_combine_buffer(handle) and pass that"
            )
        result, hook = self._low_latency.combine(
            x, topk_idx, topk_weights, handle, out, combine_wait_recv_cost_stats, at_once=not return_recv_hook
        )
        if return_recv_hook:
            return result, EventOverlap(), hook
        hook()
        return result, self._event(async_finish), None

    def get_next_low_latency_combine_buffer(self, handle: Any) -> torch.Tensor:
        """Memory [L, num_ranks * max, hidden] to write expert outputs into, for ``zero_copy``."""
        self._require_low_latency()
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

    # ---- inside ----

    def _mask(self) -> torch.Tensor:
        self._communicator.ensure_usable()
        if self._low_latency.mask is None:
            raise ArgumentError("no rank can be masked: create the Buffer with enable_shrink=True")
        return self._low_latency.mask

    def _require_low_latency(self) -> None:
        self._communicator.ensure_usable()
        if not self.low_latency_mode:
            raise ArgumentError(
                "this buffer has no low-latency mode: create it with low_latency_mode=True and num_rdma_bytes="
                "Buffer.get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, "
                "num_experts)"
            )

    @staticmethod
    def _payload(result: high_throughput.Dispatched) -> Payload:
        return result.x if result.scales is None else (result.x, result.scales)

    @staticmethod
    def _wait(previous_event: EventOverlap | None) -> None:
        if previous_event is not None:
            previous_event.current_stream_wait()

    @staticmethod
    def _event(async_finish: bool) -> EventOverlap:
        return EventOverlap(EventHandle() if async_finish else None)
