"""In which order, and with how many roundings, a combine sums the rows that come home.

``V1``: biases, then ranks in rank order, rounded once. ``v2``: a rank's row stands at the largest k among the token's
picks that live there; rows are summed in increasing k, biases first. With ``domains_first`` the rows of one scale-up
domain are summed on their own before, in that order, and rounded; the sum stands at the domain's largest k.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from uccl_ep_core.kernel_parameters import TermOrderParameters

from .tensors import pointer

if TYPE_CHECKING:
    from .communicator import Communicator


@dataclasses.dataclass(frozen=True, eq=False)
class Rounding:
    """The rounding tree of a handle.

    Attributes:
        name: for people.
        term_ranks: int32 [num_tokens, topk], ranks in the order their rows are summed, and -1; None: rank order.
        domains_first: rows of one domain, neighbours in ``term_ranks``, are summed and rounded before.
    """

    name: str
    term_ranks: torch.Tensor | None = None
    domains_first: bool = False

    @property
    def max_terms(self) -> int:
        """Columns of ``term_ranks``."""
        return 0 if self.term_ranks is None else self.term_ranks.shape[1]


V1 = Rounding("v1")


def last_places(groups: torch.Tensor) -> torch.Tensor:
    """int64 [T, K]: the largest k at which the group of each entry of ``groups`` [T, K] stands."""
    num_topk = groups.shape[1]
    same = groups[:, :, None] == groups[:, None, :]
    places = torch.arange(num_topk, device=groups.device).expand_as(same)
    return torch.where(same, places, -1).amax(2) if num_topk else groups


def ranks_of(topk_idx: torch.Tensor, num_experts: int, num_ranks: int) -> torch.Tensor:
    """int64 [T, K]: the rank of each pick, -1 for none."""
    picks = topk_idx.long()
    picked = (picks >= 0) & (picks < num_experts)
    return torch.where(picked, picks // (num_experts // num_ranks), -1)


def v2(communicator: Communicator, topk_idx: torch.Tensor, num_experts: int, *, domains_first: bool) -> Rounding:
    """The tree of v2 for a dispatch of ``topk_idx`` [T, K], int32 or int64, contiguous."""
    terms = communicator.backend.empty(topk_idx.shape, torch.int32)
    if terms.numel():
        parameters = TermOrderParameters(
            topk_idx=pointer(topk_idx),
            term_ranks=pointer(terms),
            index_bytes=topk_idx.element_size(),
            num_tokens=topk_idx.shape[0],
            num_topk=topk_idx.shape[1],
            num_experts=num_experts,
            num_ranks=communicator.num_ranks,
            ranks_per_domain=communicator.ranks_per_domain,
            domains_first=int(domains_first),
        )
        communicator.launch("uccl_ep_term_order", parameters, **communicator.local_grid())
    return Rounding("v2", terms, domains_first)
