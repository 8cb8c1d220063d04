"""Kernels that record what they do: every step of every path is there, and inside what it is part of."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ranks import Context, RankPool
from stream_cases import LowLatencyPair, Pair, finish_low_latency, run_pair, start_low_latency
from uccl_ep.tracing import clocks, launches, perfetto, profile, rings
from uccl_ep.tracing.names import ACTIVITIES, KERNELS, NOBODY
from uccl_ep_core.errors import ArgumentError, CapabilityError

TRACED = {"UCCL_EP_TRACE_KERNELS": "1"}
SMALL = {"UCCL_EP_NUM_CHANNELS": "1", "UCCL_EP_NUM_SLOTS": "2", "UCCL_EP_SLOT_BYTES": "4096"}
LANES = tuple({1, int(os.environ.get("UCCL_EP_HOST_LANES") or 32)})

STREAM_OUT = ("waits for room", "hands over", "waits until sent")
STREAM_IN = ("waits for rows", "gives back")


def under(role: str, *steps: str) -> set[str]:
    return {role, *(f"{role} / {step}" for step in steps)}


NOTIFY = {"counts"} | under("sends", *STREAM_OUT) | under("receives", *STREAM_IN)
DISPATCH = under("sends", "copies", *STREAM_OUT) | under("receives", "copies", *STREAM_IN) | {"keeps"}
# A forwarder takes what is for its own rank; in a domain of one that is all that others send.
TAKEN_BY_FORWARDER = under("forwards", "copies", *STREAM_IN)
FORWARDS = TAKEN_BY_FORWARDER | under("forwards", *STREAM_OUT)
ALONE = {step for step in DISPATCH if not step.startswith("receives")} | TAKEN_BY_FORWARDER
COMBINE = under("sends", "copies", *STREAM_OUT) | under("sums", "waits for rows", "adds up", "gives back")
PACKED_SENDS = ("waits for room", "copies", "meets blocks", "hands over")
PACKED_RECEIVES = ("waits for rows", "meets blocks", "gives back")
PACKED_DISPATCH = under("sends", "places", *PACKED_SENDS) | under(
    "receives", "places", "copies", "counts", *PACKED_RECEIVES
)
PACKED_COMBINE = under("sends", *PACKED_SENDS) | under("receives", "adds up", *PACKED_RECEIVES)
# Through a transport a send tells what was read: behind its messages, or before it looks for room itself, where that is
# not known. The first dispatch has to look.
LOOKS_FOR_ROOM = {"sends / waits for room", "sends / waits for room / meets blocks"}
TOLD_BY_SENDS = {"gives back", "sends / waits for room / gives back"}
TOLD_BY_RECEIVES = {"receives / gives back", "receives / meets blocks"}
DIRECT_SENDS = ("sends words", "sends words / waits for room", "hands over")
DIRECT_DISPATCH = under("sends", "copies", *DIRECT_SENDS) | under(
    "receives", "gathers picks", "places", "counts", "copies own", "waits for rows", "copies"
)
DIRECT_COMBINE = under("sends", "adds up", "adds up own", *DIRECT_SENDS) | under(
    "receives", "waits for rows", "adds up"
)


def high_throughput(ctx: Context, path: str = "") -> list[dict[str, Any]]:
    buffer = ctx.new_buffer()
    for seed in range(2):
        run_pair(ctx, buffer, Pair(ctx, [60 + rank for rank in range(ctx.num_ranks)], seed, 256, "random"))
    rows = told(buffer)
    buffer.destroy()
    return rows


def low_latency(ctx: Context, hook: bool) -> list[dict[str, Any]]:
    buffer = ctx.new_buffer()
    for seed in range(3):
        pair = LowLatencyPair(ctx, [9 + rank for rank in range(ctx.num_ranks)], seed, 16, "random")
        if hook:
            finish_low_latency(ctx, buffer, pair, start_low_latency(ctx, buffer, pair))
            continue
        rank = ctx.rank
        _, _, handle, _, _ = buffer.low_latency_dispatch(
            pair.inputs.xs[rank], pair.ids, pair.most, pair.experts, use_fp8=False
        )
        combined, _, _ = buffer.low_latency_combine(pair.y, pair.ids, pair.weights, handle)
        assert combined.equal(pair.combined(handle.rounding))
    rows = told(buffer)
    buffer.destroy()
    return rows


def told(buffer: Any) -> list[dict[str, Any]]:
    """The rows of a profile, after what holds of any; a second one has nothing to tell."""
    found = buffer.profile()
    assert found.lost == 0
    assert str(found).count("whole kernel") == len({row.kernel for row in found.rows})
    for row in found.rows:
        assert 0 <= row.first_start_us <= row.mean_end_us <= row.last_end_us, row
        assert 0 <= row.warp_us <= row.spans * row.last_end_us, row
        assert row.warps > 0 and row.spans >= 1, row
    again = buffer.profile()
    assert again.rows == () and str(again).startswith("no kernel was traced")
    return [dict(row) for row in found.as_dict()["rows"]]


def activities(rows: Sequence[dict[str, Any]], kernel: str) -> set[str]:
    return {row["activity"] for row in rows if row["kernel"] == kernel} - {profile.WHOLE}


def check_file(folder: Path, rank: int, proxies: bool) -> None:
    """Spans of a track lie within each other or apart, and all of a rank are on the clock of its proxies."""
    trace = json.loads((folder / f"trace.{rank}.json").read_text())
    assert trace["otherData"]["lost_kernel_spans"] == 0
    events = trace["traceEvents"]
    assert {event["pid"] for event in events} == {rank}
    tracks: dict[int, list[tuple[int, int]]] = {}  # ns, as a reader of the file takes them
    for event in events:
        if event["ph"] == "X":
            begin = int(event["ts"] * 1e3)
            tracks.setdefault(event["tid"], []).append((begin, begin + int(event["dur"] * 1e3)))
    named = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert all(named[thread].startswith("block ") for thread in tracks)
    for spans in tracks.values():
        open_until: list[int] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert end >= begin and (not open_until or end <= open_until[-1])
            open_until.append(end)
    first = min(span[0] for spans in tracks.values() for span in spans)
    last = max(span[1] for spans in tracks.values() for span in spans)
    commands = [event["ts"] * 1e3 for event in events if event["name"] == "command" and event["ph"] == "b"]
    assert bool(commands) == proxies
    # Only kernels push, and the last one waits for the other ranks, which go by what these commands brought.
    assert all(first <= popped for popped in commands)
    assert not commands or min(commands) <= last


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("domain", [0, 1, 2])
def test_high_throughput(pool: RankPool, tmp_path: Path, lanes: int, domain: int) -> None:
    options = {**TRACED, **SMALL, "UCCL_EP_HOST_LANES": str(lanes), "UCCL_EP_TRACE": str(tmp_path / "trace.json")}
    ranks = 4
    for rows in pool.run(high_throughput, ranks=ranks, domain=domain, options=options, timeout_s=120):
        assert activities(rows, "notify") == NOTIFY
        dispatch = {0: DISPATCH, 1: ALONE, 2: DISPATCH | FORWARDS}[domain]
        assert dispatch - activities(rows, "dispatch") <= ({"forwards / waits for room"} if domain == 2 else set())
        assert activities(rows, "dispatch") <= dispatch
        assert activities(rows, "combine") == COMBINE
    for rank in range(ranks):
        check_file(tmp_path, rank, proxies=domain != 0)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize(("path", "domain"), [("packed", 0), ("packed", 1), ("direct", 0)])
@pytest.mark.parametrize("hook", [False, True])
def test_low_latency(pool: RankPool, tmp_path: Path, lanes: int, path: str, domain: int, hook: bool) -> None:
    options = {
        **TRACED, "UCCL_EP_HOST_LANES": str(lanes), "UCCL_EP_TRACE": str(tmp_path / "trace.json"),
        "UCCL_EP_LOW_LATENCY_PATH": path,
    }  # fmt: skip
    wanted = {"dispatch": PACKED_DISPATCH, "combine": PACKED_COMBINE}
    if domain:
        wanted = {half: steps - TOLD_BY_RECEIVES - LOOKS_FOR_ROOM for half, steps in wanted.items()}
        wanted["dispatch"].add("receives / reads heads")
    if path == "direct":
        wanted = {"dispatch": DIRECT_DISPATCH, "combine": DIRECT_COMBINE}
        if lanes > 1:  # then a block has several warps, and each looks for itself
            wanted["dispatch"] = DIRECT_DISPATCH | {"sends / copies / waits for room"}
            wanted["combine"] = DIRECT_COMBINE | {"sends / adds up / waits for room"}
    stem = "ll_direct_" if path == "direct" else "ll_"
    for rows in pool.run(low_latency, ranks=3, domain=domain, options=options, timeout_s=120, arguments={"hook": hook}):
        for half, steps in wanted.items():
            names = [f"{stem}{half}_send", f"{stem}{half}_receive"] if hook else [stem + half]
            found = [activities(rows, name) for name in names]
            if domain:
                assert found[0] & TOLD_BY_SENDS, found
                assert half == "combine" or found[0] >= LOOKS_FOR_ROOM, found
            assert set().union(*found) - (TOLD_BY_SENDS | LOOKS_FOR_ROOM if domain else set()) == steps
            if hook:
                assert all(step.startswith("sends") for step in found[0] - TOLD_BY_SENDS)
                assert all(step.startswith("receives") for step in found[1])
    for rank in range(3):
        check_file(tmp_path, rank, proxies=domain != 0)


def test_blocks_have_tracks_of_their_own(pool: RankPool) -> None:
    options = {**TRACED, "UCCL_EP_HOST_THREADS": "3", "UCCL_EP_LOW_LATENCY_PATH": "direct"}
    for rows in pool.run(low_latency, ranks=2, options=options, arguments={"hook": False}, timeout_s=120):
        (whole,) = (row for row in rows if (row["kernel"], row["activity"]) == ("ll_direct_dispatch", profile.WHOLE))
        assert (whole["launches"], whole["warps"], whole["spans"]) == (3, 3.0, 1.0)


def overflowing(ctx: Context) -> tuple[Any, list[str], int]:
    buffer = ctx.new_buffer()
    few = LowLatencyPair(ctx, [5] * ctx.num_ranks, 1, 16, "random")
    for _ in range(8):
        finish_low_latency(ctx, buffer, few, start_low_latency(ctx, buffer, few))
    newest = buffer.profile()
    for _ in range(2):  # more spans in a launch than a ring holds: nothing of it is there in full
        run_pair(ctx, buffer, Pair(ctx, [200] * ctx.num_ranks, 1, 256, "random"))
    nothing = buffer.profile()
    buffer.destroy()
    return newest.as_dict(), [row.kernel for row in nothing.rows], nothing.lost


def test_a_ring_that_is_too_small_keeps_the_newest_and_says_so(pool: RankPool, tmp_path: Path) -> None:
    options = {
        **TRACED, **SMALL, "UCCL_EP_TRACE_KERNEL_SPANS": "16", "UCCL_EP_TRACE": str(tmp_path / "trace.json"),
        "UCCL_EP_LOW_LATENCY_PATH": "packed",
    }  # fmt: skip
    for rank, (newest, kernels, lost) in enumerate(pool.run(overflowing, ranks=2, options=options, timeout_s=120)):
        assert newest["lost"] > 0
        # What is left is whole: the last halves that fit, which have all of their steps.
        assert newest["rows"] and {row["launches"] for row in newest["rows"]} == {1}
        last = activities(newest["rows"], "ll_combine_receive")
        assert last == {step for step in PACKED_COMBINE if step.startswith("receives")}
        assert "dispatch" not in kernels and lost > 0
        other = json.loads((tmp_path / f"trace.{rank}.json").read_text())["otherData"]
        assert other["lost_kernel_spans"] == newest["lost"] + lost


def off(ctx: Context) -> None:
    buffer = ctx.new_buffer()
    run_pair(ctx, buffer, Pair(ctx, [9] * ctx.num_ranks, 1, 64, "random"))
    with pytest.raises(ArgumentError, match="trace_kernels = true"):
        buffer.profile()
    buffer.destroy()


def test_off_nothing_is_recorded(pool: RankPool, tmp_path: Path) -> None:
    options = {"UCCL_EP_TRACE": str(tmp_path / "trace.json")}
    pool.run(off, ranks=2, domain=1, options=options)
    for rank in range(2):
        assert '"ph":"X"' not in (tmp_path / f"trace.{rank}.json").read_text()


def without_a_file(ctx: Context) -> list[dict[str, Any]]:
    return low_latency(ctx, hook=False)


def test_a_profile_needs_no_file(pool: RankPool, tmp_path: Path) -> None:
    for rows in pool.run(without_a_file, ranks=2, options=TRACED):
        assert rows
    assert not list(tmp_path.iterdir())


def cannot(ctx: Context) -> None:
    from uccl_ep_host.backend import HostBackend

    able = HostBackend.traces_kernels
    try:
        HostBackend.traces_kernels = property(lambda self: False)  # type: ignore[assignment]
        with pytest.raises(CapabilityError, match="host cannot record what kernels do; set it to false"):
            ctx.new_buffer()
    finally:
        HostBackend.traces_kernels = able  # type: ignore[method-assign]


def test_a_backend_that_cannot_says_so(pool: RankPool) -> None:
    pool.run(cannot, ranks=2, options=TRACED)


# ---- what becomes of records, without kernels ----


def spans(*rows: tuple[str, int, int]) -> Any:
    """Records in the order in which they ended, of activities by name."""
    records = np.zeros(len(rows), rings._RECORD)
    for record, (name, start, end) in zip(records, rows, strict=True):
        record["activity"], record["start"], record["end"] = ACTIVITIES.index(name), start, end
        record["detail"] = NOBODY
    return records


def warp(block: int, start: int, end: int, *rows: tuple[str, int, int], kernel: str = "combine", warps: int = 2) -> Any:
    return rings.WarpSpans(block, 0, KERNELS.index(kernel), start, end, warps, spans(*rows))


def test_spans_lie_within_those_that_end_later() -> None:
    steps = (("waits for room", 2, 3), ("hands over", 4, 6), ("sends", 1, 7), ("sums", 7, 9))
    outer = launches.nested(warp(0, 0, 9, *steps))
    assert [(span.name, [inner.name for inner in span.inside]) for span in outer] == [
        ("sends", ["waits for room", "hands over"]),
        ("sums", []),
    ]


def test_a_coarse_clock_does_not_put_one_step_into_another() -> None:
    outer = launches.nested(warp(0, 0, 9, ("waits for rows", 5, 5), ("copies", 5, 6), ("receives", 5, 6)))
    (role,) = outer
    assert role.name == "receives" and [step.name for step in role.inside] == ["waits for rows", "copies"]


def test_launches_are_told_apart_and_cut_ones_left_out() -> None:
    second = [warp(0, 20, 25), warp(1, 26, 30)]  # a block that begins when the other has ended
    third = [warp(block, 40 + block, 50, kernel="dispatch", warps=3) for block in range(3)]
    recorded = [*third, warp(1, 3, 9, ("sums", 4, 8)), *second]  # block 0 of the first is gone
    found, lost = launches.launches_of(recorded)
    shapes = [(launch.kernel, launch.start, len(launch.warps)) for launch in found]
    assert shapes == [("combine", 20, 2), ("dispatch", 40, 3)]
    assert lost == 2


def test_sums() -> None:
    first = launches.Launch(
        "combine",
        (
            warp(0, 1000, 9000, ("waits for rows", 2000, 3000), ("waits for rows", 4000, 7000), ("sums", 1500, 8000)),
            warp(1, 1100, 5000, ("waits for rows", 1200, 2200), ("sums", 1200, 4000)),
        ),
    )
    found = profile.summed_up([first, first], lost=3)
    assert [row.activity for row in found.rows] == [profile.WHOLE, "sums", "sums / waits for rows"]
    waits = found.rows[2]
    assert (waits.launches, waits.warps, waits.spans) == (2, 2.0, 1.5)
    assert (waits.warp_us, waits.first_start_us, waits.mean_end_us, waits.last_end_us) == (2.5, 0.2, 3.6, 6.0)
    assert "3 older spans are gone" in str(found)


def test_times_follow_the_comparisons_of_clocks() -> None:
    anchors = [clocks.Anchor(100, 1100, 2), clocks.Anchor(300, 1340, 2)]  # the device's clock is slow
    assert [clocks.follow(anchors, ns) for ns in (50, 100, 200, 300, 400)] == [1050, 1100, 1220, 1340, 1440]
    mapped = [clocks.follow(anchors, ns) for ns in range(500)]
    assert mapped == sorted(mapped)


def test_a_kernel_compares_its_clock_with_the_hosts() -> None:
    """The host backend's kernels go by the host's own clock: what is measured is the error."""
    from uccl_ep_host.backend import HostBackend

    backend = HostBackend.open(None, {})
    window = backend.allocate_host_window(clocks.WINDOW_BYTES)
    for _ in range(2):  # in the same memory again
        anchor = clocks.compare(backend, window)
        assert abs(anchor.device_ns - anchor.host_ns) <= anchor.error_ns
    clock = clocks.DeviceClock(backend, window)
    clock.compare()
    assert abs(clock.host_ns(anchor.device_ns) - anchor.host_ns) <= 2 * max(anchor.error_ns, clock.error_ns)
    window.close()


def events(text: str) -> Iterator[dict[str, Any]]:
    yield from json.loads(f"[{text}]")


def test_events_of_a_launch() -> None:
    idle = rings.WarpSpans(0, 1, KERNELS.index("combine"), 0, 9, 2, spans())
    launch = launches.Launch("combine", (warp(0, 1000, 9000, ("adds up", 2000, 3000)), idle))
    found = list(events(perfetto.events_of([launch], 3, lambda ns: ns + 500)))
    slices = [event for event in found if event["ph"] == "X"]
    assert [(event["name"], round(event["ts"], 3), round(event["dur"], 3)) for event in slices] == [
        ("combine", 1.5, 8.0),
        ("adds up", 2.5, 1.0),
    ]
    assert {event["pid"] for event in found} == {3}
    assert [event["args"]["name"] for event in found if event["name"] == "thread_name"] == ["block 0, warp 0"]
