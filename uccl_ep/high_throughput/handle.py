"""What a high-throughput dispatch decided, for combine and for dispatches along the same routes."""

from __future__ import annotations

import dataclasses
import weakref

import torch

from uccl_ep_core.errors import HandleError

from ..communicator import Communicator
from ..rounding import V1, Rounding


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
