"""The orders in which copies and sums drive the bulk copy engine, against a model of a late engine and late lanes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, program: str, *options: str) -> subprocess.CompletedProcess[str]:
    built = folder / program
    command = ["g++", "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", *options]
    include = [f"-I{ROOT}/{part}" for part in ("gpu_backends/cuda/native", "core/kernels", "core/native/include")]
    source = str(Path(__file__).with_name(f"{program}.cpp"))
    subprocess.run([*command, *include, source, "-o", str(built)], check=True, timeout=120)
    return subprocess.run([str(built)], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("program", "mutant"),
    [
        *(("stage_pipeline_test", mutant) for mutant in (0, 1, 2, 3)),
        *(("sum_pipeline_test", mutant) for mutant in (0, 2, 3, 4)),
    ],
)
def test_no_stage_is_filled_before_it_was_read(tmp_path: Path, program: str, mutant: int) -> None:
    """It fails without the wait for stores (1) or lanes (4) that read, for fetches (2), or the end (3) alone."""
    done = run(tmp_path, program, f"-DMUTANT={mutant}")
    assert (done.returncode == 0) == (mutant == 0), done.stdout


def test_sums_of_staged_pieces_have_the_bits_of_the_definition(tmp_path: Path) -> None:
    """All element types, lengths that end within a step of the warp, odd and even numbers of rows, minus zeros."""
    done = run(tmp_path, "sum_pieces_test")
    assert done.returncode == 0, done.stdout
