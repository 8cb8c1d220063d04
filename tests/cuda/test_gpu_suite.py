"""The command that shows everything on GPUs runs here on the host backend, with small shapes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import sanitizer

SUITE = Path(__file__).with_name("gpu_suite.py")


def run_suite(folder: Path, *arguments: str) -> dict[str, dict[str, object]]:
    command = [sys.executable, str(SUITE), "--small", "--ranks", "2", "--out", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    stages: dict[str, dict[str, object]] = json.loads((folder / "stages.json").read_text())
    assert stages and all(stage["ok"] for stage in stages.values()), done.stdout
    return stages


def test_stages_that_check(tmp_path: Path) -> None:
    stages = run_suite(tmp_path, "--only", "exact", "killed, low")
    assert [name for name in stages if not name.endswith("libfabric")] == [
        "exact, one domain", "exact, 24 SMs", "exact, domains of 1", "exact, 4 ranks, domains of 2",
        "killed, low_latency",
    ]  # fmt: skip


@pytest.mark.full
def test_every_stage(tmp_path: Path) -> None:
    stages = run_suite(tmp_path)
    assert len(stages) == 23
    assert str(stages["graphs"]["words"]).startswith("skipped: ")
    for name in ("ep2_domains_of_1", "proxied2_shm"):
        assert json.loads((tmp_path / f"{name}.json").read_text())


@pytest.mark.parametrize(
    ("tool", "says", "shown"),
    [
        ("memcheck", "========= ERROR SUMMARY: 0 errors", True),
        ("memcheck", "========= ERROR SUMMARY: 2 errors", False),
        ("racecheck", "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", True),
        ("racecheck", "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)", False),
        ("synccheck", "", False),  # it looked at nothing
    ],
)
def test_what_the_sanitizer_says_is_heard(tmp_path: Path, tool: str, says: str, shown: bool) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\necho '{says}'\n")
    program.chmod(0o755)
    if shown:
        assert sanitizer.run(str(program), tool, 2, ("exact",), 60) == "0 findings in all processes"
    else:
        with pytest.raises(RuntimeError, match=f"{tool}: exit status 0"):
            sanitizer.run(str(program), tool, 2, ("exact",), 60)


def test_a_failing_stage_fails_the_suite(tmp_path: Path) -> None:
    command = [sys.executable, str(SUITE), "--small", "--ranks", "2", "--limit-s", "-1", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 1 and "no time was left" in done.stdout
