"""Cases that rank processes run; see test_dispatch_combine.py.

A NIC pins all of a registered window, so these buffers are only as large as the cases need.
"""

from __future__ import annotations

import json
from typing import Any

import cases
from ranks import Context
from uccl_ep import Buffer

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
