"""Fixtures for the devices; see devices.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from devices import device_of


@pytest.fixture(scope="session")
def connected_device() -> str:
    """An InfiniBand or RoCE device; SoftRoCE in the guest."""
    return device_of("connected")


@pytest.fixture(scope="session")
def iwarp_device() -> str:
    """An iWARP device; siw in the guest."""
    return device_of("iwarp")


@pytest.fixture(params=["connected", "iwarp"])
def device(request: pytest.FixtureRequest) -> str:
    """A device of either kind, one after the other."""
    return device_of(request.param)
