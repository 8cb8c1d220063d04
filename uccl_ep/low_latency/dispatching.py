"""What a low-latency dispatch is given, checked; where it receives; and what its kernel is told of both."""

from __future__ import annotations

import dataclasses
import weakref

import torch

from uccl_ep_core._native import kernels
from uccl_ep_core.errors import ArgumentError
from uccl_ep_core.gpu_backend import GpuBackend
from uccl_ep_core.kernel_parameters import Group, LowLatencyDispatchParameters, LowLatencyShape, Quantization

from ..communicator import Communicator
from ..tensors import (
    REDUCIBLE,
    check_expert_rows,
    check_experts,
    check_matrix,
    check_rows,
    check_statistics,
    check_topk_idx,
    names,
    pointer,
)
from .path import DirectPath
from .results import HandleState, KernelMemory, Results

QUANTIZABLE = (torch.bfloat16, torch.float16, torch.float32)


@dataclasses.dataclass(frozen=True)
class Outgoing:
    """Tokens of this rank, as a kernel reads them.

    Attributes:
        x: [num_tokens, hidden], contiguous.
        topk_idx: int32 or int64 [num_tokens, topk] global expert indices, -1 for none, contiguous.
        statistics: int32 [local experts], raised by the received counts; or None.
        wait_cost: int64 [num_ranks], raised by the time waited for each rank (ns on the host); or None.
    """

    x: torch.Tensor
    topk_idx: torch.Tensor
    shape: LowLatencyShape
    statistics: torch.Tensor | None
    wait_cost: torch.Tensor | None

    @classmethod
    def check(
        cls,
        communicator: Communicator,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        max_tokens: int,
        num_experts: int,
        quantization: Quantization,
        statistics: torch.Tensor | None,
        wait_cost: torch.Tensor | None,
    ) -> Outgoing:
        """Raise `ArgumentError`, which says what would do, or return what is to be sent."""
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
        if max_tokens > kernels.MOST_LOW_LATENCY_TOKENS:
            raise ArgumentError(
                f"num_max_dispatch_tokens_per_rank = {max_tokens}: low-latency dispatch takes at most "
                f"{kernels.MOST_LOW_LATENCY_TOKENS}; use dispatch(), which has no limit"
            )
        check_expert_rows(topk_idx, max_tokens)
        if quantization != Quantization.NONE and x.dtype not in QUANTIZABLE:
            raise ArgumentError(f"x is {x.dtype}: use_fp8 casts from {names(QUANTIZABLE)}; or pass use_fp8=False")
        row_bytes = hidden if quantization else hidden * x.element_size()
        scale_bytes = 4 * -(-hidden // kernels.SCALE_GROUP) if quantization else 0
        communicator.capacity.require(
            max_tokens, row_bytes, scale_bytes, hidden * x.element_size(), num_topk, num_experts
        )
        check_statistics("cumulative_local_expert_recv_stats", statistics, torch.int32, num_experts // ranks)
        check_statistics("dispatch_wait_recv_cost_stats", wait_cost, torch.int64, ranks)
        shape = LowLatencyShape(
            max_tokens=max_tokens,
            hidden=hidden,
            num_topk=num_topk,
            num_experts=num_experts,
            row_bytes=row_bytes,
            scale_bytes=scale_bytes,
            quantization=int(quantization),
            payload_type=int(REDUCIBLE[x.dtype]),
        )
        return cls(x, topk_idx, shape, statistics, wait_cost)


@dataclasses.dataclass(frozen=True)
class Incoming:
    """Where a dispatch receives: L local experts, R rows of each.

    Attributes:
        x: [L, R, hidden].
        scales: float32 [L, groups, R], int32 [L, groups / 4, R] where they are exponents, or None.
        source_index: int32 [L, R], each row's token index on its source rank.
        count: int32 [L], rows of each expert.
    """

    x: torch.Tensor
    scales: torch.Tensor | None
    source_index: torch.Tensor
    count: torch.Tensor

    @classmethod
    def allocate(
        cls, shape: LowLatencyShape, dtype: torch.dtype, num_ranks: int, kept: Results, backend: GpuBackend
    ) -> Incoming:
        """Memory for what arrives: what was ``kept`` of an earlier dispatch of this shape, where there is some."""
        local_experts, rows = shape.num_experts // num_ranks, num_ranks * shape.max_tokens
        wire_dtype = torch.float8_e4m3fn if shape.quantization else dtype
        x = kept.get("x", (local_experts, rows, shape.hidden), wire_dtype, backend)
        groups, scales = shape.scale_bytes // 4, None
        if shape.quantization == Quantization.FLOAT8_EXPONENT:
            scales = kept.get("scales", (local_experts, -(-groups // 4), rows), torch.int32, backend)
        elif shape.quantization:
            scales = kept.get("scales", (local_experts, groups, rows), torch.float32, backend)
        source_index = kept.get("source", (local_experts, rows), torch.int32, backend)
        return cls(x, scales, source_index, backend.empty((local_experts,), torch.int32))


def new_state(
    owner: object,
    generation: int,
    outgoing: Outgoing,
    incoming: Incoming,
    num_ranks: int,
    backend: GpuBackend,
    direct: DirectPath | None,
) -> HandleState:
    """What combine will need, most of it still to be filled in by the kernel."""
    num_tokens, num_topk = outgoing.topk_idx.shape
    local_experts = outgoing.shape.num_experts // num_ranks
    pairs, own = local_experts * num_ranks, num_tokens * num_topk
    picks = num_ranks * outgoing.shape.max_tokens * (num_topk + 1) if direct else 0
    places = KernelMemory.of(backend, (own, own, pairs, pairs, num_ranks, pairs, num_ranks, picks))
    return HandleState(
        owner=weakref.ref(owner),
        generation=generation,
        shape=outgoing.shape,
        dtype=outgoing.x.dtype,
        num_tokens=num_tokens,
        topk_idx=outgoing.topk_idx.clone(),
        source_index=incoming.source_index,
        memory=places,
        layout_range=backend.empty((local_experts, num_ranks), torch.int64),
        direct=direct,
    )


def dispatch_parameters(
    group: Group,
    outgoing: Outgoing,
    incoming: Incoming,
    state: HandleState,
    mask: torch.Tensor | None,
    num_chunks: int,
    own_in_place: bool,
) -> LowLatencyDispatchParameters:
    """What the kernels of both halves are given.

    Args:
        mask: int32 [num_ranks], 1: left out; or None.
        num_chunks: runs of tokens that the warps of a block place, from `dispatch_grid`.
        own_in_place: rows for this rank are read from x, which the caller cannot change before the receive half.
    """
    memory = state.memory
    return LowLatencyDispatchParameters(
        group=group,
        shape=outgoing.shape,
        x=pointer(outgoing.x),
        topk_idx=pointer(state.topk_idx),
        num_tokens=state.num_tokens,
        index_bytes=state.topk_idx.element_size(),
        combine_row=memory.combine_row,
        own_row=memory.own_row,
        masked=pointer(mask),
        own_in_place=int(own_in_place and not outgoing.shape.quantization),
        num_chunks=num_chunks,
        receive_x=pointer(incoming.x),
        receive_scales=pointer(incoming.scales),
        source_index=pointer(incoming.source_index),
        begin=memory.begin,
        count=memory.count,
        receive_count=pointer(incoming.count),
        combine_base=memory.combine_base,
        rows_before=memory.rows_before,
        rows_home=memory.rows_home,
        layout_range=pointer(state.layout_range),
        statistics=pointer(outgoing.statistics),
        wait_cost=pointer(outgoing.wait_cost),
        picks=memory.picks,
    )
