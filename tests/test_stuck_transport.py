"""A function of the transport that never returns costs its thread and its memory, and hangs nobody."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("function", ["poll_completions", "post_writes"])
def test_a_transport_that_does_not_return_hangs_nobody(tmp_path: Path, function: str) -> None:
    script = Path(__file__).with_name("stuck_ranks.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "store"), function],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        out, err = ranks[0].communicate(timeout=60)  # also the end of the process, with the thread still in there
        ranks[1].communicate(timeout=10)
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[0].returncode == 0, err
    assert ranks[1].returncode == -9
    report = json.loads(out)
    assert (report["culprit"], report["reason"]) == (1, "dead")
    assert report["raised_s"] < 5
    assert report["destroyed_s"] < 8
    assert f"{function.partition('_')[0]}" in report["destroy"]
    assert "of the transport does not return" in report["destroy"]
    assert "memory stays allocated" in report["destroy"]
