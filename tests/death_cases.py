"""What the ranks do in the tests of ranks that die or are late."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import cases
import closed_form
from fault_cases import finish, start
from life_cases import same_as_before
from ranks import Context
from uccl_ep_core.errors import EPError, PeerFailure


def failure_of(call: Callable[[], Any]) -> dict[str, Any]:
    started = time.monotonic()
    try:
        call()
    except PeerFailure as error:
        return {**{k: getattr(error, k) for k in ("rank", "reason", "phase", "reporter", "expected", "seen",
                                                  "operation", "elapsed_s")},
                "message": str(error), "after_s": time.monotonic() - started}  # fmt: skip
    raise AssertionError("a rank is gone and nothing was raised")


def one_rank_dies(ctx: Context, who: int, when: str, mode: str) -> dict[str, Any] | None:
    """``when``: "before", "inside" or "after" a dispatch. The survivors' errors are returned."""
    buffer = ctx.new_buffer()
    tokens = [40 + r for r in range(ctx.num_ranks)]

    def pair(seed: int, count: list[int] = tokens) -> None:
        if mode == "low_latency":
            cases.low_latency(ctx, tokens=count, most=64, seed=seed, buffer=buffer)
        else:
            cases.high_throughput(ctx, tokens=count, seed=seed, buffer=buffer)

    def until_it_fails() -> None:
        for seed in range(100_000):
            pair(seed % 50)

    pair(1)
    ctx.barrier()
    if ctx.rank == who:
        if when == "before":
            os.kill(os.getpid(), 9)
        if when == "inside":  # somewhere in a stream of pairs
            subprocess.Popen(["/bin/sh", "-c", f"sleep 0.3; kill -9 {os.getpid()}"])
            until_it_fails()
        if when == "after":
            start(buffer, ctx, tokens, seed=2)
            os.kill(os.getpid(), 9)
    if when == "after":
        report = failure_of(
            lambda: (finish(buffer, ctx, tokens, start(buffer, ctx, tokens, seed=2), seed=2), until_it_fails())
        )
    else:
        report = failure_of(until_it_fails)
    buffer.destroy()
    return report


def killed_inside_a_long_dispatch(ctx: Context, who: int, rows: int) -> dict[str, Any] | None:
    """One dispatch of so many rows that the kill lands in the middle of it.

    The survivors' errors are returned, with what `destroy` raised ("" where it raised nothing) and everybody's pid.
    """
    buffer = ctx.new_buffer()
    pids: list[Any] = [None] * ctx.num_ranks
    dist.all_gather_object(pids, os.getpid(), group=ctx.group)
    experts = closed_form.few_experts(ctx.num_ranks)
    x = closed_form.rows(rows, 4096, rank=ctx.rank, seed=1, dtype=torch.bfloat16)
    ids = closed_form.topk_idx("random", rows, 4, experts, ctx.num_ranks, rank=ctx.rank, seed=1)
    layout = buffer.get_dispatch_layout(ids, experts)
    cases.high_throughput(ctx, tokens=[3] * ctx.num_ranks, buffer=buffer)
    ctx.barrier()
    if ctx.rank == who:
        subprocess.Popen(["/bin/sh", "-c", f"sleep 0.03; kill -9 {os.getpid()}"])

    def forever() -> None:
        while True:
            buffer.dispatch(x, topk_idx=ids, num_tokens_per_rank=layout[0], is_token_in_rank=layout[3],
                            num_tokens_per_expert=layout[2])  # fmt: skip

    report = {**failure_of(forever), "pids": pids, "destroy": ""}
    try:
        buffer.destroy()
    except EPError as error:
        report["destroy"] = str(error)
    return report


def late_rank(ctx: Context, who: int, delay_s: float) -> None:
    buffer = ctx.new_buffer()
    for seed in range(2):
        if ctx.rank == who:
            time.sleep(delay_s)  # this is the lateness under test
        cases.high_throughput(ctx, tokens=[6] * ctx.num_ranks, seed=seed, buffer=buffer)
        if ctx.rank == who:
            time.sleep(delay_s)
        cases.low_latency(ctx, tokens=[6] * ctx.num_ranks, most=8, seed=seed, buffer=buffer)
    buffer.destroy()


def too_late_rank(ctx: Context, who: int, mode: str) -> dict[str, Any]:
    """Rank ``who`` does not call at all; the others' wait ends, and so does its own next call."""
    buffer = ctx.new_buffer()
    cases.high_throughput(ctx, tokens=[6] * ctx.num_ranks, buffer=buffer)
    cases.low_latency(ctx, tokens=[6] * ctx.num_ranks, most=8, buffer=buffer)
    x, ids = torch.ones(ctx.num_ranks, 64), torch.arange(2 * ctx.num_ranks).view(-1, 2)  # a row to every rank
    layout = buffer.get_dispatch_layout(ids, 2 * ctx.num_ranks)
    handle = buffer.dispatch(x, topk_idx=ids, is_token_in_rank=layout[3], num_tokens_per_expert=layout[2])[4]

    def call() -> None:
        if mode == "cached_dispatch":
            buffer.dispatch(x, handle=handle)
        elif mode == "low_latency":
            cases.low_latency(ctx, tokens=[7] * ctx.num_ranks, most=8, buffer=buffer)
        else:
            cases.high_throughput(ctx, tokens=[7] * ctx.num_ranks, buffer=buffer)

    if ctx.rank != who:
        report = failure_of(call)
        ctx.barrier()
    else:
        ctx.barrier()  # the others have given up
        report = failure_of(call)
    started = time.monotonic()
    buffer.destroy()
    report["destroy_s"] = time.monotonic() - started
    ctx.barrier()
    same_as_before(ctx, {})  # the processes and the group are still good
    return report
