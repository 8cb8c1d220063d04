"""The command that shows everything on GPUs runs here on the host backend, with small shapes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
    assert list(stages) == ["exact, one domain", "exact, 24 SMs", "exact, domains of 1", "killed, low_latency"]


@pytest.mark.full
def test_every_stage(tmp_path: Path) -> None:
    assert len(run_suite(tmp_path)) == 15
    assert json.loads((tmp_path / "ep2_domains_of_1.json").read_text())


def test_a_failing_stage_fails_the_suite(tmp_path: Path) -> None:
    command = [sys.executable, str(SUITE), "--small", "--ranks", "2", "--limit-s", "-1", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 1 and "no time was left" in done.stdout
