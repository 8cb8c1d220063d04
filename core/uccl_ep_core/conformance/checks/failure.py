"""peer_failure: a rank is killed in the middle of traffic; the others must learn of it and go on."""

from __future__ import annotations

import time

from .. import abi
from ..context import Context
from ..driver import PromiseBroken
from .check import OUTBOX, Check

VICTIM = 2


def peer_failure(context: Context) -> str:
    """Rank 2 is killed; ranks 0 and 1 must notice as promised, and still reach each other."""
    driver = context.open()
    assert context.windows is not None
    notice = context.capabilities.peer_failure
    nbytes = context.rounded(8)
    to_victim = context.write(VICTIM, context.rank * nbytes, OUTBOX, nbytes)
    if context.rank != VICTIM:
        driver.post(0, [to_victim] * 8)
        driver.wait_all(context.limit_s)
    context.barrier("warm")
    if context.rank == VICTIM:
        context.exchange("waiting for the end")
        raise PromiseBroken("the kit could not kill a rank")
    if context.rank == 0:
        context.kill(VICTIM)
    begin = time.monotonic()
    noticed = _notice(context, to_victim) if notice != "none" else True
    seconds = time.monotonic() - begin
    if not noticed:
        how = "an error completion" if notice == "error_completion" else "peer_state DEAD"
        raise PromiseBroken(
            f"peer_failure: rank {VICTIM} was killed and {context.limit_s:.0f} s later rank {context.rank} has seen no "
            f"{how}, though it kept writing to it; the transport claims {notice!r}"
        )
    context.barrier("noticed", progress=False)
    other = 1 - context.rank
    if driver.peer_state(other) not in (None, abi.PEER_ALIVE):
        raise PromiseBroken(f"peer_failure: peer_state calls rank {other} dead, which lives")
    content = bytes([context.rank + 1]) * nbytes
    context.windows.views[abi.DATA][OUTBOX : OUTBOX + nbytes] = content
    driver.post(0, [context.write(other, 1024, OUTBOX, nbytes)], label="write between survivors")
    inbox = context.windows.views[abi.DATA]
    if not context.eventually(lambda: inbox[1024 : 1024 + nbytes] == bytes([other + 1]) * nbytes):
        raise PromiseBroken(f"peer_failure: after the death of rank {VICTIM} the survivors no longer reach each other")
    context.barrier("survivors talked")
    return f"{notice}, noticed after {seconds:.2f} s" if notice != "none" else "not noticed, as claimed"


def _notice(context: Context, write: abi.Write) -> bool:
    """Go on writing to the victim until its death shows in the way that is claimed."""
    driver = context.driver
    assert driver is not None
    wants_error = context.capabilities.peer_failure == "error_completion"
    end = time.monotonic() + context.limit_s
    while time.monotonic() < end:
        posted = driver.post_once(0, [write]) if driver.outstanding < 16 else 0
        if wants_error and (posted < 0 or any(entry.peer == VICTIM for entry in driver.errors)):
            return True
        if not wants_error and driver.peer_state(VICTIM) == abi.PEER_DEAD:
            return True
        driver.progress()
        strangers = [entry for entry in driver.errors if entry.peer != VICTIM]
        if strangers:
            raise PromiseBroken(f"peer_failure: a write to rank {strangers[0].peer}, which lives, failed")
    return False


CHECKS = (
    Check(
        "peer_failure",
        "a killed peer is noticed, the others go on",
        peer_failure,
        size=3,
        seeded=False,
    ),
)
