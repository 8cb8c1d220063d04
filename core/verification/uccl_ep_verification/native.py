"""Checks that compile the shipped headers: the ring under Relacy, and the packing at its limits."""

from __future__ import annotations

import re
import shutil
import threading
from pathlib import Path

from .case import Case, Limits, Outcome, Verdict
from .process import run

HERE = Path(__file__).resolve().parents[1]
INCLUDE = HERE.parent / "native" / "include"
COMPILE_TIME_S = 120.0
_build_lock = threading.Lock()  # several cases share one binary: the first builds it


def build(source: Path, target: Path, flags: list[str]) -> str:
    """Compile ``source`` into ``target`` unless it is there; the compiler's words where it fails."""
    with _build_lock:
        if target.exists():
            return ""
        command = ["g++", "-O2", *flags, f"-I{INCLUDE}", source, "-o", target]
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


# Header, line of it, and what the mutant has instead.
PACKING_MUTANTS = {
    "value of 63 bits": ("command.hpp", "(command.value >> kValueLowBits) << (", "(command.value & 0) << ("),
    "phase in one word": ("command.hpp", "packed.word[3] = phase | ", "packed.word[3] = "),
    "index overlaps epoch": ("immediate.hpp", "{imm.index} << (1 + kEpochBits)", "{imm.index} << kEpochBits"),
    "widths not refused": ("immediate.hpp", "usable < taken + kMinIndexBits", "usable < kMinIndexBits"),
}


def packing_case(mutation: str = "") -> Case:
    """Commands and immediates through the shipped code, at every limit of every field."""

    def check(scratch: Path, shared: Path, limits: Limits) -> Outcome:
        include = scratch / "include"
        shutil.copytree(INCLUDE, include)
        if mutation:
            header, line, instead = PACKING_MUTANTS[mutation]
            path = include / "uccl_ep" / header
            text = path.read_text(encoding="utf-8")
            if text.count(line) != 1:
                return Outcome("unknown", 0, f"{header} no longer has the line {line!r} once")
            path.write_text(text.replace(line, instead), encoding="utf-8")
        binary = scratch / "packing_check"
        error = build(HERE / "arithmetic" / "packing_check.cpp", binary, ["-std=c++20", f"-I{include}"])
        if error:
            return Outcome("unknown", 0, error)
        done = run([binary], scratch, limits.time_s, limits.memory_mb)
        count = re.search(r"checked=(\d+)", done.output)
        if done.code == 0 and count:
            return Outcome("pass", int(count.group(1)), "")
        return Outcome("fail", 0, done.output.strip()[-300:])

    return Case("packing", mutation or "shipped code at all limits", "fail" if mutation else "pass", ("g++",), check)
