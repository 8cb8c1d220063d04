"""Low-latency operations of a communicator: dispatch and combine, each in a send and a receive half."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable

import torch

from uccl_ep_core.errors import ArgumentError, HandleError
from uccl_ep_core.kernel_parameters import (
    LowLatencyCombineParameters,
    LowLatencyDispatchParameters,
    LowLatencyShape,
    Quantization,
)

from .communicator import Communicator
from .low_latency_grid import dispatch_grid, full_grid
from .low_latency_results import LIVE_RESULTS, HandleState, LowLatencyHandle, Results
from .tensors import (
    REDUCIBLE,
    check_expert_rows,
    check_experts,
    check_matrix,
    check_rows,
    check_tensor,
    check_topk_idx,
    check_topk_weights,
    names,
    plain,
    pointer,
)

SCALE_GROUP = 128  # elements that share a scale
MOST_TOKENS = (1 << 16) - 1  # sum_below of core/kernels/ll_dispatch.hpp adds 16-bit counts
QUANTIZABLE = (torch.bfloat16, torch.float16, torch.float32)


class LowLatency:
    """The low-latency mode of one communicator."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._generation = 0
        self._results = (Results(), Results())
        self._combine_buffers = (Results(), Results())
        # Receive halves that were not run yet, in order: messages are taken in the order they were sent.
        self._pending: collections.deque[tuple[str, int, Callable[[], None]]] = collections.deque()
        self._sent = {"dispatch": 0, "combine": 0}
        # int32 [num_ranks] on the device, 1: left out; kernels set it for a rank that is gone or late.
        self.mask: torch.Tensor | None = None

    # ---- receive halves ----

    def _fuses(self, at_once: bool) -> bool:
        """Whether one kernel does both halves: the caller waits anyhow, and no earlier message waits to be taken."""
        return at_once and not self._pending

    def _hook(self, kind: str, receive: Callable[[], None], received: bool = False) -> Callable[[], None]:
        self._sent[kind] += 1
        number = self._sent[kind]
        if received:
            return self._communicator.ensure_usable
        self._pending.append((kind, number, receive))

        def hook() -> None:
            self._communicator.ensure_usable()  # also when called again: a receive that failed has brought nothing
            while any(entry[:2] == (kind, number) for entry in self._pending):
                self._communicator.ensure_usable()
                self._pending.popleft()[2]()

        return hook

    def _check_pending(self, kind: str) -> None:
        outstanding = sum(entry[0] == kind for entry in self._pending)
        if outstanding >= LIVE_RESULTS:
            raise ArgumentError(
                f"{outstanding} low-latency {kind} results are not received yet: call the hook of an earlier {kind} "
                f"first (at most {LIVE_RESULTS} are in flight)"
            )

    # ---- dispatch ----

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        max_tokens: int,
        num_experts: int,
        quantization: Quantization,
        statistics: torch.Tensor | None = None,
        wait_cost: torch.Tensor | None = None,
        at_once: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, LowLatencyHandle, Callable[[], None]]:
        """Send half of a dispatch. Collective.

        Args:
            x: [num_tokens, hidden], num_tokens at most ``max_tokens``.
            topk_idx: int32 or int64 [num_tokens, topk] global expert indices, -1 for none.
            max_tokens: most tokens of any rank; equal on all ranks.
            quantization: how rows are cast before they travel.
            statistics: int32 [local experts], raised by the received counts.
            wait_cost: int64 [num_ranks], raised by the time waited for each rank (ns on the host).
            at_once: the hook is called before the caller can change x: own rows are then not copied twice.

        Returns:
            (received x [L, num_ranks * max_tokens, hidden], scales or None, count int32 [L], handle, hook);
            the first three hold data after ``hook()``, until the second dispatch after this one.

        Raises:
            ArgumentError: before any communication; says what would do.
        """
        communicator = self._communicator
        communicator.ensure_usable()
        device, ranks = communicator.backend.torch_device, communicator.num_ranks
        x = check_matrix("x", x, device)
        check_experts(num_experts, ranks)
        topk_idx = check_topk_idx(topk_idx, device, num_experts)
        check_rows("topk_idx", topk_idx, x.shape[0], "x")
        num_tokens, hidden = x.shape
        num_topk = topk_idx.shape[1]
        if x.dtype not in REDUCIBLE:
            raise ArgumentError(f"x is {x.dtype}: low-latency dispatch takes {names(REDUCIBLE)}")
        if hidden == 0 or num_topk == 0:
            raise ArgumentError(f"hidden is {hidden} and top-k {num_topk}: both must be at least 1")
        if num_tokens > max_tokens:
            raise ArgumentError(
                f"{num_tokens} tokens exceed num_max_dispatch_tokens_per_rank = {max_tokens}: use at least {num_tokens}"
            )
        if max_tokens > MOST_TOKENS:
            raise ArgumentError(
                f"num_max_dispatch_tokens_per_rank = {max_tokens}: low-latency dispatch takes at most {MOST_TOKENS}; "
                "use dispatch(), which has no limit"
            )
        check_expert_rows(topk_idx, max_tokens)
        if quantization != Quantization.NONE and x.dtype not in QUANTIZABLE:
            raise ArgumentError(f"x is {x.dtype}: use_fp8 casts from {names(QUANTIZABLE)}; or pass use_fp8=False")
        groups = -(-hidden // SCALE_GROUP)
        wire_bytes = hidden if quantization else hidden * x.element_size()
        scale_bytes = 4 * groups if quantization else 0
        communicator.capacity.require(
            max_tokens, wire_bytes, scale_bytes, hidden * x.element_size(), num_topk, num_experts
        )
        self._check_statistics("cumulative_local_expert_recv_stats", statistics, torch.int32, num_experts // ranks)
        self._check_statistics("dispatch_wait_recv_cost_stats", wait_cost, torch.int64, ranks)
        self._check_pending("dispatch")

        self._generation += 1
        local_experts, rows = num_experts // ranks, ranks * max_tokens
        results, empty = self._results[self._generation % LIVE_RESULTS], communicator.backend.empty
        wire_dtype = torch.float8_e4m3fn if quantization else x.dtype
        receive_x = results.get("x", (local_experts, rows, hidden), wire_dtype, communicator.backend)
        receive_scales = None
        if quantization == Quantization.FLOAT8_EXPONENT:
            receive_scales = results.get(
                "scales", (local_experts, -(-groups // 4), rows), torch.int32, communicator.backend
            )
        elif quantization:
            receive_scales = results.get("scales", (local_experts, groups, rows), torch.float32, communicator.backend)
        count = empty((local_experts,), torch.int32)
        pairs = local_experts * ranks
        begin, counts, rows_before, combine_base, rows_home = torch.split(
            empty((3 * pairs + 2 * ranks,), torch.int32), [pairs, pairs, pairs, ranks, ranks]
        )
        state = HandleState(
            owner=weakref.ref(self),
            generation=self._generation,
            shape=LowLatencyShape(
                max_tokens=max_tokens,
                hidden=hidden,
                num_topk=num_topk,
                num_experts=num_experts,
                row_bytes=wire_bytes,
                scale_bytes=scale_bytes,
                quantization=int(quantization),
                payload_type=int(REDUCIBLE[x.dtype]),
            ),
            dtype=x.dtype,
            num_tokens=num_tokens,
            topk_idx=topk_idx.clone(),
            combine_row=empty((num_tokens, num_topk), torch.int32),
            own_row=empty((num_tokens, num_topk), torch.int32),
            source_index=results.get("source", (local_experts, rows), torch.int32, communicator.backend),
            begin=begin,
            count=counts,
            combine_base=combine_base,
            rows_before=rows_before,
            rows_home=rows_home,
            layout_range=empty((local_experts, ranks), torch.int64),
        )
        grid, num_chunks, shared_bytes = dispatch_grid(communicator, num_tokens, num_topk, num_experts)
        parameters = LowLatencyDispatchParameters(
            group=communicator.group_struct(),
            shape=state.shape,
            x=pointer(x),
            topk_idx=pointer(state.topk_idx),
            num_tokens=num_tokens,
            index_bytes=topk_idx.element_size(),
            combine_row=pointer(state.combine_row),
            own_row=pointer(state.own_row),
            masked=pointer(self.mask),
            own_in_place=int(at_once and not quantization),
            num_chunks=num_chunks,
            receive_x=pointer(receive_x),
            receive_scales=pointer(receive_scales),
            source_index=pointer(state.source_index),
            begin=pointer(state.begin),
            count=pointer(state.count),
            receive_count=pointer(count),
            combine_base=pointer(state.combine_base),
            rows_before=pointer(state.rows_before),
            rows_home=pointer(state.rows_home),
            layout_range=pointer(state.layout_range),
            statistics=pointer(statistics),
            wait_cost=pointer(wait_cost),
        )
        handle = LowLatencyHandle.of(state)
        # Referred to by address until the receive half has run, whatever the caller keeps of the results.
        keep = (x, statistics, wait_cost, state, count, receive_x, receive_scales)
        # LowLatencyArrivals of core/kernels/ll_dispatch.hpp
        arrivals_bytes = 12 * grid["warps"] * num_topk + 4 * (ranks + num_experts)

        fused = self._fuses(at_once)
        if fused:
            communicator.launch(
                "uccl_ep_ll_dispatch", parameters, shared_bytes=max(shared_bytes, arrivals_bytes), **grid
            )
        else:
            communicator.launch("uccl_ep_ll_dispatch_send", parameters, shared_bytes=shared_bytes, **grid)

        def receive() -> None:
            communicator.launch("uccl_ep_ll_dispatch_receive", parameters, shared_bytes=arrivals_bytes, **grid)
            _ = keep

        hook = self._hook("dispatch", receive, fused)
        scales_view = None if receive_scales is None else receive_scales.transpose(1, 2)
        return receive_x, scales_view, count, handle, hook

    def _check_statistics(self, name: str, tensor: torch.Tensor | None, dtype: torch.dtype, length: int) -> None:
        if tensor is None:
            return
        check_tensor(name, tensor)
        if tensor.dtype != dtype or tuple(tensor.shape) != (length,) or not tensor.is_contiguous():
            raise ArgumentError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}: a contiguous {dtype} tensor of shape ({length},) "
                "is needed"
            )

    # ---- combine ----

    def check_handle(self, handle: object) -> HandleState:
        """The state behind a handle of this mode that has not expired.

        Raises:
            HandleError: it is another thing, another buffer's, or expired.
        """
        if not isinstance(handle, LowLatencyHandle):
            raise HandleError(f"a handle from low_latency_dispatch() is needed, not {type(handle).__name__}")
        state = handle.state
        if state.owner() is not self:
            raise HandleError("this handle came from another buffer: use the buffer that made it")
        if self._generation - state.generation >= LIVE_RESULTS:
            raise HandleError(
                f"this handle expired: {self._generation - state.generation} dispatches came after its own, and a "
                f"result lives until the second; combine before that"
            )
        return state

    def combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: object,
        out: torch.Tensor | None = None,
        wait_cost: torch.Tensor | None = None,
        at_once: bool = False,
    ) -> tuple[torch.Tensor, Callable[[], None]]:
        """Send half of a combine. Collective.

        out[t] = sum over k, in increasing k, of topk_weights[t, k] * (row of expert topk_idx[t, k] for t);
        product and sum in float32 (float64 for float64), rounded once.

        Args:
            x: [local experts, num_ranks * max_tokens, hidden] expert outputs, rows as they were received, of the
                dtype of dispatch's x (then all ranks agree on it without a word more on the wire).
            topk_idx: this rank's own indices, as given to dispatch.
            topk_weights: float32 [num_tokens, topk].
            out: [num_tokens, hidden] of x's dtype to write into, or None.
            at_once: the hook is called before the caller can change x: own rows are then summed from it.

        Returns:
            (out, hook); out holds the sums after ``hook()``.
        """
        communicator = self._communicator
        communicator.ensure_usable()
        state = self.check_handle(handle)
        device, ranks, shape = communicator.backend.torch_device, communicator.num_ranks, state.shape
        expected = (shape.num_experts // ranks, ranks * shape.max_tokens, shape.hidden)
        check_tensor("x", x)
        if tuple(x.shape) != expected:
            raise ArgumentError(f"x has shape {tuple(x.shape)}: {expected} is needed, as dispatch delivered")
        if x.device.type != device.type:
            raise ArgumentError(f"x is on {x.device}: this buffer works on {device}")
        if x.dtype != state.dtype:
            raise ArgumentError(
                f"x is {x.dtype}: combine takes the dtype that was dispatched, use {names([state.dtype])}"
            )
        x = plain(x)
        topk_idx = check_topk_idx(topk_idx, device, shape.num_experts)
        if tuple(topk_idx.shape) != (state.num_tokens, shape.num_topk):
            raise ArgumentError(
                f"topk_idx has shape {tuple(topk_idx.shape)}: pass this rank's own indices, "
                f"{(state.num_tokens, shape.num_topk)}, as given to dispatch"
            )
        if device.type == "cpu" and not torch.equal(topk_idx.to(torch.int64), state.topk_idx.to(torch.int64)):
            raise ArgumentError(
                "topk_idx differs from what was given to dispatch: pass this rank's own indices unchanged"
            )
        topk_weights = check_topk_weights(topk_weights, topk_idx.shape, device)
        if out is None:
            out = communicator.backend.empty((state.num_tokens, shape.hidden), x.dtype)
        elif (
            tuple(check_tensor("out", out).shape) != (state.num_tokens, shape.hidden)
            or out.dtype != x.dtype
            or not out.is_contiguous()
        ):
            raise ArgumentError(
                f"out is {out.dtype} {tuple(out.shape)}: a contiguous {x.dtype} tensor of shape "
                f"{(state.num_tokens, shape.hidden)} is needed"
            )
        row_bytes = shape.hidden * x.element_size()
        communicator.capacity.require(
            shape.max_tokens, shape.row_bytes, shape.scale_bytes, row_bytes, shape.num_topk, shape.num_experts
        )
        self._check_statistics("combine_wait_recv_cost_stats", wait_cost, torch.int64, ranks)
        self._check_pending("combine")
        if any(entry[0] == "dispatch" and entry[1] <= state.generation for entry in self._pending):
            raise ArgumentError("this dispatch was not received yet: call its hook before combine")
        parameters = LowLatencyCombineParameters(
            group=communicator.group_struct(),
            shape=LowLatencyShape(
                max_tokens=shape.max_tokens,
                hidden=shape.hidden,
                num_topk=shape.num_topk,
                num_experts=shape.num_experts,
                row_bytes=row_bytes,
                scale_bytes=0,
                quantization=0,
                payload_type=shape.payload_type,
            ),
            x=pointer(x),
            begin=pointer(state.begin),
            count=pointer(state.count),
            combine_base=pointer(state.combine_base),
            rows_before=pointer(state.rows_before),
            rows_home=pointer(state.rows_home),
            topk_idx=pointer(state.topk_idx),
            topk_weights=pointer(topk_weights),
            combine_row=pointer(state.combine_row),
            own_row=pointer(state.own_row),
            num_tokens=state.num_tokens,
            index_bytes=state.topk_idx.element_size(),
            masked=pointer(self.mask),
            own_in_place=int(at_once),
            out=pointer(out),
            wait_cost=pointer(wait_cost),
        )
        grid = full_grid(communicator)
        keep = (x, topk_weights, out, wait_cost, state)
        terms_bytes = 16 * grid["warps"] * shape.num_topk  # WeightedRow of core/kernels/ll_combine.hpp

        fused = self._fuses(at_once)
        if fused:
            communicator.launch("uccl_ep_ll_combine", parameters, shared_bytes=terms_bytes, **grid)
        else:
            communicator.launch("uccl_ep_ll_combine_send", parameters, **grid)

        def receive() -> None:
            communicator.launch("uccl_ep_ll_combine_receive", parameters, shared_bytes=terms_bytes, **grid)
            _ = keep

        return out, self._hook("combine", receive, fused)

    def combine_buffer(self, handle: object) -> torch.Tensor:
        """Memory [L, num_ranks * max_tokens, hidden] for expert outputs, which the send half reads as it is."""
        state = self.check_handle(handle)
        ranks, shape = self._communicator.num_ranks, state.shape
        size = (shape.num_experts // ranks, ranks * shape.max_tokens, shape.hidden)
        return self._combine_buffers[state.generation % LIVE_RESULTS].get(
            "x", size, state.dtype, self._communicator.backend
        )
