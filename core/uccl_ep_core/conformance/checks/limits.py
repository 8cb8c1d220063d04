"""Sizes, alignment, bounds, the send queue, lanes, and that no call blocks."""

from __future__ import annotations

import statistics
import time

from .. import abi
from ..context import Context
from ..driver import PromiseBroken, message_of
from .check import OUTBOX, Check

LARGEST_TESTED = 64 << 20  # bytes; beyond this the windows of the kit would not fit small machines
BLOCKING_S = 0.005  # median of a call that must not block; a loaded machine deschedules single calls, not most
HANGING_S = 2.0  # one call


def _outcome(context: Context, write: abi.Write) -> str | None:
    """How a bad write was refused, or None where it was accepted and completed as if it were good."""
    driver = context.driver
    assert driver is not None
    try:
        end = time.monotonic() + context.limit_s
        while (accepted := driver.post_once(0, [write], "bad write")) == 0:
            driver.progress()
            if time.monotonic() > end:
                return "never accepted"
        if accepted < 0:
            return message_of(accepted)
        posted = driver.ledger[max(driver.ledger)]
        if context.eventually(lambda: posted.status is not None):
            context.linger(0.05)  # a write that completed before its placement can only break the lane afterwards
    except PromiseBroken as lane_broken:
        return str(lane_broken)
    if posted.status is None:
        raise PromiseBroken("a bad write was accepted and never completed, not even with an error")
    return message_of(posted.status) if posted.status else None


def max_message(context: Context) -> str:
    """The largest write lands whole; a larger one is refused."""
    claimed = context.new_transport()
    largest, alignment = claimed.capabilities.max_message, claimed.capabilities.alignment
    claimed.close()
    tested = min(largest, LARGEST_TESTED) // alignment * alignment
    beside = context.rounded(4096) + alignment
    source = tested + 2 * beside
    driver = context.open(data_bytes=(2 * source + 4095) // 4096 * 4096)
    target = context.peers[1][abi.DATA]
    content = context.rng.randbytes(tested)
    if context.rank == 0:
        assert context.windows is not None
        context.windows.views[abi.DATA][source : source + tested] = content
        driver.post(0, [context.write(1, 0, source, tested)])
        driver.wait_all(context.limit_s, f"writes of {tested} bytes")
    if not context.eventually(lambda: target[:tested] == content):
        seen = bytes(target[:tested])
        first = next(at for at in range(tested) if seen[at] != content[at])
        raise PromiseBroken(
            f"max_message: a write of {tested} bytes is not at the target from byte {first} on, though it completed"
        )
    if any(target[tested : tested + beside]):
        raise PromiseBroken(f"max_message: a write of {tested} bytes touched bytes behind its end")
    context.barrier("largest seen")
    over = context.write(1, 0, source, tested + alignment)
    if context.rank == 0 and tested == largest // alignment * alignment and _outcome(context, over) is None:
        raise PromiseBroken(
            f"max_message: a write of {tested + alignment} bytes was accepted and completed; "
            f"the limit is {largest}, so post must refuse it"
        )
    context.barrier("larger refused")
    return f"up to {tested} bytes"


def alignment(context: Context) -> str:
    """Densely packed little writes at every offset the alignment allows; neighbours stay."""
    driver = context.open()
    unit = context.capabilities.alignment
    sizes = [context.rng.randint(1, 17) * unit for _ in range(150)]
    inbox = context.peers[1][abi.DATA]
    content = context.rng.randbytes(sum(sizes) + 2 * unit)
    expected = bytearray(b"\xee" * len(content))
    offset, writes = unit, []
    for index, size in enumerate(sizes):
        if index % 3:  # two of three are written, the third must keep what it holds
            writes.append(context.write(1, offset, OUTBOX + offset, size))
            expected[offset : offset + size] = content[offset : offset + size]
        offset += size
    if context.rank == 1:
        inbox[: len(content)] = b"\xee" * len(content)
    context.barrier("filled")
    if context.rank == 0:
        assert context.windows is not None
        context.windows.views[abi.DATA][OUTBOX : OUTBOX + len(content)] = content
        context.rng.shuffle(writes)
        driver.post(0, writes)
        driver.wait_all(context.limit_s, "writes")
    if not context.eventually(lambda: inbox[: len(content)] == expected):
        seen = bytes(inbox[: len(content)])
        wrong = next(at for at in range(len(content)) if seen[at] != expected[at])
        raise PromiseBroken(f"alignment {unit}: byte {wrong} is wrong after little writes side by side")
    context.barrier("compared")
    return f"{unit} byte(s)"


def bounds(context: Context) -> str:
    """Writes beyond a region, from or to none, or to no rank, must end in an error and touch nothing."""
    driver = context.open()
    assert context.windows is not None
    data_bytes = len(context.windows.views[abi.DATA])
    nbytes = context.rounded(64)
    last = (1 << 64) - nbytes
    cases = {
        "to rank 4000, which does not exist": context.write(4000, 0, OUTBOX, nbytes),
        "from region 9": context.write(1, 0, OUTBOX, nbytes, local_region=9),
        "to region 9": context.write(1, 0, OUTBOX, nbytes, remote_region=9),
        "whose source ends beyond its region": context.write(1, 0, data_bytes - nbytes // 2, nbytes),
        "whose source offset wraps around": context.write(1, 0, last, 2 * nbytes),
        "whose target offset wraps around": context.write(1, last, OUTBOX, 2 * nbytes),
        "whose target ends beyond its region": context.write(1, data_bytes - nbytes // 2, OUTBOX, nbytes),
    }
    if context.rank == 0:
        context.windows.views[abi.DATA][OUTBOX : OUTBOX + 2 * nbytes] = b"\xaa" * (2 * nbytes)
        for words, write in cases.items():
            if _outcome(context, write) is None:
                raise PromiseBroken(f"bounds: a write {words} was accepted and completed without error")
        context.driver = None  # on many devices a refused write breaks the lane; nothing more is asked of it
    context.barrier("tried")
    if context.rank == 1:
        driver.raise_errors()
    context.driver = None
    context.barrier("refused")
    if any(context.windows.views[abi.DATA][:OUTBOX]) or any(context.windows.views[abi.CONTROL]):
        raise PromiseBroken("bounds: a refused write changed memory")
    return f"{len(cases)} kinds"


def send_queue_depth(context: Context) -> str:
    """As many as promised go in without a poll; beyond that post says 0, and nothing is lost."""
    driver = context.open()
    depth = min(context.capabilities.send_queue_depth, 4096)
    nbytes = context.rounded(8)
    if context.rank == 0:
        accepted = refused = 0
        while accepted < depth and refused < 1000:
            count = min(driver.BATCH, depth - accepted)
            took = driver.post_once(0, [context.write(1, i * nbytes, OUTBOX, nbytes) for i in range(count)])
            if took < 0:
                raise PromiseBroken(f"send_queue_depth: post failed with {message_of(took)} after {accepted} writes")
            accepted, refused = accepted + took, refused + (took < count)
        if accepted < depth:
            raise PromiseBroken(
                f"send_queue_depth is {depth}, but only {accepted} writes fit before completions are polled"
            )
        for _ in range(100):
            took = driver.post_once(0, [context.write(1, i * nbytes, OUTBOX, nbytes) for i in range(driver.BATCH)])
            if took < 0:
                raise PromiseBroken(f"send_queue_depth: a full queue must answer 0, not {message_of(took)}")
        driver.wait_all(2 * context.limit_s, "writes")
        driver.post(0, [context.write(1, 0, OUTBOX, nbytes)])
        driver.wait_all(context.limit_s, "writes")
    context.barrier("drained")
    return f"{depth} writes"


def never_blocks(context: Context) -> str:
    """Posts and polls return at once, also with a full queue and a receiver that does nothing."""
    driver = context.open()
    nbytes = min(context.rounded(16 << 10), context.capabilities.max_message)
    worst = 0.0
    if context.rank == 0:
        times: dict[str, list[float]] = {"post_writes": [], "poll_completions": []}
        end = time.monotonic() + 1.5
        for _ in range(400):
            begin = time.perf_counter()
            took = driver.post_once(0, [context.write(1, 0, OUTBOX, nbytes)])
            middle = time.perf_counter()
            times["post_writes"].append(middle - begin)
            if took == 0:
                driver.poll(0)
                times["poll_completions"].append(time.perf_counter() - middle)
            if time.monotonic() > end:
                break
        for call, taken in times.items():
            if taken and (statistics.median(taken) > BLOCKING_S or max(taken) > HANGING_S):
                raise PromiseBroken(
                    f"{call} blocks: {statistics.median(taken) * 1e3:.1f} ms in the middle and "
                    f"{max(taken) * 1e3:.1f} ms at worst over {len(taken)} calls while the receiver was busy; "
                    f"it must return at once"
                )
        worst = max(max(taken, default=0.0) for taken in times.values())
    context.barrier("measured", progress=False)
    if context.rank == 0:
        driver.wait_all(2 * context.limit_s, "writes")
    context.barrier("drained")
    return f"{worst * 1e3:.2f} ms at worst" if context.rank == 0 else ""


def lanes(context: Context) -> str:
    """A lane that nobody polls does not hold up another one."""
    driver = context.open(lanes=2)
    nbytes = context.rounded(8)
    if context.rank == 0:
        writes = [context.write(1, index * nbytes, OUTBOX, nbytes) for index in range(driver.BATCH)]
        for _ in range(min(context.capabilities.send_queue_depth, 4096) // driver.BATCH + 1):
            if driver.post_once(0, writes) <= 0:
                break
        stuck = driver.outstanding
        done = 0
        end = time.monotonic() + context.limit_s
        while done < driver.BATCH:
            if done == 0 and driver.outstanding == stuck:
                driver.post_once(1, writes)
            done += len(driver.poll(1))
            if time.monotonic() > end:
                raise PromiseBroken("lanes: nothing completes on lane 1 while the full lane 0 is not polled")
            if driver.outstanding == stuck and done:
                break
        driver.wait_all(2 * context.limit_s, "writes")
    context.barrier("both drained")
    return f"2 of {context.capabilities.lanes}"


CHECKS = (
    Check("max_message", "the largest write lands whole, a larger one is refused", max_message, seeded=False),
    Check("alignment", "writes at every allowed offset leave their neighbours alone", alignment),
    Check("bounds", "writes outside the regions are refused", bounds, seeded=False),
    Check("send_queue_depth", "the queue takes what it promises and then says so", send_queue_depth, seeded=False),
    Check("never_blocks", "no call blocks", never_blocks, seeded=False),
    Check("lanes", "lanes do not wait for each other", lanes, lambda c: c.lanes > 1, seeded=False),
)
