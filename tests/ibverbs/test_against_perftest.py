"""Message rate and bandwidth of plain writes against perftest's ib_write_bw: same device, sizes and depth.

ib_write_bw counts at its better of one doorbell for each write, and one for as many as this transport posts with
one. Both sides of each measurement run on this machine, in turns, and the best of several rounds counts, since
anything else that runs here only slows either down. Absolute numbers of software devices mean nothing.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator

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
    command = ["ib_write_bw", "-d", device, "-x", str(gid_index), "-F", "-s", str(nbytes), "-n", str(count)]
    command += ["-t", str(DEPTH), "-p", "18599"]
    if batch > 1:
        command += ["-l", str(batch)]
    # Line by line, so that the line it is waited for comes through the pipe.
    server = subprocess.Popen(["stdbuf", "-oL", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert server.stdout is not None
        for line in server.stdout:  # it listens once it says so
            if "Waiting for client" in line:
                break
        client = subprocess.run([*command, "localhost"], capture_output=True, text=True, timeout=120)
    finally:
        server.kill()
        server.wait()
    found = re.search(rf"^\s*{nbytes}\s+{count}\s+[\d.]+\s+([\d.]+)\s+([\d.]+)", client.stdout, re.MULTILINE)
    assert found, client.stdout + client.stderr
    return float(found.group(2)) * 1e6


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
    if shutil.which("ib_write_bw") is None:
        pytest.skip("ib_write_bw is not installed: apt-get install perftest")
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
