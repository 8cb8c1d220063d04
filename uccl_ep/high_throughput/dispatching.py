"""High-throughput dispatch: tokens go to the ranks of their experts."""

from __future__ import annotations

import dataclasses

import torch

from uccl_ep_core.errors import ArgumentError
from uccl_ep_core.kernel_parameters import DispatchParameters, DispatchShape, PayloadType

from ..communicator import Communicator
from ..tensors import (
    CARRIED,
    NUMBERED,
    check_experts,
    check_matrix,
    check_rows,
    check_topk_idx,
    check_topk_weights,
    check_vector,
    names,
    pointer,
)
from .announcing import announce
from .handle import DispatchHandle, check_handle
from .slots import check_counts_fit, check_dispatch_row_fits
from .teams import TeamGrid, dispatch_grid


@dataclasses.dataclass(frozen=True)
class Dispatched:
    """Output of a dispatch; the tensors belong to the caller.

    Attributes:
        x: [rows, hidden], rows in the order (source rank, token index there).
        scales: [rows, columns] as given, or None.
        topk_idx: [rows, topk] local expert indices, -1 elsewhere; None for a cached dispatch.
        topk_weights: float32 [rows, topk], 0 where -1; None where none were given.
        expert_rows: rows of each local expert, unaligned; None for a cached dispatch.
        expert_counts: the same as int32 [local experts] on the device, also with ``num_worst_tokens``.
    """

    x: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    expert_rows: list[int] | None
    handle: DispatchHandle
    expert_counts: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class _Tokens:
    """Rows of tokens with what travels beside them, as `dispatch` takes them; or memory for such rows."""

    x: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None

    @classmethod
    def check(cls, communicator: Communicator, x: torch.Tensor, scales: torch.Tensor | None) -> _Tokens:
        """The payload, contiguous, without indices."""
        device = communicator.backend.torch_device
        x = check_matrix("x", x, device)
        if x.shape[1] == 0:
            raise ArgumentError("x has hidden size 0: at least 1 is needed")
        if x.dtype not in CARRIED:
            raise ArgumentError(f"x is {x.dtype}: dispatch carries {names(CARRIED)}")
        if scales is not None:
            scales = check_matrix("scales", scales, device)
            check_rows("scales", scales, x.shape[0], "x")
        return cls(x, scales)

    def with_picks(
        self,
        communicator: Communicator,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        num_experts: int,
    ) -> _Tokens:
        """The same with indices and weights, checked against the payload."""
        if topk_idx is None:
            if topk_weights is not None:
                raise ArgumentError("topk_weights was given without topk_idx: give both, or neither")
            return self
        device = communicator.backend.torch_device
        topk_idx = check_topk_idx(topk_idx, device, num_experts)
        check_rows("topk_idx", topk_idx, self.x.shape[0], "x")
        if topk_weights is not None:
            topk_weights = check_topk_weights(topk_weights, topk_idx.shape, device)
        return _Tokens(self.x, self.scales, topk_idx, topk_weights)

    def shape(self, communicator: Communicator, num_experts: int, max_tokens: int = 0) -> DispatchShape:
        """What all ranks must agree on.

        Raises:
            ArgumentError: a token is larger than a slot.
        """
        row_bytes = self.x.shape[1] * self.x.element_size()
        scale_bytes = 0 if self.scales is None else self.scales.shape[1] * self.scales.element_size()
        num_topk = 0 if self.topk_idx is None else self.topk_idx.shape[1]
        check_dispatch_row_fits(communicator, row_bytes, scale_bytes, num_topk)
        dtype = int(CARRIED[self.x.dtype])
        if self.scales is not None:
            dtype |= NUMBERED.get(self.scales.dtype, PayloadType.BYTES) << 8
        return DispatchShape(row_bytes, scale_bytes, num_topk, num_experts, dtype, max_tokens)

    def room_for(self, communicator: Communicator, num_rows: int) -> _Tokens:
        """Memory for as many rows like these. Weights have a place wherever indices have.

        Indices are -1 and weights 0 until a row arrives. Where none does, since there are fewer, or since a rank failed
        and this one has not heard of it yet, nobody may find a number there that indexes out of bounds.
        """
        empty = communicator.backend.empty
        x = empty((num_rows, self.x.shape[1]), self.x.dtype)
        scales = None if self.scales is None else empty((num_rows, self.scales.shape[1]), self.scales.dtype)
        if self.topk_idx is None:
            return _Tokens(x, scales)
        num_topk = self.topk_idx.shape[1]
        topk_idx = empty((num_rows, num_topk), self.topk_idx.dtype).fill_(-1)
        return _Tokens(x, scales, topk_idx, empty((num_rows, num_topk), torch.float32).zero_())


def dispatch(
    communicator: Communicator,
    x: torch.Tensor,
    scales: torch.Tensor | None,
    topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    is_token_in_rank: torch.Tensor,
    num_tokens_per_expert: torch.Tensor,
    num_worst_tokens: int = 0,
    max_tokens: int = 0,
    wait: bool = True,
) -> Dispatched:
    """Send tokens to the ranks of their experts. Collective.

    Args:
        x: [num_tokens, hidden] of any dtype; moved, not computed with.
        scales: [num_tokens, columns], travels with x.
        topk_idx: int32 or int64 [num_tokens, topk], or None.
        topk_weights: float32 like topk_idx, or None.
        is_token_in_rank, num_tokens_per_expert: as from `get_layout`.
        num_worst_tokens: make the outputs this many rows long (their tail has index -1) and return no counts.
        max_tokens: no rank has more tokens than this; all ranks must say the same. 0: not said.
        wait: read how many rows arrive; False: ``num_worst_tokens`` rows are certain to be enough.

    Raises:
        ArgumentError: before any communication.
        PeerFailure: a rank failed.
    """
    communicator.ensure_usable()
    tokens = _Tokens.check(communicator, x, scales)
    is_token_in_rank, num_tokens_per_expert = _check_layout(
        communicator, is_token_in_rank, num_tokens_per_expert, tokens.x.shape[0]
    )
    num_experts = num_tokens_per_expert.numel()
    if num_worst_tokens < 0:
        raise ArgumentError(f"num_worst_tokens = {num_worst_tokens}: use 0, or the most rows that can arrive")
    tokens = tokens.with_picks(communicator, topk_idx, topk_weights, num_experts)
    shape = tokens.shape(communicator, num_experts, max_tokens)
    grid = dispatch_grid(communicator)
    received = _room_for_worst(communicator, tokens, num_worst_tokens) if num_worst_tokens else None
    handle, expert_counts, expert_rows = announce(
        communicator, shape, is_token_in_rank, num_tokens_per_expert, num_worst_tokens, wait
    )
    # Too many rows are an error, but the others go on with this operation: it is finished first.
    if received is None or handle.num_received > num_worst_tokens:
        received = tokens.room_for(communicator, handle.num_rows)
    _stream(communicator, handle, handle.receive_source, shape, grid, tokens, received)
    if not num_worst_tokens:
        return _result(handle, tokens, received, expert_rows, expert_counts)
    if handle.num_received > num_worst_tokens:
        raise ArgumentError(
            f"num_worst_tokens = {num_worst_tokens}, but {handle.num_received} rows arrived: use at least "
            f"{handle.num_received}"
        )
    return _result(handle, tokens, received, None, expert_counts)


def dispatch_cached(
    communicator: Communicator,
    handle: DispatchHandle,
    x: torch.Tensor,
    scales: torch.Tensor | None,
    topk_idx: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
) -> Dispatched:
    """Send other payload along the routes of an earlier dispatch. Collective; no counts are exchanged.

    Args:
        topk_idx, topk_weights: both, where weights travel too: the indices of that dispatch, and float32 like them.
    """
    communicator.ensure_usable()
    check_handle(communicator, handle)
    tokens = _Tokens.check(communicator, x, scales)
    check_rows("x", tokens.x, handle.num_tokens, "the handle's dispatch")
    if topk_idx is not None and topk_weights is not None:
        topk_weights = check_topk_weights(topk_weights, topk_idx.shape, communicator.backend.torch_device)
        tokens = _Tokens(tokens.x, tokens.scales, topk_idx, topk_weights)
    shape = tokens.shape(communicator, handle.num_experts)
    grid = dispatch_grid(communicator)
    received = tokens.room_for(communicator, handle.num_rows)
    # The kernel writes source indices again, the same ones: not into the handle, which others may be reading.
    scratch = torch.empty(handle.num_received, dtype=torch.int32, device=tokens.x.device)
    _stream(communicator, handle, scratch, shape, grid, tokens, received)
    return _result(handle, tokens, received)


def _check_layout(
    communicator: Communicator, is_token_in_rank: torch.Tensor, num_tokens_per_expert: torch.Tensor, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as kernels read them."""
    device, ranks = communicator.backend.torch_device, communicator.num_ranks
    num_tokens_per_expert = check_vector("num_tokens_per_expert", num_tokens_per_expert, device, torch.int32)
    check_experts(num_tokens_per_expert.numel(), ranks)
    check_counts_fit(communicator, num_tokens_per_expert.numel())
    is_token_in_rank = check_matrix("is_token_in_rank", is_token_in_rank, device, ranks)
    check_rows("is_token_in_rank", is_token_in_rank, num_tokens, "x")
    if is_token_in_rank.dtype != torch.bool:
        raise ArgumentError(f"is_token_in_rank is {is_token_in_rank.dtype}: use bool")
    return is_token_in_rank, num_tokens_per_expert


def _room_for_worst(communicator: Communicator, tokens: _Tokens, num_worst_tokens: int) -> _Tokens:
    """Memory whose size is known beforehand: when there is too little of it, nobody has communicated yet."""
    try:
        return tokens.room_for(communicator, num_worst_tokens)
    except (MemoryError, RuntimeError, OSError, OverflowError, ValueError) as error:
        raise ArgumentError(
            f"num_worst_tokens = {num_worst_tokens}: no memory for so many rows ({error}); use at least the rows "
            "that can arrive, and no more than fit"
        ) from error


def _stream(
    communicator: Communicator,
    handle: DispatchHandle,
    receive_source: torch.Tensor,
    shape: DispatchShape,
    grid: TeamGrid,
    tokens: _Tokens,
    received: _Tokens,
) -> None:
    """Send ``tokens`` along the routes of ``handle``, and fill ``received`` and ``receive_source``."""
    communicator.launch(
        "uccl_ep_dispatch",
        DispatchParameters(
            group=communicator.group_struct(),
            shape=shape,
            x=pointer(tokens.x),
            scales=pointer(tokens.scales),
            topk_idx=pointer(tokens.topk_idx),
            topk_weights=pointer(tokens.topk_weights),
            is_token_in_rank=pointer(handle.is_token_in_rank),
            send_rows=pointer(handle.send_rows),
            rail_send_rows=pointer(handle.rail_send_rows),
            receive_rows=pointer(handle.receive_rows),
            receive_offset=pointer(handle.receive_offset),
            rail_rows=pointer(handle.rail_rows),
            num_tokens=tokens.x.shape[0],
            index_bytes=0 if tokens.topk_idx is None else tokens.topk_idx.element_size(),
            receive_x=pointer(received.x),
            receive_scales=pointer(received.scales),
            receive_topk_idx=pointer(received.topk_idx),
            receive_topk_weights=pointer(received.topk_weights),
            receive_source=pointer(receive_source),
            team_ends=grid.team_ends,
        ),
        num_blocks=grid.num_blocks,
        warps=grid.warps,
    )


def _result(
    handle: DispatchHandle,
    sent: _Tokens,
    received: _Tokens,
    expert_rows: list[int] | None = None,
    expert_counts: torch.Tensor | None = None,
) -> Dispatched:
    weights = None if sent.topk_weights is None else received.topk_weights
    return Dispatched(received.x, received.scales, received.topk_idx, weights, expert_rows, handle, expert_counts)
