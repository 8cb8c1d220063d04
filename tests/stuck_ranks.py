"""A rank whose transport stops returning when its peer is killed, as libfabric 1.17 over shared memory may.

``python stuck_ranks.py RANK STORE FUNCTION``: of two ranks, rank 1 is killed, and rank 0's proxy then never comes back
from ``FUNCTION`` of the transport. Rank 0 prints what it met, as JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from typing import Any

import torch.distributed as dist

import cases
from ranks import Context
from uccl_ep import Buffer
from uccl_ep_core.conformance import abi
from uccl_ep_core.errors import EPError, PeerFailure
from uccl_ep_shm import ShmTransport

stuck = threading.Event()  # from now on the function does not return
for_ever = threading.Event()


class StuckTable:
    """The table of an shm endpoint, one function of which stays away once `stuck` is set."""

    def __init__(self, address: int, function: str) -> None:
        inner = abi.Ops.from_address(address)
        original = getattr(inner, function)

        def call(*arguments: Any) -> int:
            if stuck.is_set():
                for_ever.wait()
            return int(original(inner.context, *arguments[1:]))

        self.ops = abi.Ops.from_buffer_copy(inner)
        self.callback = type(original)(call)
        setattr(self.ops, function, self.callback)
        self.address = ctypes.addressof(self.ops)


def main(rank: int, store: str, function: str) -> None:
    os.environ.update(UCCL_EP_TRANSPORT="shm", UCCL_EP_DOMAIN_SIZE="1", UCCL_EP_TIMEOUT_S="20", UCCL_EP_PLAN="counted")
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    tables: list[StuckTable] = []
    original = ShmTransport.native_ops.fget  # type: ignore[attr-defined]

    def native_ops(transport: ShmTransport) -> int:
        tables.append(StuckTable(original(transport), function))
        return tables[-1].address

    ShmTransport.native_ops = property(native_ops)  # type: ignore[assignment, method-assign]
    ctx = Context(rank, 2, dist.group.WORLD, 0, {}, {})
    buffer = Buffer(dist.group.WORLD)
    cases.high_throughput(ctx, tokens=[20, 30], buffer=buffer)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    stuck.set()
    report: dict[str, Any] = {}
    begin = time.monotonic()
    try:
        cases.high_throughput(ctx, tokens=[20, 30], buffer=buffer)
    except PeerFailure as failure:
        report.update(culprit=failure.rank, reason=failure.reason, raised_s=time.monotonic() - begin)
    begin = time.monotonic()
    try:
        buffer.destroy()
    except EPError as error:
        report.update(destroy=str(error), destroyed_s=time.monotonic() - begin)
    buffer.destroy()  # has nothing left to say
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
