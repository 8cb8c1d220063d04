"""The processes of the kit, seen from the parent: starts them, lets them meet, and ends what hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, cast

from .report import Found


class Group:
    """``size`` fresh processes. After anything but a kept promise it is closed, never used again."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.usable = True
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(entry or "." for entry in sys.path))
        for _ in range(size):
            ours, theirs = Pipe()
            command = [sys.executable, "-m", "uccl_ep_core.conformance.worker", str(theirs.fileno())]
            self._processes.append(subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment))
            theirs.close()
            self._connections.append(ours)

    def run(self, request: Mapping[str, Any], limit_s: float) -> tuple[Found, str]:
        """Run one check on all ranks; (outcome, message)."""
        for rank, connection in enumerate(self._connections):
            connection.send(dict(request, rank=rank, size=self.size))
        outcome, message = self._serve(limit_s)
        if outcome in ("broken", "not started"):
            self.usable = False
        return outcome, message

    def _serve(self, limit_s: float) -> tuple[Found, str]:
        alive = dict(enumerate(self._connections))
        killed: set[int] = set()
        done: dict[int, tuple[str, str]] = {}
        meeting: dict[int, tuple[str, Any]] = {}
        last_phase = ["start"] * self.size
        while len(done) < len(alive):
            ready = wait([alive[rank] for rank in alive if rank not in done], limit_s)
            if not ready:
                return "broken", self._hang(limit_s, alive, done, meeting, last_phase)
            for rank in [rank for rank, connection in alive.items() if connection in ready]:
                try:
                    kind, first, second = alive[rank].recv()
                except (EOFError, OSError):
                    alive.pop(rank)
                    if rank not in killed:
                        code = self._processes[rank].wait(timeout=10)
                        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
                        return "broken", f"rank {rank} died {how} after phase {last_phase[rank]!r}"
                    continue
                if kind == "meet":
                    meeting[rank] = (first, second)
                    last_phase[rank] = first
                elif kind == "kill":
                    killed.add(first)
                    self._processes[first].kill()
                    self._processes[first].wait(timeout=10)
                    alive[rank].send(True)
                else:
                    done[rank] = (first, second)
            self._let_meet(alive, done, meeting, killed)
        broken = [message for outcome, message in done.values() if outcome == "broken"]
        if broken:
            return "broken", broken[0]
        not_started = [message for outcome, message in done.values() if outcome == "not started"]
        if not_started:
            return "not started", not_started[0]
        if any(outcome == "stopped" for outcome, _ in done.values()):
            return "broken", "ranks disagree about the course of the check"
        if killed:
            self.usable = False
        outcomes = {outcome for outcome, _ in done.values()}
        if len(outcomes) != 1:
            return "broken", f"ranks disagree about the outcome of the check: {', '.join(sorted(outcomes))}"
        return cast(Found, outcomes.pop()), next((message for _, message in done.values() if message), "")

    def _let_meet(
        self,
        alive: Mapping[int, Connection],
        done: Mapping[int, tuple[str, str]],
        meeting: dict[int, tuple[str, Any]],
        killed: set[int],
    ) -> None:
        """Answer the waiting ranks once all are there, or send them home once one has left."""
        for rank in [rank for rank in meeting if rank not in alive]:
            del meeting[rank]
        waiting = [rank for rank in alive if rank not in done and rank not in killed]
        if any(rank not in meeting for rank in waiting):
            return
        values = [meeting[rank][1] if rank in meeting else None for rank in range(self.size)]
        answer = values if not done else None
        for rank in list(meeting):
            with contextlib.suppress(OSError):
                alive[rank].send(answer)
        meeting.clear()

    def _hang(
        self,
        limit_s: float,
        alive: Mapping[int, Connection],
        done: Mapping[int, tuple[str, str]],
        meeting: Mapping[int, tuple[str, Any]],
        last_phase: list[str],
    ) -> str:
        broken = [message for outcome, message in done.values() if outcome == "broken"]
        if broken:
            return broken[0]
        stuck = [rank for rank in alive if rank not in done and rank not in meeting]
        phases = ", ".join(f"rank {rank} after phase {last_phase[rank]!r}" for rank in stuck)
        return f"a call of the transport did not return within {limit_s:.0f} s: {phases} (no function may block)"

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            try:
                process.wait(timeout=3 if self.usable else 0.2)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=10)
