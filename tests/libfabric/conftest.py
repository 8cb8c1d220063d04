"""Skips what this machine has no library or provider for, saying why."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from variants import missing


def pytest_runtest_setup(item: pytest.Item) -> None:
    variant = getattr(item, "callspec", None) and item.callspec.params.get("variant")  # type: ignore[attr-defined]
    if variant is not None and (why := missing(variant.library, variant.provider)):
        pytest.skip(why)
