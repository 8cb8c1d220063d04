"""What a low-latency combine is given, checked against its dispatch, and what its kernel is told of it."""

from __future__ import annotations

import dataclasses

import torch

from uccl_ep_core.errors import ArgumentError
from uccl_ep_core.kernel_parameters import Group, LowLatencyCombineParameters, LowLatencyShape

from ..communicator import Communicator
from ..tensors import check_statistics, check_tensor, check_topk_idx, check_topk_weights, names, plain, pointer
from .results import HandleState


@dataclasses.dataclass(frozen=True)
class Returning:
    """Expert outputs on their way home, as a kernel reads them.

    Attributes:
        x: [local experts, num_ranks * max_tokens, hidden], contiguous.
        topk_weights: float32 [num_tokens, topk], contiguous.
        out: [num_tokens, hidden] of x's dtype, contiguous.
        wait_cost: int64 [num_ranks], raised by the time waited for each rank (ns on the host); or None.
    """

    x: torch.Tensor
    topk_weights: torch.Tensor
    out: torch.Tensor
    wait_cost: torch.Tensor | None

    @property
    def row_bytes(self) -> int:
        return self.x.shape[2] * self.x.element_size()

    @classmethod
    def check(
        cls,
        communicator: Communicator,
        state: HandleState,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor | None,
        wait_cost: torch.Tensor | None,
    ) -> Returning:
        """Raise `ArgumentError`, which says what would do, or return what is to be sent."""
        device, ranks, shape = communicator.backend.torch_device, communicator.num_ranks, state.shape
        x = _check_rows_of_experts(x, state, ranks, device)
        _check_same_indices(topk_idx, state, device)
        topk_weights = check_topk_weights(topk_weights, (state.num_tokens, shape.num_topk), device)
        expected = (state.num_tokens, shape.hidden)
        if out is None:
            out = communicator.backend.empty(expected, x.dtype)
        elif tuple(check_tensor("out", out).shape) != expected or out.dtype != x.dtype or not out.is_contiguous():
            raise ArgumentError(
                f"out is {out.dtype} {tuple(out.shape)}: a contiguous {x.dtype} tensor of shape {expected} is needed"
            )
        returning = cls(x, topk_weights, out, wait_cost)
        communicator.capacity.require(
            shape.max_tokens, shape.row_bytes, shape.scale_bytes, returning.row_bytes, shape.num_topk, shape.num_experts
        )
        check_statistics("combine_wait_recv_cost_stats", wait_cost, torch.int64, ranks)
        return returning


def _check_rows_of_experts(x: torch.Tensor, state: HandleState, num_ranks: int, device: torch.device) -> torch.Tensor:
    expected = state.rows_shape(num_ranks)
    check_tensor("x", x)
    if tuple(x.shape) != expected:
        raise ArgumentError(f"x has shape {tuple(x.shape)}: {expected} is needed, as dispatch delivered")
    if x.device.type != device.type:
        raise ArgumentError(f"x is on {x.device}: this buffer works on {device}")
    if x.dtype != state.dtype:
        raise ArgumentError(f"x is {x.dtype}: combine takes the dtype that was dispatched, use {names([state.dtype])}")
    return plain(x)


def _check_same_indices(topk_idx: torch.Tensor, state: HandleState, device: torch.device) -> None:
    """On a GPU only the shape is compared: a look at the values would cost a host wait."""
    topk_idx = check_topk_idx(topk_idx, device, state.shape.num_experts)
    if topk_idx.shape != state.topk_idx.shape:
        raise ArgumentError(
            f"topk_idx has shape {tuple(topk_idx.shape)}: pass this rank's own indices, "
            f"{tuple(state.topk_idx.shape)}, as given to dispatch"
        )
    if device.type == "cpu" and not torch.equal(topk_idx.to(torch.int64), state.topk_idx.to(torch.int64)):
        raise ArgumentError("topk_idx differs from what was given to dispatch: pass this rank's own indices unchanged")


def combine_parameters(
    group: Group, returning: Returning, state: HandleState, mask: torch.Tensor | None, own_in_place: bool
) -> LowLatencyCombineParameters:
    """What the kernels of both halves are given.

    Args:
        mask: int32 [num_ranks], 1: left out; or None.
        own_in_place: rows of this rank are summed from x, which the caller cannot change before the receive half.
    """
    memory = state.memory
    return LowLatencyCombineParameters(
        group=group,
        shape=LowLatencyShape(
            max_tokens=state.shape.max_tokens,
            hidden=state.shape.hidden,
            num_topk=state.shape.num_topk,
            num_experts=state.shape.num_experts,
            row_bytes=returning.row_bytes,
            payload_type=state.shape.payload_type,
        ),
        x=pointer(returning.x),
        begin=memory.begin,
        count=memory.count,
        combine_base=memory.combine_base,
        rows_before=memory.rows_before,
        rows_home=memory.rows_home,
        topk_idx=pointer(state.topk_idx),
        topk_weights=pointer(returning.topk_weights),
        combine_row=memory.combine_row,
        own_row=memory.own_row,
        num_tokens=state.num_tokens,
        index_bytes=state.topk_idx.element_size(),
        masked=pointer(mask),
        own_in_place=int(own_in_place),
        out=pointer(returning.out),
        wait_cost=pointer(returning.wait_cost),
        picks=memory.picks,
    )
