"""Which RDMA devices the tests of this folder use, and why they skip where there is none.

On a machine (or in the guest of ``make softroce``) with devices, their own names are used; in the guest
a device that is missing fails the tests instead of skipping them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from uccl_ep_ibverbs import discovery
from uccl_ep_ibverbs.loader import VerbsMissingError, data_plane, verbs
from uccl_ep_ibverbs.settings import Settings

IN_GUEST = os.environ.get("UCCL_EP_SOFTROCE") == "1"


def find_device(kinds: tuple[str, ...]) -> tuple[str, str]:
    """The best device of these kinds, or "" and the reason why there is none."""
    try:
        verbs(), data_plane()
    except VerbsMissingError as missing:
        return "", f"{missing.args[0]}; {missing.args[1]}"
    nics = [discovery.nic(name, Settings.of({})) for name in discovery.names()]
    best = discovery.rank_devices([nic for nic in nics if nic.kind in kinds], ())
    if best:
        return best[0].name, ""
    refused = "; ".join(f"{nic.name}: {nic.reason or nic.kind}" for nic in nics)
    return "", f"no usable RDMA device of kind {' or '.join(kinds)} ({refused or 'none at all'}): run 'make softroce'"


def _device(kinds: tuple[str, ...]) -> str:
    name, reason = find_device(kinds)
    if not name:
        (pytest.fail if IN_GUEST else pytest.skip)(reason)
    return name


@pytest.fixture(scope="session")
def connected_device() -> str:
    """An InfiniBand or RoCE device; SoftRoCE in the guest."""
    return _device(("infiniband", "roce"))


@pytest.fixture(scope="session")
def iwarp_device() -> str:
    """An iWARP device; siw in the guest."""
    return _device(("iwarp",))


@pytest.fixture(params=["connected", "iwarp"])
def device(request: pytest.FixtureRequest) -> str:
    """A device of either kind, one after the other."""
    return str(request.getfixturevalue(f"{request.param}_device"))
