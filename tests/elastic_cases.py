"""The cases of `ElasticBuffer`: dispatch and combine in v2's terms, bit for bit on every rank.

Expert outputs are a closed form of (source token, k), as a careful caller of v2 checks it: so a rank knows what every
pick of its tokens brings home, whoever computed it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import cases
import closed_form
from ranks import Context, buffer_environment, check_equal, environment
from uccl_ep import reference_v2


def elastic_buffer(ctx: Context, **arguments: Any) -> Any:
    """The buffer of this topology and these arguments, kept until the pool runs another topology."""
    from uccl_ep import ElasticBuffer

    key = ("elastic", ctx.num_ranks, ctx.domain, tuple(sorted(ctx.options.items())), tuple(sorted(arguments.items())))
    if key not in ctx.buffers:
        with environment(buffer_environment(ctx.domain, ctx.options)):
            ctx.buffers[key] = ElasticBuffer(ctx.group, **arguments)
    return ctx.buffers[key]


def pick_outputs(tokens: Tensor, topk: int, hidden: int, seed: int, dtype: torch.dtype) -> Tensor:
    """[tokens, topk, hidden] outputs of the picks of source tokens given as rank * most + index."""
    places = (tokens.long()[:, None] * topk + torch.arange(topk)).flatten()
    everything = closed_form.rows(8192, hidden, rank=0, seed=seed, dtype=dtype, salt=77)
    return everything[places % 8192].view(len(tokens), topk, hidden)


def sum_in_order(terms: Tensor, stands: Tensor) -> Tensor:
    """What the caller's experts do with un-expanded rows: picks in increasing k, in float32, rounded."""
    groups = torch.where(stands, 0, -1)
    sums, stand = reference_v2.reduce_groups(terms, groups)
    return torch.where(stand[..., None], sums, 0).sum(1, dtype=sums.dtype) if terms.shape[0] else sums[:, 0]


def wait_arguments(mode: str, buffer: Any) -> dict[str, Any]:
    return {
        "sync": {},
        "async": {"async_with_compute_stream": True},
        "event": {"previous_event": buffer.capture(), "allocate_on_comm_stream": True},
        "full": {
            "previous_event": buffer.capture(),
            "previous_event_before_epilogue": buffer.capture(),
            "allocate_on_comm_stream": True,
            "async_with_compute_stream": True,
        },
    }[mode]


def _check_received(got: Any, want: Any, name: str, rows: int, arrived: Tensor | None = None) -> None:
    """The rows that arrived: the first ``rows``, or those that ``arrived`` marks."""
    if want is None:
        assert got is None, f"{name} is {type(got).__name__}, not None"
        return
    keep = slice(0, rows) if arrived is None else arrived
    got = got[: want.shape[0]]
    for dtype in (torch.float8_e4m3fn,):
        if want.dtype == dtype:
            assert got.dtype == dtype
            got, want = got.view(torch.uint8), want.view(torch.uint8)
    check_equal(name, got[keep].contiguous(), want[keep].contiguous())


class Expected:
    """What a dispatch must return.

    Args:
        want: as from `reference_v2.dispatch`.
        most_rows: of outputs that are as long as they could be; None: those of ``want``.
    """

    def __init__(self, want: Any, expand: bool, padding: bool, tma: bool, most_rows: int | None) -> None:
        self.want, self.expand, self.tma = want, expand, tma
        self.num_rows = want.x.shape[0] if most_rows is None else most_rows
        self.rows, self.slots = want.metadata.shape[0], want.metadata[:, 2:].long()
        self.arrived: Tensor | None = None
        if expand and not padding:
            self.arrived = torch.zeros(want.x.shape[0], dtype=torch.bool)
            self.arrived[self.slots[self.slots >= 0]] = True

    def check(self, name: str, recv: Any, recv_weights: Any, with_weights: bool) -> None:
        """Compare received rows, scales and weights."""
        want, (got, scales) = self.want, recv if isinstance(recv, tuple) else (recv, None)
        check_equal(f"rows of {name}", got.shape[0], self.num_rows)
        rows = want.x.shape[0] if self.expand else self.rows
        _check_received(got, want.x, name, rows, self.arrived)
        _check_received(scales, want.scales, f"{name}, scales", rows, self.arrived)
        if self.tma and scales is not None and scales.shape[0]:
            pitch = reference_v2.align(scales.shape[0], 16 // scales.element_size())
            check_equal("strides of column-major scales", scales.stride(), (1, pitch))
        if with_weights and want.topk_weights is not None:
            check_equal(f"{name}, weights", recv_weights[: want.topk_weights.shape[0]], want.topk_weights)
        else:
            assert recv_weights is None

    def expert_outputs(self, handle: Any, outputs: Tensor) -> Tensor:
        """The rows to combine, of the picks' outputs [rows, topk, hidden]; NaN where none stands."""
        rows = handle.num_expanded_tokens if self.expand else handle.num_recv_tokens
        y = torch.full((rows, outputs.shape[2]), float("nan"), dtype=outputs.dtype)
        if self.expand:
            y[self.slots[self.slots >= 0]] = outputs[self.slots >= 0]
        else:
            y[: self.rows] = sum_in_order(outputs, self.slots >= 0)
        return y


def elastic(
    ctx: Context, *, hidden: int = 64, topk: int = 4, experts: int = 0, tokens: list[int], routing: str = "random",
    dtype: str = "bf16", index: str = "int64", weights: bool = True, bias: int = 0, cached: bool = True,
    alignment: int = 1, expand: bool = False, padding: bool = False, cpu_sync: bool = True, hybrid: bool = True,
    multiple: bool = True, deterministic: bool = False, tma: bool = False, copy: bool = True, stream: str = "sync",
    seed: int = 0, buffer: Any = None,
) -> None:  # fmt: skip
    """``tokens`` of each rank to the experts and back; ``buffer`` None: one that the topology shares."""
    if buffer is None:
        buffer = elastic_buffer(
            ctx, allow_hybrid_mode=hybrid, allow_multiple_reduction=multiple, deterministic=deterministic
        )
    rank, n, most = ctx.rank, ctx.num_ranks, max([*tokens, 1]) + 3
    experts = experts or closed_form.few_experts(n)
    local, per_domain = experts // n, ctx.domain or n
    scaleup = per_domain if hybrid else n
    check_equal("logical domains", buffer.get_logical_domain_size(), (n // scaleup, scaleup))
    check_equal("physical domains", buffer.get_physical_domain_size(), (n // per_domain, per_domain))
    inputs = cases.make_inputs(
        n, tokens, hidden=hidden, experts=experts, topk=topk, routing=routing, dtype=dtype, index=index,
        weights=weights, seed=seed,
    )  # fmt: skip
    x: Any = inputs.xs[rank]
    if inputs.scales is not None:
        x = (x, closed_form.non_contiguous(inputs.scales[rank]))
    ids = inputs.ids[rank]
    w = None if inputs.weights is None else torch.where(ids >= 0, inputs.weights[rank], 0.0)
    stats = torch.full((local,), 7, dtype=torch.int32)
    mode = wait_arguments(stream, buffer)
    recv, recv_idx, recv_weights, handle, event = buffer.dispatch(
        x, topk_idx=ids, topk_weights=w, num_experts=experts, num_max_tokens_per_rank=most,
        expert_alignment=alignment, do_expand=expand, do_zero_padding=padding and expand, do_cpu_sync=cpu_sync,
        cumulative_local_expert_recv_stats=stats, do_handle_copy=copy, use_tma_aligned_col_major_sf=tma, **mode,
    )  # fmt: skip
    cases.wait(event)
    want = reference_v2.dispatch(
        rank, inputs.xs, inputs.ids, experts, most, topk_weights=inputs.weights, scales=inputs.scales,
        expert_alignment=alignment, expand=expand, num_scaleup_ranks=scaleup,
    )  # fmt: skip
    most_rows = n * most
    if expand:
        most_rows = reference_v2.align(n * most * min(topk, local) + local * (alignment - 1), alignment)
    expected = Expected(want, expand, padding, tma, None if cpu_sync else most_rows)
    expected.check("recv_x", recv, recv_weights, weights)
    if expand:
        assert recv_idx is None
    else:
        check_equal("recv_topk_idx", recv_idx[: expected.rows], want.topk_idx)
        assert bool((recv_idx[expected.rows :] == -1).all())
    check_equal("statistics", stats, torch.tensor(want.counts, dtype=torch.int32) + 7)
    _check_handle(handle, want, ids, n, cpu_sync, expand, alignment, copy, deterministic)

    if cached:
        options = {"do_expand": expand, "do_zero_padding": padding and expand, "use_tma_aligned_col_major_sf": tma}
        again, idx, none, same, event = buffer.dispatch(
            x, handle=handle, do_cpu_sync=False, **options, **wait_arguments(stream, buffer)
        )
        cases.wait(event)
        assert same is handle
        expected.check("recv_x of the cached handle", again, none, False)
        if not expand:
            check_equal("recv_topk_idx of the cached handle", idx, recv_idx)
        if weights:
            again, _, its_weights, _, _ = buffer.dispatch(x, topk_weights=w, handle=handle, **options)
            expected.check("recv_x of the cached handle with weights", again, its_weights, True)

    payload = torch.bfloat16 if dtype in ("fp8", "uint8") else cases.DTYPES[dtype]
    y = expected.expert_outputs(handle, pick_outputs(want.metadata[:, 0], topk, hidden, seed, payload))
    biases = [closed_form.rows(tokens[rank], hidden, rank=rank, seed=seed, dtype=payload, salt=9 + b)
              for b in range(bias)]  # fmt: skip
    back = None
    if weights and (multiple or not expand):
        back = recv_weights.clone()
        if not expand:  # what stands where this rank has no expert is nobody's
            back[recv_idx < 0] = 5.0
    combined, combined_weights, event = buffer.combine(
        y, handle, topk_weights=back, bias=None if bias == 0 else biases[0] if bias == 1 else tuple(biases),
        **wait_arguments(stream, buffer),
    )  # fmt: skip
    cases.wait(event)
    mine = rank * most + torch.arange(tokens[rank])
    hybrid_sum = multiple and hybrid and n > per_domain
    want_combined = reference_v2.combine(
        pick_outputs(mine, topk, hidden, seed, payload), ids, experts, n, bias=biases,
        reduce_in_rank=multiple or not expand, ranks_per_domain=per_domain if hybrid_sum else 0,
    )  # fmt: skip
    check_equal("combined_x", combined, want_combined)
    if back is None:
        assert combined_weights is None
    else:
        check_equal("combined_topk_weights", combined_weights, w)


def sent_ordinals(ids: Tensor, experts_per_rank: int, num_ranks: int) -> Tensor:
    """`EPHandle.dst_buffer_slot_idx`, token by token."""
    sent = [0] * num_ranks
    ordinals = torch.full(ids.shape, -1, dtype=torch.int32)
    for token, picks in enumerate(ids.tolist()):
        last = {expert // experts_per_rank: k for k, expert in enumerate(picks) if expert >= 0}
        for rank, k in last.items():
            ordinals[token, k] = sent[rank]
            sent[rank] += 1
    return ordinals


def _check_handle(handle: Any, want: Any, ids: Tensor, num_ranks: int, cpu_sync: bool, expand: bool, alignment: int,
                  copy: bool, deterministic: bool) -> None:  # fmt: skip
    def check(name: str, wanted: Tensor, rows: int | None = None) -> None:
        check_equal(name, getattr(handle, name)[:rows].cpu(), wanted)

    rows = want.metadata.shape[0]
    check("recv_src_metadata", want.metadata, rows)
    assert bool((handle.recv_src_metadata[rows:] == -1).all())
    check("psum_num_recv_tokens_per_expert", want.psum_experts)
    check("psum_num_recv_tokens_per_scaleup_rank", want.psum_scaleup_ranks)
    check("num_unaligned_recv_tokens_per_expert", torch.tensor(want.counts, dtype=torch.int32))
    aligned = [reference_v2.align(count, alignment) for count in want.counts]
    check_equal("num_recv_tokens_per_expert_list", handle.num_recv_tokens_per_expert_list, aligned if cpu_sync else [])
    check_equal("do_expand", handle.do_expand, expand)
    check("topk_idx", ids)
    if ids.numel() and handle.topk_idx.device.type == "cpu":
        check_equal("whether topk_idx was copied", handle.topk_idx.data_ptr() != ids.data_ptr(), copy)
    check("dst_buffer_slot_idx", sent_ordinals(ids, handle.num_experts // num_ranks, num_ranks))
    if deterministic:
        check("cached_recv_src_metadata_before_sort", want.metadata, rows)
    handle.deterministic_sort()
    check("recv_src_metadata", want.metadata, rows)
