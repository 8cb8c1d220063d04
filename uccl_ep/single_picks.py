"""The expanded combine without reduction before rows cross: every pick comes home by itself, as a token of its own."""

from __future__ import annotations

import torch

from uccl_ep_core.kernel_parameters import DispatchShape

from . import expanded, high_throughput
from .communicator import Communicator
from .ep_handle import Routes


def announce(
    communicator: Communicator,
    rank_of_pick: torch.Tensor,
    num_experts: int,
    max_tokens: int,
    expansion: expanded.Expansion,
    wait: bool,
) -> high_throughput.DispatchHandle:
    """The route of single picks. Collective.

    Args:
        rank_of_pick: int64 [num_tokens, topk], -1 for none.
        expansion: of the rows that this rank received.
        wait: read how many picks arrive; False: assume the most.
    """
    ranks = torch.arange(communicator.num_ranks, device=rank_of_pick.device)
    in_rank = rank_of_pick.reshape(-1, 1) == ranks
    nothing = torch.zeros(num_experts, dtype=torch.int32, device=rank_of_pick.device)
    worst = 0 if wait else expansion.slots.numel()
    shape = DispatchShape(0, 0, rank_of_pick.shape[1], num_experts, 0, max_tokens)
    return high_throughput.announce(communicator, shape, in_rank, nothing, worst, wait=wait)[0]


def combine(
    communicator: Communicator,
    x: torch.Tensor,
    routes: Routes,
    picks: high_throughput.DispatchHandle,
    expansion: expanded.Expansion,
    biases: expanded.Biases,
) -> torch.Tensor:
    """Biases, then every pick's row of ``x`` in increasing k, rounded once. Collective.

    Holds [num_tokens, topk, hidden] of what came home.
    """
    num_tokens, num_topk = routes.topk_idx.shape
    checked = high_throughput.check_biases(communicator, biases, x, num_tokens)
    order = expanded.picks_in_order(expansion, picks.num_rows)
    rows = expanded.gather(communicator, x, order, zero_padding=False)
    home, _ = high_throughput.combine(communicator, picks, rows)
    places = torch.arange(num_tokens * num_topk, dtype=torch.int32, device=x.device).view(num_tokens, num_topk)
    terms = torch.where(routes.ranks >= 0, places, -1).to(torch.int32)
    return expanded.fold(communicator, home, terms, checked)
