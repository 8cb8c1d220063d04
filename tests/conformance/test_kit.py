"""The kit passes honest transports and reports in every form; strangers reach it by command and by pytest."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from uccl_ep_core.conformance import main, run
from uccl_ep_core.conformance.checks import CHECKS
from uccl_ep_core.errors import ConfigurationError


def _broken(report: object) -> list[str]:
    return [f"{result.check} (seed {result.seed}): {result.message}" for result in report.broken]  # type: ignore[attr-defined]


def test_shm_keeps_every_promise() -> None:
    report = run("shm", seeds=[1, 2])
    assert report.passed, _broken(report)
    assert {result.check for result in report.results} == set(CHECKS)


@pytest.mark.parametrize("profile", ["rc", "srd", "iwarp", "bnxt", "none"])
def test_sim_keeps_what_each_profile_promises(profile: str) -> None:
    report = run("sim", {"profile": profile}, seeds=[1, 2])
    assert report.passed, _broken(report)
    claimed = {result.check for result in report.results if result.outcome == "kept"}
    assert ("write_order" in claimed) == (profile in ("rc", "bnxt"))
    assert ("imm_after_payload" in claimed) == (profile in ("rc", "srd", "bnxt"))
    assert ("delivery_complete" in claimed) == (profile != "none")
    assert report.plan.startswith("refused") == (profile == "none")


@pytest.mark.parametrize("profile", ["rc", "srd", "iwarp"])
def test_sim_renews_lanes_that_break(profile: str) -> None:
    options = {"profile": profile, "break_every": 25, "delay": 30.0}
    report = run("sim", options, seeds=[1, 2], checks=["renew_lane"])
    assert report.passed, _broken(report)
    assert report.results[0].outcome == "kept"
    assert re.match(r"[1-9]\d* renewals, [1-9]\d* operations failed", report.results[0].message)


@pytest.mark.parametrize(
    ("transport", "outcome", "words"),
    [
        ("shm", "not claimed", "the table has no renew_lane: an error on a lane is final and ends the group"),
        ("renewal_liars:NeverBreaks", "not tested", "has renew_lane, but nothing made a lane fail: set the option"),
    ],
)
def test_what_cannot_be_tested_is_said(
    transport: str, outcome: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--transport", transport, "--check", "renew_lane", "--seeds", "2"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{outcome}: renew_lane: the table" in printed
    assert words in printed


@pytest.mark.full
@pytest.mark.parametrize("faults", [{}, {"duplicate": 0.2}, {"drop": 0.2, "early_completion": 0.5}, {"stall": 0.05}])
@pytest.mark.parametrize("profile", ["rc", "srd", "iwarp", "bnxt"])
def test_sim_renews_lanes_under_many_seeds(profile: str, faults: dict[str, float]) -> None:
    options = {"profile": profile, "break_every": 15, "distribution": "heavy"} | faults
    report = run("sim", options, seeds=range(20), checks=["renew_lane"], limit_s=20)
    assert report.passed, _broken(report)


@pytest.mark.full
@pytest.mark.parametrize("profile", ["rc", "srd", "iwarp", "bnxt"])
def test_sim_keeps_its_promises_under_many_seeds(profile: str) -> None:
    options = {"profile": profile, "distribution": "heavy", "drop": 0.1, "stall": 0.02}
    checks = ["placement", "write_order", "signal_order", "imm_after_payload", "delivery_complete", "exactly_once"]
    report = run("sim", options, seeds=range(40), checks=checks, limit_s=20)
    assert report.passed, _broken(report)


def test_report_as_json(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    arguments = ["--transport", "liars:LosesCompletions", "--check", "completions", "--limit", "1", "--seeds", "1"]
    assert main([*arguments, "--json", str(file)]) == 1
    document = json.loads(file.read_text())
    assert document["passed"] is False
    (result,) = document["results"]
    assert result["outcome"] == "broken"
    assert "never completed" in result["message"]
    assert "--check completions --seed 1" in result["reproduce"]
    assert document["capabilities"]["imm_bits"] == 64


def test_command_says_why_it_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--transport", "shmm"]) == 2
    assert "did you mean 'shm'" in capsys.readouterr().err
    assert main(["--transport", "shm", "--option", "lane=2"]) == 2
    assert "did you mean 'lanes'" in capsys.readouterr().err
    assert main(["--transport", "shm", "--option", "lanes"]) == 2
    assert "NAME=VALUE" in capsys.readouterr().err


@pytest.mark.parametrize(("transport", "words"), [
    ("closed_doors:NoDevice", "this host has no such NIC; plug one in"),
    ("closed_doors:NoDeviceOfOneRank", "the device is taken"),
    ("closed_doors:Stumbles", r"ZeroDivisionError: .* \(closed_doors.py:\d+\)"),
    ("sim --option inner=no_such_nic", "transport 'no_such_nic' .* is not installed"),
    (":", "':' cannot be imported"),
    ("liars:", "'liars:' cannot be imported"),
])  # fmt: skip
@pytest.mark.parametrize("check", ["", " --check write_order"])
def test_what_cannot_be_started_has_broken_no_promise(
    transport: str, words: str, check: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(f"--transport {transport}{check}".split()) == 2
    printed = capsys.readouterr()
    assert re.search(words, printed.err), printed.err
    assert "could not be started" in printed.err or transport.endswith(":")
    assert "promise(s) broken" not in printed.out and len(printed.err.splitlines()) == 1


def test_what_does_not_open_again_breaks_a_promise() -> None:
    report = run("closed_doors:OpensTwice", seeds=[1], checks=["table", "leaks"])
    assert [result.check for result in report.broken] == ["leaks"]
    assert "open failed, which it did not before: the device is used up" in report.broken[0].message


def test_unknown_check_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'write_order'"):
        run("shm", checks=["write_orders"])


def _pytest(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "uccl_ep_core.conformance.pytest_plugin", "-p", "no:cacheprovider"]
    environment = dict(os.environ, PYTHONPATH=str(Path(__file__).parent))
    return subprocess.run(
        [*command, "--rootdir", str(tmp_path), *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_strangers_pytest_run_passes_an_honest_transport(tmp_path: Path) -> None:
    ended = _pytest(tmp_path, "--uccl-ep-transport", "shm", "--uccl-ep-option", "lanes=1", "--uccl-ep-seeds", "1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    # A single lane promises nothing about lanes, and errors of shm are final.
    assert f"{len(CHECKS) - 2} passed, 2 skipped" in ended.stdout


def test_strangers_pytest_run_says_what_cannot_be_started(tmp_path: Path) -> None:
    ended = _pytest(tmp_path, "--uccl-ep-transport", "closed_doors:NoDevice")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert f"{len(CHECKS)} failed" in ended.stdout
    words = "could not be started, so no promise was tested: this host has no such NIC"
    assert ended.stdout.count(words) >= len(CHECKS)
    assert "Traceback" not in ended.stdout


def test_strangers_pytest_run_fails_a_liar(tmp_path: Path) -> None:
    arguments = ["--uccl-ep-transport", "liars:TruncatesImmediates", "--uccl-ep-seeds", "1", "-k", "imm_bits"]
    ended = _pytest(tmp_path, *arguments)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "had been truncated" in ended.stdout
    assert "repeat it: uccl-ep conformance --transport liars:TruncatesImmediates" in ended.stdout
