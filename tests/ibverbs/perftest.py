"""Runs perftest's programs and reads what they measured."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Sequence

import pytest

PORT = "18599"


def require(program: str) -> None:
    """Skip the test where a program of perftest is missing."""
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed: apt-get install perftest")


def command(program: str, device: str, gid_index: int, nbytes: int, count: int) -> list[str]:
    """The words that both ends of a measurement have in common."""
    return [program, "-d", device, "-x", str(gid_index), "-F", "-s", str(nbytes), "-n", str(count), "-p", PORT]


def both_ends(words: Sequence[str]) -> str:
    """Run the two ends of a measurement on this host; what the client printed."""
    # Line by line, so that the line it is waited for comes through the pipe.
    server = subprocess.Popen(["stdbuf", "-oL", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert server.stdout is not None
        for line in server.stdout:  # it listens once it says so
            if "Waiting for client" in line:
                break
        client = subprocess.run([*words, "localhost"], capture_output=True, text=True, timeout=120)
    finally:
        server.kill()
        server.wait()
    return client.stdout + client.stderr


def numbers(printed: str, nbytes: int, count: int) -> list[float]:
    """The figures behind size and count in the last line of results."""
    found = re.findall(rf"^\s*{nbytes}\s+{count}\s+([-\w.\s]+?)\s*$", printed, re.MULTILINE)
    assert found, printed
    return [float(it) for it in found[-1].split()]


def typical_latency_us(printed: str, nbytes: int, count: int) -> list[float]:
    """``t_typical`` of ib_write_lat: the median, in microseconds; nothing where it could not tell.

    It measures the clock rate of the core first, and on a busy machine gives up on that and prints "inf".
    """
    typical = numbers(printed, nbytes, count)[2]  # columns: least, most, typical, average, ...
    return [typical] if math.isfinite(typical) and typical > 0 else []
