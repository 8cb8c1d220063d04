"""The table itself, bytes at their place, one completion each, and nothing left behind."""

from __future__ import annotations

import dataclasses
import gc
import json
import os

from uccl_ep_core.transport import Memory

from .. import abi
from ..context import Context, Windows
from ..driver import PromiseBroken
from .check import OUTBOX, Check, make_messages

CYCLES = 100


def table(context: Context) -> str:
    """The ops table is whole and the capabilities make sense; returns them as JSON for the parent."""
    driver = context.open()
    ops, claims = driver.ops, context.capabilities
    problems = []
    if ops.magic != abi.MAGIC:
        problems.append(f"native_ops.magic is {ops.magic:#x}, not {abi.MAGIC:#x}")
    if ops.size < abi.OLDEST_SIZE:
        problems.append(f"native_ops.size is {ops.size}, less than {abi.OLDEST_SIZE}")
    required = ["post_writes", "poll_completions", "last_error"]
    required += ["poll_arrivals"] if claims.imm_bits else []
    required += ["post_signals"] if claims.native_signal != "none" else []
    required += ["peer_state"] if claims.peer_failure == "event" else []
    problems += [
        f"native_ops.{name} is NULL but the capabilities need it" for name in required if not getattr(ops, name)
    ]
    if claims.imm_bits not in (0, 32, 64):
        problems.append(f"imm_bits is {claims.imm_bits}, none of 0, 32, 64")
    if claims.imm_after_payload and not claims.imm_bits:
        problems.append("imm_after_payload without immediates")
    if claims.signal_order and claims.native_signal == "none":
        problems.append("signal_order without native_signal")
    if claims.alignment < 1 or claims.alignment & (claims.alignment - 1):
        problems.append(f"alignment is {claims.alignment}, no power of two")
    for name in ("max_message", "send_queue_depth", "lanes"):
        if getattr(claims, name) < 1:
            problems.append(f"{name} is {getattr(claims, name)}, less than 1")
    if problems:
        raise PromiseBroken("; ".join(problems))
    return json.dumps(dataclasses.asdict(claims))


def placement(context: Context) -> None:
    """Each rank writes to the other; every byte at its place, no byte beside it, peers alive all the while."""
    driver = context.open()
    assert context.windows is not None
    by_source = [make_messages(context, 100, source=source == context.rank) for source in range(context.size)]
    target = (context.rank + 1) % context.size
    writes = [context.write(target, m.remote_offset, m.local_offset, m.nbytes) for m in by_source[context.rank]]
    context.barrier("filled")
    driver.post(0, writes)
    driver.wait_all(context.limit_s, "writes")
    inbox = context.windows.views[abi.DATA]
    messages = by_source[(context.rank - 1) % context.size]
    if not context.eventually(lambda: all(message.is_at(inbox) for message in messages)):
        late = next(message for message in messages if not message.is_at(inbox))
        raise PromiseBroken(
            f"write {late.index} of {late.nbytes} bytes never arrived whole: missing is {late.what_is_missing(inbox)}"
        )
    expected = bytearray(OUTBOX)
    for message in messages:
        expected[message.remote_offset : message.remote_offset + message.nbytes] = message.content
    seen = bytes(inbox[:OUTBOX])
    if seen != expected:
        at = next(at for at in range(OUTBOX) if seen[at] != expected[at])
        raise PromiseBroken(f"byte {at} of the window changed although no write covers it")
    if driver.peer_state(target) not in (None, abi.PEER_ALIVE):
        raise PromiseBroken(f"peer_state calls rank {target} dead while it answers")


def one_completion(context: Context) -> None:
    """Every accepted write gives exactly one completion; the driver's ledger judges each."""
    driver = context.open()
    if context.rank == 0:
        nbytes = context.rounded(8)
        for _ in range(4):
            slots = [context.rng.randrange(1024) * nbytes for _ in range(100)]
            driver.post(0, [context.write(1, slot, OUTBOX + slot, nbytes) for slot in slots])
            driver.wait_all(context.limit_s, "writes")
        context.linger(0.05)
    context.barrier("completed")


def _census() -> dict[str, int]:
    gc.collect()
    with open("/proc/self/maps") as maps:
        mappings = sum(1 for _ in maps)
    return {
        "file descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "memory mappings": mappings,
        "registered regions (Memory objects)": sum(isinstance(found, Memory) for found in gc.get_objects()),
    }


def nothing_left(context: Context) -> str:
    """Open, register, connect, write once, close; a hundred times over."""
    before: dict[str, int] = {}
    for cycle in range(CYCLES + 8):
        if cycle == 8:  # caches have settled
            before = _census()
        transport = context.transport = context.new_transport()
        context.capabilities = transport.capabilities
        windows = context.windows = Windows(64 << 10, 4096)
        for memory in windows.memories():
            transport.register(memory)
        context.connect(transport, 1)
        assert context.driver is not None
        nbytes = context.rounded(64)
        context.barrier("connected")
        if context.rank == 0:
            context.driver.post(0, [context.write(1, 0, 32 << 10, nbytes)])
            context.driver.wait_all(context.limit_s, "writes")
        context.barrier("written")
        del transport, windows
        context.close()
    after = _census()
    grown = [f"{after[kind] - before[kind]} {kind}" for kind in before if after[kind] - before[kind] > CYCLES // 4]
    if grown:
        raise PromiseBroken(f"{CYCLES} times open and close left {' and '.join(grown)} behind")
    return f"{CYCLES} times open and close"


CHECKS = (
    Check("table", "the ops table is whole, the capabilities make sense", table, seeded=False),
    Check("placement", "every byte lands at its place, none beside it", placement),
    Check("completions", "every accepted write completes exactly once", one_completion),
    Check("leaks", "close gives back regions, descriptors and threads", nothing_left, seeded=False),
)
