"""Checks that compile the shipped headers: the ring under Relacy, and the packing at its limits."""

from __future__ import annotations

import re
import threading
from pathlib import Path

from .case import Case, Limits, Outcome, Verdict
from .process import run

HERE = Path(__file__).resolve().parents[1]
INCLUDE = HERE.parent / "native" / "include"
COMPILE_TIME_S = 300.0
_build_lock = threading.Lock()  # several cases share one binary: the first builds it


def build(source: Path, target: Path, flags: list[str]) -> str:
    """Compile ``source`` into ``target`` unless it is there; the compiler's words where it fails."""
    with _build_lock:
        if target.exists():
            return ""
        command = ["g++", "-O2", f"-I{INCLUDE}", *flags, source, "-o", target]
        done = run(command, target.parent, COMPILE_TIME_S, 8192)
        return "" if done.code == 0 else f"g++: {done.output.strip()[-300:]}"


def ring_case(
    configuration: str, variant: str, expect: Verdict, search: str, limit: int, *, full: bool = False
) -> Case:
    """The shipped ring under the C++11 memory model; ``variant`` is the mutation, or a pass's description."""
    mutation = variant if expect == "fail" else "none"

    def check(scratch: Path, shared: Path, limits: Limits) -> Outcome:
        binary = shared / "ring_relacy"
        header = '-DUCCL_EP_RING_HEADER="uccl_ep/ring.hpp"'
        error = build(HERE / "ring" / "ring_relacy.cpp", binary, ["-std=c++17", "-w", header])
        if error:
            return Outcome("unknown", 0, error)
        done = run([binary, configuration, mutation, search, str(limit)], scratch, limits.time_s, limits.memory_mb)
        verdict = re.search(r"verdict=(pass|fail) executions=(\d+) reason='(.*)'", done.output)
        if verdict is None:
            return Outcome("unknown", 0, "time limit" if done.timed_out else done.output.strip()[-300:])
        passed = verdict.group(1) == "pass"
        return Outcome("pass" if passed else "fail", int(verdict.group(2)), "" if passed else verdict.group(3).lower())

    return Case("ring", variant, expect, ("relacy", "g++"), check, full)


def packing_case() -> Case:
    """Commands and immediates through the shipped code, at every limit of every field."""

    def check(scratch: Path, shared: Path, limits: Limits) -> Outcome:
        binary = shared / "packing_check"
        error = build(HERE / "arithmetic" / "packing_check.cpp", binary, ["-std=c++20"])
        if error:
            return Outcome("unknown", 0, error)
        done = run([binary], scratch, limits.time_s, limits.memory_mb)
        count = re.search(r"checked=(\d+)", done.output)
        if done.code == 0 and count:
            return Outcome("pass", int(count.group(1)), "")
        return Outcome("fail", 0, done.output.strip()[-300:])

    return Case("packing", "shipped code at all limits", "pass", ("g++",), check)
