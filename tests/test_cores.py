"""When threads that poll look away."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from ranks import Context, RankPool
from uccl_ep.connection import Connection
from uccl_ep.cores import Cores, Place


def test_threads_and_cores_of_one_host_are_counted() -> None:
    one, two = Place("one", frozenset({0, 1, 2, 3})), Place("two", frozenset({0}))
    assert Cores.of([one, one, two], 0, 2) == Cores(4, 4)
    assert not Cores.of([one, one, two], 0, 2).crowded
    assert Cores.of([one, one, two], 2, 2) == Cores(2, 1)
    assert Cores.of([one, one, two], 2, 2).crowded
    # Ranks that are bound to cores of their own have all of them together.
    bound = [Place("one", frozenset({2 * rank, 2 * rank + 1})) for rank in range(4)]
    assert Cores.of(bound, 1, 2) == Cores(8, 8)
    assert Cores.of(bound, 1, 0) == Cores(0, 8)
    assert Cores.of(bound, 1, 3).describe() == {
        "name": "look away",
        "reason": "12 threads of this host's ranks may wait at once, on 8 cores",
    }


@pytest.mark.parametrize(
    ("on_cpu", "device_memory", "lanes", "ranks", "proxies"),
    [
        (False, False, 8, 2, 4),  # 16 cores
        (False, False, 3, 2, 3),
        (False, False, 8, 4, 3),  # of 4 cores one is the rank's own
        (False, False, 8, 32, 1),
        (False, True, 8, 2, 1),
        (True, False, 8, 2, 1),
    ],
)
def test_proxies_are_as_many_as_copy_what_a_bus_brings(
    on_cpu: bool, device_memory: bool, lanes: int, ranks: int, proxies: int
) -> None:
    capabilities = SimpleNamespace(device_memory=device_memory, lanes=lanes)
    communicator: Any = SimpleNamespace(
        _on_cpu=on_cpu,
        transport=SimpleNamespace(capabilities=capabilities),
        _places=[Place("one", frozenset(range(16)))] * ranks,
        rank=0,
    )
    assert Connection._automatic_proxies(communicator) == proxies


def test_this_process_has_a_place() -> None:
    place = Place.here()
    assert place.host and place.cpus == os.sched_getaffinity(0)


def _waits(ctx: Context) -> dict[str, str]:
    buffer = ctx.new_buffer()
    waits = buffer.describe()["waits"]
    buffer.destroy()
    return dict(waits)


def test_a_buffer_says_how_it_waits(pool: RankPool) -> None:
    for waits in pool.run(_waits, ranks=2, domain=1):
        crowded = len(os.sched_getaffinity(0)) < 4
        assert waits["name"] == ("look away" if crowded else "poll")
        assert waits["reason"].startswith("4 threads")
