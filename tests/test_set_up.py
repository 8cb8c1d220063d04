"""Ranks that end or stay away while a Buffer is made: the others' error names the rank and the stage, in time."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

import life_cases
from ranks import Context, RankPool
from uccl_ep import roll_call
from uccl_ep.connection import Connection
from uccl_ep.windows import Windows
from uccl_ep_core.errors import PeerFailure

SOON_S = 5.0  # for a death of this host to be seen, on a machine that is busy; the limit is 60 s
# What rank `who` replaces by its own end, and the stage that the others then name.
STAGES = {
    (Connection, "_agree_on_options"): "agreeing on options",
    (Connection, "_allocate"): "allocating windows",
    (Windows, "import_peers"): "importing windows of the scale-up domain",
    (Connection, "_register"): "registering windows with the transport",
    (Connection, "_connect"): "connecting the transport",
}


def die(*_: Any) -> None:
    os.kill(os.getpid(), 9)


def one_rank_ends(ctx: Context, who: int, step: tuple[type, str]) -> dict[str, Any]:
    ctx.barrier()
    if ctx.rank == who:
        assert hasattr(*step)
        setattr(*step, die)
    started = time.monotonic()
    try:
        ctx.new_buffer()
    except PeerFailure as error:
        return {"rank": error.rank, "reason": error.reason, "phase": error.phase, "text": str(error),
                "after_s": time.monotonic() - started}  # fmt: skip
    raise AssertionError("a buffer was made although a rank is gone")


@pytest.mark.parametrize("step", STAGES, ids=lambda step: step[1])
def test_killed_while_a_buffer_is_made(pool: RankPool, step: tuple[type, str]) -> None:
    reports = pool.run(
        one_rank_ends, ranks=3, domain=1, options={"UCCL_EP_TIMEOUT_S": "60"}, may_die=(1,),
        arguments={"who": 1, "step": step},
    )  # fmt: skip
    for report in (reports[0], reports[2]):
        assert (report["rank"], report["reason"]) == (1, "dead"), report
        assert report["phase"] == f"set-up: {STAGES[step]}" and STAGES[step] in report["text"], report
        assert report["after_s"] < SOON_S, report


def killed_between(ctx: Context, who: int) -> dict[str, Any]:
    """It has answered, and ends inside the group's own exchange, whose error is then explained."""
    ctx.barrier()
    if ctx.rank == who:
        answer = roll_call.RollCall.answer

        def answer_and_die(self: Any, stage: str) -> None:
            answer(self, stage)
            if stage == "comparing hosts":
                die()

        roll_call.RollCall.answer = answer_and_die  # type: ignore[method-assign]
    started = time.monotonic()
    try:
        ctx.new_buffer()
    except PeerFailure as error:
        return {"rank": error.rank, "reason": error.reason, "after_s": time.monotonic() - started}
    raise AssertionError("a buffer was made although a rank is gone")


def test_killed_inside_an_exchange(pool: RankPool) -> None:
    reports = pool.run(killed_between, ranks=3, options={"UCCL_EP_TIMEOUT_S": "60"}, may_die=(2,), arguments={"who": 2})
    for report in reports[:2]:
        assert (report["rank"], report["reason"]) == (2, "dead") and report["after_s"] < SOON_S, report


def stays_away(ctx: Context, who: int) -> str | None:
    """Rank ``who`` makes no buffer; the others wait as long as timeout_s, and all is well afterwards."""
    text = None
    if ctx.rank != who:
        started = time.monotonic()
        with pytest.raises(PeerFailure) as caught:
            ctx.new_buffer()
        waited_s = time.monotonic() - started
        assert (caught.value.rank, caught.value.reason) == (who, "timeout") and waited_s < 2 + SOON_S, waited_s
        text = str(caught.value)
    ctx.barrier()
    if ctx.rank == who:  # it comes too late, for a buffer that the others have given up
        with pytest.raises(PeerFailure, match=f"rank {who} is at fault"):
            ctx.new_buffer()
    ctx.barrier()
    life_cases.same_as_before(ctx, {})
    return text


def test_rank_that_makes_no_buffer(pool: RankPool) -> None:
    texts = pool.run(stays_away, ranks=3, options={"UCCL_EP_TIMEOUT_S": "2"}, arguments={"who": 1})
    assert texts[1] is None and all("'meeting'" in str(text) and "timeout_s" in str(text) for text in texts[::2]), texts
