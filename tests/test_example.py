"""The example's loss curve is that of a single process, bit for bit, on any number of processes and any topology."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ranks import Context, RankPool

EXAMPLE = Path(__file__).parent.parent / "examples" / "train_moe.py"
STEPS = 6


@lru_cache
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_moe", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_moe"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def single() -> list[float]:
    torch.set_num_threads(1)
    module = example()
    return list(module.train(module.Model(), STEPS, 4, 2, quiet=True))


def parallel(ctx: Context) -> list[float]:
    module = example()
    os.environ["UCCL_EP_DOMAIN_SIZE"] = str(ctx.domain)
    try:
        return list(module.train(module.Model(), STEPS, 4, 2, group=ctx.group, quiet=True))
    finally:
        del os.environ["UCCL_EP_DOMAIN_SIZE"]


@pytest.mark.parametrize(("ranks", "domain"), [(1, 0), (2, 0), (2, 1), (4, 0), (4, 2)])
def test_same_losses_on_any_number_of_processes(pool: RankPool, single: list[float], ranks: int, domain: int) -> None:
    assert len(set(single)) == STEPS and single[-1] < single[0]
    for curve in pool.run(parallel, ranks=ranks, domain=domain, timeout_s=120):
        assert curve == single


def test_under_torchrun(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)),
        *("--steps", "3", "--plot", str(tmp_path / "plot.png"), "--json", str(tmp_path / "curve.json")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit for bit" in done.stdout
    curves = json.loads((tmp_path / "curve.json").read_text())
    assert curves["parallel"] == curves["single"] and len(curves["single"]) == 3
    assert (tmp_path / "plot.png").stat().st_size > 10_000
