"""Where tokens go, counted by each rank for itself."""

from __future__ import annotations

import dataclasses

import torch

from uccl_ep_core.kernel_parameters import RoutingParameters

from ..communicator import Communicator
from ..tensors import check_experts, check_topk_idx, pointer


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
        ArgumentError: a wrong dtype, shape or expert count, or an index that is no expert's, with what would do. On
            a GPU a look at the indices would cost a host wait: there the kernel refuses them, and all ranks raise
            `PeerFailure`, which names this one, from their next call on.
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
            group=communicator.group_struct(count=False),  # a call of this rank alone
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
