"""Which plan is in force on which device, that nothing else runs, and that results stay right under attack."""

from __future__ import annotations

from typing import Any

import pytest
import sim_cases

from ranks import CaseFailure, RankPool

PLAN_OF = {"rc": "native", "bnxt": "native", "srd": "counted", "iwarp": "fenced"}
TOPOLOGIES = [(2, 1), (3, 1), (4, 2)]  # ranks, ranks a scale-up domain


def sim(profile: str, seed: int = 1, **options: Any) -> dict[str, str]:
    """The environment that puts the simulator under a buffer."""
    values = {"profile": profile, "seed": seed, **options}
    return {
        "UCCL_EP_TRANSPORT": "sim",
        "UCCL_EP_TIMEOUT_S": "30",
        **{f"UCCL_EP_SIM_{name.upper()}": str(value) for name, value in values.items()},
    }


def emulated(engine: dict[str, Any]) -> dict[str, int]:
    """The counters of emulation that moved."""
    return {name: value for name, value in engine.items() if name.startswith("emulated_") and value}


@pytest.mark.parametrize(("ranks", "domain"), TOPOLOGIES)
@pytest.mark.parametrize("profile", PLAN_OF)
def test_plan_in_force(pool: RankPool, profile: str, ranks: int, domain: int) -> None:
    results = pool.run(
        sim_cases.every_feature, ranks=ranks, domain=domain, options=sim(profile), arguments={"seed": 1}, timeout_s=120
    )
    for result in results:
        engine, device = result["engine"], result["sim"]
        assert result["plan"] == PLAN_OF[profile]
        assert device["source_changed"] == 0, "bytes were changed before the write that carries them completed"
        assert device["writes"] > 0
        assert device["segments"] > 0
        if profile in ("rc", "bnxt"):
            assert emulated(engine) == {}, "emulation ran on a device that keeps order itself"
            assert engine["native_signals"] > 0
            assert device["early_completions"] > 0
            assert device["overtakes"] == 0
        elif profile == "srd":
            assert engine["emulated_counts"] > 0
            assert engine["native_signals"] == engine["emulated_fences"] == engine["emulated_signal_writes"] == 0
            assert device["early_completions"] > 0
        else:
            assert engine["emulated_fences"] > 0
            assert engine["native_signals"] == engine["emulated_counts"] == engine["emulated_immediates"] == 0
    if profile in ("srd", "iwarp"):  # how many depends on how quick the machine is
        assert sum(result["sim"]["overtakes"] for result in results) > 0


def test_bnxt_collapse_is_avoided_by_the_cap(pool: RankPool) -> None:
    """The in-flight cap that the capability names keeps the device below its limit; without, it collapses."""

    def collapsed(**options: Any) -> int:
        results = pool.run(
            sim_cases.every_feature,
            ranks=2,
            domain=1,
            options=sim("bnxt", max_segments=1, **options),
            arguments={"seed": 1},
            timeout_s=120,
        )
        return sum(result["sim"]["collapsed"] for result in results)

    assert collapsed() == 0
    assert collapsed(inflight_limit=64, collapse=2.0) > 0  # less than one message: the device collapses anyway


@pytest.mark.parametrize(("ranks", "domain"), [(2, 1), (4, 2)])
def test_no_promise_is_refused(pool: RankPool, ranks: int, domain: int) -> None:
    for words in pool.run(sim_cases.refused, ranks=ranks, domain=domain, options=sim("none")):
        assert "write_order" in words
        assert "imm_after_payload" in words
        assert "delivery_complete or flush" in words


def test_a_plan_that_cannot_hold_is_refused(pool: RankPool) -> None:
    for words in pool.run(sim_cases.refused, ranks=2, domain=1, options=sim("srd", plan="native")):
        assert "not native: lacks write_order and signal_order and native_signal" in words


@pytest.mark.parametrize(("profile", "plan"), [("rc", "counted"), ("rc", "fenced"), ("srd", "fenced")])
def test_a_requested_plan_is_in_force(pool: RankPool, profile: str, plan: str) -> None:
    options = sim(profile, plan=plan)
    for result in pool.run(sim_cases.every_feature, ranks=2, domain=1, options=options, arguments={"seed": 2}):
        assert result["plan"] == plan
        assert result["engine"]["native_signals"] == 0


@pytest.mark.parametrize(
    "faults",
    [
        {"duplicate": 0.2},
        {"drop": 0.3, "retry_delay": 100.0},
        {"stall": 0.05, "stall_time": 400.0},
        {"refuse": 0.5, "send_queue_depth": 16},
        {"distribution": "heavy", "delay": 20.0, "arrival_delay": 20.0},
        {"clock": "microseconds", "delay": 200.0, "completion_delay": 50.0},
        {"early_completion": 1.0, "bounce_bytes": 65536},
    ],
    ids=lambda faults: next(iter(faults)),
)
@pytest.mark.parametrize("profile", ["rc", "srd", "iwarp"])
def test_each_fault(pool: RankPool, profile: str, faults: dict[str, Any]) -> None:
    options = sim(profile, seed=7, **faults)
    results = pool.run(
        sim_cases.every_feature, ranks=2, domain=1, options=options, arguments={"seed": 3}, timeout_s=120
    )
    counters = {"duplicate": "duplicates", "drop": "losses", "stall": "stalls", "refuse": "refusals"}
    moved = counters.get(next(iter(faults)), "writes")
    assert all(result["sim"][moved] > 0 for result in results)
    assert all(result["sim"]["source_changed"] == 0 for result in results)


@pytest.mark.parametrize("profile", ["rc", "srd", "iwarp"])
def test_a_peer_that_the_device_loses_is_named_by_all(pool: RankPool, profile: str) -> None:
    options = sim(profile, kill_peer=1, kill_after=40) | {"UCCL_EP_TIMEOUT_S": "8"}
    results = pool.run(sim_cases.until_it_fails, ranks=3, domain=1, options=options, arguments={"limit_s": 20.0})
    for rank in (0, 2):
        assert results[rank]["rank"] == 1, results
        assert results[rank]["reason"] != "timeout", f"a time-out, not the device, told of the death: {results}"


@pytest.mark.parametrize("profile", ["rc", "srd", "iwarp"])
def test_a_reported_loss_is_an_error_never_a_wrong_result(pool: RankPool, profile: str) -> None:
    options = sim(profile, drop=0.01, report_drops=1)
    results = pool.run(sim_cases.until_it_fails, ranks=2, domain=1, options=options, arguments={"limit_s": 20.0})
    assert len({result["rank"] for result in results}) == 1, f"ranks blame different culprits: {results}"


def _break_lanes(pool: RankPool, profile: str, seed: int) -> None:
    """What was under way fails, part of it lands all the same, the rest is revoked; all is posted again."""
    options = sim(profile, seed=seed, break_every=25, delay=30.0)
    results = pool.run(
        sim_cases.every_feature, ranks=3, domain=1, options=options, arguments={"seed": seed + 1}, timeout_s=120
    )
    for result in results:
        engine, device = result["engine"], result["sim"]
        # The last break may still wait for its renewal.
        assert engine["lane_generations"] > 0 and 0 <= device["breaks"] - engine["lane_generations"] <= 2, result
        assert engine["retried"] > 0
        assert device["source_changed"] == 0
        if profile in ("rc", "bnxt"):
            assert emulated(engine) == {}

    def of_all(half: str, counter: str) -> int:
        return sum(result[half][counter] for result in results)

    # At each break a draw says what lands, so of so many breaks one has each fate, however slow the machine is.
    assert of_all("sim", "revoked") > 0, "all that failed landed: no attack"
    assert of_all("sim", "late_copies") > 0, "nothing landed after its error: no attack"
    if profile == "srd":
        copies = of_all("engine", "emulated_duplicates") + of_all("engine", "emulated_closed")
        assert copies > 0, "nothing arrived twice: no attack"


@pytest.mark.parametrize("profile", ["rc", "srd", "iwarp"])
def test_a_lane_that_breaks_is_renewed_and_no_late_copy_lands_on_new_data(pool: RankPool, profile: str) -> None:
    _break_lanes(pool, profile, seed=3)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(200, 250))
@pytest.mark.parametrize("profile", ["rc", "srd", "iwarp"])
def test_lanes_that_break_under_50_seeds(pool: RankPool, profile: str, seed: int) -> None:
    _break_lanes(pool, profile, seed)


def test_a_lane_that_breaks_again_and_again_ends_the_group(pool: RankPool) -> None:
    options = sim("srd", break_every=1, early_completion=0.0) | {"UCCL_EP_TIMEOUT_S": "8"}
    results = pool.run(sim_cases.until_it_fails, ranks=2, domain=1, options=options, arguments={"limit_s": 20.0})
    assert all(result["reason"] != "timeout" for result in results), f"a time-out, not the lane, ended it: {results}"


SEEDS_OF_CI = 3


@pytest.mark.parametrize("seed", range(SEEDS_OF_CI))
@pytest.mark.parametrize("profile", ["rc", "srd", "iwarp"])
def test_every_feature_under_seeds(pool: RankPool, profile: str, seed: int) -> None:
    options = sim(profile, seed=100 + seed)
    pool.run(sim_cases.every_feature, ranks=3, domain=1, options=options, arguments={"seed": 10 * seed}, timeout_s=120)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(200))
@pytest.mark.parametrize("profile", ["rc", "srd", "iwarp"])
def test_every_feature_under_200_seeds(pool: RankPool, profile: str, seed: int) -> None:
    ranks, domain = TOPOLOGIES[seed % len(TOPOLOGIES)]
    pool.run(
        sim_cases.every_feature,
        ranks=ranks,
        domain=domain,
        options=sim(profile, seed=1000 + seed),
        arguments={"seed": seed},
        timeout_s=120,
    )


def test_many_steps_under_srd(pool: RankPool) -> None:
    arguments = {"count": 200, "seed": 5}
    results = pool.run(sim_cases.steps, ranks=2, domain=1, options=sim("srd"), arguments=arguments, timeout_s=120)
    assert sum(result["sim"]["overtakes"] for result in results) > 0  # how many depends on how quick the machine is


@pytest.mark.full
def test_10000_steps_under_srd(pool: RankPool) -> None:
    options = sim("srd", distribution="heavy", delay=20.0)
    arguments = {"count": 10_000, "seed": 6}
    for result in pool.run(sim_cases.steps, ranks=2, domain=1, options=options, arguments=arguments, timeout_s=1800):
        assert result["plan"] == "counted"
        assert result["sim"]["overtakes"] > 5000


def test_the_checks_can_fail(pool: RankPool) -> None:
    """With immediates that come before their payload and a plan that trusts them, a result must be wrong."""
    options = sim("none", plan="counted", delay=300.0)
    with pytest.raises(CaseFailure, match=r"differs first at|in another operation"):
        pool.run(sim_cases.trusting, ranks=2, domain=1, options=options, arguments={"seed": 1})
