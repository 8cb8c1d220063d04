"""Set-up, life and end of buffers (rows 1, 2, 6, 26 and 32 of the table of reported faults)."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

import life_cases
from ranks import RankPool


@pytest.mark.parametrize("name", ["ibverbs", "libfabric"])
def test_fault_01_unusable_transport_names_a_fallback(pool: RankPool, name: str) -> None:
    from uccl_ep_core import registry

    plugin = registry.find(registry.TRANSPORTS, name)
    if plugin.loaded is not None and any(d.usable for d in plugin.loaded.probe({})):
        pytest.skip(f"{name} is usable on this machine")
    arguments = {"values": {"UCCL_EP_TRANSPORT": name}}
    for text in pool.run(life_cases.construction_error, ranks=2, domain=1, arguments=arguments):
        assert name in text and "shm" in text, text


@pytest.mark.parametrize("name", ["cuda", "hip"])
def test_fault_02_failed_probe_is_an_exception(pool: RankPool, name: str) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    arguments = {"values": {"UCCL_EP_GPU_BACKEND": name}}
    for text in pool.run(life_cases.construction_error, ranks=2, arguments=arguments):
        assert name in text, text


def test_unknown_plugin_names_the_nearest(pool: RankPool) -> None:
    arguments = {"values": {"UCCL_EP_TRANSPORT": "smh"}}
    for text in pool.run(life_cases.construction_error, ranks=2, arguments=arguments):
        assert "smh" in text and "shm" in text and "UCCL_EP_TRANSPORT" in text, text


@pytest.mark.parametrize("who", [0, 1])
def test_fault_06_failed_start_raises_on_every_rank(pool: RankPool, who: int) -> None:
    texts = pool.run(life_cases.failing_start, ranks=3, arguments={"who": who})
    assert all(texts), texts


@pytest.mark.parametrize("how", ["destroy", "drop", "twice"])
@pytest.mark.parametrize("domain", [0, 1])
def test_fault_26_create_and_destroy(pool: RankPool, how: str, domain: int) -> None:
    times = 100 if how == "destroy" else 30
    arguments = {"times": times, "how": how}
    for rank, use in enumerate(
        pool.run(life_cases.create_and_destroy, ranks=2, domain=domain, arguments=arguments, timeout_s=120)
    ):
        check_growth(rank, use, times)


def test_fault_26_every_call_of_another_shape(pool: RankPool) -> None:
    rounds = 60
    for rank, use in enumerate(pool.run(life_cases.many_shapes, ranks=2, arguments={"rounds": rounds}, timeout_s=120)):
        check_growth(rank, use, rounds)


def check_growth(rank: int, use: dict[str, list[int]], rounds: int) -> None:
    for name, (before, after) in use.items():
        slack = {"memory_kib": 24 << 10, "maps": 8}.get(name, 0)
        assert after <= before + slack, f"rank {rank}: {name} grew from {before} to {after} in {rounds} rounds"


def test_fault_26_exit_without_destroy() -> None:
    ours = RankPool(2, {k: v for k, v in os.environ.items() if k.startswith("UCCL_EP_")})
    ours.run(life_cases.exit_without_destroy, ranks=2)
    before = set(os.listdir("/dev/shm"))
    processes = list(ours._processes)
    started = time.monotonic()
    ours.stop()
    assert time.monotonic() - started < 9, "the processes did not exit by themselves"
    assert [p.exitcode for p in processes] == [0, 0]
    mine = {str(p.pid) for p in processes}
    left = [n for n in set(os.listdir("/dev/shm")) | before if any(pid in n for pid in mine)]
    assert not [n for n in left if Path("/dev/shm", n).exists()], left


def test_fault_32_one_host_needs_no_nic(pool: RankPool) -> None:
    (described, _) = pool.run(life_cases.describe, ranks=2)
    for key in ("gpu_backend", "transport", "plan", "domains"):
        assert described[key]["reason"], key


def test_a_named_transport_that_is_not_needed_is_tried_and_closed(pool: RankPool) -> None:
    """What it keeps for a process, such as files in shared memory, would outlive a kill."""
    assert pool.run(life_cases.unneeded_transport, ranks=2) == [["open", "close"]] * 2


def test_options_of_this_run_reach_buffers(pool: RankPool, pytestconfig: pytest.Config) -> None:
    """What --transport, --plan and --lanes ask for is what the buffers of the rank processes have."""
    described = pool.run(life_cases.describe, ranks=2, domain=1)[0]
    for option, key in (("--transport", "transport"), ("--plan", "plan")):
        if pytestconfig.getoption(option) is not None:
            assert described[key]["name"] == pytestconfig.getoption(option)
    lanes = pytestconfig.getoption("--lanes")
    if lanes is not None:
        assert pool.run(life_cases.warp_size, ranks=2) == [lanes] * 2
