"""What the ranks do in the tests of set-up, life and end of buffers."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import cases
from ranks import Context, check_equal, environment


def lasting_names() -> set[str]:
    """This library's names in shared memory that stay; those of other processes of the machine come and go."""
    names, looks = {name for name in os.listdir("/dev/shm") if name.startswith("uccl_ep")}, 0
    while names and looks < 5:
        time.sleep(0.2)  # until they are gone, if they are another's
        names, looks = names & set(os.listdir("/dev/shm")), looks + 1
    return names


def resources() -> dict[str, int]:
    gc.collect()
    status = Path("/proc/self/status").read_text()
    words = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return {
        "threads": int(words["Threads"]),
        "fds": len(os.listdir("/proc/self/fd")),
        "maps": len(Path("/proc/self/maps").read_text().splitlines()),
        "memory_kib": int(words["VmRSS"].split()[0]),
        "shm_names": len(lasting_names()),
    }


def create_and_destroy(ctx: Context, times: int, how: str) -> dict[str, list[int]]:
    """Resources after 5 rounds and after all: ``destroy``, ``drop`` (no destroy), ``twice``."""
    before: dict[str, int] = {}
    for i in range(times):
        buffer = ctx.new_buffer()
        if i % 10 == 0:
            cases.high_throughput(ctx, tokens=[3] * ctx.num_ranks, buffer=buffer, seed=i)
        if how != "drop":
            buffer.destroy()
        if how == "twice":
            buffer.destroy()
        del buffer
        if i == 4:
            ctx.barrier()
            before = resources()
    ctx.barrier()
    after = resources()
    return {name: [before[name], after[name]] for name in before}


def many_shapes(ctx: Context, rounds: int) -> dict[str, list[int]]:
    """Resources of one buffer after a third of the rounds and after all; every round has sizes of its own."""
    buffer, before = ctx.new_buffer(), {}
    for i in range(rounds):
        tokens = [(i + rank) % (rounds + 1) for rank in range(ctx.num_ranks)]
        sizes = {"hidden": 64, "experts": ctx.num_ranks * (1 + i % 7), "topk": 1 + i % 2, "seed": i, "buffer": buffer}
        cases.low_latency(ctx, most=rounds + 1, tokens=tokens, **sizes)
        cases.high_throughput(ctx, tokens=tokens, **sizes)
        if i == rounds // 3:
            ctx.barrier()
            before = resources()
    ctx.barrier()
    after = resources()
    buffer.destroy()
    return {name: [before[name], after[name]] for name in before}


def exit_without_destroy(ctx: Context) -> None:
    buffer = ctx.new_buffer()
    cases.high_throughput(ctx, tokens=[3] * ctx.num_ranks, buffer=buffer)
    globals()["kept_until_exit"] = buffer


def same_as_before(ctx: Context, options: dict[str, Any]) -> None:
    buffer = ctx.new_buffer(**options)
    cases.high_throughput(ctx, tokens=[4 + r for r in range(ctx.num_ranks)], buffer=buffer, seed=3)
    buffer.destroy()


def failing_start(ctx: Context, who: int) -> str:
    """Rank ``who`` may create no file of any size, so its windows fail; every rank must raise, then all succeed."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if ctx.rank == who:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        buffer = ctx.new_buffer()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    else:
        buffer.destroy()
        raise AssertionError("a buffer was made although one rank had no memory for it")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    ctx.barrier()
    same_as_before(ctx, {})
    return text


def construction_error(ctx: Context, values: dict[str, str]) -> str:
    with environment(values):
        try:
            ctx.new_buffer()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        else:
            raise AssertionError(f"{values} was accepted")
    ctx.barrier()
    same_as_before(ctx, {})
    return text


def unneeded_transport(ctx: Context) -> list[str]:
    """What is called of a transport that was asked for by name, where all ranks are in one domain."""
    from uccl_ep_shm import ShmTransport

    calls: list[str] = []
    opened, closed = ShmTransport.open, ShmTransport.close
    try:
        ShmTransport.open = classmethod(lambda cls, *a: calls.append("open") or opened(*a))  # type: ignore
        ShmTransport.close = lambda self: calls.append("close") or closed(self)  # type: ignore
        with environment({"UCCL_EP_TRANSPORT": "shm"}):
            buffer = ctx.new_buffer()
        before_use = list(calls)
        cases.high_throughput(ctx, tokens=[3] * ctx.num_ranks, buffer=buffer)
        buffer.destroy()
    finally:
        ShmTransport.open, ShmTransport.close = opened, closed  # type: ignore
    check_equal("calls after the construction", calls, before_use)
    return before_use


def describe(ctx: Context) -> dict[str, Any]:
    same_as_before(ctx, {})
    return dict(ctx.buffer().describe())


def warp_size(ctx: Context) -> int:
    return int(ctx.buffer()._communicator.backend.limits.warp_size)
