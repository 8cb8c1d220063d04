"""Ranks that die or are late (rows 9 to 12 and 31 of the table of reported faults).

Every survivor must raise, within the time-out, an error that names the same rank, and be able to exit.
"""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

import death_cases
from ranks import RankPool

TIMEOUT_S = 4.0
OPTIONS = {"UCCL_EP_TIMEOUT_S": str(TIMEOUT_S)}
TOPOLOGIES = [(4, 0), (4, 2)]
# The shm provider of libfabric 1.17 may not come back from a call when its peer is killed inside a write. All that
# may then differ is that `destroy` names the function (docs/transports/libfabric.md).
MAY_NOT_RETURN = tuple(
    os.environ.get(f"UCCL_EP_{name}") for name in ("TRANSPORT", "LIBFABRIC_LIBRARY", "LIBFABRIC_PROVIDER")
) == ("libfabric", "system", "shm")
STUCK = "of the transport does not return"


def check_reports(reports: list[Any], culprit: int) -> None:
    survivors = [r for r in reports if r is not None]
    assert len(survivors) == len(reports) - 1
    for report in survivors:
        assert report["rank"] == culprit, report
        assert report["reason"] in ("dead", "timeout", "transport"), report
        assert report["phase"] and report["phase"] in report["message"], report
        assert f"rank {culprit}" in report["message"], report
        assert report["operation"] > 0, report
        for count in ("operation", "expected", "seen"):
            assert str(report[count]) in report["message"], report
        assert report["after_s"] < 3 * TIMEOUT_S + 5, report


@pytest.mark.parametrize(("ranks", "domain"), TOPOLOGIES)
@pytest.mark.parametrize("mode", ["high_throughput", "low_latency"])
@pytest.mark.parametrize("when", ["before", "inside", "after"])
def test_fault_11_one_rank_is_killed(pool: RankPool, ranks: int, domain: int, mode: str, when: str) -> None:
    who = 2
    reports = pool.run(
        death_cases.one_rank_dies, ranks=ranks, domain=domain, options=OPTIONS, may_die=(who,), timeout_s=45,
        arguments={"who": who, "when": when, "mode": mode},
    )  # fmt: skip
    check_reports(reports, who)


@pytest.mark.parametrize(("ranks", "domain"), [*TOPOLOGIES, (2, 1)])  # (2, 1): all rows go by the transport
def test_fault_11_killed_inside_a_long_dispatch(pool: RankPool, ranks: int, domain: int) -> None:
    reports = pool.run(
        death_cases.killed_inside_a_long_dispatch, ranks=ranks, domain=domain, options=OPTIONS, may_die=(1,),
        arguments={"who": 1, "rows": 3000}, timeout_s=45,
    )  # fmt: skip
    check_reports(reports, 1)
    for report in filter(None, reports):
        assert report["after_s"] < TIMEOUT_S + 2, report  # 2 s: for the kill to come, on a busy machine
        assert report["destroy"] == "" or (MAY_NOT_RETURN and STUCK in report["destroy"]), report
    # By the numbers of these processes, since others of the machine make files there too.
    pids = {str(pid) for pid in reports[0]["pids"]}
    left = [name for name in os.listdir("/dev/shm") if pids & set(re.findall(r"\d+", name))]
    assert not left, "files stay in shared memory"


@pytest.mark.parametrize("domain", [0, 2])
def test_fault_09_a_late_rank_is_waited_for(pool: RankPool, domain: int) -> None:
    arguments = {"who": 3, "delay_s": 1.0}
    pool.run(death_cases.late_rank, ranks=4, domain=domain, options=OPTIONS, arguments=arguments)


@pytest.mark.parametrize(("ranks", "domain"), [*TOPOLOGIES, (4, 1)])
@pytest.mark.parametrize("mode", ["high_throughput", "cached_dispatch", "low_latency"])
def test_fault_10_12_31_a_rank_that_does_not_come(pool: RankPool, ranks: int, domain: int, mode: str) -> None:
    """The others time out with the same culprit, counts and operation; the late rank itself learns of it; destroy
    returns; the processes make a new buffer and go on."""
    options = {"UCCL_EP_TIMEOUT_S": "1.5"}
    reports = pool.run(
        death_cases.too_late_rank, ranks=ranks, domain=domain, options=options, arguments={"who": 1, "mode": mode}
    )
    for rank, report in enumerate(reports):
        assert report["rank"] == 1, report
        assert report["destroy_s"] < 5, report
        if rank != 1:
            assert report["reason"] == "timeout", report
            assert "rank 1" in report["message"] and str(report["operation"]) in report["message"], report
            assert report["operation"] > 0, report
            # On a busy machine the first whose time is up may be one that waits for a rank that waits for rank 1.
            cut_short = f"rank {report['reporter']} still waited for it when the time of another rank was up"
            assert report["elapsed_s"] >= 1.4 or cut_short in report["message"], report
