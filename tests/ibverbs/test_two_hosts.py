"""Two hosts: two guests, each with a kernel of its own, and a link between them that loses and reorders packets.

Runs on the host that starts the guests. The kernel must have been built (``make softroce`` does).
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from devices import STEP

ROOT = Path(__file__).parents[2]
SOFTROCE = ROOT / "transports/ibverbs/softroce"
SCRIPT = Path(__file__).with_name("two_hosts.py")
WAYS = [("rxe0", "native"), ("rxe0", "counted"), ("siw0", "fenced")]
BAD_LINK = "delay 1ms reorder 25% 50% loss 1%"
START_S = 240.0  # for two guests to boot and import torch on a busy machine


def _guest() -> Any:
    spec = importlib.util.spec_from_file_location("softroce_guest", SOFTROCE / "guest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["softroce_guest"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def guest() -> Any:
    if os.environ.get("JOB"):
        pytest.skip("this is a guest; the tests of two hosts start their own")
    if os.environ.get("SOFTROCE_GUEST") != "1":
        pytest.skip("two guests take minutes: run 'make softroce'")
    if sys.platform != "linux" or shutil.which("taskset") is None:
        pytest.skip("guests need Linux and taskset")
    built = subprocess.run([str(SOFTROCE / "build_kernel.sh"), "--only-cached"], capture_output=True, text=True)
    if built.returncode != 0:
        pytest.fail(f"no kernel for the guests ({built.stderr.strip()}): run 'make softroce'")
    return _guest()


def run(
    guest: Any,
    way: tuple[str, str],
    netem: str,
    arguments: str,
    limit_s: float,
    timeout_s: float,
    extra: dict[str, str] | None = None,
) -> list[str]:
    """What both ranks printed; fails with all that they printed where one does not end with 0."""
    device, plan = way
    settings = {
        "OMP_NUM_THREADS": "1",
        "UCCL_EP_TRANSPORT": "ibverbs",
        "UCCL_EP_IBVERBS_DEVICE": device,
        "UCCL_EP_IBVERBS_PLAN": plan,
        "UCCL_EP_TIMEOUT_S": str(timeout_s),
        **(extra or {}),
    }
    spoil = " && ".join(f"tc qdisc add dev {link} root netem {netem}" for link in ("vec0", "vec1")) if netem else "true"
    command = f"{spoil} && exec timeout {limit_s} {sys.executable} {SCRIPT} {arguments}"
    results = guest.run([command, command], timeout_s=START_S + limit_s, memory="3G", env=settings)
    logs = "\n".join(f"--- node {it.node} ended with {it.status}\n{it.log}" for it in results)
    assert [it.status for it in results] == [0, 0], logs
    return [it.log for it in results]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(way))
def test_exact_over_a_bad_link(guest: Any, way: tuple[str, str]) -> None:
    number = 1000 // STEP
    for log in run(guest, way, BAD_LINK, f"steps {number}", limit_s=1200, timeout_s=120):
        assert f"exact for {number} steps over {way[1]}" in log
        found = re.search(r"qdisc netem.*?dropped (\d+),", log, re.DOTALL)
        assert found, f"there was no netem on the link:\n{log}"
        assert int(found.group(1)) > 0, f"the link lost nothing, so nothing was tested:\n{log}"
        print(log)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(way))
def test_a_cut_link_names_the_peer(guest: Any, way: tuple[str, str]) -> None:
    timeout_s = 10.0
    # Beyond the time-out itself: the other rank's verdict cannot arrive, and the machine may be busy.
    for node, log in enumerate(run(guest, way, "", f"cut 20 {timeout_s + 10}", limit_s=600, timeout_s=timeout_s)):
        assert f"rank {1 - node}" in log
        assert "destroyed in" in log


@pytest.mark.parametrize("way", [way for way in WAYS if way[0] == "rxe0"], ids=lambda way: "-".join(way))
def test_a_link_that_comes_back(guest: Any, way: tuple[str, str]) -> None:
    """Silent for longer than the queue pairs repeat a packet: they fail on both hosts and are replaced."""
    quick = {
        "UCCL_EP_IBVERBS_TIMEOUT": "14",  # 67 ms, four times
        "UCCL_EP_IBVERBS_RETRY": "3",
        "UCCL_EP_IBVERBS_RENEW_TIMEOUT_S": "60",
    }
    for log in run(guest, way, "", "flap 10 4", limit_s=600, timeout_s=120, extra=quick):
        found = re.search(r"exact for 30 steps; (\d+) queue pairs replaced, (\d+) writes repeated", log)
        assert found, log
        assert int(found.group(1)) > 0, log
        print(log)


def test_latency_against_perftest(guest: Any) -> None:
    if shutil.which("ib_write_lat") is None:
        pytest.skip("ib_write_lat is not installed: apt-get install perftest")
    log = run(guest, WAYS[0], "", "latency", limit_s=600, timeout_s=120)[0]
    ratios = [float(it) for it in re.findall(r"ratio ([\d.]+)", log)]
    print(log)
    if "could not measure" in log:
        pytest.skip("ib_write_lat could not measure the clock of its core in eight runs: the machine is too busy")
    assert len(ratios) == 3, log
    assert max(ratios) < 2, log
