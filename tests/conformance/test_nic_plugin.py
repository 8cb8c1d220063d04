"""The example plugin: installed as a stranger would, found by its entry point, passing the kit, moving tokens."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cases
from ranks import Context, RankPool
from uccl_ep_core import registry
from uccl_ep_core.conformance import run
from uccl_ep_core.errors import BackendUnavailableError

EXAMPLE = Path(__file__).parents[2] / "examples" / "nic_plugin"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the plugin in it, on ``sys.path``; the checkout is left as it is."""
    pytest.importorskip("setuptools", reason="builds the example's wheel; pip install setuptools")
    base = tmp_path_factory.mktemp("stranger")
    source, target = base / "source", base / "installed"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("*.so", "build", "*.egg-info"))
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    ended = subprocess.run(
        [*command, "--target", str(target), str(source)], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    sys.path.insert(0, str(target))
    registry.refresh()
    yield target
    sys.path.remove(str(target))
    registry.refresh()
    for name in [name for name in sys.modules if name.partition(".")[0] == "socketnic"]:
        del sys.modules[name]


def test_it_is_well_under_200_lines() -> None:
    lines = (EXAMPLE / "socketnic" / "__init__.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) < 170


def test_python_version_passes_the_kit(installed: Path) -> None:
    environment = dict(os.environ, PYTHONPATH=str(installed))
    command = [sys.executable, "-m", "uccl_ep_core.conformance", "--transport", "socketnic", "--seeds", "2"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "every promise kept" in ended.stdout


def test_c_version_passes_the_kit(installed: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler: install gcc")
    from socketnic import in_c

    with pytest.raises(BackendUnavailableError, match=r"could not be started.* run cc -std=c11"):
        run("socketnic_c", seeds=[1], checks=["table"])
    command = [*in_c.build_command(installed / "socketnic" / "libdata.so"), "-Werror"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    report = run("socketnic_c", seeds=[1, 2])
    assert report.passed, [f"{result.check}: {result.message}" for result in report.broken]


@pytest.mark.parametrize("profile", ["srd", "iwarp"])
def test_the_simulator_wraps_it_too(installed: Path, profile: str) -> None:
    checks = ["placement", "completions", "imm_bits", "imm_after_payload", "delivery_complete", "exactly_once"]
    report = run("sim", {"inner": "socketnic", "profile": profile}, seeds=[1], checks=checks)
    assert report.passed, [f"{result.check}: {result.message}" for result in report.broken]


def both_modes(ctx: Context) -> str:
    """One case of each mode over whatever transport the environment names."""
    buffer = ctx.new_buffer(num_rdma_bytes=8 << 20)
    tokens = [5 + rank for rank in range(ctx.num_ranks)]
    arguments: dict[str, Any] = {"tokens": tokens, "experts": 12, "hidden": 128, "buffer": buffer}
    cases.high_throughput(ctx, **arguments)
    cases.low_latency(ctx, most=16, **arguments)
    ctx.barrier()
    described = buffer.describe()
    buffer.destroy()
    return f"{described['transport']['name']} {described['plan']['name']}"


def test_dispatch_and_combine_over_it(installed: Path) -> None:
    pool = RankPool(2)
    try:
        options = {"UCCL_EP_TRANSPORT": "socketnic", "UCCL_EP_TIMEOUT_S": "30"}
        assert pool.run(both_modes, ranks=2, domain=1, options=options) == ["socketnic counted"] * 2
    finally:
        pool.stop()
