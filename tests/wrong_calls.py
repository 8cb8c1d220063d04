"""Calls that must be refused on the calling rank before anything is sent, with the value that would do.

Each function prepares on all ranks and returns the wrong call and words that its error must contain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import cases
import fault_cases
from ranks import Context
from uccl_ep_core.errors import ArgumentError

EXPERTS, TOPK, HIDDEN, TOKENS, MOST = 12, 4, 64, 6, 8
Wrong = tuple[Callable[[], Any], list[str]]


def inputs(ctx: Context) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    made = cases.make_inputs(ctx.num_ranks, [TOKENS] * ctx.num_ranks, hidden=HIDDEN, experts=EXPERTS, topk=TOPK)
    assert made.weights is not None
    return made.xs[ctx.rank], made.ids[ctx.rank], made.weights[ctx.rank]


def dispatch(ctx: Context, buffer: Any, **changes: Any) -> Any:
    """A right dispatch but for ``changes``."""
    x, ids, w = inputs(ctx)
    layout = buffer.get_dispatch_layout(ids, EXPERTS)
    arguments = {
        "x": x, "topk_idx": ids, "topk_weights": w, "num_tokens_per_rank": layout[0], "is_token_in_rank": layout[3],
        "num_tokens_per_expert": layout[2], **changes,
    }  # fmt: skip
    return buffer.dispatch(**arguments)


def low_latency_dispatch(ctx: Context, buffer: Any, **changes: Any) -> Any:
    x, ids, _ = inputs(ctx)
    arguments = {
        "x": x, "topk_idx": ids, "num_max_dispatch_tokens_per_rank": MOST, "num_experts": EXPERTS, "use_fp8": False,
        **changes,
    }  # fmt: skip
    return buffer.low_latency_dispatch(**arguments)


# ---- high throughput ----


def experts_not_divisible(ctx: Context, buffer: Any) -> Wrong:
    n = ctx.num_ranks
    return lambda: buffer.get_dispatch_layout(inputs(ctx)[1], 4 * n + 1), [str(4 * n + 1), str(4 * n)]


def layout_of_int16(ctx: Context, buffer: Any) -> Wrong:
    return lambda: buffer.get_dispatch_layout(inputs(ctx)[1].short(), EXPERTS), ["int16", "int64"]


def expert_out_of_range(ctx: Context, buffer: Any) -> Wrong:
    ids = inputs(ctx)[1].clone()
    ids[2, 1] = EXPERTS
    return lambda: buffer.get_dispatch_layout(ids, EXPERTS), [str(EXPERTS)]


def expert_below_minus_one(ctx: Context, buffer: Any) -> Wrong:
    ids = inputs(ctx)[1].clone()
    ids[2, 1] = -2
    return lambda: buffer.get_dispatch_layout(ids, EXPERTS), ["-2", "-1"]


def sparse_tokens(ctx: Context, buffer: Any) -> Wrong:
    return lambda: dispatch(ctx, buffer, x=inputs(ctx)[0].to_sparse()), ["x is", "to_dense"]


def sparse_weights(ctx: Context, buffer: Any) -> Wrong:
    return lambda: dispatch(ctx, buffer, topk_weights=inputs(ctx)[2].to_sparse()), ["topk_weights", "to_dense"]


def sparse_index_of_layout(ctx: Context, buffer: Any) -> Wrong:
    return lambda: buffer.get_dispatch_layout(inputs(ctx)[1].to_sparse(), EXPERTS), ["topk_idx", "to_dense"]


def negative_experts(ctx: Context, buffer: Any) -> Wrong:
    n = ctx.num_ranks
    return lambda: buffer.get_dispatch_layout(inputs(ctx)[1], -1), [f"-1 experts on {n}", f"use {n}"]


def sparse_low_latency_tokens(ctx: Context, buffer: Any) -> Wrong:
    return lambda: low_latency_dispatch(ctx, buffer, x=inputs(ctx)[0].to_sparse()), ["x is", "to_dense"]


def index_of_int16(ctx: Context, buffer: Any) -> Wrong:
    return lambda: dispatch(ctx, buffer, topk_idx=inputs(ctx)[1].short()), ["int16", "int64"]


def index_rows(ctx: Context, buffer: Any) -> Wrong:
    return lambda: dispatch(ctx, buffer, topk_idx=inputs(ctx)[1][:-1]), ["topk_idx", str(TOKENS)]


def weights_shape(ctx: Context, buffer: Any) -> Wrong:
    return lambda: dispatch(ctx, buffer, topk_weights=inputs(ctx)[2][:, :-1]), ["topk_weights", str(TOPK)]


def weights_dtype(ctx: Context, buffer: Any) -> Wrong:
    return lambda: dispatch(ctx, buffer, topk_weights=inputs(ctx)[2].double()), ["topk_weights", "float32"]


def x_without_columns(ctx: Context, buffer: Any) -> Wrong:
    return lambda: dispatch(ctx, buffer, x=inputs(ctx)[0][:, :0]), ["x", "1"]


def x_one_dimension(ctx: Context, buffer: Any) -> Wrong:
    return lambda: dispatch(ctx, buffer, x=inputs(ctx)[0][:, 0]), ["x"]


def scales_rows(ctx: Context, buffer: Any) -> Wrong:
    x = inputs(ctx)[0].to(torch.float8_e4m3fn)
    return lambda: dispatch(ctx, buffer, x=(x, torch.ones(TOKENS - 1, 1))), ["scale", str(TOKENS)]


def nothing_says_where(ctx: Context, buffer: Any) -> Wrong:
    return lambda: buffer.dispatch(inputs(ctx)[0]), ["get_dispatch_layout", "handle"]


def combine_rows(ctx: Context, buffer: Any) -> Wrong:
    recv, _, _, _, handle, _ = dispatch(ctx, buffer)
    y = torch.zeros(recv.shape[0] + 1, HIDDEN, dtype=recv.dtype)
    return lambda: buffer.combine(y, handle), [str(recv.shape[0] + 1), str(recv.shape[0])]


def combine_of_bytes(ctx: Context, buffer: Any) -> Wrong:
    recv, _, _, _, handle, _ = dispatch(ctx, buffer)
    return lambda: buffer.combine(torch.zeros(recv.shape, dtype=torch.uint8), handle), ["uint8", "bfloat16"]


def bias_shape(ctx: Context, buffer: Any) -> Wrong:
    recv, _, _, _, handle, _ = dispatch(ctx, buffer)
    bias = torch.zeros(TOKENS, HIDDEN + 1, dtype=recv.dtype)
    return lambda: buffer.combine(recv, handle, bias=bias), ["bias", str(HIDDEN)]


def foreign_handle(ctx: Context, buffer: Any) -> Wrong:
    other = ctx.buffers.setdefault("other", None) or ctx.new_buffer()
    ctx.buffers["other"] = other
    recv, _, _, _, handle, _ = dispatch(ctx, other)
    return lambda: buffer.combine(recv, handle), ["buffer"]


def cached_rows(ctx: Context, buffer: Any) -> Wrong:
    x, handle = inputs(ctx)[0], dispatch(ctx, buffer)[4]
    return lambda: buffer.dispatch(x[:-1], handle=handle), [str(TOKENS)]


# ---- low latency ----


def ll_over_the_limit(ctx: Context, buffer: Any) -> Wrong:
    call = lambda: low_latency_dispatch(ctx, buffer, num_max_dispatch_tokens_per_rank=TOKENS - 1)  # noqa: E731
    return call, [str(TOKENS), str(TOKENS - 1)]


def ll_experts_not_divisible(ctx: Context, buffer: Any) -> Wrong:
    n = ctx.num_ranks
    return lambda: low_latency_dispatch(ctx, buffer, num_experts=4 * n + 1), [str(4 * n + 1), str(4 * n)]


def ll_index_of_int16(ctx: Context, buffer: Any) -> Wrong:
    return lambda: low_latency_dispatch(ctx, buffer, topk_idx=inputs(ctx)[1].short()), ["int16", "int64"]


def ll_index_rows(ctx: Context, buffer: Any) -> Wrong:
    return lambda: low_latency_dispatch(ctx, buffer, topk_idx=inputs(ctx)[1][:-1]), ["topk_idx", str(TOKENS)]


def ll_expert_out_of_range(ctx: Context, buffer: Any) -> Wrong:
    ids = inputs(ctx)[1].clone()
    ids[2, 1] = EXPERTS
    return lambda: low_latency_dispatch(ctx, buffer, topk_idx=ids), [str(EXPERTS)]


def ll_x_of_integers(ctx: Context, buffer: Any) -> Wrong:
    return lambda: low_latency_dispatch(ctx, buffer, x=inputs(ctx)[0].int()), ["int32", "bfloat16"]


def ll_combine_index_shape(ctx: Context, buffer: Any) -> Wrong:
    _, ids, w = inputs(ctx)
    recv, _, handle, _, _ = low_latency_dispatch(ctx, buffer)
    return lambda: buffer.low_latency_combine(recv, ids[:-1], w[:-1], handle), [str(TOKENS)]


def ll_combine_received_ids(ctx: Context, buffer: Any) -> Wrong:
    """Other ids than the ones dispatched with (another system summed silently wrong)."""
    _, ids, w = inputs(ctx)
    recv, _, handle, _, _ = low_latency_dispatch(ctx, buffer)
    return lambda: buffer.low_latency_combine(recv, ids.roll(1, 0), w, handle), ["topk_idx"]


def ll_combine_shape(ctx: Context, buffer: Any) -> Wrong:
    _, ids, w = inputs(ctx)
    recv, _, handle, _, _ = low_latency_dispatch(ctx, buffer)
    return lambda: buffer.low_latency_combine(recv[:, :-1], ids, w, handle), [str(ctx.num_ranks * MOST)]


def ll_combine_out(ctx: Context, buffer: Any) -> Wrong:
    _, ids, w = inputs(ctx)
    recv, _, handle, _, _ = low_latency_dispatch(ctx, buffer)
    out = torch.empty(TOKENS + 1, HIDDEN, dtype=recv.dtype)
    return lambda: buffer.low_latency_combine(recv, ids, w, handle, out=out), ["out", str(TOKENS)]


def ll_combine_weights_dtype(ctx: Context, buffer: Any) -> Wrong:
    _, ids, w = inputs(ctx)
    recv, _, handle, _, _ = low_latency_dispatch(ctx, buffer)
    return lambda: buffer.low_latency_combine(recv, ids, w.double(), handle), ["topk_weights", "float32"]


def ll_expired_handle(ctx: Context, buffer: Any) -> Wrong:
    _, ids, w = inputs(ctx)
    recv, _, handle, _, _ = low_latency_dispatch(ctx, buffer)
    y = recv.clone()
    for _ in range(2):
        low_latency_dispatch(ctx, buffer)
    return lambda: buffer.low_latency_combine(y, ids, w, handle), ["expired"]


def ll_foreign_handle(ctx: Context, buffer: Any) -> Wrong:
    _, ids, w = inputs(ctx)
    other = ctx.buffers.setdefault("other", None) or ctx.new_buffer()
    ctx.buffers["other"] = other
    recv, _, handle, _, _ = low_latency_dispatch(ctx, other)
    return lambda: buffer.low_latency_combine(recv, ids, w, handle), ["buffer"]


def _functions() -> dict[str, Callable[[Context, Any], Wrong]]:
    helpers = {"inputs", "dispatch", "low_latency_dispatch", "refused"}
    return {
        name: f
        for name, f in globals().items()
        if callable(f) and getattr(f, "__module__", "") == __name__ and name not in helpers and name[0] != "_"
    }


NAMES = sorted(_functions())


def refused(ctx: Context, who: int, wrong: str) -> str | None:
    """Rank ``who`` makes the wrong call; then all make right ones, which shows that nothing was sent."""
    buffer = ctx.buffer()
    call, words = _functions()[wrong](ctx, buffer)
    text = None
    if ctx.rank == who:
        try:
            call()
        except ArgumentError as error:
            text = str(error)
        else:
            raise AssertionError(f"{wrong} was accepted")
        missing = [word for word in words if word not in text]
        if missing:
            raise AssertionError(f"the error does not say {missing}: {text}")
    fault_cases.both_modes(ctx, tokens=[5 + r for r in range(ctx.num_ranks)], seed=21)
    return text
