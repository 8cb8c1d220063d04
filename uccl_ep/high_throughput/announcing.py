"""The step before a dispatch: every rank tells every other how many rows it will get."""

from __future__ import annotations

import weakref

import torch

from uccl_ep_core.kernel_parameters import DispatchShape, NotifyParameters

from ..communicator import Communicator
from ..tensors import pointer
from .handle import DispatchHandle


def announce(
    communicator: Communicator,
    shape: DispatchShape,
    is_token_in_rank: torch.Tensor,
    num_tokens_per_expert: torch.Tensor,
    num_worst_tokens: int = 0,
    wait: bool = True,
) -> tuple[DispatchHandle, torch.Tensor, list[int]]:
    """Tell every rank how many rows it will get, and learn the same. Collective; arguments are checked already.

    Args:
        num_worst_tokens: rows of the output at least.
        wait: read how many rows arrive; False: ``num_worst_tokens`` is certain to be enough.

    Returns:
        The handle, int32 [local experts] rows of each, and the same as a list; [] where they were not waited for.

    Raises:
        PeerFailure: a rank failed. Without ``wait`` on a GPU that shows later, and kernels that go by this handle do
            nothing.
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
    # What the host waits for lies together, from the number of all rows on: one copy brings it.
    learned = torch.zeros(ranks * channels + 1 + num_experts // ranks, dtype=torch.int32, device=device)
    receive_offset, expert_rows = learned[: ranks * channels + 1], learned[ranks * channels + 1 :]
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
    num_received, rows_of_experts = num_worst_tokens, []
    if wait or device.type == "cpu":
        num_received, *rows_of_experts = learned[ranks * channels :].tolist()
        # A launch on a GPU returns before its kernel has ended. One that failed has left no counts to size anything by.
        communicator.check()
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
    return handle, expert_rows, rows_of_experts
