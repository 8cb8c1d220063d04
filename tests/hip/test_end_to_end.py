"""Dispatch and combine through the whole HIP backend: its loader, windows between processes, streams, and
launches, on the fake runtime, with kernels executed by the host backend. The CUDA backend likewise.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fakes
import hip_cases
import pytest

from ranks import RankPool


@pytest.fixture(scope="module")
def hip_pool(files: fakes.FakeFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RankPool, Any]]:
    cache = tmp_path_factory.mktemp("cache")
    cache.chmod(0o700)
    vendor = files.vendor.upper()
    options = {
        "UCCL_EP_GPU_BACKEND": files.vendor,
        f"UCCL_EP_{vendor}_LIBRARY": str(files.driver),
        f"UCCL_EP_{vendor}_{'HIPRTC' if vendor == 'HIP' else 'NVRTC'}": str(files.compiler),
        f"UCCL_EP_{vendor}_CACHE_DIR": str(cache),
        "FAKE_COMPILER_IMAGE": str(files.image),
        "PYTHONPATH": str(Path(__file__).parent),
    }
    pool = RankPool(4, options)
    try:
        yield pool, files
    finally:
        pool.stop()


def run(hip_pool: tuple[RankPool, Any], case: Any, *, ranks: int, domain: int = 0, **arguments: Any) -> list[Any]:
    pool, files = hip_pool
    function = f"{Path(hip_cases.__file__).stem}:{case.__name__}"
    return pool.run(function, ranks=ranks, domain=domain, timeout_s=120, arguments={"files": files, **arguments})


@pytest.mark.parametrize(("ranks", "domain"), [(2, 0), (4, 0), (2, 1), (4, 2)])
def test_high_throughput_is_exact(hip_pool: tuple[RankPool, Any], ranks: int, domain: int) -> None:
    journals = run(
        hip_pool, hip_cases.high_throughput, ranks=ranks, domain=domain, tokens=[33, 0, 64, 7][:ranks], hidden=128,
        experts=8, topk=3, bias=1, cached=True, seed=ranks,
    )  # fmt: skip
    for journal in journals:
        assert sum("Launch" in call for call in journal) >= 5, "every kernel goes through the driver"


# With a hook each half is a kernel, without one kernel does both.
@pytest.mark.parametrize(
    ("ranks", "domain", "hook"), [(2, 0, True), (4, 0, False), (2, 1, False), (4, 2, True), (4, 2, False)]
)
def test_low_latency_is_exact(hip_pool: tuple[RankPool, Any], ranks: int, domain: int, hook: bool) -> None:
    journals = run(
        hip_pool, hip_cases.low_latency, ranks=ranks, domain=domain, tokens=[8, 3, 0, 5][:ranks], most=8, hidden=256,
        experts=8, topk=2, hook=hook, seed=ranks,
    )  # fmt: skip
    for journal in journals:
        assert sum("Launch" in call for call in journal) == (4 if hook else 2)


@pytest.mark.parametrize("domain", [0, 1])
def test_traced_kernels_are_read_back(hip_pool: tuple[RankPool, Any], domain: int) -> None:
    pool, files = hip_pool
    found = pool.run(
        f"{Path(hip_cases.__file__).stem}:traced", ranks=2, domain=domain, timeout_s=120,
        options={"UCCL_EP_TRACE_KERNELS": "1"},
        arguments={"files": files, "tokens": [8, 3], "most": 8, "hidden": 256, "experts": 8, "topk": 2, "hook": False,
                   "seed": 1},
    )  # fmt: skip
    for rows, off_ns, error_ns in found:
        names = {(row["kernel"], row["activity"]) for row in rows}
        stem = "ll_" if domain else "ll_direct_"
        assert {(f"{stem}dispatch", "receives / copies"), (f"{stem}combine", "receives / adds up")} <= names
        assert off_ns <= error_ns


def test_kernels_of_another_build_are_an_error_of_every_rank(hip_pool: tuple[RankPool, Any], tmp_path: Path) -> None:
    pool, files = hip_pool
    if files.vendor != "hip":
        pytest.skip("the fake of the other vendor is an older driver, which cannot say")
    tmp_path.chmod(0o700)
    size = ctypes.sizeof(fakes.KERNELS["uccl_ep_dispatch"])
    errors = pool.run(
        f"{Path(hip_cases.__file__).stem}:another_build",
        ranks=2,
        options={"UCCL_EP_HIP_CACHE_DIR": str(tmp_path), "FAKE_COMPILER_IMAGE": str(files.longer)},
        arguments={"files": files, "tokens": [3, 5]},
    )
    for error in errors:
        assert f"takes {size + 8} bytes of parameters, given {size}" in error, errors


def test_buffers_leave_nothing_behind(hip_pool: tuple[RankPool, Any]) -> None:
    for live in run(hip_pool, hip_cases.created_and_destroyed, ranks=2, times=3):
        assert len(set(live)) == 1, f"memory grows from life to life: {live}"


def test_a_failure_of_one_rank_raises_on_all(hip_pool: tuple[RankPool, Any]) -> None:
    _, files = hip_pool
    call = "hipExtMallocWithFlags" if files.vendor == "hip" else "cuMemAlloc_v2"
    errors = run(hip_pool, hip_cases.fails_to_open, ranks=2, call=call)
    assert all(call in error for error in errors), errors
