"""DeepEP's `Config`: accepted everywhere, needed nowhere; sizes come from the streams' own options."""

from __future__ import annotations

import dataclasses
from typing import Any

from .tensors import check_sizes


@dataclasses.dataclass(frozen=True, init=False)
class Config:
    """Tuning hints in DeepEP's names. They never change a result, so names that it does not know are left aside.

    `get_nvl_buffer_size_hint` and `get_rdma_buffer_size_hint` return what a `Buffer` of that size would
    be created with; tokens stream through bounded slots, so any size works.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __init__(
        self,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
        **other_hints: Any,
    ) -> None:
        for name, value in (
            ("num_sms", num_sms),
            ("num_max_nvl_chunked_send_tokens", num_max_nvl_chunked_send_tokens),
            ("num_max_nvl_chunked_recv_tokens", num_max_nvl_chunked_recv_tokens),
            ("num_max_rdma_chunked_send_tokens", num_max_rdma_chunked_send_tokens),
            ("num_max_rdma_chunked_recv_tokens", num_max_rdma_chunked_recv_tokens),
        ):
            check_sizes(**{name: value})
            object.__setattr__(self, name, value)

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes for tokens of ``hidden_bytes`` bytes among ``num_ranks`` ranks."""
        return self._hint(hidden_bytes, num_ranks, self.num_max_nvl_chunked_recv_tokens)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Likewise for ranks that are reached through a transport."""
        return self._hint(hidden_bytes, num_ranks, self.num_max_rdma_chunked_recv_tokens)

    def _hint(self, hidden_bytes: int, num_ranks: int, tokens: int) -> int:
        return (hidden_bytes * tokens * num_ranks + 127) // 128 * 128
