"""Rank processes that start once and are fed cases.

A pool has ``size`` processes in one gloo group over the loop-back interface, and a subgroup of its first n ranks
for every n. A case is a function ``(ctx, **arguments)`` of an importable module; the first n ranks run it, and the
first error of every rank is reported. A case that fails, kills a rank or runs late costs the pool: the next case
gets a fresh one, so no case sees what another left behind.

Children are forked from a server that has imported torch and the package but started nothing, so a fresh pool costs
well under a second.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "numpy", "uccl_ep.buffer"])

# Windows of the buffers that cases share: enough for the largest case of the matrix, touched only as far as used.
SHARED_LOW_LATENCY_BYTES = 2560 << 20
OWN_LOW_LATENCY_BYTES = 64 << 20

DIED = "the process died"
LATE = "no answer in time"


class Mismatch(AssertionError):
    """A tensor differs from the reference."""


class CaseFailure(AssertionError):
    """A case failed on some rank; the message has the report of every rank that failed."""


@dataclass
class Context:
    """What a case gets: who it is, its group, and buffers that are kept from case to case."""

    rank: int
    num_ranks: int
    group: Any
    domain: int
    options: dict[str, str]
    groups: dict[tuple[int, ...], Any]
    buffers: dict[Any, Any] = field(default_factory=dict)

    def new_buffer(self, group: Any = None, **arguments: Any) -> Any:
        """A fresh Buffer, for both modes, with this case's domain size and options in the environment."""
        from uccl_ep import Buffer

        arguments = {"num_rdma_bytes": OWN_LOW_LATENCY_BYTES, "low_latency_mode": True, **arguments}
        with environment(buffer_environment(self.domain, self.options)):
            return Buffer(self.group if group is None else group, **arguments)

    def buffer(self, **arguments: Any) -> Any:
        """The buffer of this topology and these arguments, kept until the pool runs another topology."""
        arguments = {"num_rdma_bytes": SHARED_LOW_LATENCY_BYTES, **arguments}
        key = (self.num_ranks, self.domain, tuple(sorted(self.options.items())), tuple(sorted(arguments.items())))
        if key not in self.buffers:
            self.buffers[key] = self.new_buffer(**arguments)
        return self.buffers[key]

    def barrier(self) -> None:
        dist.barrier(self.group)


def buffer_environment(domain: int, options: Mapping[str, str]) -> dict[str, str]:
    return {**({"UCCL_EP_DOMAIN_SIZE": str(domain)} if domain else {}), **options}


@contextmanager
def environment(values: Mapping[str, str]) -> Any:
    old = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in old.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def check_equal(what: str, got: Any, want: Any) -> None:
    """Raises ``Mismatch`` that names the first differing place, unless both are the same, bit for bit."""
    if not isinstance(want, Tensor):
        if got != want:
            raise Mismatch(f"{what}: got {got!r}, want {want!r}")
        return
    if not isinstance(got, Tensor):
        raise Mismatch(f"{what}: got {type(got).__name__}, want a tensor {list(want.shape)}")
    if got.dtype != want.dtype or got.shape != want.shape:
        raise Mismatch(f"{what}: got {got.dtype} {list(got.shape)}, want {want.dtype} {list(want.shape)}")
    a, b = got.detach().contiguous(), want.detach().contiguous()
    if a.numel() == 0:
        return
    differs = (a.view(torch.uint8) != b.view(torch.uint8)) if a.dim() else torch.tensor(not torch.equal(a, b))
    if a.dim() and a.element_size() > 1:
        differs = differs.view(*a.shape, a.element_size()).any(-1)
    if a.is_floating_point() and a.element_size() > 1:
        differs &= ~((a == 0) & (b == 0))  # the sign of a zero sum is nobody's promise
    if not differs.any():
        return
    place = tuple(differs.nonzero()[0].tolist())
    rows_bad = differs.reshape(differs.shape[0], -1).any(1).nonzero().flatten().tolist() if a.dim() > 1 else []
    raise Mismatch(
        f"{what} differs first at {place}: got {a[place].item()!r}, want {b[place].item()!r}; "
        f"{int(differs.sum())} of {a.numel()} elements"
        + (f" in {len(rows_bad)} of {a.shape[0]} rows, {rows_bad[:8]}" if rows_bad else "")
    )


def _serve(rank: int, size: int, port: int, pipe: Any, env: dict[str, str], trace: str) -> None:
    os.environ.update(env)
    gc.freeze()  # what the server has imported: to look through it took each rank 0.2 s, and a copy of its pages
    trace_file = open(trace, "w")  # noqa: SIM115  (lives as long as the process)
    faulthandler.enable(trace_file)
    faulthandler.register(signal.SIGUSR1, trace_file, all_threads=True)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120))
    groups: dict[tuple[int, ...], Any] = {}
    for n in range(1, size + 1):
        members = tuple(range(n))
        groups[members] = dist.new_group(members)
    for members in ((2, 3), (1, 2, 3)):
        if size > members[-1]:
            groups[members] = dist.new_group(members)
    pipe.send(("ready", None))
    buffers: dict[Any, Any] = {}
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            break
        if message is None:
            break
        if message == "drop":
            for buffer in buffers.values():
                buffer.destroy()
            buffers.clear()
            pipe.send(("ok", None))
            continue
        function, num_ranks, domain, options, arguments = message
        module, name = function.split(":")
        ctx = Context(rank, num_ranks, groups[tuple(range(num_ranks))], domain, options, groups, buffers)
        try:
            case = getattr(importlib.import_module(module), name)
            ctx.barrier()  # a rank that is still importing would be late for the time-outs of the case
            pipe.send(("ok", case(ctx, **arguments)))
        except Mismatch as error:
            pipe.send(("failed", str(error)))
        except BaseException:  # whatever it was, the other ranks' reports matter too
            pipe.send(("failed", traceback.format_exc(limit=12)))
    for buffer in buffers.values():
        buffer.destroy()
    # No destroy_process_group: it may wait for ranks that a test has killed.


class RankPool:
    """``size`` rank processes; see the module's text."""

    def __init__(self, size: int = 6, env: Mapping[str, str] | None = None) -> None:
        self.size = size
        self.env = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **(env or {})}
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._store: dist.TCPStore | None = None  # served by this process, as torchrun's agent serves it
        self._topology: Any = None

    def start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="uccl_ep_ranks_")
        self._store = dist.TCPStore("127.0.0.1", 0, self.size, is_master=True, wait_for_workers=False)
        for rank in range(self.size):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=_serve,
                args=(rank, self.size, self._store.port, theirs, self.env, self._trace(rank)),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        self._topology = None
        failed = self._collect(range(self.size), 120)[1]
        if failed:
            raise self._failure("start of the rank processes", failed)

    def stop(self) -> None:
        """Asks the ranks to end, and after 10 s ends them."""
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(None)
        limit = time.monotonic() + 10
        for process in self._processes:
            process.join(max(0.0, limit - time.monotonic()))
        self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._store = [], [], None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def pid(self, rank: int) -> int:
        pid = self._processes[rank].pid
        assert pid is not None
        return int(pid)

    def run(
        self,
        function: str | Callable[..., Any],
        *,
        ranks: int,
        domain: int = 0,
        options: Mapping[str, str] | None = None,
        timeout_s: float = 60,
        arguments: Mapping[str, Any] | None = None,
        per_rank: list[dict[str, Any]] | None = None,
        may_die: tuple[int, ...] = (),
    ) -> list[Any]:
        """Runs ``function`` on ranks 0..ranks-1 and returns what each returned (None of one that may die).

        ``domain`` is the number of ranks per scale-up domain, 0 for all. ``per_rank`` adds arguments by rank.
        """
        if not self._processes:
            self.start()
        if not isinstance(function, str):
            function = f"{function.__module__}:{function.__qualname__}"
        topology = (ranks, domain, tuple(sorted((options or {}).items())))
        if topology != self._topology:
            self.drop()
        self._topology = topology
        messages = [
            (function, ranks, domain, dict(options or {}), {**(arguments or {}), **(per_rank[r] if per_rank else {})})
            for r in range(ranks)
        ]
        self._send_all(range(ranks), messages)
        results, failed = self._collect(range(ranks), timeout_s, may_die)
        if failed:
            raise self._failure(f"{function} on {ranks} ranks, domains of {domain or ranks}", failed)
        if may_die:
            self._expect_clean_exit([r for r in range(self.size) if r not in may_die])
        return [results.get(r) for r in range(ranks)]

    def drop(self) -> None:
        """Destroys the buffers that cases share. Their idle proxies take a part of a core each."""
        if not self._processes or self._topology is None:
            return
        self._topology = None
        self._send_all(range(self.size), ["drop"] * self.size)
        failed = self._collect(range(self.size), 60)[1]
        if failed:
            raise self._failure("destroying the buffers of earlier cases", failed)

    def _expect_clean_exit(self, survivors: list[int]) -> None:
        """Ends the processes that live on: each must destroy its buffers and exit with code 0 in time."""
        for rank in survivors:
            self._pipes[rank].send(None)
        limit = time.monotonic() + 15
        bad = {}
        for rank in survivors:
            process = self._processes[rank]
            process.join(max(0.0, limit - time.monotonic()))
            if process.exitcode is None:
                os.kill(process.pid, signal.SIGUSR1)
                time.sleep(0.3)  # for the stack to be written; nothing waits on this
                bad[rank] = f"did not exit; its stack:\n{self._read_trace(rank)}"
            elif process.exitcode != 0:
                bad[rank] = f"exited with code {process.exitcode}\n{self._read_trace(rank)}"
        if bad:
            raise self._failure("exit after a rank died", bad)
        self._kill()

    def _send_all(self, ranks: range, messages: list[Any]) -> None:
        for rank, message in zip(ranks, messages, strict=True):
            with suppress(OSError):  # its death is reported by _collect
                self._pipes[rank].send(message)

    def _collect(
        self, ranks: range, timeout_s: float, may_die: tuple[int, ...] = ()
    ) -> tuple[dict[int, Any], dict[int, str]]:
        """Answers by rank, and the reports of ranks that failed, died or are late."""
        results: dict[int, Any] = {}
        failed: dict[int, str] = {}
        open_ranks = {self._pipes[r]: r for r in ranks}
        limit = time.monotonic() + timeout_s
        while open_ranks:
            # After a first failure the others may be waiting for the rank that failed: give them less.
            left = min(limit, time.monotonic() + 5 if failed else limit) - time.monotonic()
            ready = connection.wait(list(open_ranks), timeout=max(0.0, left))
            if not ready:
                break
            for pipe in ready:
                rank = open_ranks.pop(pipe)
                try:
                    kind, value = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    self._processes[rank].join(5)
                    if rank not in may_die:
                        failed[rank] = f"{DIED} (exit code {self._processes[rank].exitcode})\n{self._read_trace(rank)}"
                    continue
                if kind == "failed":
                    failed[rank] = value
                else:
                    results[rank] = value
        for rank in open_ranks.values():
            os.kill(self.pid(rank), signal.SIGUSR1)
        if open_ranks:
            time.sleep(0.3)  # for the stacks to be written; nothing waits on this
        for rank in sorted(open_ranks.values()):
            failed[rank] = f"{LATE}; its stack:\n{self._read_trace(rank)}"
        return results, failed

    def _failure(self, what: str, failed: dict[int, str]) -> CaseFailure:
        self._kill()
        reports = "\n".join(f"rank {rank}: {failed[rank].rstrip()}" for rank in sorted(failed))
        return CaseFailure(f"{what}: {len(failed)} ranks failed\n{reports}")

    def _trace(self, rank: int) -> str:
        assert self._folder is not None
        return f"{self._folder.name}/trace{rank}"

    def _read_trace(self, rank: int) -> str:
        path = Path(self._trace(rank))
        return path.read_text()[-3000:] if path.exists() else ""


def add_tests_to_path() -> None:
    """Cases live in modules beside this one; children inherit sys.path."""
    here = str(Path(__file__).parent)
    if here not in sys.path:
        sys.path.insert(0, here)
