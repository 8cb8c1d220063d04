"""What fits a slot: a message is never larger than one, and a row never cut in two."""

from __future__ import annotations

from uccl_ep_core._native import kernels
from uccl_ep_core.errors import ArgumentError

from ..communicator import Communicator
from ..tensors import round_up


def _require(communicator: Communicator, what: str, needed: int) -> None:
    if needed > communicator.slot_bytes:
        raise ArgumentError(
            f"{what} not fit a slot of {communicator.slot_bytes} bytes: set slot_bytes (UCCL_EP_SLOT_BYTES) to at "
            f"least {round_up(needed, 64)}"
        )


def check_dispatch_row_fits(communicator: Communicator, row_bytes: int, scale_bytes: int, num_topk: int) -> None:
    """Raise `ArgumentError` where a slot does not hold a token with all that travels beside it."""
    needed = kernels.dispatch_slot_bytes(row_bytes, scale_bytes, num_topk)
    _require(communicator, f"a token of {row_bytes + scale_bytes} bytes does", needed)


def check_combine_row_fits(communicator: Communicator, row_bytes: int, num_topk: int) -> None:
    """Raise `ArgumentError` where a slot does not hold a row that goes home, with its weights."""
    _require(communicator, f"a row of {row_bytes} bytes does", kernels.combine_slot_bytes(row_bytes, num_topk))


def check_counts_fit(communicator: Communicator, num_experts: int) -> None:
    """Raise `ArgumentError` where a slot does not hold the counts that announce a dispatch, which are one message."""
    local_experts = num_experts // communicator.num_ranks
    needed = kernels.notify_message_bytes(communicator.num_channels, local_experts)
    _require(communicator, f"the counts of {local_experts} experts a rank do", needed)
