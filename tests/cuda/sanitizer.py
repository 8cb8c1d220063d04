"""The small cases of the GPU suite under NVIDIA's compute-sanitizer: what it looked for, and that it found nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

SUITE = Path(__file__).with_name("gpu_suite.py")
TOOLS = ("memcheck", "racecheck", "synccheck")
SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", re.MULTILINE)
TIMEOUT_S = "200"  # of waits in kernels, which run tens of times slower there


def find() -> str | None:
    """The program, on the path or where the toolkit puts it."""
    there = Path("/usr/local/cuda/bin/compute-sanitizer")
    return shutil.which("compute-sanitizer") or (str(there) if there.exists() else None)


def run(program: str, tool: str, ranks: int, stages: tuple[str, ...], limit_s: float) -> str:
    """Run ``stages`` of the suite with small shapes under ``tool``; returns what was shown, in words.

    Raises:
        RuntimeError: it found something, or says nothing of what it looked at, or a case failed.
        subprocess.TimeoutExpired: it took longer than ``limit_s`` seconds.
    """
    suite = [sys.executable, str(SUITE), "--small", "--ranks", str(ranks), "--only", *stages]
    command = [program, "--tool", tool, "--target-processes", "all", *suite]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=limit_s, env={**os.environ, "UCCL_EP_TIMEOUT_S": TIMEOUT_S}
    )
    found = [int(count) for count in SUMMARY.findall(done.stdout)]
    if done.returncode != 0 or not found or any(found):
        raise RuntimeError(
            f"{tool}: exit status {done.returncode}, {len(found)} summaries, {sum(found)} findings\n"
            f"{done.stdout[-3000:]}{done.stderr[-1000:]}"
        )
    return "0 findings in all processes"  # which have one summary or one each, by the tool's version
