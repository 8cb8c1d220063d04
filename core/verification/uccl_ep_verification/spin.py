"""Spin: every reachable state of a Promela model, or a state that breaks it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from .case import Case, Limits, Outcome, Verdict
from .process import run

MODELS = Path(__file__).resolve().parents[1] / "models"
MAX_DEPTH = 3_000_000


def spin_case(
    model: str, variant: str, expect: Verdict, defines: str, *, live: bool = False, full: bool = False
) -> Case:
    """A case of ``models/<model>.pml``; ``defines`` are its parameters, e.g. ``"M=4 W=2"``.

    With ``live`` the model's temporal property is checked under weak fairness, else its assertions and
    the absence of deadlock.
    """

    def check(scratch: Path, shared: Path, limits: Limits) -> Outcome:
        for source in MODELS.glob("*.pml"):
            shutil.copy(source, scratch)
        flags = [f"-D{define}" for define in defines.split()]
        built = run(["spin", "-a", *flags, f"{model}.pml"], scratch, limits.time_s, limits.memory_mb)
        if built.code != 0 or not (scratch / "pan.c").exists():
            return Outcome("unknown", 0, "spin: " + built.output.strip()[-300:])
        mode = ["-DNFAIR=4"] if live else ["-DSAFETY", "-DNOCLAIM"]
        memory = f"-DMEMLIM={limits.memory_mb * 3 // 4}"
        built = run(["gcc", "-O2", "-w", *mode, memory, "-o", "pan", "pan.c"], scratch, limits.time_s, 4096)
        if built.code != 0:
            return Outcome("unknown", 0, "gcc: " + built.output.strip()[-300:])
        search = ["./pan", f"-m{MAX_DEPTH}", "-w22", *(["-a", "-f"] if live else [])]
        done = run(search, scratch, limits.time_s, limits.memory_mb * 2)
        return read_verdict(done.output, done.timed_out)

    return Case(model, variant, expect, ("spin", "gcc"), check, full)


def read_verdict(output: str, timed_out: bool) -> Outcome:
    """A pass only where the search was exhaustive."""
    stored = re.search(r"(\d+) states, stored", output)
    errors = re.search(r"errors: (\d+)", output)
    size = int(stored.group(1)) if stored else 0
    broken = re.search(r"pan:\d+: (.*?)(?: \(at depth \d+\))?$", output, re.MULTILINE)
    if broken:
        return Outcome("fail", size, broken.group(1))
    for sign in ("max search depth too small", "reached -DMEMLIM bound", "out of memory"):
        if sign in output:
            return Outcome("unknown", size, sign)
    if timed_out:
        return Outcome("unknown", size, "time limit")
    if errors is None or size == 0:
        return Outcome("unknown", size, output.strip()[-300:])
    return Outcome("pass" if errors.group(1) == "0" else "fail", size, "")
