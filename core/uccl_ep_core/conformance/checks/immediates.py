"""imm_bits and imm_after_payload, and arrivals that nobody fetches for a while."""

from __future__ import annotations

import time
from collections import Counter

from .. import abi
from ..context import Context
from ..driver import PromiseBroken
from .check import OUTBOX, Check, make_messages

ROUNDS = 6
BATCH = 24
BACKLOG = 2048


def _limits(bits: int) -> list[int]:
    powers = [1 << at for at in range(bits)]
    return [0, *powers, *(power - 1 for power in powers), (1 << bits) - 1]


def imm_bits(context: Context) -> str:
    """Both ranks send the limits of the width and random values, with and without payload."""
    driver = context.open()
    bits, target = context.capabilities.imm_bits, 1 - context.rank
    nbytes = context.rounded(8)
    values = _limits(bits) + [context.rng.getrandbits(bits) for _ in range(64)]
    # "low imm_bits bits travel": whatever a caller leaves above them must not come through.
    garbage = context.rng.getrandbits(64 - bits) << bits if bits < 64 else 0
    writes = []
    for index, value in enumerate(values):
        size = nbytes if index % 2 else 0
        writes.append(context.write(target, index * nbytes, OUTBOX + index * nbytes, size, immediate=value | garbage))
    driver.post(0, writes, label="write with immediate")
    driver.wait_all(context.limit_s, "writes with immediate")
    context.eventually(lambda: len(driver.arrived) >= len(values))
    context.linger(0.02)
    context.barrier("arrived")
    got, wanted = Counter(value for value, _ in driver.arrived), Counter(values)
    if got != wanted:
        lost, strange = list((wanted - got).elements()), list((got - wanted).elements())
        cut = next(
            (value for value in lost if any(value & mask in strange for mask in (0xFF, 0xFFFF, 0xFFFFFFFF))), None
        )
        example = f", as if {cut:#x} had been truncated" if cut is not None else ""
        raise PromiseBroken(
            f"imm_bits: of {len(values)} immediates {len(lost)} never came ({[hex(v) for v in lost[:3]]}) and "
            f"{len(strange)} came that were not sent or came again ({[hex(v) for v in strange[:3]]}){example}"
        )
    strangers = {peer for _, peer in driver.arrived} - {target, abi.PEER_UNKNOWN}
    if strangers:
        raise PromiseBroken(f"imm_bits: arrivals from rank {target} name rank {strangers.pop()} as their sender")
    return f"{bits} bits"


def imm_after_payload(context: Context) -> None:
    """At each arrival the payload must be there, also while the sender stands still in the middle of a batch."""
    context.open()
    for number in range(ROUNDS):
        _imm_round(context, number * BATCH)


def _imm_round(context: Context, base: int) -> None:
    driver = context.driver
    assert driver is not None
    inbox = context.peers[context.rank][abi.DATA]
    messages = make_messages(context, BATCH, largest=24 << 10, source=context.rank == 0)
    stops = [context.rng.randint(0, 30) for _ in range(4)]
    seen: set[int] = set()

    def arrived(immediate: int, peer: int) -> None:
        index = immediate - base
        if not 0 <= index < BATCH or index in seen:
            raise PromiseBroken(f"exactly_once: immediate {immediate} arrived again, or was never sent")
        seen.add(index)
        message = messages[index]
        if not message.is_at(inbox):
            raise PromiseBroken(
                f"imm_after_payload: the immediate of a write of {message.nbytes} bytes arrived before its "
                f"payload; missing was {message.what_is_missing(inbox)}"
            )

    # Set before rank 0 may post, and only on the rank that messages go to.
    driver.on_arrival = arrived if context.rank == 1 else None
    context.barrier("filled")
    if context.rank == 0:
        writes = [
            context.write(1, m.remote_offset, m.local_offset, m.nbytes, immediate=base + m.index) for m in messages
        ]
        driver.post(0, writes, label="write with immediate")
    for stop in stops:
        if context.rank == 0:
            for _ in range(stop):
                driver.progress()
        context.barrier("stand still", progress=context.rank == 1)
        if context.rank == 1:
            for _ in range(20):
                driver.poll_arrivals(0)
        context.barrier("go on", progress=context.rank == 1)
    if context.rank == 0:
        driver.wait_all(context.limit_s, "writes with immediate")
    elif not context.eventually(lambda: len(seen) == BATCH):
        raise PromiseBroken(f"imm_bits: {BATCH - len(seen)} of {BATCH} immediates never arrived")
    context.barrier("batch done")


def backlog(context: Context) -> str:
    """The receiver fetches nothing for a while; then everything accepted must still arrive."""
    driver = context.open()
    wanted = min(context.capabilities.remote_queue_depth or BACKLOG, BACKLOG)
    accepted = 0
    if context.rank == 0:
        writes = [context.write(1, 0, 0, 0, immediate=index) for index in range(wanted)]
        end = time.monotonic() + 1.0
        while accepted < wanted and time.monotonic() < end:
            took = driver.post_once(0, writes[accepted : accepted + 64], "immediate")
            if took < 0:
                raise PromiseBroken(f"post failed while the receiver was busy: {driver.last_error()!r}")
            accepted += took
            driver.poll(0)
    accepted = context.exchange("posted", accepted, progress=context.rank == 0)[0]
    if context.rank == 0:
        driver.wait_all(context.limit_s, "immediates")
    elif not context.eventually(lambda: len(driver.arrived) >= accepted):
        raise PromiseBroken(
            f"of {accepted} immediates sent while the receiver did not poll, {accepted - len(driver.arrived)} never "
            f"arrived (remote_queue_depth is {context.capabilities.remote_queue_depth})"
        )
    context.barrier("fetched")
    return f"{accepted} waiting"


CHECKS = (
    Check(
        "imm_bits",
        "immediates arrive at full width, once, with and without payload",
        imm_bits,
        lambda c: c.imm_bits > 0,
    ),
    Check(
        "imm_after_payload",
        "the payload is visible when its immediate is",
        imm_after_payload,
        lambda c: c.imm_after_payload,
    ),
    Check("remote_queue_depth", "arrivals wait for a busy receiver", backlog, lambda c: c.imm_bits > 0, seeded=False),
)
