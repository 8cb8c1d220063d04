"""The benchmark and the demo run, check what they time, and write what they promise."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from uccl_ep import Buffer
from uccl_ep.bench import channel, ep, gpu, gpu_systems, ordering, proxied, records, transport
from uccl_ep.bench.channel import slower_than
from uccl_ep.bench.clocks import CALLS_OF_A_GRAPH, WallClock
from uccl_ep.bench.workload import Case, inputs
from uccl_ep_core import conformance
from uccl_ep_core.errors import ConfigurationError


def test_bench_ep_writes_records_and_a_plot(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "uccl_ep.bench.ep", "--ranks", "2", "--iterations", "2", "--tokens", "16"),
        *("--hidden", "256", "--experts", "16", "--domain-size", "1"),
        *("--json", str(tmp_path / "ep.json"), "--plot", str(tmp_path / "ep.png")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "ep.json").read_text())
    keys = {"bench", "case", "metric", "value", "unit", "baseline", "ratio", "machine", "date", "note"}
    assert all(set(r) == keys and r["bench"] == "ep" for r in found)
    for mode in ("low latency", "high throughput"):
        rows = {(r["metric"], r["baseline"]): r for r in found if r["case"].startswith(mode)}
        ours, gloo = "dispatch + combine, uccl_ep", "dispatch + combine, gloo"
        assert rows[ours, gloo]["ratio"] == pytest.approx(rows[gloo, ""]["value"] / rows[ours, gloo]["value"])
        assert rows[ours, "memcpy of the received bytes"]["ratio"] > 0
    assert (tmp_path / "ep.png").stat().st_size > 10_000


@pytest.mark.parametrize("bench", ["ep", "proxied"])
def test_profile_says_what_bounds_each_half(tmp_path: Path, bench: str) -> None:
    command = [
        *(sys.executable, "-m", f"uccl_ep.bench.{bench}", "--ranks", "2", "--iterations", "1", "--tokens", "16"),
        *("--hidden", "256", "--device", "cpu", "--profile", str(tmp_path / "profile.json")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "profile.json").read_text())
    modes = [mode for mode in ("low latency", "high throughput") for _ in range(3)]
    assert [one["case"].partition(":")[0] for one in found] == modes * 2
    assert [one["rank"] for one in found] == [0] * 6 + [1] * 6
    for one in found:
        assert one["half"] in ("dispatch fp8", "dispatch bf16", "combine bf16") and one["lost"] == 0
        assert (one["half"] in done.stdout) and one["launches"] == 10
        steps = {row["activity"] for row in one["rows"]}
        assert "sends / hands over" in steps
        assert {f"{who} / waits for rows" for who in ("forwards", "receives", "sums")} & steps
        assert ("domains of 1" in one["case"]) == (bench == "proxied")


def test_profile_refuses_ranks_of_others(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        ep.main(["--device", "cpu", "--profile"])
    assert "run it without torchrun" in capsys.readouterr().err


def test_bench_of_gpus_compares_halves_and_checks_them() -> None:
    """On the host backend: what it runs, without events and graphs."""
    cases = [Case("low latency", 16, 256, 4, 16, most=32), Case("high throughput", 32, 256, 4, 16, skewed=True)]
    halves: list[tuple[str, str]] = []
    found = gpu.run(cases, ranks=2, iterations=2, device="cpu", on_event=lambda rank, half: halves.append(half))
    assert len(set(halves)) == 6
    for case in cases:
        rows = {(r.metric, r.baseline): r for r in found if r.case == case.title(2, 0)}
        for half in ("dispatch bf16", "combine bf16"):
            ours, gloo = f"{half}, call, uccl_ep", f"{half}, call, gloo all_to_all"
            assert rows[ours, gloo].ratio == pytest.approx(rows[gloo, ""].value / rows[ours, gloo].value)
        assert rows["dispatch fp8, call, uccl_ep", ""].value > 0


@pytest.mark.parametrize("plan", ["native", "fenced"])
def test_bench_of_proxies_sums_the_steps(plan: str) -> None:
    cases = [Case("low latency", 5, 256, 4, 18, most=8), Case("high throughput", 32, 256, 4, 18)]
    options = {"transport": "shm", "num_proxies": 2, "plan": plan}
    found = proxied.run(cases, ranks=3, iterations=2, options=options, device="cpu")
    assert len({r.case for r in found}) == len(cases)
    for case in dict.fromkeys(r.case for r in found):
        rows = {(r.metric, r.baseline): r for r in found if r.case == case}
        for half in ("dispatch fp8", "dispatch bf16", "combine bf16"):
            steps = [rows[f"{half}, {step}", ""].value for step in (proxied.INTO, proxied.THROUGH, proxied.OUT_OF)]
            ours, total = rows[f"{half}, uccl_ep", f"{half}, {proxied.SUM}"], rows[f"{half}, {proxied.SUM}", ""]
            assert min(steps) > 0
            assert ((f"{half}, {proxied.WAITS}", "") in rows) == case.startswith("low latency")
            assert total.value == pytest.approx(sum(steps))
            assert ours.ratio == pytest.approx(total.value / ours.value)


def test_what_crosses_between_domains() -> None:
    """Two tokens of rank 0: its low-latency combine brings a row home for each pick, its dispatch one a rank."""
    case = Case("low latency", 2, 256, 3, 6)
    owners = [inputs(case, rank)[1] // 3 for rank in range(2)]
    rows = [int((owners[rank] == 1 - rank).any(1).sum()) for rank in range(2)]
    picks = [int((owners[rank] == 1 - rank).sum()) for rank in range(2)]
    halves = proxied.crossings(case, 2, 0)
    assert halves["dispatch bf16"] == proxied.Crossing(rows[0] * 512, rows[1] * 512, max(rows) * 512)
    assert halves["dispatch fp8"].leaving == rows[0] * (256 + 8)
    assert halves["combine bf16"] == proxied.Crossing(picks[1] * 512, picks[0] * 512, max(picks) * 512)
    moved_back = proxied.crossings(dataclasses.replace(case, mode="high throughput"), 2, 0)["combine bf16"]
    assert moved_back == proxied.Crossing(rows[1] * 512, rows[0] * 512, max(rows) * 512)


class Broken:
    """A system that can do neither 18 experts nor the combine of a single token."""

    def __init__(self, case: Case) -> None:
        self.name, self.case = "broken 1.0", case
        if case.experts == 18:
            raise RuntimeError("num_experts / num_ranks <= 8\n  was not so")

    def calls(self) -> dict[str, Callable[[], None]]:
        return {"dispatch bf16": lambda: None, "combine bf16": self.combine}

    def combine(self) -> None:
        assert self.case.tokens != 1, "no combine of one token"


def open_broken(run: gpu_systems.Run) -> gpu_systems.Factory:
    return lambda case, data: Broken(case)


def open_absent(run: gpu_systems.Run) -> gpu_systems.Factory:
    raise ImportError("libabsent.so.1: cannot open shared object file")


class OneSided:
    """Refuses on rank 1 alone, while the others are inside it and wait: ``when`` it is opened, made, or called."""

    name = "one-sided"

    def __init__(self, run: gpu_systems.Run, when: str, now: str) -> None:
        self.run, self.when = run, when
        self.meet(now)

    def meet(self, now: str) -> None:
        if now != self.when:
            return
        if dist.get_rank() == 1:
            raise RuntimeError(f"no such thing when {now}")
        dist.barrier(self.run.group)

    def calls(self) -> dict[str, Callable[[], None]]:
        return {"dispatch bf16": lambda: self.meet("called")}


def open_one_sided(when: str, run: gpu_systems.Run) -> gpu_systems.Factory:
    OneSided(run, when, "opened")
    return lambda case, data: OneSided(run, when, "made")


class Particular:
    """Like DeepEP's: the signals of low latency must be cleaned for each shape, and after high-throughput kernels."""

    def __init__(self, buffer: Any) -> None:
        self.buffer, self.clean_for = buffer, (0, 0, 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.buffer, name)

    def clean_low_latency_buffer(self, *shape: int) -> None:
        self.buffer.clean_low_latency_buffer(*shape)
        self.clean_for = shape

    def dispatch(self, *arguments: Any, **named: Any) -> Any:
        self.clean_for = (0, 0, 0)
        return self.buffer.dispatch(*arguments, **named)

    def low_latency_dispatch(self, x: Any, idx: Any, most: int, experts: int, **named: Any) -> Any:
        assert self.clean_for == (most, x.shape[1], experts), self.clean_for
        return self.buffer.low_latency_dispatch(x, idx, most, experts, **named)


def open_particular(run: gpu_systems.Run) -> gpu_systems.Factory:
    hint = max(Buffer.get_low_latency_rdma_size_hint(c.max_tokens, c.hidden, 2, c.experts) for c in run.cases)
    buffer = Particular(Buffer(run.group, num_rdma_bytes=hint, low_latency_mode=True, device=run.device))
    return lambda case, data: gpu_systems.ExpertParallel("particular", case, data, buffer, run)


def test_bench_of_gpus_goes_on_without_a_system_that_refuses() -> None:
    cases = [
        Case("high throughput", 8, 64, 2, 18),
        Case("high throughput", 8, 64, 2, 16),
        Case("low latency", 1, 64, 2, 16),
        Case("low latency", 8, 128, 2, 16),
    ]
    others = {"broken": open_broken, "absent": open_absent, "particular": open_particular}
    rivals = {**gpu_systems.RIVALS, **others}
    found = gpu.run(cases, ranks=2, iterations=1, device="cpu", rivals=rivals)
    for case, words in zip(cases, ("RuntimeError: num_experts / num_ranks <= 8 was not so", "", "one token", ""),
                           strict=True):  # fmt: skip
        rows = [r for r in found if r.case == case.title(2, 0)]
        left_out = {r.metric: r.note for r in rows if r.note}
        assert "libabsent.so.1" in left_out["left out: absent"]
        assert words in left_out.get("left out: broken", "") and bool(words) == ("left out: broken" in left_out)
        assert bool(words) != any("broken 1.0" in r.metric for r in rows)
        for other in ("gloo all_to_all", "particular"):
            assert any(r.metric == f"combine bf16, call, {other}" for r in rows), left_out
    records.show(found)


def test_bench_of_gpus_goes_on_without_a_system_that_refuses_on_one_rank() -> None:
    one_sided = {when: partial(open_one_sided, when) for when in ("opened", "made", "called")}
    rivals = {"all_to_all": gpu_systems.all_to_all, **one_sided}
    case = Case("high throughput", 8, 64, 2, 18)
    found = gpu.run([case], ranks=3, iterations=1, device="cpu", rivals=rivals, patience_s=0.5)
    left_out = {r.metric: r.note for r in found if r.note}
    for when in one_sided:
        assert f"RuntimeError: no such thing when {when}" in left_out[f"left out: {when}"], left_out
        assert "refused on rank 1" in left_out[f"left out: {when}"]
    assert any(r.metric == "combine bf16, call, gloo all_to_all" for r in found)


class Alternating:
    """A library with two buffers, which it changes at every call, on the host."""

    def __init__(self) -> None:
        self.buffer = 0

    def call(self) -> None:
        self.buffer ^= 1

    def graph(self) -> Any:
        captured = self.buffer

        def replay() -> None:
            assert self.buffer == captured, "replayed into the buffer that was used last"

        return replay


def test_a_replay_finds_a_library_that_alternates_as_its_capture_left_it() -> None:
    library, clock = Alternating(), WallClock(None)
    clock.synchronize = lambda: None  # type: ignore[method-assign]
    timed = [(("half", "call", "it"), library.call, 1), (("half", "graph replay", "it"), library.graph(), 100)]
    times = gpu.timed_in_turns(clock, timed, 5)
    assert {key[1]: len(values) for key, values in times.items()} == {"call": 5, "graph replay": 5}
    assert gpu.timed_in_turns(clock, [], 3) == {}
    assert gpu.WARM_UP % 2 == gpu.CALLS % 2 == gpu.PROFILED % 2 == CALLS_OF_A_GRAPH % 2 == 0


def test_bench_picks_more_experts_than_the_size_hint_counts_on() -> None:
    cases = [Case("low latency", 2, 8, 40, 80), Case("low latency", 3, 256, 1, 2)]
    assert len(ep.run(cases, ranks=2, iterations=1)) == 2 * len(ep.run(cases[:1], ranks=2, iterations=1))
    assert gpu.run(cases, ranks=2, iterations=1, device="cpu", rivals={})


def test_skewed_routing_gives_a_quarter_to_one_expert() -> None:
    _, idx, _ = inputs(Case("high throughput", 400, 8, 4, 16, skewed=True), rank=1)
    assert int((idx == 0).sum()) == 100 and all(row.unique().numel() == 4 for row in idx)


def test_bench_channel_writes_records_with_their_ceilings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "uccl_ep.bench.channel", "--rounds", "1", "--laps", "5", "--require", "1"]
    command += ["--json", str(tmp_path / "channel.json"), "--plot", str(tmp_path / "channel.png")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [records.Record(**r) for r in json.loads((tmp_path / "channel.json").read_text())]
    through = [r for r in found if r.metric == "commands a proxy, uccl_ep"]
    assert {plan for plan in ("native", "counted", "fenced") for r in through if plan in r.case} == {
        "native",
        "counted",
        "fenced",
    }
    assert all(0 < r.ratio < 1 and r.baseline == "popped and decoded only" for r in through)
    assert {(r.case, r.metric) for r in found} >= {(r.case, r.baseline) for r in found if r.baseline}
    assert len([r for r in found if r.case.startswith("between two threads") and r.baseline]) == 3
    assert (tmp_path / "channel.png").stat().st_size > 10_000
    assert len(slower_than(found, 1e6)) == len(through)


def test_bench_ordering_compares_plans_on_one_transport(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "uccl_ep.bench.ordering", "--rounds", "3", "--writes", "256"]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "ordering.json"), "--plot", str(tmp_path / "ordering.png")],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [records.Record(**r) for r in json.loads((tmp_path / "ordering.json").read_text())]
    for plan in ("counted", "fenced"):
        rates = [r for r in found if r.metric == f"rate, {plan} plan"]
        assert len(rates) == 4 and {r.baseline for r in rates} == {f"rate, native plan beside {plan}"}
        # A bound that a busy machine keeps; the figure itself is in docs/performance.md.
        assert all(r.ratio > 0.5 for r in rates), rates
    assert (tmp_path / "ordering.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        (ep.main, "--device cpu --num-sms 24", ["--num-sms", "--device cuda"]),
        (ep.main, "--iterations 0", ["--iterations", "at least 1"]),
        (ep.main, "--ranks 0", ["--ranks", "at least 1"]),
        (ep.main, "--device cpu --ranks 100000", ["--ranks", "100000", "at most"]),
        (ep.main, "--tokens -1", ["--tokens", "at least 0"]),
        (ep.main, "--hidden 0", ["--hidden", "at least 1"]),
        (ep.main, "--topk 0", ["--topk", "at least 1"]),
        (ep.main, "--domain-size -1", ["--domain-size", "at least 0"]),
        (ep.main, "--ranks 2 --experts 7", ["--experts", "6 or 8"]),
        (ep.main, "--ranks 2 --experts 4 --topk 5", ["--topk 5", "at most 4"]),
        (ep.main, "--json {tmp}/none/x.json", ["--json", "{tmp}/none"]),
        (ep.main, "--json {tmp}", ["--json", "is a folder"]),
        (ep.main, "--plot {tmp}/x.nope", ["--plot", ".png"]),
        (channel.main, "--laps 0", ["--laps", "at least 1"]),
        (ordering.main, "--writes 0", ["--writes", "at least 1"]),
        (transport.main, "--transport shm --rounds 0", ["--rounds", "at least 1"]),
        (conformance.main, "--transport shm --seeds 0", ["--seeds", "at least 1"]),
        (conformance.main, "--transport shm --seed -1", ["--seed", "at least 0"]),
        (conformance.main, "--transport shm --limit 0", ["--limit", "above 0"]),
        (conformance.main, "--transport shm --limit nan", ["--limit", "finite"]),
        (conformance.main, "--transport shm --json {tmp}/none/x.json", ["--json", "{tmp}/none"]),
    ],
)
def test_nonsense_is_refused_before_anything_runs(
    command: Callable[[Sequence[str]], int],
    arguments: str,
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as ended:
        command(arguments.replace("{tmp}", str(tmp_path)).split())
    assert ended.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert all(word.replace("{tmp}", str(tmp_path)) in message for word in words), message


def test_what_a_rank_refuses_reaches_the_caller_as_it_was() -> None:
    with pytest.raises(ConfigurationError, match="cannot wrap itself"):
        transport.main(["--transport", "sim", "--option", "inner=sim", "--rounds", "1"])


def test_any_number_of_ranks_runs_with_the_default_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Case] = []
    monkeypatch.setattr(ep, "run", lambda cases, **_: asked.extend(cases) or [])
    monkeypatch.setattr(ep, "put_out", lambda *_: None)
    assert ep.main(["--device", "cpu", "--ranks", "3"]) == 0
    assert [case.experts for case in asked] == [288, 258]


def test_records_round_trip(tmp_path: Path) -> None:
    record = records.Record("ep", "a case", "dispatch", 2.0, "us", "dispatch, gloo", 3.0)
    records.write_json(tmp_path / "r.json", [record])
    (read,) = json.loads((tmp_path / "r.json").read_text())
    assert read["machine"] and read["date"] and records.Record(**read) == record


def test_demo(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "uccl_ep.demo", "--checks", "1", "--rounds", "1"),
        *("--plot", str(tmp_path / "demo.png")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("two domains", "one domain", "ordering plan", "every byte equals the reference", "commands", "gloo"):
        assert words in done.stdout, done.stdout
    assert str(tmp_path / "demo.png") in done.stdout and (tmp_path / "demo.png").stat().st_size > 10_000
