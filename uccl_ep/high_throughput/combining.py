"""High-throughput combine: rows go home and are summed."""

from __future__ import annotations

import torch

from uccl_ep_core.errors import ArgumentError
from uccl_ep_core.kernel_parameters import CombineParameters

from ..communicator import Communicator
from ..tensors import check_matrix, check_reducible, check_rows, check_tensor, check_topk_weights, pointer
from .handle import DispatchHandle, check_handle
from .slots import check_combine_row_fits
from .teams import combine_grid

Biases = tuple[torch.Tensor | None, torch.Tensor | None]


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
    if x.shape[1] == 0:
        raise ArgumentError("x has hidden size 0: at least 1 is needed")
    check_rows("x", x, handle.num_rows, "the handle's dispatch")
    num_topk = 0
    if topk_weights is not None:
        num_columns = check_tensor("topk_weights", topk_weights).shape[-1:].numel()
        topk_weights = check_topk_weights(topk_weights, (handle.num_rows, num_columns), device)
        num_topk = topk_weights.shape[1]
    biases = check_biases(communicator, bias, x, handle.num_tokens)
    row_bytes = x.shape[1] * x.element_size()
    check_combine_row_fits(communicator, row_bytes, num_topk)
    grid, shared_bytes = combine_grid(communicator)
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
            team_ends=grid.team_ends,
        ),
        shared_bytes=shared_bytes,
        num_blocks=grid.num_blocks,
        warps=grid.warps,
    )
    return out, out_weights
