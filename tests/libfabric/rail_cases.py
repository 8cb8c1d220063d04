"""Cases that rank processes run; see test_rails_in_use.py.

Dispatch and combine go on, every step bit for bit as the reference has it, while rails of one rank die under them.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from contextlib import suppress
from typing import Any

import torch.distributed as dist

import cases
import closed_form
from ranks import Context
from uccl_ep import Buffer
from uccl_ep_core.errors import PeerFailure

MOST_TOKENS, HIDDEN, EXPERTS = 64, 2048, 12
MANY_TOKENS = 600  # a rank's slots then go round several times, so that the loss finds writes under way


def step(ctx: Context, buffer: Any, number: int, many: bool) -> None:
    """Writes of both kinds: whole slots, which are cut over the rails, and single tokens, which are not."""
    tokens = closed_form.token_counts("rotate", ctx.num_ranks, number, MOST_TOKENS)
    if many:
        tokens = [MANY_TOKENS] * ctx.num_ranks
    shape = {"experts": EXPERTS, "hidden": HIDDEN, "topk": 4, "tokens": tokens, "seed": number, "buffer": buffer}
    if number % 2 and not many:
        cases.low_latency(ctx, most=MOST_TOKENS, **shape)
    else:
        cases.high_throughput(ctx, **shape)


def _port(transport: Any, lane: int, rail: int) -> int:
    """Where an endpoint of this rank listens: its name is a sockaddr_in."""
    name = transport._endpoint(lane, rail).name
    return int.from_bytes(name[2:4], "big")


def cut_connections(ports: set[int]) -> int:
    """Shut down every connection of this process that begins or ends at one of the ports; how many there were."""
    cut = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile; a listening socket has no peer
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.family == socket.AF_INET and {found.getsockname()[1], found.getpeername()[1]} & ports:
                    found.shutdown(socket.SHUT_RDWR)
                    cut += 1
    return cut


def _kill(transport: Any, how: str, rails: list[int], ports: set[int]) -> None:
    from uccl_ep_libfabric.library import native

    if how == "connections":
        assert cut_connections(ports) > 0, f"no connection at ports {sorted(ports)}"
        return
    for lane in range(transport.capabilities.lanes):
        for rail in rails:
            native().lib.fab_break_rail(transport.native_context, lane, rail)


class _Killer(threading.Thread):
    """Kills rails as soon as data of this rank, cut over the rails, are under way."""

    def __init__(self, transport: Any, *arguments: Any) -> None:
        super().__init__(daemon=True)
        self.transport, self.arguments = transport, arguments
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            end, before = time.monotonic() + 20.0, self.transport.statistics()
            while time.monotonic() < end:
                now = self.transport.statistics()
                under_way = now["posted"] - now["completed"] - now["failed"]
                if now["split"] > before["split"] and under_way > 0:
                    _kill(self.transport, *self.arguments)
                    return
            raise AssertionError("no data were under way in 20 s")
        except BaseException as error:
            self.error = error


def lost_rails(ctx: Context, *, who: int, how: str, rails: list[int], steps: int, after: int) -> dict[str, Any]:
    """``steps`` steps; in that with number ``after`` the ``rails`` of rank ``who`` die.

    ``how``: "endpoint", which the rank itself gives up, or "connections", whose sockets are shut down.
    """
    nbytes = Buffer.get_low_latency_rdma_size_hint(MOST_TOKENS, HIDDEN, ctx.num_ranks, EXPERTS)
    buffer = ctx.new_buffer(num_rdma_bytes=nbytes)
    transport = buffer._communicator.transport
    lanes = range(transport.capabilities.lanes)
    ports: list[Any] = [None] * ctx.num_ranks
    dist.all_gather_object(ports, [_port(transport, lane, r) for lane in lanes for r in rails], group=ctx.group)
    killer = _Killer(transport, how, rails, {port for of_rank in ports for port in of_rank})
    begin, number, error = time.monotonic(), 0, None
    try:
        for number in range(steps):
            if number == after:
                begin = time.monotonic()
                if ctx.rank == who:
                    killer.start()
            step(ctx, buffer, number, many=number == after)
    except PeerFailure as failure:
        error = {"rank": failure.rank, "reason": failure.reason, "reporter": failure.reporter,
                 "message": str(failure)}  # fmt: skip
    seconds = time.monotonic() - begin
    if ctx.rank == who:
        killer.join()
    statistics = transport.statistics()
    ctx.barrier()  # so that nobody's end is among the losses that another counts
    buffer.destroy()
    if killer.error is not None:
        raise killer.error
    return {"steps": number + (error is None), "error": error, "seconds": seconds,
            **{name: statistics[name] for name in ("split", "moved", "rails_lost", "failed")}}  # fmt: skip
