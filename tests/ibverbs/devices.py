"""Which RDMA devices the tests of this folder use, and why they skip where there is none.

On a machine (or in the guest of ``make softroce``) with devices, their own names are used; in the guest
a device that is missing fails the tests instead of skipping them.
"""

from __future__ import annotations

import os

import pytest

from uccl_ep_ibverbs import discovery
from uccl_ep_ibverbs.loader import VerbsMissingError, data_plane, verbs
from uccl_ep_ibverbs.settings import Settings

IN_GUEST = os.environ.get("SOFTROCE_GUEST") == "1"
STEP = int(os.environ.get("SOFTROCE_STEP", "1"))
"""A quick run takes every n-th case, and the longest tests do an n-th of their work."""
KINDS = {"connected": ("infiniband", "roce"), "iwarp": ("iwarp",)}


def find_device(kind: str) -> tuple[str, str]:
    """The best device of a kind of `KINDS`, or "" and the reason why there is none."""
    try:
        verbs(), data_plane()
    except VerbsMissingError as missing:
        return "", f"{missing.args[0]}; {missing.args[1]}"
    nics = [discovery.nic(name, Settings.of({})) for name in discovery.names()]
    best = discovery.rank_devices([nic for nic in nics if nic.kind in KINDS[kind]], ())
    if best:
        return best[0].name, ""
    refused = "; ".join(f"{nic.name}: {nic.reason or nic.kind}" for nic in nics)
    return "", f"no usable RDMA device of kind {kind} ({refused or 'none at all'}): run 'make softroce'"


def device_of(kind: str) -> str:
    """The device, or the end of the test: skipped, but in the guest failed."""
    name, reason = find_device(kind)
    if not name:
        (pytest.fail if IN_GUEST else pytest.skip)(reason)
    return name
