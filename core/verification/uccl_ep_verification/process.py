"""Run a tool under a time and a memory limit."""

from __future__ import annotations

import dataclasses
import os
import resource
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Finished:
    """What a tool said. ``timed_out`` is set where it was stopped at its time limit."""

    code: int
    output: str
    timed_out: bool


WALL_FACTOR = 5  # a machine that does other things as well must not change a verdict


def run(command: Sequence[str | Path], cwd: Path, time_limit_s: float, memory_limit_mb: int) -> Finished:
    """Run ``command``, at most ``time_limit_s`` seconds of a processor, and ``WALL_FACTOR`` times that on the clock."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (int(time_limit_s), int(time_limit_s)))
        resource.setrlimit(resource.RLIMIT_AS, (memory_limit_mb << 20, memory_limit_mb << 20))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=limit,
    )
    try:
        output, _ = process.communicate(timeout=WALL_FACTOR * time_limit_s)
        spent = process.returncode in (-signal.SIGXCPU, -signal.SIGKILL)
        return Finished(process.returncode, output, spent)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return Finished(-signal.SIGKILL, output, True)
