"""The script that runs frameworks on GPUs, at a size for CPUs, so that it is in order when GPUs are at hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from versions import needs


@pytest.mark.parametrize(
    "framework",
    [pytest.param("megatron", marks=needs("megatron-core")), pytest.param("transformers", marks=needs("transformers"))],
)
def test_small(tmp_path: Path, framework: str) -> None:
    script = Path(__file__).parent / "gpu_frameworks.py"
    command = [sys.executable, str(script), framework, "--small", "--iterations", "2", "--json", str(tmp_path / "out")]
    environment = {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", **os.environ}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "out").read_text())
    assert result["ranks"] == 2
    if framework == "megatron":
        assert set(result["difference from allgather"].values()) == {0.0}
    else:
        assert result["float64, eager"]["tokens generated, equal"] is True
