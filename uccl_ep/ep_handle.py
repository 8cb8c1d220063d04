"""`EPHandle`: what a dispatch of `ElasticBuffer` decided, under the names that DeepEP v2 gives it."""

from __future__ import annotations

import dataclasses

import torch

from . import rounding
from .expanded import Expansion
from .high_throughput import DispatchHandle


@dataclasses.dataclass(frozen=True, eq=False)
class Routes:
    """What `ElasticBuffer` itself goes by; an immutable snapshot, so that attributes of the handle may be changed.

    Attributes:
        rows: the route of tokens, with the rounding tree of its combine.
        picks: the route of single picks, for an expanded combine without reduction before the rows cross.
        local_idx: [received rows, topk] local expert ids, -1 elsewhere.
        expansion: the expanded layout; None where the dispatch was not expanded.
        topk_idx: as given to dispatch.
        num_ranks: of the group.
    """

    rows: DispatchHandle
    picks: DispatchHandle | None
    local_idx: torch.Tensor
    expansion: Expansion | None
    topk_idx: torch.Tensor
    num_ranks: int

    @property
    def ranks(self) -> torch.Tensor:
        """int64 [num_tokens, topk]: the rank of each pick, -1 for none."""
        return rounding.ranks_of(self.topk_idx, self.rows.num_experts, self.num_ranks)


@dataclasses.dataclass(eq=False)
class EPHandle:
    """A handle from `ElasticBuffer.dispatch`: for `combine`, and for `dispatch(handle=)`, any number of times.

    N rows were received (without ``do_cpu_sync``: the most that could be), K is top-k, L the experts of a rank.

    Attributes:
        do_expand: whether the output has a row for each pick.
        num_experts: of the whole group.
        expert_alignment: blocks of experts are padded to a multiple of it.
        num_max_tokens_per_rank: most tokens of any rank; equal on all.
        num_sms: hint given to, or chosen by, the dispatch.
        topk_idx: [num_tokens, K] as given; a copy unless ``do_handle_copy=False``.
        num_recv_tokens: N.
        num_expanded_tokens: rows of the expanded output; 0 where it is not expanded.
        num_recv_tokens_per_expert_list: rows of each local expert, aligned; empty without ``do_cpu_sync``.
        psum_num_recv_tokens_per_scaleup_rank: int32 [scale-up ranks], rows received from sources at each place of a
            scale-up domain, summed up; the last entry is the number of rows received.
        psum_num_recv_tokens_per_expert: int32 [L], inclusive sums of aligned counts; expanded: where the rows of each
            expert end, that is the aligned rows of the experts before it and its own unaligned ones.
        num_unaligned_recv_tokens_per_expert: int32 [L].
        recv_src_metadata: int32 [N, K + 2]: the source's token as ``rank * num_max_tokens_per_rank + index``; the
            ordinal of the row among those from that source; the output row of each pick, -1 where its expert is
            on another rank. Rows that did not arrive hold -1.
        token_metadata_at_forward, channel_linked_list: None; forwarding needs no tables here.
        cached_recv_src_metadata_before_sort: with ``deterministic``, a copy of ``recv_src_metadata``.
    """

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: torch.Tensor
    num_recv_tokens: int
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: torch.Tensor
    psum_num_recv_tokens_per_expert: torch.Tensor
    num_unaligned_recv_tokens_per_expert: torch.Tensor
    routes: Routes = dataclasses.field(repr=False)
    token_metadata_at_forward: torch.Tensor | None = None
    channel_linked_list: torch.Tensor | None = None
    cached_recv_src_metadata_before_sort: torch.Tensor | None = None
    _recv_src_metadata: torch.Tensor | None = dataclasses.field(default=None, repr=False)

    @property
    def recv_src_metadata(self) -> torch.Tensor:
        if self._recv_src_metadata is None:  # few callers look: made when it is first asked for
            self._recv_src_metadata = source_metadata(self.routes, self.num_max_tokens_per_rank)
        return self._recv_src_metadata

    @recv_src_metadata.setter
    def recv_src_metadata(self, metadata: torch.Tensor) -> None:
        self._recv_src_metadata = metadata

    @property
    def dst_buffer_slot_idx(self) -> torch.Tensor:
        """int32 [num_tokens, K]: the ordinal of the token's row among those this rank sends to the rank of each
        pick; -1 where there is no pick, or where that rank holds a later pick of the token too."""
        routes = self.routes
        ranks = routes.ranks
        if ranks.numel() == 0:
            return torch.empty(ranks.shape, dtype=torch.int32, device=ranks.device)
        order = routes.rows.is_token_in_rank.long().cumsum(0) - 1
        places = torch.arange(ranks.shape[1], device=ranks.device)
        stands = (ranks >= 0) & (rounding.last_places(ranks) == places)
        return torch.where(stands, order.gather(1, ranks.clamp(min=0)), -1).to(torch.int32)

    def deterministic_sort(self) -> None:
        """Rows lie in the order (source rank, index there) already: there is nothing to move."""


def source_metadata(routes: Routes, max_tokens: int) -> torch.Tensor:
    """`EPHandle.recv_src_metadata`, without a host wait."""
    rows, local_idx, expansion, num_ranks = routes.rows, routes.local_idx, routes.expansion, routes.num_ranks
    device, num_rows = local_idx.device, local_idx.shape[0]
    ends = rows.receive_rows.view(num_ranks, -1).sum(1).cumsum(0)
    numbers = torch.arange(num_rows, device=device)
    source = torch.bucketize(numbers, ends, right=True)
    arrived = source < num_ranks
    begins = torch.cat([ends.new_zeros(1), ends])
    index = rows.receive_source[:num_rows].long()
    metadata = torch.empty((num_rows, local_idx.shape[1] + 2), dtype=torch.int32, device=device)
    metadata[:, 0] = torch.where(arrived, source * max_tokens + index, -1)
    metadata[:, 1] = torch.where(arrived, numbers - begins[source], -1)
    metadata[:, 2:] = torch.where(local_idx >= 0, numbers[:, None], -1) if expansion is None else expansion.slots
    return metadata
