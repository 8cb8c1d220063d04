"""What the ranks do in the tests of dispatch and combine over the simulator."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import cases
import closed_form
from ranks import Context
from uccl_ep_core.errors import CapabilityError, PeerFailure

WINDOW_BYTES = 8 << 20  # low-latency memory of a case's buffer: hidden of 128 and 32 tokens are the most here

# One entry a feature; hidden is at most 128 and a rank has at most 32 tokens.
HIGH_THROUGHPUT: list[dict[str, Any]] = [
    {"hidden": 128, "topk": 4, "dtype": "bf16", "bias": 1},
    {"hidden": 100, "topk": 2, "dtype": "fp32", "weights": False},
    {"hidden": 128, "topk": 6, "dtype": "fp8", "cached": True},
    {"hidden": 64, "topk": 1, "dtype": "fp16", "routing": "one_rank", "bias": 2},
    {"hidden": 64, "topk": 4, "index": "int32", "alignment": 128},
    {"hidden": 64, "topk": 4, "worst": True},
    {"hidden": 64, "topk": 4, "stream": "async"},
    {"hidden": 64, "topk": 4, "stream": "full", "contiguous": False},
]
LOW_LATENCY: list[dict[str, Any]] = [
    {"hidden": 128, "topk": 4},
    {"hidden": 128, "topk": 2, "cast": "fp8"},
    {"hidden": 128, "topk": 2, "cast": "ue8m0", "hook": False},
    {"hidden": 64, "topk": 6, "zero_copy": True},
    {"hidden": 64, "topk": 4, "out": True, "index": "int32"},
    {"hidden": 64, "topk": 1, "routing": "one_rank"},
]
EXPERTS = 12


def _tokens(ctx: Context, seed: int) -> list[int]:
    return closed_form.token_counts("rotate", ctx.num_ranks, seed, 32)


def _one_of_each(ctx: Context, buffer: Any, seed: int) -> None:
    for step, feature in enumerate(HIGH_THROUGHPUT):
        cases.high_throughput(
            ctx, tokens=_tokens(ctx, seed + step), experts=EXPERTS, seed=seed + step, buffer=buffer, **feature
        )
    for step, feature in enumerate(LOW_LATENCY):
        cases.low_latency(
            ctx, most=32, tokens=_tokens(ctx, seed + step), experts=EXPERTS, seed=seed + step, buffer=buffer, **feature
        )


def _what_happened(buffer: Any) -> dict[str, Any]:
    """The plan in force, what the proxies did, and what the simulator did to them."""
    communicator = buffer._communicator
    return {
        "plan": buffer.describe()["plan"]["name"],
        "engine": buffer.stats()["engine"],
        "sim": dict(communicator.transport.statistics),
    }


def every_feature(ctx: Context, *, seed: int) -> dict[str, Any]:
    """One case a feature in both modes, bit for bit."""
    buffer = ctx.new_buffer(num_rdma_bytes=WINDOW_BYTES)
    try:
        _one_of_each(ctx, buffer, seed)
        ctx.barrier()
        return _what_happened(buffer)
    finally:
        buffer.destroy()


def trusting(ctx: Context, *, seed: int) -> None:
    """`every_feature` with the choice of the plan taken out: any plan on any device."""
    with mock.patch("uccl_ep_core.ordering.missing_promises", return_value=[]):
        every_feature(ctx, seed=seed)


def steps(ctx: Context, *, count: int, seed: int) -> dict[str, Any]:
    """``count`` steps, a dispatch and a combine each, of changing shape, checked bit for bit."""
    buffer = ctx.new_buffer(num_rdma_bytes=WINDOW_BYTES)
    try:
        for step in range(count):
            tokens = closed_form.token_counts("rotate", ctx.num_ranks, seed + step, 8)
            if step % 2:
                cases.low_latency(ctx, most=32, tokens=tokens, experts=EXPERTS, hidden=64, seed=step, buffer=buffer)
            else:
                cases.high_throughput(ctx, tokens=tokens, experts=EXPERTS, hidden=64, seed=step, buffer=buffer)
        ctx.barrier()
        return _what_happened(buffer)
    finally:
        buffer.destroy()


def refused(ctx: Context) -> str:
    """The words of the refusal at connect."""
    try:
        buffer = ctx.new_buffer(num_rdma_bytes=WINDOW_BYTES)
    except CapabilityError as error:
        return str(error)
    buffer.destroy()
    raise AssertionError("a buffer was made over a transport that keeps no promise")


def until_it_fails(ctx: Context, *, limit_s: float) -> dict[str, Any]:
    """Steps until an exception, and what it says."""
    buffer = ctx.new_buffer(num_rdma_bytes=WINDOW_BYTES)
    begin = time.monotonic()
    try:
        while time.monotonic() - begin < limit_s:
            cases.low_latency(ctx, most=32, tokens=[8] * ctx.num_ranks, experts=EXPERTS, hidden=64, buffer=buffer)
    except PeerFailure as failure:
        return {"rank": failure.rank, "reason": failure.reason}
    finally:
        buffer.destroy()
    raise AssertionError(f"no failure within {limit_s} s")
