"""Signals that arrive while a call waits: handlers run at once, and one that raises ends the wait."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

import cases
import life_cases
from ranks import Context, RankPool
from uccl_ep_core.errors import BufferClosedError, PeerFailure

SOON_S = 3.0  # for a signal to be seen, on a machine that is busy; the wait itself would take 30 s
OPTIONS = {"UCCL_EP_TIMEOUT_S": "30"}


def pair(ctx: Context, buffer: Any, mode: str) -> None:
    if mode == "low_latency":
        cases.low_latency(ctx, tokens=[6] * ctx.num_ranks, most=8, buffer=buffer)
    else:
        cases.high_throughput(ctx, tokens=[6] * ctx.num_ranks, buffer=buffer)


def interrupted(ctx: Context, mode: str, absent: int, number: int) -> tuple[str, float] | None:
    """Rank ``absent`` does not call; rank 0 gets the signal while it waits for it. What each raised, and how soon."""
    buffer = ctx.new_buffer()
    pair(ctx, buffer, mode)
    ctx.barrier()
    if ctx.rank == absent:
        ctx.barrier()  # the others have given up
        with pytest.raises(PeerFailure, match="rank 0 is at fault"):
            pair(ctx, buffer, mode)
        result = None
    else:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGALRM, fail_by_alarm)
        if ctx.rank == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            if number == signal.SIGINT:
                signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
        started = time.monotonic()
        try:
            pair(ctx, buffer, mode)
        except (KeyboardInterrupt, TimeoutError, PeerFailure) as error:
            result = f"{type(error).__name__}: {error}", time.monotonic() - started - 0.5
        with pytest.raises(BufferClosedError, match="rank 0"):
            pair(ctx, buffer, mode)
        ctx.barrier()
    buffer.destroy()
    ctx.barrier()
    life_cases.same_as_before(ctx, {})
    return result


def fail_by_alarm(*_: Any) -> None:
    raise TimeoutError("by the alarm")


@pytest.mark.parametrize("mode", ["high_throughput", "low_latency"])
@pytest.mark.parametrize("domain", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM])
def test_interrupt_while_waiting(pool: RankPool, mode: str, domain: int, number: int) -> None:
    arguments = {"mode": mode, "absent": 1, "number": number}
    reports = pool.run(interrupted, ranks=3, domain=domain, options=OPTIONS, arguments=arguments)
    own, by_others = reports[0], reports[2]
    assert own[0].startswith("KeyboardInterrupt" if number == signal.SIGINT else "TimeoutError: by the alarm"), own
    assert by_others[0].startswith("PeerFailure: rank 0 is at fault (interrupted)"), by_others
    assert own[1] < SOON_S and by_others[1] < SOON_S, reports


@pytest.mark.parametrize(("name", "value"), [("UCCL_EP_HOST_LANES", "32"), ("UCCL_EP_HOST_THREADS", "2")])
def test_interrupt_of_many_fibers_and_threads(pool: RankPool, name: str, value: str) -> None:
    arguments = {"mode": "high_throughput", "absent": 1, "number": signal.SIGINT}
    reports = pool.run(interrupted, ranks=2, options={**OPTIONS, name: value}, arguments=arguments)
    assert reports[0][0].startswith("KeyboardInterrupt") and reports[0][1] < SOON_S, reports


def handled(ctx: Context, mode: str, absent: int) -> float | None:
    """A handler that returns runs during the wait, which then goes on to its right end."""
    buffer, seen = ctx.new_buffer(), []
    pair(ctx, buffer, mode)
    ctx.barrier()
    started = time.monotonic()
    if ctx.rank == absent:
        time.sleep(1.5)  # this is the lateness under test
    elif ctx.rank == 0:
        signal.signal(signal.SIGALRM, lambda *_: seen.append(time.monotonic()))
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    pair(ctx, buffer, mode)
    buffer.destroy()
    return seen[0] - started if ctx.rank == 0 else None


@pytest.mark.parametrize("mode", ["high_throughput", "low_latency"])
def test_handler_that_returns(pool: RankPool, mode: str) -> None:
    ran_after_s = pool.run(handled, ranks=2, options=OPTIONS, arguments={"mode": mode, "absent": 1})[0]
    assert ran_after_s < 1.2, f"the handler ran {ran_after_s:.1f} s after the start of a wait of 1.5 s"
