"""What fits a slot: a message is never larger than one, and a row never cut in two."""

from __future__ import annotations

from uccl_ep_core.errors import ArgumentError

from ..communicator import Communicator
from ..tensors import round_up

SLOT_OVERHEAD = 64 + 3 * 16 + 64  # bytes of a slot that are not rows, at most (DispatchRows::capacity)
RAIL_MASK_BYTES = 16


def _require(communicator: Communicator, what: str, needed: int) -> None:
    if needed > communicator.slot_bytes:
        raise ArgumentError(
            f"{what} not fit a slot of {communicator.slot_bytes} bytes: set slot_bytes (UCCL_EP_SLOT_BYTES) to at "
            f"least {round_up(needed, 64)}"
        )


def check_dispatch_row_fits(communicator: Communicator, row_bytes: int, scale_bytes: int, num_topk: int) -> None:
    """Raise `ArgumentError` where a slot does not hold a token with all that travels beside it."""
    needed = row_bytes + scale_bytes + num_topk * 8 + 4 + RAIL_MASK_BYTES + SLOT_OVERHEAD
    _require(communicator, f"a token of {row_bytes + scale_bytes} bytes does", needed)


def check_combine_row_fits(communicator: Communicator, row_bytes: int, num_topk: int) -> None:
    """Raise `ArgumentError` where a slot does not hold a row that goes home, with its weights."""
    _require(communicator, f"a row of {row_bytes} bytes does", row_bytes + num_topk * 4 + SLOT_OVERHEAD)


def check_counts_fit(communicator: Communicator, num_experts: int) -> None:
    """The counts that announce a dispatch are one message, of NotifyWords of core/kernels/notify.hpp."""
    local_experts = num_experts // communicator.num_ranks
    needed = 64 + 24 + 4 * (2 * communicator.num_channels + local_experts)
    _require(communicator, f"the counts of {local_experts} experts a rank do", needed)
