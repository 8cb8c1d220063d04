"""``uccl-ep bench transport``: what a transport moves through its table of functions, between two processes.

One rank writes with immediate data (as the counted plan does), the other polls the arrivals. A transport
may bring a bare loop on the library below it: then both run alternately, between the same barriers, and
the ratio says how much of the bare rate is left. A figure is the median of all rounds, a ratio the
median over pairs of neighbouring rounds. The loops come from the transport's ``benchmark_loops()``;
without them the table is driven from Python, which is slow.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from uccl_ep_core.argument_types import at_least

from ..plain_text import plain
from .records import Record, add_output_options, put_out
from .spawn import run_ranks

WINDOW = 64  # writes in flight
TIMEOUT_S = 120.0


@dataclasses.dataclass(frozen=True)
class Size:
    """One size of write.

    Attributes:
        nbytes: of a write.
        count: writes of a round.
        unit: of the figure: ``"kmsg/s"`` or ``"GB/s"``.
    """

    nbytes: int
    count: int
    unit: str

    @property
    def case(self) -> str:
        return f"{self.nbytes} B writes with immediate, {WINDOW} in flight"

    def figure(self, seconds: float) -> float:
        per_second = self.count / seconds
        return per_second / 1e3 if self.unit == "kmsg/s" else per_second * self.nbytes / 1e9


SIZES = (
    Size(8, 40_000, "kmsg/s"),
    Size(7 << 10, 16_000, "kmsg/s"),
    Size(14 << 10, 8_000, "kmsg/s"),
    Size(1 << 20, 300, "GB/s"),
)


class Loops(Protocol):
    """What ``benchmark_loops()`` of a transport returns. Each call moves ``count`` writes on lane 0, or raises."""

    bare_name: str
    """Name of the library below, "" where there is no bare loop."""

    def send(self, peer: int, nbytes: int, count: int, window: int, timeout_s: float) -> None: ...
    def receive(self, count: int, timeout_s: float) -> None: ...
    def bare_send(self, peer: int, nbytes: int, count: int, window: int, timeout_s: float) -> None: ...
    def bare_receive(self, count: int, timeout_s: float) -> None: ...


class PythonLoops:
    """Drives any table from Python."""

    bare_name = ""

    def __init__(self, operations: int) -> None:
        from uccl_ep_core.conformance.driver import Driver

        self._driver = Driver(operations, 1)

    def send(self, peer: int, nbytes: int, count: int, window: int, timeout_s: float) -> None:
        from uccl_ep_core.conformance import abi

        driver, end, posted = self._driver, time.monotonic() + timeout_s, 0
        write = abi.Write(peer, abi.IMMEDIATE, 0, 0, 0, 0, nbytes, 1, 0)
        while posted < count or driver.outstanding:
            room = min(window - driver.outstanding, count - posted)
            if room > 0:
                accepted = driver.post_once(0, [write] * room)
                if accepted < 0:
                    raise RuntimeError(f"post failed with {accepted}: {driver.last_error()}")
                posted += accepted
            driver.poll(0)
            driver.raise_errors()
            if time.monotonic() > end:
                raise TimeoutError(f"{driver.outstanding} writes did not complete in {timeout_s:g} s")

    def receive(self, count: int, timeout_s: float) -> None:
        end, seen = time.monotonic() + timeout_s, 0
        while seen < count:
            seen += self._driver.poll_arrivals(0)
            if time.monotonic() > end:
                raise TimeoutError(f"only {seen} of {count} writes arrived in {timeout_s:g} s")

    def bare_send(self, peer: int, nbytes: int, count: int, window: int, timeout_s: float) -> None:
        raise RuntimeError("this transport brings no bare loop")

    def bare_receive(self, count: int, timeout_s: float) -> None:
        raise RuntimeError("this transport brings no bare loop")


def measure(
    rank: int,
    num_ranks: int,
    name: str,
    options: Mapping[str, Any],
    sizes: Sequence[Size],
    rounds: int,
    report: Callable[[Any], None],
) -> tuple[dict[str, Any], list[dict[str, list[float]]]]:
    """One rank's part: facts of the transport, and for each size the seconds of each round by system."""
    import torch.distributed as dist

    from uccl_ep_core import registry, shared_memory
    from uccl_ep_core.transport import Memory

    transport = registry.load(registry.TRANSPORTS, name).open(str(options.get("device", "")) or None, options)
    windows = [shared_memory.create(max(size.nbytes for size in sizes)), shared_memory.create(4096)]
    try:
        if transport.capabilities.imm_bits == 0:
            raise RuntimeError(f"{name} has no immediate data here, which this benchmark counts arrivals by")
        for window in windows:
            transport.register(Memory(window.pointer, window.nbytes, share_handle=window.handle()))
        addresses: list[Any] = [None] * num_ranks
        dist.all_gather_object(addresses, transport.address())
        transport.connect(rank, addresses, [1 - rank], 1, 60.0)
        loops = transport.benchmark_loops() if hasattr(transport, "benchmark_loops") else None
        loops = loops or PythonLoops(transport.native_ops)
        systems = ["uccl_ep"] + ([loops.bare_name] if loops.bare_name else [])
        times = []
        for size in sizes:
            seconds: dict[str, list[float]] = {system: [] for system in systems}
            for turn in range(rounds + 1):
                for system in systems if turn % 2 else reversed(systems):
                    taken = _one_round(loops, system == "uccl_ep", rank, size)
                    if turn:  # the first round warms up
                        seconds[system].append(taken)
                report((size.case, turn))
            times.append(seconds)
        dist.barrier()
        return {"bare": loops.bare_name, **transport.describe()}, times
    finally:
        transport.close()
        for window in windows:
            window.close()


def _one_round(loops: Loops, through_table: bool, rank: int, size: Size) -> float:
    """Seconds from the first post to the moment when both sides are done."""
    import torch.distributed as dist

    send = loops.send if through_table else loops.bare_send
    receive = loops.receive if through_table else loops.bare_receive
    dist.barrier()
    begin = time.perf_counter()
    if rank == 0:
        send(1, size.nbytes, size.count, WINDOW, TIMEOUT_S)
    else:
        receive(size.count, TIMEOUT_S)
    dist.barrier()
    return time.perf_counter() - begin


def run(
    transport: str,
    options: Mapping[str, Any] | None = None,
    *,
    sizes: Sequence[Size] = SIZES,
    rounds: int = 7,
    on_event: Callable[[int, Any], None] | None = None,
) -> list[Record]:
    """Measure, and return the records: for each size the transport's figure, then the bare loop's."""
    given = _validated(transport, options or {})
    results = run_ranks(measure, 2, transport, given, tuple(sizes), rounds, on_event=on_event)
    facts, times = results[0]
    words = "/".join(str(facts[key]) for key in ("provider", "library") if key in facts)
    label = f"{transport} {words}".strip()
    records = []
    for size, seconds in zip(sizes, times, strict=True):
        metric = "message rate" if size.unit == "kmsg/s" else "bandwidth"
        mine = size.figure(statistics.median(seconds["uccl_ep"]))
        case = f"{label}: {size.case}"
        bare = facts["bare"]
        if not bare:
            records.append(Record("transport", case, f"{metric}, uccl_ep", mine, size.unit))
            continue
        theirs = size.figure(statistics.median(seconds[bare]))
        name = f"{metric}, bare {bare}"
        # Neighbours in time see the same load of the machine: the median of their ratios, not the ratio of medians.
        ratio = statistics.median(b / m for m, b in zip(seconds["uccl_ep"], seconds[bare], strict=True))
        records.append(Record("transport", case, f"{metric}, uccl_ep", mine, size.unit, name, ratio))
        records.append(Record("transport", case, name, theirs, size.unit))
    return records


def _validated(transport: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as the library itself would resolve them: files and environment, then these."""
    from uccl_ep_core.config import Configuration

    overrides = {f"{transport}.{name}": value for name, value in options.items()}
    configuration = Configuration.resolve({"transport": transport, **overrides})
    return configuration.options("transports", transport)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description=plain(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", required=True, help="the transport's name, e.g. libfabric")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="an option; repeatable")
    parser.add_argument("--rounds", type=at_least(1), default=7, help="timed rounds of each size (default 7)")
    add_output_options(parser)
    given = parser.parse_args(arguments)
    options = {}
    for pair in given.option:
        name, found, value = pair.partition("=")
        if not found:
            parser.error(f"--option takes NAME=VALUE, got {pair!r}")
        options[name] = value

    from rich.progress import Progress

    with Progress(transient=True) as progress:
        bars = {size.case: progress.add_task(size.case, total=given.rounds) for size in SIZES}

        def on_event(rank: int, event: Any) -> None:
            if rank == 0:
                progress.update(bars[event[0]], completed=event[1])

        records = run(given.transport, options, rounds=given.rounds, on_event=on_event)
    put_out(given, records)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
