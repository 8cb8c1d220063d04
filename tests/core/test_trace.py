"""The trace of an engine obeys the trace event format that Perfetto reads."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import trace_runs
from uccl_ep_core import _native

# What each phase of an event must carry, by the trace event format.
REQUIRED = {
    "M": {"name", "pid", "args"},
    "b": {"name", "cat", "id2", "pid", "tid", "ts"},
    "n": {"name", "cat", "id2", "pid", "tid", "ts"},
    "e": {"name", "cat", "id2", "pid", "tid", "ts"},
    "i": {"name", "pid", "tid", "ts", "s"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur"},
}


def check(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The events, after every rule that the format has for those used here."""
    assert set(trace) <= {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    opened: dict[tuple[str, str], list[tuple[str, float]]] = {}
    for event in trace["traceEvents"]:
        assert event["ph"] in REQUIRED, event
        assert REQUIRED[event["ph"]] <= set(event), event
        assert isinstance(event["name"], str) and isinstance(event["pid"], int), event
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name") and isinstance(event["args"]["name"], str), event
            continue
        assert isinstance(event["ts"], (int, float)) and event["ts"] >= 0 and isinstance(event["tid"], int), event
        if event["ph"] == "X":
            assert isinstance(event["dur"], (int, float)) and event["dur"] >= 0, event
            continue
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t"), event
            continue
        stack = opened.setdefault((event["cat"], event["id2"]["local"]), [])
        if event["ph"] == "b":
            stack.append((event["name"], event["ts"]))
            continue
        assert stack, f"an event of a slice that is not open: {event}"
        assert event["ts"] >= stack[-1][1], f"before its slice began: {event}"
        if event["ph"] == "e":
            assert stack.pop()[0] == event["name"], event
    assert not any(opened.values()), f"slices without an end: {[key for key, stack in opened.items() if stack]}"
    return list(trace["traceEvents"])


@pytest.mark.parametrize("plan", ["native", "counted", "fenced"])
def test_the_trace_is_valid_and_tells_the_life_of_every_command(tmp_path: Path, plan: str) -> None:
    trace_runs.two_ranks(tmp_path, plan, 30)
    trace = json.loads((tmp_path / "trace.0.json").read_text())
    events = check(trace)
    assert (trace["otherData"]["lost_kernel_spans"], trace["otherData"]["kernel_clock_error_ns"]) == (7, 9)
    slices = [event["name"] for event in events if event["ph"] == "X"]
    assert slices == ["dispatch", "sends", "waits for room", "copies"], "kernels beside the proxies"
    assert {event["pid"] for event in events} == {0}
    named = [event for event in events if event["name"] == "command"]
    assert {event["args"]["ticket"] for event in named} == set(range(30))
    assert len([e for e in events if e["name"] == "posted"]) == 30
    arrived = check(json.loads((tmp_path / "trace.1.json").read_text()))
    if plan == "counted":
        assert any(event["name"] == "signal raised" for event in arrived)
    else:
        assert any(event["name"] == "signal sent" for event in events)


def test_kernels_have_a_file_where_there_are_no_proxies(tmp_path: Path) -> None:
    json_text = trace_runs.events_of([trace_runs.one_launch(1000)], 1, lambda ns: ns)
    assert _native.write_trace(str(tmp_path / "trace.json"), 1, json_text, 0, 0) == ""
    events = check(json.loads((tmp_path / "trace.1.json").read_text()))
    assert [event["ts"] for event in events if event["ph"] == "X"] == [1.00025, 1.00125, 1.00125, 1.00225]
    assert "/nowhere/trace.1.json" in _native.write_trace("/nowhere/trace.json", 1, json_text, 0, 0)
