"""High-throughput operations of a communicator: layout, dispatch, combine."""

from __future__ import annotations

import dataclasses
import weakref

import torch

from uccl_ep_core.errors import ArgumentError, HandleError
from uccl_ep_core.kernel_parameters import (
    CombineParameters,
    DispatchParameters,
    DispatchShape,
    NotifyParameters,
    PayloadType,
    RoutingParameters,
)

from .communicator import Communicator
from .rounding import V1, Rounding
from .tensors import (
    CARRIED,
    NUMBERED,
    check_experts,
    check_matrix,
    check_reducible,
    check_rows,
    check_tensor,
    check_topk_idx,
    check_topk_weights,
    check_vector,
    names,
    pointer,
    round_up,
)

SLOT_OVERHEAD = 64 + 3 * 16 + 64  # bytes of a slot that are not rows, at most (DispatchRows::capacity)
RAIL_MASK_BYTES = 16
Biases = tuple[torch.Tensor | None, torch.Tensor | None]
TEAM_WARPS = 12  # of a block that works one role


@dataclasses.dataclass(frozen=True, eq=False)
class DispatchHandle:
    """What a dispatch decided: an immutable snapshot, usable any number of times while its buffer lives.

    Attributes:
        rounding: the tree in which `combine` sums, see `uccl_ep.rounding`.
        num_tokens: tokens this rank dispatched.
        num_received: rows this rank received.
        num_rows: rows of the output, more than received where ``num_worst_tokens`` asked for it.
        num_experts: of the whole group.
        is_token_in_rank: bool [num_tokens, num_ranks].
        receive_source: int32 [num_rows], each row's token index on its source rank, -1 where no row arrived.
        receive_offset: int32 [num_ranks * num_channels + 1], first row of each source rank and channel.
    """

    owner: weakref.ref[Communicator]
    num_tokens: int
    num_received: int
    num_rows: int
    num_experts: int
    is_token_in_rank: torch.Tensor
    send_rows: torch.Tensor
    rail_send_rows: torch.Tensor
    receive_rows: torch.Tensor
    receive_offset: torch.Tensor
    rail_rows: torch.Tensor
    receive_source: torch.Tensor
    rounding: Rounding = V1

    def source_ranks(self, num_ranks: int) -> torch.Tensor:
        """int64 [num_received]: the source rank of each received row."""
        rows = self.receive_rows.view(num_ranks, -1).sum(1)
        return torch.repeat_interleave(torch.arange(num_ranks, device=rows.device), rows)


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
class Layout:
    """Where tokens go: int32 [num_ranks], int32 [num_domains] or None, int32 [num_experts], and bool
    [num_tokens, num_ranks]."""

    num_tokens_per_rank: torch.Tensor
    num_tokens_per_domain: torch.Tensor | None
    num_tokens_per_expert: torch.Tensor
    is_token_in_rank: torch.Tensor


def get_layout(communicator: Communicator, topk_idx: torch.Tensor, num_experts: int) -> Layout:
    """Count where tokens go. No communication.

    Raises:
        ArgumentError: a wrong dtype, shape or expert count, with what would do.
    """
    device = communicator.backend.torch_device
    check_experts(num_experts, communicator.num_ranks)
    topk_idx = check_topk_idx(topk_idx, device, num_experts)
    num_tokens, num_topk = topk_idx.shape
    ranks = communicator.num_ranks
    per_rank = torch.zeros(ranks, dtype=torch.int32, device=device)
    per_expert = torch.zeros(num_experts, dtype=torch.int32, device=device)
    in_rank = torch.empty((num_tokens, ranks), dtype=torch.bool, device=device)
    communicator.launch(
        "uccl_ep_routing",
        RoutingParameters(
            topk_idx=pointer(topk_idx),
            index_bytes=topk_idx.element_size(),
            num_tokens=num_tokens,
            num_topk=num_topk,
            num_experts=num_experts,
            num_ranks=ranks,
            num_tokens_per_rank=pointer(per_rank),
            num_tokens_per_expert=pointer(per_expert),
            is_token_in_rank=pointer(in_rank),
        ),
    )
    per_domain = None
    if communicator.num_domains > 1:
        domains = in_rank.view(num_tokens, communicator.num_domains, communicator.ranks_per_domain).any(2)
        per_domain = domains.sum(0, dtype=torch.int32)
    return Layout(per_rank, per_domain, per_expert, in_rank)


def _shape(
    communicator: Communicator,
    x: torch.Tensor,
    scales: torch.Tensor | None,
    num_topk: int,
    num_experts: int,
    max_tokens: int = 0,
) -> DispatchShape:
    row_bytes = x.shape[1] * x.element_size()
    scale_bytes = 0 if scales is None else scales.shape[1] * scales.element_size()
    needed = row_bytes + scale_bytes + num_topk * 8 + 4 + RAIL_MASK_BYTES + SLOT_OVERHEAD
    if needed > communicator.slot_bytes:
        raise ArgumentError(
            f"a token of {row_bytes + scale_bytes} bytes does not fit a slot of {communicator.slot_bytes} "
            f"bytes: set slot_bytes (UCCL_EP_SLOT_BYTES) to at least {round_up(needed, 64)}"
        )
    dtype = CARRIED[x.dtype] | (0 if scales is None else NUMBERED.get(scales.dtype, PayloadType.BYTES) << 8)
    return DispatchShape(row_bytes, scale_bytes, num_topk, num_experts, dtype, max_tokens)


def _check_notify(communicator: Communicator, num_experts: int) -> None:
    """The counts that announce a dispatch are one message, of NotifyWords of core/kernels/notify.hpp."""
    local_experts = num_experts // communicator.num_ranks
    needed = 64 + 24 + 4 * (2 * communicator.num_channels + local_experts)
    if needed > communicator.slot_bytes:
        raise ArgumentError(
            f"the counts of {local_experts} experts a rank do not fit a slot of "
            f"{communicator.slot_bytes} bytes: set slot_bytes (UCCL_EP_SLOT_BYTES) to at least "
            f"{round_up(needed, 64)}"
        )


def _check_payload(
    communicator: Communicator, x: torch.Tensor, scales: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    device = communicator.backend.torch_device
    x = check_matrix("x", x, device)
    if x.shape[1] == 0:
        raise ArgumentError("x has hidden size 0: at least 1 is needed")
    if x.dtype not in CARRIED:
        raise ArgumentError(f"x is {x.dtype}: dispatch carries {names(CARRIED)}")
    if scales is not None:
        scales = check_matrix("scales", scales, device)
        check_rows("scales", scales, x.shape[0], "x")
    return x, scales


def _grid(communicator: Communicator, roles: int, most_warps: int = TEAM_WARPS) -> dict[str, int]:
    """Blocks and warps so that every role of every channel has a team: roles wait for each other.

    A team is a block where there are blocks for all, else a warp.
    """
    limits, channels = communicator.backend.limits, communicator.num_channels
    if 1 < roles * channels <= limits.max_blocks:
        warps = max(1, min(most_warps, limits.max_warps_per_block))
        return {"num_blocks": roles * channels, "warps": warps, "team_warps": warps}
    warps = min(roles, limits.max_warps_per_block)
    blocks_per_channel = -(-roles // warps)
    blocks = blocks_per_channel * channels
    if blocks > limits.max_blocks:
        raise ArgumentError(
            f"{channels} channels with {roles} roles need {blocks} blocks at once, but the device "
            f"runs {limits.max_blocks}: set num_channels (UCCL_EP_NUM_CHANNELS) to at most "
            f"{max(1, limits.max_blocks // blocks_per_channel)}"
        )
    return {"num_blocks": blocks, "warps": warps, "team_warps": 1}


def _combine_grid(communicator: Communicator) -> tuple[dict[str, int], int]:
    """The grid of a combine and its bytes of shared memory, fewer warps where more would not fit."""
    ranks = communicator.num_ranks
    for most_warps in range(TEAM_WARPS, 0, -1):
        grid = _grid(communicator, ranks, most_warps)
        # CombineProgress of core/kernels/combine.hpp
        tokens = 8 if grid["team_warps"] == 1 else grid["team_warps"]
        tokens = max(1, min(tokens, 2048 // ranks))
        shared_bytes = 8 * (ranks + 1) + 24 * grid["team_warps"] * (ranks + 2) + 4 * ranks * (2 + tokens)
        if shared_bytes <= communicator.backend.limits.max_shared_bytes:
            break
    return grid, shared_bytes


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
    device, ranks = communicator.backend.torch_device, communicator.num_ranks
    x, scales = _check_payload(communicator, x, scales)
    num_tokens_per_expert = check_vector("num_tokens_per_expert", num_tokens_per_expert, device, torch.int32)
    num_experts = num_tokens_per_expert.numel()
    check_experts(num_experts, ranks)
    _check_notify(communicator, num_experts)
    if num_worst_tokens < 0:
        raise ArgumentError(f"num_worst_tokens = {num_worst_tokens}: use 0, or the most rows that can arrive")
    is_token_in_rank = check_matrix("is_token_in_rank", is_token_in_rank, device, ranks)
    check_rows("is_token_in_rank", is_token_in_rank, x.shape[0], "x")
    if is_token_in_rank.dtype != torch.bool:
        raise ArgumentError(f"is_token_in_rank is {is_token_in_rank.dtype}: use bool")
    num_topk = 0
    if topk_idx is not None:
        topk_idx = check_topk_idx(topk_idx, device, num_experts)
        check_rows("topk_idx", topk_idx, x.shape[0], "x")
        num_topk = topk_idx.shape[1]
        if topk_weights is not None:
            topk_weights = check_topk_weights(topk_weights, topk_idx.shape, device)
    elif topk_weights is not None:
        raise ArgumentError("topk_weights was given without topk_idx: give both, or neither")
    shape = _shape(communicator, x, scales, num_topk, num_experts, max_tokens)
    grid = _grid(communicator, communicator.dispatch_roles)
    outputs = None
    if num_worst_tokens:  # known beforehand: when there is no memory for it, nobody has communicated yet
        try:
            outputs = _outputs(communicator, shape, num_worst_tokens, x, scales, topk_idx)
        except (MemoryError, RuntimeError, OSError, OverflowError, ValueError) as error:
            raise ArgumentError(
                f"num_worst_tokens = {num_worst_tokens}: no memory for so many rows ({error}); use at least the rows "
                "that can arrive, and no more than fit"
            ) from error
    handle, expert_rows = announce(communicator, shape, is_token_in_rank, num_tokens_per_expert, num_worst_tokens, wait)
    num_received = handle.num_received
    # Too many rows are an error, but the others go on with this operation: it is finished first.
    if outputs is None or num_received > num_worst_tokens:
        outputs = _outputs(communicator, shape, handle.num_rows, x, scales, topk_idx)
    result = _stream(communicator, handle, shape, x, scales, topk_idx, topk_weights, grid, outputs)
    result = dataclasses.replace(result, expert_counts=expert_rows)
    if num_worst_tokens:
        if num_received > num_worst_tokens:
            raise ArgumentError(
                f"num_worst_tokens = {num_worst_tokens}, but {num_received} rows arrived: use at least {num_received}"
            )
        tail = torch.arange(num_worst_tokens, device=device) >= handle.receive_offset[-1]
        if result.topk_idx is not None:
            result.topk_idx.masked_fill_(tail[:, None], -1)
        if result.topk_weights is not None:
            result.topk_weights.masked_fill_(tail[:, None], 0)
        return result
    return dataclasses.replace(result, expert_rows=expert_rows.tolist())


def announce(
    communicator: Communicator,
    shape: DispatchShape,
    is_token_in_rank: torch.Tensor,
    num_tokens_per_expert: torch.Tensor,
    num_worst_tokens: int = 0,
    wait: bool = True,
) -> tuple[DispatchHandle, torch.Tensor]:
    """Tell every rank how many rows it will get, and learn the same. Collective; arguments are checked already.

    Args:
        num_worst_tokens: rows of the output at least.
        wait: read how many rows arrive; False: ``num_worst_tokens`` is certain to be enough.

    Returns:
        The handle, and int32 [local experts] rows of each.
    """
    device, ranks, channels = communicator.backend.torch_device, communicator.num_ranks, communicator.num_channels
    num_tokens, num_experts = is_token_in_rank.shape[0], num_tokens_per_expert.numel()
    counts = torch.zeros((4, ranks * channels + 1), dtype=torch.int32, device=device)
    send_rows, rail_send_rows, receive_rows, rail_rows = (
        counts[0, : ranks * channels],
        counts[1, : communicator.num_domains * channels],
        counts[2, : ranks * channels],
        counts[3, : communicator.num_domains * channels],
    )
    receive_offset = torch.zeros(ranks * channels + 1, dtype=torch.int32, device=device)
    expert_rows = torch.zeros(num_experts // ranks, dtype=torch.int32, device=device)
    in_rank = is_token_in_rank.clone()  # the handle outlives the caller's tensor, which may be changed
    communicator.launch(
        "uccl_ep_notify",
        NotifyParameters(
            group=communicator.group_struct(),
            shape=shape,
            is_token_in_rank=pointer(in_rank),
            num_tokens_per_expert=pointer(num_tokens_per_expert),
            num_tokens=num_tokens,
            send_rows=pointer(send_rows),
            rail_send_rows=pointer(rail_send_rows),
            receive_rows=pointer(receive_rows),
            receive_offset=pointer(receive_offset),
            rail_rows=pointer(rail_rows),
            expert_rows=pointer(expert_rows),
        ),
    )
    num_received = int(receive_offset[-1]) if wait or device.type == "cpu" else num_worst_tokens
    handle = DispatchHandle(
        owner=weakref.ref(communicator),
        num_tokens=num_tokens,
        num_received=num_received,
        num_rows=max(num_received, num_worst_tokens),
        num_experts=num_experts,
        is_token_in_rank=in_rank,
        send_rows=send_rows,
        rail_send_rows=rail_send_rows,
        receive_rows=receive_rows,
        receive_offset=receive_offset,
        rail_rows=rail_rows,
        receive_source=torch.full((max(num_received, num_worst_tokens),), -1, dtype=torch.int32, device=device),
    )
    return handle, expert_rows


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
    x, scales = _check_payload(communicator, x, scales)
    check_rows("x", x, handle.num_tokens, "the handle's dispatch")
    num_topk = 0
    if topk_idx is not None and topk_weights is not None:
        topk_weights = check_topk_weights(topk_weights, topk_idx.shape, communicator.backend.torch_device)
        num_topk = topk_idx.shape[1]
    shape = _shape(communicator, x, scales, num_topk, handle.num_experts)
    grid = _grid(communicator, communicator.dispatch_roles)
    scratch = torch.empty(handle.num_received, dtype=torch.int32, device=x.device)
    own = dataclasses.replace(handle, receive_source=scratch)
    outputs = _outputs(communicator, shape, handle.num_rows, x, scales, topk_idx)
    result = _stream(communicator, own, shape, x, scales, topk_idx, topk_weights, grid, outputs)
    return dataclasses.replace(result, handle=handle)


_Outputs = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def _outputs(
    communicator: Communicator,
    shape: DispatchShape,
    rows: int,
    x: torch.Tensor,
    scales: torch.Tensor | None,
    topk_idx: torch.Tensor | None,
) -> _Outputs:
    """Memory for received x, scales, indices and weights."""
    empty = communicator.backend.empty
    receive_x = empty((rows, x.shape[1]), x.dtype)
    receive_scales = None if scales is None else empty((rows, scales.shape[1]), scales.dtype)
    if topk_idx is None:
        return receive_x, receive_scales, None, None
    receive_idx = empty((rows, shape.num_topk), topk_idx.dtype)
    return receive_x, receive_scales, receive_idx, empty((rows, shape.num_topk), torch.float32)


def _stream(
    communicator: Communicator,
    handle: DispatchHandle,
    shape: DispatchShape,
    x: torch.Tensor,
    scales: torch.Tensor | None,
    topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    grid: dict[str, int],
    outputs: _Outputs,
) -> Dispatched:
    receive_x, receive_scales, receive_idx, receive_weights = outputs
    communicator.launch(
        "uccl_ep_dispatch",
        DispatchParameters(
            group=communicator.group_struct(),
            shape=shape,
            x=pointer(x),
            scales=pointer(scales),
            topk_idx=pointer(topk_idx),
            topk_weights=pointer(topk_weights),
            is_token_in_rank=pointer(handle.is_token_in_rank),
            send_rows=pointer(handle.send_rows),
            rail_send_rows=pointer(handle.rail_send_rows),
            receive_rows=pointer(handle.receive_rows),
            receive_offset=pointer(handle.receive_offset),
            rail_rows=pointer(handle.rail_rows),
            num_tokens=x.shape[0],
            index_bytes=0 if topk_idx is None else topk_idx.element_size(),
            receive_x=pointer(receive_x),
            receive_scales=pointer(receive_scales),
            receive_topk_idx=pointer(receive_idx),
            receive_topk_weights=pointer(receive_weights),
            receive_source=pointer(handle.receive_source),
            team_warps=grid["team_warps"],
        ),
        num_blocks=grid["num_blocks"],
        warps=grid["warps"],
    )
    weights = receive_weights if topk_weights is not None else None
    return Dispatched(receive_x, receive_scales, receive_idx, weights, None, handle)


def check_handle(communicator: Communicator, handle: object) -> DispatchHandle:
    """The handle, if it is a high-throughput one of this communicator.

    Raises:
        HandleError: it is not.
    """
    if not isinstance(handle, DispatchHandle):
        raise HandleError(f"a handle from dispatch() is needed, not {type(handle).__name__}")
    if handle.owner() is not communicator:
        raise HandleError("this handle came from another buffer: use the buffer that made it")
    return handle


def check_biases(
    communicator: Communicator, bias: Biases, x: torch.Tensor, num_tokens: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Two biases [num_tokens, hidden] like ``x``, contiguous, or None for each."""

    def check(term: torch.Tensor | None) -> torch.Tensor | None:
        if term is None:
            return None
        term = check_matrix("bias", term, communicator.backend.torch_device, x.shape[1])
        check_rows("bias", term, num_tokens, "the handle's dispatch")
        if term.dtype != x.dtype:
            raise ArgumentError(f"bias is {term.dtype}, but x is {x.dtype}: use the same")
        return term

    return check(bias[0]), check(bias[1])


def combine(
    communicator: Communicator,
    handle: DispatchHandle,
    x: torch.Tensor,
    topk_weights: torch.Tensor | None = None,
    bias: Biases = (None, None),
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Send rows home and sum them by token. Collective.

    out[t] = bias[0][t] + bias[1][t] + sum over ranks, in the order of ``handle.rounding``, of that rank's row for
    t; in float32 (float64 for float64), rounded once.

    Args:
        x: [handle.num_rows, hidden] bf16, fp16, fp32 or fp64, rows as dispatch delivered them.
        topk_weights: float32 [handle.num_rows, topk], summed likewise.
        bias: tensors [num_tokens, hidden] of x's dtype.

    Returns:
        [num_tokens, hidden] of x's dtype, and float32 [num_tokens, topk] or None.
    """
    communicator.ensure_usable()
    check_handle(communicator, handle)
    device = communicator.backend.torch_device
    x = check_matrix("x", x, device)
    payload_type = check_reducible("x", x)
    check_rows("x", x, handle.num_rows, "the handle's dispatch")
    num_topk = 0
    if topk_weights is not None:
        num_columns = check_tensor("topk_weights", topk_weights).shape[-1:].numel()
        topk_weights = check_topk_weights(topk_weights, (handle.num_rows, num_columns), device)
        num_topk = topk_weights.shape[1]
    biases = check_biases(communicator, bias, x, handle.num_tokens)
    row_bytes = x.shape[1] * x.element_size()
    needed = row_bytes + num_topk * 4 + SLOT_OVERHEAD
    if x.shape[1] == 0 or needed > communicator.slot_bytes:
        raise ArgumentError(
            f"a row of {row_bytes} bytes does not fit a slot of {communicator.slot_bytes} bytes: "
            f"set slot_bytes (UCCL_EP_SLOT_BYTES) to at least {round_up(needed, 64)}"
        )
    grid, shared_bytes = _combine_grid(communicator)
    out = communicator.backend.empty((handle.num_tokens, x.shape[1]), x.dtype)
    out_weights = None
    if topk_weights is not None:
        out_weights = communicator.backend.empty((handle.num_tokens, num_topk), torch.float32)
    communicator.launch(
        "uccl_ep_combine",
        CombineParameters(
            group=communicator.group_struct(),
            payload_type=payload_type,
            hidden=x.shape[1],
            row_bytes=row_bytes,
            num_topk=num_topk,
            x=pointer(x),
            topk_weights=pointer(topk_weights),
            bias=(pointer(biases[0]), pointer(biases[1])),
            is_token_in_rank=pointer(handle.is_token_in_rank),
            send_rows=pointer(handle.send_rows),
            receive_rows=pointer(handle.receive_rows),
            receive_offset=pointer(handle.receive_offset),
            term_ranks=pointer(handle.rounding.term_ranks),
            max_terms=handle.rounding.max_terms,
            domains_first=int(handle.rounding.domains_first),
            num_tokens=handle.num_tokens,
            out=pointer(out),
            out_topk_weights=pointer(out_weights),
            team_warps=grid["team_warps"],
        ),
        shared_bytes=shared_bytes,
        num_blocks=grid["num_blocks"],
        warps=grid["warps"],
    )
    return out, out_weights
