"""The order in which the copy primitive drives the bulk copy engine, against a model of a late engine."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutant", [0, 1, 2, 3])
def test_no_stage_is_filled_before_it_was_read(tmp_path: Path, mutant: int) -> None:
    """The real order passes; without the wait for readers, for fetches, or the final stores, the test fails."""
    program = tmp_path / "pipeline"
    command = ["g++", "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", f"-DMUTANT={mutant}"]
    include = [f"-I{ROOT}/{folder}" for folder in ("gpu_backends/cuda/native", "core/kernels", "core/native/include")]
    source = str(Path(__file__).with_name("stage_pipeline_test.cpp"))
    subprocess.run([*command, *include, source, "-o", str(program)], check=True, timeout=120)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=60)
    assert (done.returncode == 0) == (mutant == 0), done.stdout
