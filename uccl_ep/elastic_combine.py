"""What `ElasticBuffer.combine` is made of: the way home of rows as they arrived, or in the expanded layout."""

from __future__ import annotations

import torch

from uccl_ep_core.errors import ArgumentError

from . import expanded, high_throughput, single_picks
from .communicator import Communicator
from .ep_handle import Routes
from .high_throughput import Biases
from .tensors import check_matrix, check_rows, check_topk_weights, check_vector


def combine(
    communicator: Communicator, routes: Routes, x: torch.Tensor, topk_weights: torch.Tensor | None, biases: Biases
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Send rows home and sum them by token, along the routes of a dispatch. Collective.

    Args:
        x: [rows as the dispatch returned them, hidden].
        topk_weights: float32 [rows, topk], or [rows] when expanded.

    Returns:
        [num_tokens, hidden], and float32 [num_tokens, topk] or None.
    """
    if routes.expansion is None:
        if topk_weights is not None:
            device = communicator.backend.torch_device
            topk_weights = check_topk_weights(topk_weights, routes.local_idx.shape, device)
            topk_weights = topk_weights.masked_fill(routes.local_idx < 0, 0)
        return high_throughput.combine(communicator, routes.rows, x, topk_weights, biases)
    return _combine_expanded(communicator, routes, routes.expansion, x, topk_weights, biases)


def _combine_expanded(
    communicator: Communicator,
    routes: Routes,
    expansion: expanded.Expansion,
    x: torch.Tensor,
    topk_weights: torch.Tensor | None,
    biases: Biases,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    device = communicator.backend.torch_device
    x = check_matrix("x", x, device)
    check_rows("x", x, expansion.num_rows, "the handle's expanded dispatch")
    if topk_weights is not None:
        topk_weights = check_vector("topk_weights", topk_weights, device, torch.float32, expansion.num_rows)
    if routes.picks is not None:
        if topk_weights is not None:
            raise ArgumentError(
                "topk_weights of an expanded combine need allow_multiple_reduction=True: leave them out"
            )
        return single_picks.combine(communicator, x, routes, routes.picks, expansion, biases), None
    if topk_weights is not None:
        topk_weights = expanded.fold_weights(topk_weights, expansion.slots)
    folded = expanded.fold(communicator, x, expansion.slots)
    return high_throughput.combine(communicator, routes.rows, folded, topk_weights, biases)
