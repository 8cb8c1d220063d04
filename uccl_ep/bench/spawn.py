"""Starts rank processes of this host, or joins those that torchrun started."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing import connection
from typing import Any

from uccl_ep_core.errors import (
    ArgumentError,
    BackendUnavailableError,
    CapabilityError,
    ConfigurationError,
    EPError,
)

Function = Callable[..., Any]


class LeaveOut(EPError):
    """A system has the ranks apart: they can go on no more, but all can start again without it.

    Attributes:
        system: its name.
        words: why.
    """

    def __init__(self, system: str, words: str) -> None:
        super().__init__(system, words)
        self.system, self.words = system, words


# What the caller can set right: raised here as it was there, since where in a rank it arose helps nobody.
REFUSALS = (ArgumentError, BackendUnavailableError, CapabilityError, ConfigurationError, LeaveOut)


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ


def _child(rank: int, num_ranks: int, store: str, pipe: Any, env: Mapping[str, str], call: Function, args: Any) -> None:
    os.environ.update(env)
    import torch
    import torch.distributed as dist

    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=timedelta(minutes=5)
        )
        result = call(rank, num_ranks, *args, report=lambda event: pipe.send(("event", event)))
        dist.destroy_process_group()
        pipe.send(("done", result))
    except BaseException as error:
        refused = isinstance(error, REFUSALS)
        pipe.send(("refused", error) if refused else ("failed", traceback.format_exc(limit=12)))
        os._exit(1)  # the other ranks may be waiting for this one: do not wait for their threads


def run_ranks(
    call: Function,
    num_ranks: int,
    *args: Any,
    env: Mapping[str, str] | None = None,
    on_event: Callable[[int, Any], None] | None = None,
    timeout_s: float = 600,
) -> list[Any]:
    """Runs ``call(rank, num_ranks, *args, report=...)`` on ranks with a gloo group, and returns what each returned.

    ``call`` is a module-level function. What a rank gives to ``report`` reaches ``on_event(rank, event)`` here.

    Raises:
        EPError: a rank refused what it was asked for, see `REFUSALS`. All ranks are ended.
        RuntimeError: a rank failed or is late; with its traceback. All ranks are ended.
    """
    # Children forked from a server that has imported torch, and started nothing, are up in a moment.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "numpy"])
    values = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **(env or {})}
    with tempfile.TemporaryDirectory(prefix="uccl_ep_") as folder:
        processes, pipes = [], {}
        saved = {name: os.environ.get(name) for name in values}
        os.environ.update(values)  # so that torch in the children reads them when it is imported
        try:
            for rank in range(num_ranks):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_child, args=(rank, num_ranks, f"{folder}/store", theirs, values, call, args), daemon=True
                )
                process.start()
                theirs.close()
                processes.append(process)
                pipes[ours] = rank
        finally:
            for name, value in saved.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        try:
            results = _collect(pipes, on_event, time.monotonic() + timeout_s)
            for process in processes:
                process.join(10)
            return [results[rank] for rank in range(num_ranks)]
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _collect(pipes: dict[Any, int], on_event: Callable[[int, Any], None] | None, limit: float) -> dict[int, Any]:
    results: dict[int, Any] = {}
    while pipes:
        ready = connection.wait(list(pipes), timeout=max(0.0, limit - time.monotonic()))
        if not ready:
            raise RuntimeError(f"no answer in time from ranks {sorted(pipes.values())}")
        for pipe in ready:
            assert isinstance(pipe, connection.Connection)
            rank = pipes[pipe]
            try:
                kind, value = pipe.recv()
            except (EOFError, ConnectionError):
                raise RuntimeError(f"rank {rank} died") from None
            if kind == "refused":
                raise value
            if kind == "failed":
                raise RuntimeError(f"rank {rank} failed:\n{value}")
            if kind == "event":
                if on_event is not None:
                    on_event(rank, value)
                continue
            results[rank] = value
            del pipes[pipe]
    return results
