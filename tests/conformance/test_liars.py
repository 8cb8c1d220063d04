"""Each lying transport is failed by the kit, by the right check and in the right words."""

from __future__ import annotations

import inspect
import re

import liars
import pytest
import renewal_liars
from liar import Liar

from uccl_ep_core.conformance import run

LIES = {
    "ClaimsOrder": ("write_order", r"write_order: .*(visible before|landed after)"),
    "SignalsOvertake": ("signal_order", r"signal_order: .*visible before the write"),
    "SignalsAddInHalves": ("native_signal", r"native_signal: a word (held|fell)"),
    "EarlyImmediates": ("imm_after_payload", r"imm_after_payload: .* arrived before its payload"),
    "TruncatesImmediates": ("imm_bits", r"imm_bits: .*never came.*truncated"),
    "WrongSender": ("imm_bits", r"imm_bits: .*name rank 7"),
    "CompletesBeforeDelivery": ("delivery_complete", r"delivery_complete: a fenced write .*before it was placed"),
    "WritesTwice": ("exactly_once", r"exactly_once: .*(second time|more than once)"),
    "LosesCompletions": ("completions", r"\d+ of \d+ accepted writes never completed"),
    "CompletesTwice": ("completions", r"completed twice"),
    "LeaksRegions": ("leaks", r"left .*file descriptors and .*registered regions.* behind"),
    "BlocksInPost": ("never_blocks", r"post_writes blocks: 2\d\.\d ms"),
    "HangsWhenFull": ("send_queue_depth", r"did not return within .*no function may block"),
    "FailsWhenFull": ("send_queue_depth", r"a full queue must answer 0"),
    "ShallowQueue": ("send_queue_depth", r"send_queue_depth is 4096, but only 1024 writes fit before"),
    "AcceptsTooMuch": ("max_message", r"max_message: a write of 65537 bytes was accepted"),
    "DropsTails": ("max_message", r"max_message: .*not at the target from byte \d+ on"),
    "RoundsSizes": ("alignment", r"alignment 1: byte \d+ is wrong"),
    "IgnoresBounds": ("bounds", r"bounds: a write .* was accepted and completed without error"),
    "SilentAboutDeath": ("peer_failure", r"peer_failure: rank 2 was killed and .* no peer_state DEAD"),
    "SucceedsAfterDeath": ("peer_failure", r"peer_failure: rank 2 was killed and .* no an error completion"),
    "CriesWolf": ("placement", r"calls rank \d dead while it answers"),
    "Crashes": ("placement", r"rank \d died by signal SIGSEGV"),
    "LandsAfterRenewal": ("renew_lane", r"renew_lane: .*had failed landed after the lane was renewed"),
    "LandsOnTheRetry": ("renew_lane", r"renew_lane: the copy of a write that had failed landed on the one that was"),
    "ArrivesAfterRenewal": ("renew_lane", r"renew_lane: .*an arrival of an ended generation came late"),
    "CompletesAgainAfterRenewal": ("renew_lane", r"token \d+ \(.*\) completed twice"),
    "RenewsInVain": ("renew_lane", r"renew_lane: 16 renewals .* everything posted after each of them failed"),
    "NeverRenews": ("renew_lane", r"renew_lane: still 0 \(not yet\) after 2 s"),
    "CannotRenew": ("renew_lane", r"renew_lane: -95 .* though the peer lives"),
    "ForgetsWhatCompleted": ("renew_lane", r"renew_lane: .*completed without an error .*(were not there|never landed)"),
    "WorksWhileBroken": ("renew_lane", r"renew_lane: a \w+ .*completed without an error"),
}


def where(name: str) -> str:
    """As the kit takes it."""
    return f"{'liars' if hasattr(liars, name) else 'renewal_liars'}:{name}"


def test_every_liar_is_listed() -> None:
    found = [entry for module in (liars, renewal_liars) for entry in inspect.getmembers(module, inspect.isclass)]
    honest = {"Liar", "Honest", "Renewing", "NeverBreaks"}
    assert {name for name, kind in found if issubclass(kind, Liar)} - honest == set(LIES)


@pytest.mark.parametrize("name", LIES)
def test_lie_is_caught(name: str) -> None:
    check, words = LIES[name]
    # Three seeds, as the kit does by default: a lie about order must not need luck to be found.
    report = run(where(name), checks=[check], limit_s=2.0, hang_s=8.0 if name == "HangsWhenFull" else None)
    assert not report.passed, f"the kit believed {name}"
    result = report.broken[0]
    assert result.check == check
    assert re.search(words, result.message), result.message
    assert f"--check {check} --seed {result.seed} --seeds 1" in report.reproduce(result)


@pytest.mark.parametrize("name", ["Honest", "Renewing"])
def test_wrapping_alone_is_no_lie(name: str) -> None:
    report = run(where(name), seeds=[1], limit_s=10.0, checks=[] if name == "Honest" else ["renew_lane"])
    assert report.passed, [f"{result.check}: {result.message}" for result in report.broken]


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in LIES if name not in ("Crashes", "HangsWhenFull")])
def test_the_whole_kit_fails_each_liar(name: str) -> None:
    report = run(where(name), limit_s=3.0)
    assert LIES[name][0] in {result.check for result in report.broken}
