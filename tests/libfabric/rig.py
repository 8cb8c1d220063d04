"""Ranks in processes of their own, each with one opened and connected libfabric transport.

A test gives each rank a function ``(rank) -> result`` to run at the same time as the others. Functions
drive the transport through its table of C functions, exactly as a proxy does.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

from uccl_ep_core import shared_memory
from uccl_ep_core.conformance import abi
from uccl_ep_core.conformance.driver import Driver
from uccl_ep_core.transport import Memory

DATA_BYTES = 8 << 20
CONTROL_BYTES = 4096
LIMIT_S = 60.0


class Rank:
    """What a function of a test sees."""

    def __init__(self, rank: int, size: int, connection: Connection, options: Mapping[str, Any], lanes: int) -> None:
        from uccl_ep_libfabric import LibfabricTransport

        self.rank, self.size, self.connection = rank, size, connection
        self.windows = [shared_memory.create(DATA_BYTES), shared_memory.create(CONTROL_BYTES)]
        self.transport = LibfabricTransport.open(None, options)
        for window in self.windows:
            self.transport.register(Memory(window.pointer, window.nbytes))
        addresses = self.meet(self.transport.address())
        peers = [peer for peer in range(size) if peer != rank]
        self.transport.connect(rank, addresses, peers, lanes, 20.0)
        self.driver = Driver(self.transport.native_ops, lanes)
        self.data = self.view(0)

    def view(self, region: int) -> memoryview:
        import ctypes

        window = self.windows[region]
        return memoryview((ctypes.c_ubyte * window.nbytes).from_address(window.pointer)).cast("B")

    def meet(self, value: Any = None, polling: bool = True) -> list[Any]:
        """Every rank's value, once all are here; polls meanwhile, as a proxy would, unless told not to."""
        self.connection.send(("meet", value))
        while not self.connection.poll(0.0005):
            if polling and hasattr(self, "driver"):
                self.driver.progress()
        return list(self.connection.recv())

    def write(self, peer: int, local: int, remote: int, nbytes: int, immediate: int | None = None) -> abi.Write:
        flags = 0 if immediate is None else abi.IMMEDIATE
        return abi.Write(peer, flags, 0, 0, local, remote, nbytes, immediate or 0, 0)

    def until(self, condition: Callable[[], bool], limit_s: float = 20.0) -> bool:
        end = time.monotonic() + limit_s
        while not condition():
            self.driver.progress()
            if time.monotonic() > end:
                return False
        return True


def _serve(rank: int, size: int, connection: Connection, options: Mapping[str, Any], lanes: int) -> None:
    try:
        state = Rank(rank, size, connection, options, lanes)
        connection.send(("done", None))
        while True:
            function, arguments = connection.recv()
            if function is None:
                break
            connection.send(("done", function(state, *arguments)))
        state.transport.close()
        for window in state.windows:
            window.close()
        connection.send(("done", None))
    except EOFError:
        pass
    except BaseException:
        connection.send(("failed", traceback.format_exc()))


class Ranks:
    """``size`` connected ranks; a context manager that leaves no process behind."""

    def __init__(self, options: Mapping[str, Any], size: int = 2, lanes: int = 1) -> None:
        context = multiprocessing.get_context("spawn")
        self.connections: dict[int, Connection] = {}
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, theirs, options, lanes), daemon=True)
            process.start()
            theirs.close()
            self.connections[rank] = ours
            self.processes.append(process)
        self.meetings: dict[int, Any] = {}
        self._collect(set(self.connections))

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                for connection in self.connections.values():
                    connection.send((None, ()))
                self._collect(set(self.connections))
        finally:
            for process in self.processes:
                process.kill()
                process.join()

    def kill(self, rank: int) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        self.processes[rank].join()
        self.connections.pop(rank).close()

    def start(self, functions: Mapping[int, tuple[Any, ...]]) -> None:
        """Let ranks run ``(function, *arguments)`` each; `finish` has the results."""
        for rank, (function, *arguments) in functions.items():
            self.connections[rank].send((function, tuple(arguments)))

    def finish(self, ranks: set[int]) -> dict[int, Any]:
        return self._collect(ranks)

    def run(self, functions: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        self.start(functions)
        return self.finish(set(functions))

    def _collect(self, waiting: set[int]) -> dict[int, Any]:
        results: dict[int, Any] = {}
        end = time.monotonic() + LIMIT_S
        while set(results) != waiting:
            open_ranks = {self.connections[rank]: rank for rank in waiting - set(results)}
            ready = wait(list(open_ranks), max(0.0, end - time.monotonic()))
            if not ready:
                raise AssertionError(f"ranks {sorted(waiting - set(results))} gave no result within {LIMIT_S} s")
            for connection in ready:
                rank = open_ranks[connection]  # type: ignore[index]
                try:
                    kind, value = connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    raise AssertionError(f"rank {rank} died") from None
                if kind == "failed":
                    raise AssertionError(f"rank {rank}:\n{value}")
                if kind == "meet":
                    self.meetings[rank] = value
                else:
                    results[rank] = value
            if self.meetings and set(self.meetings) == set(self.connections):
                values = [self.meetings[rank] for rank in sorted(self.meetings)]
                self.meetings.clear()
                for connection in self.connections.values():
                    connection.send(values)
        return results
