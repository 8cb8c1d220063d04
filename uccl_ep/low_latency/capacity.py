"""How the bytes of the low-latency part are divided, and how many a call needs."""

from __future__ import annotations

import dataclasses
import functools
from operator import index

from uccl_ep_core._native import kernels
from uccl_ep_core.errors import ArgumentError

TOPK_RESERVED = 16
"""Top-k that the size hint reserves combine rows for; more needs a larger num_rdma_bytes."""
HINT_ELEMENT_BYTES = 4
"""The hint does not know the dtype: float32 fits."""


def _align(value: int, alignment: int = 64) -> int:
    return (value + alignment - 1) // alignment * alignment


def message_bytes(
    max_tokens: int, row_bytes: int, scale_bytes: int, num_topk: int, num_experts: int, num_ranks: int
) -> int:
    """Bytes of a full dispatch message to one rank."""
    local_experts = num_experts // num_ranks
    return int(kernels.low_latency_message_bytes(local_experts, max_tokens, row_bytes, scale_bytes, num_topk))


def _units(num_ranks: int, remote: bool) -> int:
    """Units of one full message in one parity: inboxes and combine rows, and their outboxes where there are any."""
    local = num_ranks + TOPK_RESERVED
    return local + num_ranks + TOPK_RESERVED * num_ranks if remote else local


# Every call asks, and it is always the same few.
@functools.lru_cache(maxsize=64)
def _unit_bytes(
    max_tokens: int,
    row_bytes: int,
    scale_bytes: int,
    combine_row_bytes: int,
    num_topk: int,
    num_experts: int,
    num_ranks: int,
) -> int:
    """Bytes of a unit that suffice for calls of this shape."""
    message = message_bytes(max_tokens, row_bytes, scale_bytes, num_topk, num_experts, num_ranks)
    combine = -(-max_tokens * num_topk * combine_row_bytes // TOPK_RESERVED)
    per_rank = max_tokens * min(num_topk, num_experts // num_ranks) * combine_row_bytes + 64
    return max(_align(message), _align(combine), _align(-(-per_rank // TOPK_RESERVED)))


@dataclasses.dataclass(frozen=True)
class LowLatencyCapacity:
    """Bytes of each part, of one parity.

    Attributes:
        dispatch_bytes: the largest dispatch message to one rank.
        combine_bytes: all combine rows that come home.
        outbox_bytes: all combine rows that leave through a transport.
    """

    num_ranks: int
    dispatch_bytes: int
    combine_bytes: int
    outbox_bytes: int

    @staticmethod
    def hint(max_tokens: int, hidden: int, num_ranks: int, num_experts: int) -> int:
        """Bytes that suffice for these shapes in any dtype up to float32 and top-k up to 16."""
        num_experts = _align(max(num_experts, num_ranks), num_ranks)
        cast = hidden + 4 * -(-hidden // kernels.SCALE_GROUP)  # with its scales; more than float32 for a hidden of 1
        row_bytes = max(hidden * HINT_ELEMENT_BYTES, cast)
        unit = message_bytes(max_tokens, row_bytes, 0, TOPK_RESERVED, num_experts, num_ranks)
        return 2 * _units(num_ranks, True) * unit

    @classmethod
    def of(cls, low_latency_bytes: int, num_ranks: int, *, remote: bool) -> LowLatencyCapacity:
        """The division of as many bytes; a group in one domain needs no outboxes and takes less."""
        unit = low_latency_bytes // (2 * _units(num_ranks, True)) // 64 * 64
        return cls(num_ranks, unit, unit * TOPK_RESERVED, unit * TOPK_RESERVED * num_ranks if remote else 0)

    def require(
        self, max_tokens: int, row_bytes: int, scale_bytes: int, combine_row_bytes: int, num_topk: int, num_experts: int
    ) -> None:
        """Raise `ArgumentError` with the size that would do, where a call does not fit."""
        unit = _unit_bytes(
            index(max_tokens), row_bytes, scale_bytes, combine_row_bytes, num_topk, num_experts, self.num_ranks
        )
        if unit > self.dispatch_bytes:
            needed = 2 * _units(self.num_ranks, True) * unit
            have = 2 * _units(self.num_ranks, True) * self.dispatch_bytes
            raise ArgumentError(
                f"{max_tokens} tokens of {row_bytes} bytes with top-k {num_topk} do not fit the low-latency part of "
                f"this buffer ({have} bytes): create the Buffer with low_latency_mode=True and "
                f"num_rdma_bytes >= {needed}"
            )
