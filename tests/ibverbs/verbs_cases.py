"""Cases that rank processes run; see test_dispatch_combine.py.

A NIC pins all of a registered window, so these buffers are only as large as the cases need.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

import cases
import closed_form
from ranks import Context
from uccl_ep import Buffer
from uccl_ep_core.errors import PeerFailure

MOST_TOKENS, MOST_HIDDEN, MOST_EXPERTS = 64, 1024, 64


def _buffer(ctx: Context) -> Any:
    nbytes = Buffer.get_low_latency_rdma_size_hint(MOST_TOKENS, MOST_HIDDEN, ctx.num_ranks, MOST_EXPERTS)
    return ctx.buffer(num_rdma_bytes=nbytes)


def high_throughput(ctx: Context, **arguments: Any) -> None:
    """`cases.high_throughput` on a small buffer."""
    cases.high_throughput(ctx, buffer=_buffer(ctx), **arguments)


def low_latency(ctx: Context, **arguments: Any) -> None:
    """`cases.low_latency` on a small buffer."""
    cases.low_latency(ctx, buffer=_buffer(ctx), **arguments)


def describe(ctx: Context) -> str:
    """What the library says it uses."""
    return json.dumps(_buffer(ctx).describe(), default=str)


def _rank_0_says(ctx: Context, yes: bool) -> bool:
    word = torch.tensor([int(yes)])
    dist.broadcast(word, 0, group=ctx.group)
    return bool(word.item())


def _step(ctx: Context, buffer: Any, number: int) -> None:
    tokens = closed_form.token_counts("rotate", ctx.num_ranks, number, 16)
    shape = {"experts": 12, "hidden": 256, "topk": 4, "tokens": tokens, "seed": number, "buffer": buffer}
    if number % 3:
        cases.low_latency(ctx, most=16, **shape)
    else:
        cases.high_throughput(ctx, **shape)


@contextmanager
def _breaking_queue_pairs(transport: Any, seed: int, pause_s: float) -> Iterator[list[int]]:
    """Meanwhile one queue pair of this rank after another goes into its error state; counts them."""
    stop, broken, draw = threading.Event(), [0], random.Random(seed)

    def work() -> None:
        while not stop.wait(pause_s * draw.uniform(0.5, 1.5)):
            pair = draw.choice(transport._pairs)
            # Now and then one that is being replaced, but not always: on a busy machine the run would never go on.
            if transport._plane.stage(pair.lane, pair.peer).name == "UP" or draw.random() < 0.2:
                pair.fail()
                broken[0] += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield broken
    finally:
        stop.set()
        thread.join()


def broken_lanes(ctx: Context, *, seconds: float, who: list[int]) -> dict[str, int]:
    """Dispatch and combine, bit for bit, while queue pairs of the ranks in ``who`` fail; what that cost.

    Rank 0 decides when it is enough: after ``seconds``, so that fast and slow machines see as many errors.
    """
    buffer = _buffer(ctx)
    transport = buffer._communicator.transport
    before = [transport.statistics(lane)["renewals"] for lane in range(transport._lanes)]
    pause_s = 0.3 if ctx.rank in who else 1e6
    number, start = 0, time.monotonic()
    with _breaking_queue_pairs(transport, ctx.rank, pause_s) as broken:
        while _rank_0_says(ctx, time.monotonic() - start < seconds):
            for _ in range(6):
                _step(ctx, buffer, number)
                number += 1
    _step(ctx, buffer, number)
    ctx.barrier()
    after = [transport.statistics(lane)["renewals"] for lane in range(transport._lanes)]
    engine = buffer.stats()["engine"]
    return {
        "steps": number,
        "broken": broken[0],
        "replaced": sum(after) - sum(before),
        "generations": engine["lane_generations"],
        "retried": engine["retried"],
    }


def broken_for_good(ctx: Context, *, who: int) -> str:
    """One queue pair of rank ``who`` fails where it cannot be replaced; what this rank is told."""
    buffer = _buffer(ctx)
    _step(ctx, buffer, 0)
    ctx.barrier()
    if ctx.rank == who:
        buffer._communicator.transport._pairs[0].fail()
    number = 1
    try:
        while True:
            _step(ctx, buffer, number)
            number += 1
    except PeerFailure as failure:
        return str(failure)
    finally:
        buffer.destroy()


def memory_taken_away(ctx: Context, *, who: int) -> str:
    """Rank ``who`` withdraws the registration of its windows: no new queue pair mends that."""
    buffer = _buffer(ctx)
    _step(ctx, buffer, 0)
    ctx.barrier()
    if ctx.rank == who:
        for rail in buffer._communicator.transport._rails:
            for region in rail._regions:
                region.close()
    number = 1
    try:
        while True:
            _step(ctx, buffer, number)
            number += 1
    except PeerFailure as failure:
        return str(failure)
    finally:
        buffer.destroy()
