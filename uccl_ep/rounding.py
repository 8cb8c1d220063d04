"""In which order, and with how many roundings, a combine sums the rows that come home.

``V1``: biases, then ranks in rank order, rounded once. ``v2``: a rank's row stands at the largest k among the token's
picks that live there; rows are summed in increasing k, biases first. With ``domains_first`` the rows of one scale-up
domain are summed on their own before, in that order, and rounded; the sum stands at the domain's largest k.
"""

from __future__ import annotations

import dataclasses

import torch


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


def v2(
    topk_idx: torch.Tensor, num_experts: int, num_ranks: int, ranks_per_domain: int, *, domains_first: bool
) -> Rounding:
    """The tree of v2 for a dispatch of ``topk_idx`` [T, K]."""
    ranks = ranks_of(topk_idx, num_experts, num_ranks)
    num_topk = ranks.shape[1]
    last = last_places(ranks)
    places = torch.arange(num_topk, device=ranks.device)
    kept = (ranks >= 0) & (last == places)
    order = places.expand_as(ranks)
    if domains_first:
        domains = torch.where(ranks >= 0, ranks // ranks_per_domain, -1)
        order = last_places(domains) * num_topk + order
    order = torch.where(kept, order, num_topk * num_topk).argsort(dim=1, stable=True)
    terms = torch.where(kept, ranks, -1).gather(1, order)
    return Rounding("v2", terms.to(torch.int32).contiguous(), domains_first)
