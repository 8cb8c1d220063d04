"""NUMA nodes: where rings, control windows and proxy threads should be. No library: sysfs and one system call.

Everything here is a wish. On one node, in a container that hides sysfs or forbids the call, nothing happens.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SYSFS = Path("/sys")
MPOL_PREFERRED = 1
MPOL_MF_MOVE = 2  # pages that were touched already
MBIND = {"x86_64": 237, "aarch64": 235}
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}


def parse_list(text: str) -> list[int]:
    """``"0-3,8"`` as ``[0, 1, 2, 3, 8]``."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        if first:
            found += range(int(first), int(last if dash else first) + 1)
    return found


def nodes(sysfs: Path = SYSFS) -> dict[int, list[int]]:
    """The CPUs of every node that has some; empty where the system does not say."""
    found = {}
    for file in sorted((sysfs / "devices/system/node").glob("node[0-9]*/cpulist")):
        try:
            cpus = parse_list(file.read_text())
        except (OSError, ValueError):
            continue
        if cpus:
            found[int(file.parent.name[4:])] = cpus
    return found


def node_of_device(pci_address: str, sysfs: Path = SYSFS) -> int | None:
    """The node of a PCI device such as ``0000:1b:00.0``; None where it has none."""
    try:
        node = int((sysfs / "bus/pci/devices" / pci_address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def home(pci_address: str | None = None, sysfs: Path = SYSFS) -> tuple[int, list[int]] | None:
    """The node that this rank should use, with those of its CPUs that the process may use.

    That of the device where it has one, else that of the CPU that runs the caller. None where there is no choice.
    """
    known = nodes(sysfs)
    if len(known) < 2:
        return None
    node = node_of_device(pci_address, sysfs) if pci_address else None
    if node not in known:
        cpu = ctypes.CDLL(None).sched_getcpu()
        node = next((number for number, cpus in known.items() if cpu in cpus), None)
    if node is None:
        return None
    usable = sorted(set(known[node]) & os.sched_getaffinity(0))
    return (node, usable) if usable else None


@contextlib.contextmanager
def preferring(node: int | None) -> Iterator[None]:
    """While it lasts, pages that this thread touches first lie on a node: memory is pinned where it is created."""
    number = SET_MEMPOLICY.get(platform.machine())
    if node is None or number is None or not 0 <= node < 1024:
        yield
        return
    library = ctypes.CDLL(None, use_errno=True)
    mask = _mask(node)
    library.syscall(ctypes.c_long(number), ctypes.c_int(MPOL_PREFERRED), mask, ctypes.c_ulong(1025))
    try:
        yield
    finally:
        library.syscall(ctypes.c_long(number), ctypes.c_int(0), None, ctypes.c_ulong(0))


def _mask(node: int) -> Any:
    mask = (ctypes.c_ulong * 16)()
    mask[node // 64] = 1 << (node % 64)
    return mask


def prefer(pointer: int, nbytes: int, node: int) -> bool:
    """Let the pages of this memory lie on a node, where it has room. False where the system refuses."""
    number = MBIND.get(platform.machine())
    if number is None or pointer % os.sysconf("SC_PAGE_SIZE") or not 0 <= node < 1024:
        return False
    mask = _mask(node)
    # The kernel reads one bit less than it is told.
    return (
        ctypes.CDLL(None, use_errno=True).syscall(
            ctypes.c_long(number),
            ctypes.c_void_p(pointer),
            ctypes.c_ulong(nbytes),
            ctypes.c_long(MPOL_PREFERRED),
            mask,
            ctypes.c_ulong(1025),
            ctypes.c_uint(MPOL_MF_MOVE),
        )
        == 0
    )


def describe(pci_address: str | None = None, sysfs: Path = SYSFS) -> str:
    """One line for people."""
    known = nodes(sysfs)
    place = home(pci_address, sysfs)
    if place is None:
        return f"{len(known) or 'unknown'}, nothing to choose"
    return f"{len(known)}, rings and proxies on node {place[0]} ({len(place[1])} CPUs)"
