"""``uccl-ep bench ordering``: what an emulated ordering plan costs, against the native plan of the same transport.

Two ranks of this process over shared memory, lossless and in order, so that both plans move the same bytes between
the same windows. One thread runs the proxies of both sides in turn and takes the CPU time of each: nothing waits for
a core, and a busy machine does not count. The *rate* is that of the slower proxy, as where each has a core of its
own; the *CPU time* is that of both together. Ratios are those of neighbouring rounds; 0.97 is an overhead of 3 %.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from uccl_ep_core import _native, registry, shared_memory
from uccl_ep_core.argument_types import at_least
from uccl_ep_core.transport import Memory

from ..plain_text import plain
from .records import Record, add_output_options, put_out

CONNECT_S = 60.0
RING_CAPACITY = 1024  # commands
UNIT = "kwrites/s"


@dataclasses.dataclass(frozen=True)
class Shape:
    """What crosses.

    Attributes:
        nbytes: of a write; no two are contiguous.
        writes: of a message.
        window_bytes: memory that sources and targets lie in, in turn.
    """

    nbytes: int
    writes: int
    window_bytes: int

    @property
    def case(self) -> str:
        return f"{self.nbytes} B writes over shm, {self.writes} a message, windows of {self.window_bytes >> 20} MiB"


# Windows as large as in use, and such that stay in the cache, where a copy is quickest and a plan weighs most.
SHAPES = tuple(Shape(7168, writes, mib << 20) for mib, writes in itertools.product((32, 4), (1, 8)))


class Ranks:
    """Two ranks of this process with an engine for each plan over the same two ends of one transport.

    Only one plan moves anything at a time. Its windows, mappings and lane are the others' too: where memory lies
    decides more than the plan.
    """

    def __init__(self, plans: Sequence[str], window_bytes: int, transport: str = "shm") -> None:
        self._stack = contextlib.ExitStack()
        self._window_bytes = window_bytes
        self._engines: dict[str, list[Any]] = {}
        self._signals: dict[str, int] = {}
        self._values = dict.fromkeys(plans, 0)
        try:
            self._open(plans, registry.load(registry.TRANSPORTS, transport))
        except BaseException:
            self.close()
            raise

    def _open(self, plans: Sequence[str], plugin: Any) -> None:
        slots = 8
        layout = _native.Layout(
            num_ranks=2,
            ranks_per_domain=1,
            num_channels=len(plans),  # a signal for each plan
            num_slots=slots,
            slot_bytes=-(-self._window_bytes // (2 * slots)) // 64 * 64,  # the windows hold two such rings and more
            has_remote=True,
        )
        windows = [[self._memory(nbytes) for nbytes in (layout.data_bytes(), layout.control_bytes())] for _ in range(2)]
        transports = []
        for memories in windows:
            transport = plugin.open(None, {})
            self._stack.callback(transport.close)
            for memory in memories:
                transport.register(Memory(memory.pointer, memory.nbytes, share_handle=memory.handle()))
            transports.append(transport)
        addresses = [transport.address() for transport in transports]
        for rank, transport in enumerate(transports):
            transport.connect(rank, addresses, [1 - rank], 1, CONNECT_S)
        for number, plan in enumerate(plans):
            self._signals[plan] = layout.signal_index(_native.SignalKind.DIRECT_DATA, 0, number)
            self._engines[plan] = [
                self._engine(rank, plan, layout, transports[rank], *windows[rank]) for rank in range(2)
            ]

    def _engine(self, rank: int, plan: str, layout: Any, transport: Any, data: Any, control: Any) -> Any:
        ring = self._memory(_native.Channel.host_bytes(1, RING_CAPACITY))
        state = self._memory(_native.Channel.state_bytes(1))
        return _native.Engine(
            rank=rank,
            layout=layout,
            data_pointer=data.pointer,
            control_pointer=control.pointer,
            ops_pointer=transport.native_ops,
            plan=plan,
            capabilities=transport.capabilities,
            remote_peers=[1 - rank],
            channel=_native.Channel(1, RING_CAPACITY, ring.pointer, ring.pointer, state.pointer),
            num_proxies=1,
            options={"timeout_s": CONNECT_S},
        )

    def _memory(self, nbytes: int) -> Any:
        memory = shared_memory.create(nbytes)
        self._stack.callback(memory.close)
        return memory

    def seconds(self, plan: str, shape: Shape, messages: int) -> tuple[float, float]:
        """CPU seconds that ``messages`` messages take the sender's proxy, and the receiver's."""
        first = self._values[plan] + 1
        self._values[plan] += messages
        sender, receiver = _native.bench_payload(
            *self._engines[plan], self._signals[plan], shape.nbytes, shape.writes, messages, shape.window_bytes, first
        )
        return float(sender), float(receiver)

    def close(self) -> None:
        self._engines.clear()  # they use the memory below
        self._stack.close()


def _compare(ranks: Ranks, plan: str, shape: Shape, rounds: int, messages: int) -> list[Record]:
    writes = messages * shape.writes
    taken: list[tuple[float, float, float, float]] = []
    for turn in range(rounds + 1):
        order = (plan, "native") if turn % 2 else ("native", plan)
        times = {name: ranks.seconds(name, shape, messages) for name in order}
        if turn:  # the first round warms up
            taken.append((max(times[plan]), max(times["native"]), sum(times[plan]), sum(times["native"])))
    slowest, native_slowest, both, native_both = (statistics.median(column) for column in zip(*taken, strict=True))
    rate, native_rate = f"rate, {plan} plan", f"rate, native plan beside {plan}"
    cpu, native_cpu = f"CPU time of a write, {plan} plan", f"CPU time of a write, native plan beside {plan}"

    def record(metric: str, value: float, unit: str, baseline: str = "", ratio: float = 1.0) -> Record:
        return Record("ordering", shape.case, metric, value, unit, baseline, ratio)

    return [
        record(rate, writes / slowest / 1e3, UNIT, native_rate, statistics.median(n / m for m, n, _, _ in taken)),
        record(native_rate, writes / native_slowest / 1e3, UNIT),
        record(cpu, both / writes * 1e9, "ns", native_cpu, statistics.median(n / m for _, _, m, n in taken)),
        record(native_cpu, native_both / writes * 1e9, "ns"),
    ]


def run(
    *,
    plans: Sequence[str] = ("counted", "fenced"),
    shapes: Sequence[Shape] = SHAPES,
    rounds: int = 41,
    writes: int = 4096,
    on_record: Callable[[Record], None] | None = None,
) -> list[Record]:
    """The records: for each shape and plan its rate and CPU time, with the ratio to the native plan's.

    Args:
        plans: what is compared with native.
        shapes: sizes of writes, messages and windows.
        rounds: of each, in alternation.
        writes: of one round.
        on_record: called with each record as it is there.
    """
    found = []
    with contextlib.closing(Ranks(("native", *plans), max(shape.window_bytes for shape in shapes))) as ranks:
        for shape, plan in itertools.product(shapes, plans):
            for record in _compare(ranks, plan, shape, rounds, max(1, writes // shape.writes)):
                found.append(record)
                if on_record is not None:
                    on_record(record)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description=plain(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(1), default=41, help="rounds of each case (default 41)")
    parser.add_argument("--writes", type=at_least(1), default=4096, help="writes of a round (default 4096)")
    add_output_options(parser, "rates")
    given = parser.parse_args(arguments)

    from rich.progress import Progress

    with Progress(transient=True) as progress:
        bar = progress.add_task("ordering", total=8 * len(SHAPES))
        found = run(rounds=given.rounds, writes=given.writes, on_record=lambda _: progress.advance(bar))
    put_out(given, found, "Ordering plans against the native one", unit=UNIT)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
