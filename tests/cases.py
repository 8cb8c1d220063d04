"""The cases of the matrix: one dispatch and combine, in either mode, checked bit for bit on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import closed_form
from ranks import Context, check_equal
from uccl_ep import reference

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8": torch.float8_e4m3fn,
    "uint8": torch.uint8,
}


@dataclass(frozen=True)
class Inputs:
    """Everything that all ranks put in, known to each."""

    xs: list[Tensor]
    ids: list[Tensor]
    weights: list[Tensor] | None
    scales: list[Tensor] | None


def make_inputs(
    num_ranks: int, tokens: list[int], *, hidden: int, experts: int, topk: int, routing: str = "random",
    dtype: str = "bf16", index: str = "int64", weights: bool = True, seed: int = 0,
) -> Inputs:  # fmt: skip
    fp8 = dtype == "fp8"
    payload = torch.bfloat16 if fp8 else DTYPES[dtype]
    xs = [closed_form.rows(t, hidden, rank=r, seed=seed, dtype=payload) for r, t in enumerate(tokens)]
    ids = [
        closed_form.topk_idx(routing, t, topk, experts, num_ranks, rank=r, seed=seed).to(getattr(torch, index))
        for r, t in enumerate(tokens)
    ]
    scales = None
    if fp8:
        pairs = [reference.quantize_fp8(x) for x in xs]
        xs, scales = [p[0] for p in pairs], [p[1] for p in pairs]
    w = [closed_form.weights(t, topk, rank=r, seed=seed) for r, t in enumerate(tokens)] if weights else None
    return Inputs(xs, ids, w, scales)


def as_payload(x: Any, scales: Tensor | None = None, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """What an expert computes on: the payload, or the dequantised payload in ``dtype``."""
    if isinstance(x, tuple):
        x, scales = x
    if x.dtype == torch.float8_e4m3fn:
        return reference.dequantize_fp8(x, scales).to(dtype)
    return x


def expected_combine(ctx: Context, inputs: Inputs, experts: int, bias: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    """What this rank must get back when every rank applies its experts to what it received."""
    rank, n = ctx.rank, ctx.num_ranks
    local = experts // n
    segments, weight_segments = [], []
    for d in range(n):
        rows = reference.rows_for_rank(inputs.ids[rank], d, experts, n)
        idx = reference.local_topk(inputs.ids[rank][rows], d, experts, n)
        w = None
        if inputs.weights is not None:
            w = torch.where(idx >= 0, inputs.weights[rank][rows], 0.0)
            weight_segments.append(w)
        x = as_payload(inputs.xs[rank][rows], None if inputs.scales is None else inputs.scales[rank][rows])
        segments.append(closed_form.apply_experts(x, idx, w, d * local))
    in_rank = reference.layout(inputs.ids[rank], experts, n).is_token_in_rank
    combined = reference.combine_segments(segments, in_rank, bias)
    return combined, reference.combine_segments(weight_segments, in_rank) if weight_segments else None


def check_dispatch(ctx: Context, want: reference.Dispatched, result: tuple[Any, ...]) -> None:
    recv_x, recv_idx, recv_weights, counts = result[:4]
    rows = want.source_rank.numel()
    got_x, got_scales = recv_x if isinstance(recv_x, tuple) else (recv_x, None)
    check_equal("rows of recv_x", got_x.shape[0], want.x.shape[0])
    check_equal("recv_x", got_x[:rows], want.x[:rows])
    if want.scales is not None:
        assert got_scales is not None, "dispatch of (x, scales) returned no scales"
        check_equal("recv_scales", got_scales[:rows], want.scales[:rows])
    check_equal("recv_topk_idx", recv_idx, want.topk_idx)
    if want.topk_weights is not None:
        check_equal("recv_topk_weights", recv_weights[:rows], want.topk_weights[:rows])
    check_equal("num_recv_tokens_per_expert_list", list(counts), want.num_tokens_per_expert)


def stream_arguments(buffer: Any, mode: str) -> dict[str, Any]:
    """The combinations of (previous_event, async_finish, allocate_on_comm_stream) that occur in frameworks."""
    return {
        "sync": {},
        "async": {"async_finish": True},
        "event": {"previous_event": buffer.capture()},
        "full": {"previous_event": buffer.capture(), "async_finish": True, "allocate_on_comm_stream": True},
    }[mode]


def wait(event: Any) -> None:
    if event is not None and event.event is not None:
        event.current_stream_wait()


def high_throughput(
    ctx: Context, *, hidden: int = 64, topk: int = 4, experts: int = 0, tokens: list[int], routing: str = "random",
    dtype: str = "bf16", index: str = "int64", weights: bool = True, bias: int = 0, cached: bool = False,
    contiguous: bool = True, alignment: int = 1, worst: bool = False, stream: str = "sync", seed: int = 0,
    buffer: Any = None,
) -> None:  # fmt: skip
    """``tokens`` of each rank to the experts and back; ``buffer`` None: the one that the topology shares."""
    buffer = ctx.buffer() if buffer is None else buffer
    rank, n = ctx.rank, ctx.num_ranks
    experts = experts or closed_form.few_experts(n)
    inputs = make_inputs(
        n, tokens, hidden=hidden, experts=experts, topk=topk, routing=routing, dtype=dtype, index=index,
        weights=weights, seed=seed,
    )  # fmt: skip
    shape = (lambda t: t) if contiguous else closed_form.non_contiguous
    x: Any = shape(inputs.xs[rank])
    if inputs.scales is not None:
        x = (x, shape(inputs.scales[rank]))
    ids = shape(inputs.ids[rank])
    w = shape(inputs.weights[rank]) if inputs.weights is not None else None

    layout = buffer.get_dispatch_layout(ids, experts, **stream_arguments(buffer, stream))
    wait(layout[4])
    want_layout = reference.layout(inputs.ids[rank], experts, n)
    check_equal("num_tokens_per_rank", layout[0], want_layout.num_tokens_per_rank)
    check_equal("num_tokens_per_expert", layout[2], want_layout.num_tokens_per_expert)
    check_equal("is_token_in_rank", layout[3], want_layout.is_token_in_rank)

    most = sum(tokens) if worst else 0
    result = buffer.dispatch(
        x, topk_idx=ids, topk_weights=w, num_tokens_per_rank=layout[0], num_tokens_per_rdma_rank=layout[1],
        num_tokens_per_expert=layout[2], is_token_in_rank=layout[3], expert_alignment=alignment,
        num_worst_tokens=most, **stream_arguments(buffer, stream),
    )  # fmt: skip
    wait(result[5])
    want = reference.dispatch(
        rank, inputs.xs, inputs.ids, experts, topk_weights=inputs.weights, scales=inputs.scales,
        expert_alignment=alignment, num_worst_tokens=most,
    )  # fmt: skip
    check_dispatch(ctx, want, result)
    handle = result[4]
    if cached:
        again = buffer.dispatch(x, handle=handle, **stream_arguments(buffer, stream))
        wait(again[5])
        rows = want.source_rank.numel()
        got = again[0] if isinstance(again[0], tuple) else (again[0],)
        check_equal("recv_x of the cached handle", got[0][:rows], want.x[:rows])
        if want.scales is not None:
            check_equal("recv_scales of the cached handle", got[1][:rows], want.scales[:rows])
        check_equal("outputs 1 to 3 of the cached handle", again[1:4], (None, None, None))

    if dtype == "uint8":
        return  # bytes are moved, not summed
    recv = as_payload(result[0])
    y = closed_form.apply_experts(recv, result[1], result[2] if weights else None, rank * (experts // n))
    payload = y.dtype
    biases = [closed_form.rows(tokens[rank], hidden, rank=rank, seed=seed, dtype=payload, salt=9 + b)
              for b in range(bias)]  # fmt: skip
    combined, combined_weights, event = buffer.combine(
        shape(y), handle, topk_weights=result[2] if weights else None,
        bias=None if bias == 0 else biases[0] if bias == 1 else tuple(biases), **stream_arguments(buffer, stream),
    )  # fmt: skip
    wait(event)
    want_combined, want_weights = expected_combine(ctx, inputs, experts, biases)
    check_equal("combined_x", combined, want_combined)
    if want_weights is not None:
        check_equal("combined_topk_weights", combined_weights, want_weights)


def low_latency(
    ctx: Context, *, hidden: int = 64, topk: int = 4, experts: int = 0, most: int, tokens: list[int],
    routing: str = "random", index: str = "int64", cast: str = "none", hook: bool = True, zero_copy: bool = False,
    out: bool = False, contiguous: bool = True, dtype: str = "bf16", seed: int = 0, buffer: Any = None,
) -> None:  # fmt: skip
    """The same in low-latency mode, with at most ``most`` tokens per rank."""
    buffer = ctx.buffer() if buffer is None else buffer
    rank, n = ctx.rank, ctx.num_ranks
    experts = experts or closed_form.few_experts(n)
    local = experts // n
    inputs = make_inputs(n, tokens, hidden=hidden, experts=experts, topk=topk, routing=routing, dtype=dtype,
                         index=index, seed=seed)  # fmt: skip
    assert inputs.weights is not None
    shape = (lambda t: t) if contiguous else closed_form.non_contiguous
    casts = {"use_fp8": cast != "none", "round_scale": cast in ("round", "ue8m0"), "use_ue8m0": cast == "ue8m0"}
    stats = torch.full((local,), 3, dtype=torch.int32)
    recv, count, handle, event, recv_hook = buffer.low_latency_dispatch(
        shape(inputs.xs[rank]), shape(inputs.ids[rank]), most, experts, cumulative_local_expert_recv_stats=stats,
        async_finish=not hook, return_recv_hook=hook, **casts,
    )  # fmt: skip
    if hook:
        recv_hook()
    else:
        wait(event)
    want = reference.ll_dispatch(rank, inputs.xs, inputs.ids, most, experts, **casts)
    check_equal("recv_count", count, want.count)
    check_equal("cumulative_local_expert_recv_stats", stats, want.count + 3)
    got, got_scales = recv if isinstance(recv, tuple) else (recv, None)
    check_equal("shape of recv_x", list(got.shape), list(want.x.shape))
    used = want.source_rank >= 0
    check_equal("recv_x (used rows)", got[used], want.x[used])
    if want.scales is not None:
        assert got_scales is not None, "use_fp8 returned no scales"
        check_equal("shape of recv_scales", list(got_scales.shape), list(want.scales.shape))
        check_equal("recv_scales (used rows)", got_scales[used], want.scales[used])
        if min(got_scales.shape) > 1:
            check_equal("strides of recv_scales (column-major)", got_scales.stride()[1:], want.scales.stride()[1:])

    # Only used rows reach the combine; the others get a value that would show.
    # Experts behind a cast give back the dtype that was dispatched.
    payload = inputs.xs[rank].dtype
    y = torch.full(want.x.shape, float("nan"), dtype=payload)
    scales = got_scales[used] if got_scales is not None else None
    expert_of = torch.arange(local)[:, None].expand_as(used)[used] + rank * local
    y[used] = ll_expert(as_payload(got[used], scales, payload), expert_of)
    y_in = y
    if zero_copy:
        y_in = buffer.get_next_low_latency_combine_buffer(handle)
        y_in.copy_(y)
    target = torch.empty(tokens[rank], hidden, dtype=y.dtype) if out else None
    combined, event, recv_hook = buffer.low_latency_combine(
        y_in, shape(inputs.ids[rank]), shape(inputs.weights[rank]), handle, zero_copy=zero_copy,
        async_finish=not hook, return_recv_hook=hook, out=target,
    )  # fmt: skip
    if hook:
        recv_hook()
    else:
        wait(event)
    ids = inputs.ids[rank].long()
    terms = torch.zeros(*ids.shape, hidden, dtype=y.dtype)
    mine: Any = inputs.xs[rank]
    if cast != "none":
        q, s = reference.quantize_fp8(mine, round_scale=casts["round_scale"], use_ue8m0=casts["use_ue8m0"])
        mine = as_payload(q, s, payload)
    for k in range(topk):
        terms[:, k] = ll_expert(mine, ids[:, k])
    summed = reference.ll_combine_terms(terms, ids, inputs.weights[rank], handle.rounding, local)
    check_equal("combined_x", combined, summed)
    if target is not None:
        check_equal("place of combined_x (out was given)", combined.data_ptr(), target.data_ptr())


def ll_expert(x: Tensor, expert: Tensor) -> Tensor:
    """Rows [N, H] under the expert of each row: x * (1 + e/16) + e / 4096."""
    e = expert.float()[:, None]
    return (x.float() * (1 + e / 16) + e / 4096).to(x.dtype)
