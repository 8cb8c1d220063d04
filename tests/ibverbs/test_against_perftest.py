"""Message rate and bandwidth of plain writes against perftest's ib_write_bw: same device, sizes and depth.

ib_write_bw counts at its better of one doorbell for each write, and one for as many as this transport posts with
one. Both sides of each measurement run on this machine, in turns, and the best of several rounds counts, since
anything else that runs here only slows either down. Absolute numbers of software devices mean nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import perftest
import pytest
from wire import IMMEDIATE, Endpoint, connect_all

from uccl_ep_ibverbs.loader import data_plane

DEPTH = 128
BATCH = 32
LEAST_ROUNDS, MOST_ROUNDS = 3, 15
"""The best of more rounds is nearer to what a quiet machine would show, for both sides alike."""
SIZES = {8: 19_200, 65536: 1_920, 1 << 20: 192}
"""Messages of each size; enough for tens of milliseconds."""
LEAST = 0.9


def perftest_rate(device: str, nbytes: int, count: int, gid_index: int, batch: int) -> float:
    """Messages a second as ib_write_bw measures them, posting ``batch`` with one doorbell."""
    words = [*perftest.command("ib_write_bw", device, gid_index, nbytes, count), "-t", str(DEPTH)]
    if batch > 1:
        words += ["-l", str(batch)]
    return perftest.numbers(perftest.both_ends(words), nbytes, count)[2] * 1e6


class Rate:
    """Writes from one endpoint to another at a fixed depth, posted and polled the way a proxy does."""

    def __init__(self, sender: Endpoint, receiver: Endpoint) -> None:
        self.sender, self.receiver = sender, receiver

    def __call__(self, nbytes: int, count: int, flags: int = 0) -> float:
        """Messages a second."""
        seconds = data_plane().measure(
            sender=self.sender.transport.native_ops,
            receiver=self.receiver.transport.native_ops if flags else 0,
            peer=1,
            flags=flags,
            bytes=nbytes,
            count=count,
            depth=DEPTH,
            batch=BATCH,
        )
        return count / float(seconds)


@pytest.fixture
def rate(connected_device: str) -> Iterator[Rate]:
    endpoints = [Endpoint(connected_device, {"send_depth": DEPTH, "inline_bytes": 0}, 1 << 20) for _ in range(2)]
    try:
        connect_all(endpoints)
        yield Rate(*endpoints)
    finally:
        for it in endpoints:
            it.close()


@pytest.mark.parametrize("nbytes", SIZES)
def test_plain_writes(rate: Rate, connected_device: str, nbytes: int) -> None:
    perftest.require("ib_write_bw")
    gid = rate.sender.transport._rails[0].gid.index  # type: ignore[attr-defined]
    count = SIZES[nbytes]
    ours = theirs = immediate = 0.0
    for number in range(MOST_ROUNDS):
        for batch in (1, BATCH):
            theirs = max(theirs, perftest_rate(connected_device, nbytes, count, gid, batch))
            ours = max(ours, rate(nbytes, count))
            immediate = max(immediate, rate(nbytes, count, IMMEDIATE))
        if number + 1 >= LEAST_ROUNDS and ours >= LEAST * theirs:
            break
    print(
        f"\n{nbytes} bytes, depth {DEPTH}: {ours:.0f} writes/s ({ours * nbytes / 1e6:.0f} MB/s), ib_write_bw "
        f"{theirs:.0f}/s ({theirs * nbytes / 1e6:.0f} MB/s): ratio {ours / theirs:.2f}; with immediate "
        f"{immediate:.0f}/s, ratio {immediate / theirs:.2f}"
    )
    assert ours >= LEAST * theirs


def own_latency_us(sender: Endpoint, receiver: Endpoint, nbytes: int, count: int, yields: bool) -> float:
    """Median of half an exchange between two endpoints of this process, each driven by a thread of its own."""
    with ThreadPoolExecutor(2) as threads:
        far = threads.submit(receiver.ping_pong, 0, nbytes, count, False, yields)
        near = threads.submit(sender.ping_pong, 1, nbytes, count, True, yields)
        far.result()
        return statistics.median(near.result()) * 1e6


@pytest.mark.parametrize("nbytes", SIZES)
def test_latency(connected_device: str, nbytes: int) -> None:
    """Against ib_write_lat on one host, spinning as it does, and yielding the core between looks as a proxy does.

    Where both ends share one core, as in a guest, spinning measures how long each waits for its turn.
    """
    perftest.require("ib_write_lat")
    count = 100
    endpoints = [Endpoint(connected_device, {}, 2 * nbytes) for _ in range(2)]
    try:
        connect_all(endpoints)
        gid = endpoints[0].transport._rails[0].gid.index  # type: ignore[attr-defined]
        theirs: list[float] = []
        spinning, yielding = [], []
        for number in range(MOST_ROUNDS):
            if number >= LEAST_ROUNDS and theirs:
                break
            printed = perftest.both_ends(perftest.command("ib_write_lat", connected_device, gid, nbytes, count))
            theirs += perftest.typical_latency_us(printed, nbytes, count)
            spinning.append(own_latency_us(*endpoints, nbytes, count, yields=False))
            yielding.append(own_latency_us(*endpoints, nbytes, count, yields=True))
    finally:
        for it in endpoints:
            it.close()
    if not theirs:
        pytest.skip(f"ib_write_lat could not measure this core's clock in {MOST_ROUNDS} runs: the machine is too busy")
    reference = min(theirs)
    print(
        f"\n{nbytes} bytes: ib_write_lat {reference:.1f} us; spinning {min(spinning):.1f} us, ratio "
        f"{min(spinning) / reference:.2f}; yielding {min(yielding):.1f} us, ratio {min(yielding) / reference:.2f}"
    )
    assert min(min(spinning), min(yielding)) <= reference / LEAST
