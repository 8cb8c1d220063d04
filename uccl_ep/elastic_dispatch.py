"""What `ElasticBuffer.dispatch` is made of: a dispatch along new routes, with the handle it leaves, or along those of a
handle; and rows in the expanded layout."""

from __future__ import annotations

import dataclasses

import torch

from uccl_ep_core.errors import ArgumentError

from . import expanded, high_throughput, rounding, single_picks
from .communicator import Communicator
from .ep_handle import EPHandle, Routes, source_metadata
from .tensors import check_distinct, check_experts, check_matrix, check_topk_idx, check_vector, round_up

MOST_ROWS = (1 << 31) - 1  # of an output


@dataclasses.dataclass(frozen=True)
class Reduction:
    """How the buffer's combines will sum; the handle of a dispatch prepares it.

    Attributes:
        num_scaleout_ranks, num_scaleup_ranks: the domains that the interface speaks of, and the ranks of each.
        multiple: rows of a rank, and of a domain, may be rounded before they are summed further.
        deterministic: keep what the handle says of sources a second time, as callers of that mode expect.
    """

    num_scaleout_ranks: int
    num_scaleup_ranks: int
    multiple: bool
    deterministic: bool


@dataclasses.dataclass(frozen=True)
class DispatchRequest:
    """The arguments of a dispatch without handle, as `ElasticBuffer.dispatch` names them; defaults are filled in."""

    x: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None
    statistics: torch.Tensor | None
    num_experts: int
    max_tokens: int
    alignment: int
    num_sms: int
    do_handle_copy: bool
    do_cpu_sync: bool
    do_expand: bool

    def checked(self, communicator: Communicator) -> DispatchRequest:
        """The same with tensors as kernels read them; raises `ArgumentError`, before any rank communicates."""
        device, num_ranks = communicator.backend.torch_device, communicator.num_ranks
        if self.alignment < 1:
            raise ArgumentError(f"expert_alignment = {self.alignment}: must be at least 1")
        if self.max_tokens < 1:
            raise ArgumentError(
                f"num_max_tokens_per_rank = {self.max_tokens}: pass the most tokens of any rank, here or to "
                "ElasticBuffer"
            )
        x = check_matrix("x", self.x, device)
        check_experts(self.num_experts, num_ranks)
        topk_idx = check_topk_idx(self.topk_idx, device, self.num_experts)
        most = MOST_ROWS // (num_ranks * max(1, topk_idx.shape[1] if self.do_expand else 1))
        if self.max_tokens > most:
            raise ArgumentError(
                f"num_max_tokens_per_rank = {self.max_tokens}: rows are numbered in 32 bits, use up to {most}"
            )
        if x.shape[0] > self.max_tokens:
            raise ArgumentError(
                f"{x.shape[0]} tokens exceed num_max_tokens_per_rank = {self.max_tokens}: use at least {x.shape[0]}"
            )
        check_expert_statistics(self.statistics, device, self.num_experts // num_ranks)
        if self.do_expand and not self.do_cpu_sync:
            check_distinct(topk_idx, self.num_experts // num_ranks)
        return dataclasses.replace(self, x=x, topk_idx=topk_idx)


def check_expert_statistics(statistics: torch.Tensor | None, device: torch.device, local_experts: int) -> None:
    """Raise `ArgumentError` unless it is None, or an int32 number for each local expert."""
    if statistics is not None:
        check_vector("cumulative_local_expert_recv_stats", statistics, device, torch.int32, local_experts)


def check_same(
    handle: EPHandle,
    topk_idx: torch.Tensor | None,
    num_experts: int | None,
    max_tokens: int | None,
    alignment: int | None,
    do_cpu_sync: bool | None,
    do_expand: bool,
) -> None:
    """Raise `ArgumentError` unless what was given beside a handle, if anything, says the same as the handle."""
    if topk_idx is not None:
        raise ArgumentError("a cached dispatch goes by its handle's topk_idx: leave out topk_idx or handle")
    if do_cpu_sync:
        raise ArgumentError("do_cpu_sync: a cached dispatch has no counts to wait for; leave it out, or pass False")
    for name, given, own in (
        ("num_experts", num_experts, handle.num_experts),
        ("num_max_tokens_per_rank", max_tokens, handle.num_max_tokens_per_rank),
        ("expert_alignment", alignment, handle.expert_alignment),
    ):
        if given is not None and given != own:
            raise ArgumentError(f"{name} = {given}, but the handle has {own}: leave it out, or pass {own}")
    if do_expand and handle.routes.expansion is None:
        raise ArgumentError("do_expand: the handle's dispatch was not expanded; leave it out")


def dispatch_new(
    communicator: Communicator, reduction: Reduction, request: DispatchRequest
) -> tuple[EPHandle, high_throughput.Dispatched]:
    """Send tokens to the ranks of their experts. Collective.

    Returns:
        The handle, and rows as they arrived, not expanded.
    """
    communicator.ensure_usable()
    request = request.checked(communicator)
    layout = high_throughput.get_layout(communicator, request.topk_idx, request.num_experts)
    received = high_throughput.dispatch(
        communicator,
        request.x,
        request.scales,
        request.topk_idx,
        request.topk_weights,
        layout.is_token_in_rank,
        layout.num_tokens_per_expert,
        0 if request.do_cpu_sync else communicator.num_ranks * request.max_tokens,
        request.max_tokens,
        wait=request.do_cpu_sync,
    )
    return _handle(communicator, reduction, request, received), received


def dispatch_along(
    communicator: Communicator,
    routes: Routes,
    x: torch.Tensor,
    scales: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
) -> high_throughput.Dispatched:
    """Send other payload along the routes of an earlier dispatch. Collective. Rows as they arrive, not expanded."""
    indices = routes.topk_idx if topk_weights is not None else None
    received = high_throughput.dispatch_cached(communicator, routes.rows, x, scales, indices, topk_weights)
    if received.topk_weights is not None and received.topk_weights.shape[0] > 0:
        received.topk_weights.masked_fill_(routes.local_idx < 0, 0)
    return received


def expand_rows(
    communicator: Communicator,
    received: high_throughput.Dispatched,
    expansion: expanded.Expansion,
    zero_padding: bool,
) -> high_throughput.Dispatched:
    """A row for each pick, and the weight of each."""
    x, scales, weights = received.x, received.scales, received.topk_weights
    x = expanded.gather(communicator, x, expansion.source_rows, zero_padding)
    if scales is not None:
        scales = expanded.gather(communicator, scales, expansion.source_rows, zero_padding)
    if weights is not None:
        weights = expanded.expand_weights(weights, expansion)
    return dataclasses.replace(received, x=x, scales=scales, topk_weights=weights)


def _handle(
    communicator: Communicator,
    reduction: Reduction,
    request: DispatchRequest,
    received: high_throughput.Dispatched,
) -> EPHandle:
    counts = received.expert_counts
    assert counts is not None
    aligned = [round_up(rows, request.alignment) for rows in received.expert_rows or []]
    expansion = _expansion(request, received, counts, aligned) if request.do_expand else None
    routes = _routes(communicator, reduction, request, received, expansion)
    rows_of_ranks = routes.rows.receive_rows.view(reduction.num_scaleout_ranks, reduction.num_scaleup_ranks, -1)
    ends = expanded.block_ends(counts, request.alignment)
    handle = EPHandle(
        do_expand=request.do_expand,
        num_experts=request.num_experts,
        expert_alignment=request.alignment,
        num_max_tokens_per_rank=request.max_tokens,
        num_sms=request.num_sms,
        topk_idx=routes.topk_idx if request.do_handle_copy else request.topk_idx,
        num_recv_tokens=routes.rows.num_rows,
        num_expanded_tokens=0 if expansion is None else expansion.num_rows,
        num_recv_tokens_per_expert_list=aligned,
        psum_num_recv_tokens_per_scaleup_rank=rows_of_ranks.sum((0, 2)).cumsum(0).to(torch.int32),
        psum_num_recv_tokens_per_expert=ends if expansion is None else expansion.starts + counts,
        num_unaligned_recv_tokens_per_expert=counts,
        routes=routes,
    )
    if not request.do_cpu_sync:  # in a graph, every replay must make it anew
        handle.recv_src_metadata = source_metadata(routes, request.max_tokens)
    if reduction.deterministic:
        handle.cached_recv_src_metadata_before_sort = handle.recv_src_metadata.clone()
    return handle


def _expansion(
    request: DispatchRequest, received: high_throughput.Dispatched, counts: torch.Tensor, aligned: list[int]
) -> expanded.Expansion:
    """The expanded layout: as long as the counts say, or without them as they could at most."""
    local_idx = received.topk_idx
    assert local_idx is not None
    num_rows = sum(aligned)
    if not request.do_cpu_sync:
        num_rows = expanded.most_rows(local_idx.shape[0], local_idx.shape[1], counts.shape[0], request.alignment)
    return expanded.expansion(local_idx, counts, request.alignment, num_rows)


def _routes(
    communicator: Communicator,
    reduction: Reduction,
    request: DispatchRequest,
    received: high_throughput.Dispatched,
    expansion: expanded.Expansion | None,
) -> Routes:
    """What combine will go by; collective where single picks must be announced too."""
    assert received.topk_idx is not None
    num_ranks, num_experts = communicator.num_ranks, request.num_experts
    own_idx = request.topk_idx.clone(memory_format=torch.contiguous_format)  # the caller may change its own
    domains_first = reduction.multiple and reduction.num_scaleout_ranks > 1
    tree = rounding.v2(communicator, own_idx, num_experts, domains_first=domains_first)
    picks = None
    if expansion is not None and not reduction.multiple:
        rank_of_pick = rounding.ranks_of(own_idx, num_experts, num_ranks)
        picks = single_picks.announce(
            communicator, rank_of_pick, num_experts, request.max_tokens, expansion, request.do_cpu_sync
        )
    rows = dataclasses.replace(received.handle, rounding=tree)
    return Routes(rows, picks, received.topk_idx, expansion, own_idx, num_ranks)
