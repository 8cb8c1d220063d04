"""``uccl-ep bench channel``: commands a second from a kernel's push to a proxy, and through one.

*Through a proxy*: pop, decode, bounds, merge, post to a transport that moves nothing, completion back, in CPU time
of the proxy's thread, with the commands in the ring already. The ceiling is the same commands only popped and
decoded. *Between threads*: from one thread that pushes, as a warp of the host backend does, to one that pops, wall
clock; the ceiling is the same stores and loads without tickets, credit and fences. All of it needs two idle cores
and no GPU; ``gpu_backends/cuda/bench/run`` has the same figures of a GPU.

What is compared runs in alternation; a figure is the median over rounds, a ratio the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence

from uccl_ep_core import _native
from uccl_ep_core.argument_types import at_least

from ..plain_text import plain
from .records import Record, add_output_options, put_out

UNIT = "M commands/s"
Measure = Callable[[], float]


@dataclasses.dataclass(frozen=True)
class Load:
    """A stream of commands through one proxy.

    Attributes:
        contiguous: commands of a message; they become one write.
        signals: how many signals the messages use in turn. With one, the signals of a batch become one.
        plan: the ordering plan in force.
    """

    contiguous: int
    signals: int
    plan: str = "native"

    @property
    def case(self) -> str:
        message = "1 command a message" if self.contiguous == 1 else f"{self.contiguous} contiguous commands a message"
        signals = "1 signal" if self.signals == 1 else f"{self.signals} signals in turn"
        return f"through a proxy, {self.plan} plan: {message}, {signals}"


LOADS = (
    Load(1, 1),
    Load(1, 64),
    Load(4, 64),
    Load(32, 64),
    Load(1, 64, "counted"),
    Load(4, 64, "counted"),
    Load(1, 64, "fenced"),
    Load(4, 64, "fenced"),
)


def alternate(first: Measure, second: Measure, rounds: int, *, rate: bool = True) -> tuple[float, float, float]:
    """Medians of both, and of the ratio first / second (of times: second / first), round by round."""
    pairs = []
    for turn in range(rounds + 1):
        if turn % 2:
            a, b = first(), second()
        else:
            b, a = second(), first()
        if turn:  # the first round warms up
            pairs.append((a, b))
    ratio = statistics.median(a / b if rate else b / a for a, b in pairs)
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs), ratio


def _through_proxies(rounds: int, laps: int) -> Iterator[Record]:
    for load in LOADS:
        through, popped, ratio = alternate(
            lambda load=load: _native.bench_proxy(load.plan, load.contiguous, load.signals, rounds=laps),  # type: ignore[misc]
            lambda load=load: _native.bench_pop(load.contiguous, load.signals, rounds=laps),  # type: ignore[misc]
            rounds,
        )
        ceiling = "popped and decoded only"
        yield Record("channel", load.case, "commands a proxy, uccl_ep", through, UNIT, ceiling, ratio)
        yield Record("channel", load.case, ceiling, popped, UNIT)


def _traced(rounds: int, laps: int) -> Iterator[Record]:
    load = Load(1, 64)
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "trace.json")
        on, off, ratio = alternate(
            lambda: _native.bench_proxy(load.plan, load.contiguous, load.signals, trace=file, rounds=laps),
            lambda: _native.bench_proxy(load.plan, load.contiguous, load.signals, rounds=laps),
            rounds,
        )
    case = f"with UCCL_EP_TRACE, {load.case}"
    yield Record("channel", case, "commands a proxy, traced", on, UNIT, "commands a proxy, not traced", ratio)
    yield Record("channel", case, "commands a proxy, not traced", off, UNIT)


def _between_threads(rounds: int, laps: int) -> Iterator[Record]:
    bare = "stores and loads only"
    for batch, what in ((1, "one command a push"), (32, "32 commands a push, as a warp's")):
        pushed, ceiling, ratio = alternate(
            lambda batch=batch: _native.bench_ring(batch, False, laps * 4096),  # type: ignore[misc]
            lambda batch=batch: _native.bench_ring(batch, True, laps * 4096),  # type: ignore[misc]
            rounds,
        )
        case = f"between two threads, {what}"
        yield Record("channel", case, "commands a ring, uccl_ep", pushed, UNIT, bare, ratio)
        yield Record("channel", case, bare, ceiling, UNIT)
    trip, word, ratio = alternate(
        lambda: _native.bench_round_trip(False, laps * 64),
        lambda: _native.bench_round_trip(True, laps * 64),
        rounds,
        rate=False,
    )
    case = "between two threads, there and back"
    yield Record("channel", case, "round trip, uccl_ep", trip, "us", "one word each way", ratio)
    yield Record("channel", case, "one word each way", word, "us")


PARTS: tuple[Callable[[int, int], Iterator[Record]], ...] = (_through_proxies, _traced, _between_threads)


def run(*, rounds: int = 7, laps: int = 100, on_record: Callable[[Record], None] | None = None) -> list[Record]:
    """The records of all cases.

    Args:
        rounds: measurements of each, in alternation with what it is compared with.
        laps: times that the ring of 4096 commands is filled in one measurement.
        on_record: called with each record as it is there.
    """
    found = []
    for part in PARTS:
        for record in part(rounds, laps):
            found.append(record)
            if on_record is not None:
                on_record(record)
    return found


def slower_than(records: Sequence[Record], floor: float) -> list[Record]:
    """The cases through a proxy that take fewer million commands a second than ``floor``."""
    return [r for r in records if r.metric == "commands a proxy, uccl_ep" and r.value < floor]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description=plain(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(1), default=7, help="rounds of each case (default 7)")
    parser.add_argument("--laps", type=at_least(1), default=100, help="fills of the ring in a round (default 100)")
    parser.add_argument("--require", type=float, default=0.0, metavar="RATE",
                        help="exit with status 1 where a proxy takes fewer than RATE million commands/s")  # fmt: skip
    add_output_options(parser, "rates")
    given = parser.parse_args(arguments)

    from rich.progress import Progress

    with Progress(transient=True) as progress:
        bar = progress.add_task("channel", total=2 * (len(LOADS) + 4))
        found = run(rounds=given.rounds, laps=given.laps, on_record=lambda _: progress.advance(bar))
    put_out(given, found, "The command channel on the CPU", unit=UNIT)
    slow = slower_than(found, given.require)
    for record in slow:
        print(f"{record.case}: {record.value:.1f} {UNIT}, asked for {given.require:g}")
    return 1 if slow else 0


if __name__ == "__main__":
    raise SystemExit(main())
