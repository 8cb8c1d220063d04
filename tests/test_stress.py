"""Repetition and interleaving (rows 5, 24 and 25 of the table of reported faults)."""

from __future__ import annotations

import pytest

import stream_cases
from ranks import RankPool


def test_fault_05_several_groups_and_buffers(pool: RankPool) -> None:
    pool.run(stream_cases.interleaved_groups, ranks=4, arguments={"rounds": 350}, timeout_s=120)


@pytest.mark.parametrize("mode", ["high_throughput", "low_latency"])
@pytest.mark.parametrize(("ranks", "domain"), [(4, 0), (4, 2)])
def test_fault_24_two_thousand_pairs_without_a_barrier(pool: RankPool, ranks: int, domain: int, mode: str) -> None:
    arguments = {"pairs": 2000, "mode": mode, "seed": 11}
    pool.run(stream_cases.stress, ranks=ranks, domain=domain, arguments=arguments, timeout_s=240)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mode", ["high_throughput", "low_latency"])
def test_fault_24_on_six_ranks(pool: RankPool, mode: str, seed: int) -> None:
    arguments = {"pairs": 3000, "mode": mode, "seed": seed, "longest_ms": 10.0}
    pool.run(stream_cases.stress, ranks=6, domain=(0, 1, 2, 3)[seed], arguments=arguments, timeout_s=600)


@pytest.mark.parametrize(("ranks", "domain"), [(4, 0), (4, 2)])
def test_fault_25_two_dispatches_in_flight(pool: RankPool, ranks: int, domain: int) -> None:
    pool.run(stream_cases.two_in_flight, ranks=ranks, domain=domain, arguments={"rounds": 30})


@pytest.mark.parametrize(("ranks", "domain"), [(4, 0), (4, 2)])
def test_fault_25_two_threads(pool: RankPool, ranks: int, domain: int) -> None:
    pool.run(stream_cases.two_threads, ranks=ranks, domain=domain, arguments={"rounds": 30})
