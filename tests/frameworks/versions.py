"""The versions of frameworks that are tried, from requirements.txt beside this file; without one its tests skip."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

PINNED = dict(
    line.split("==")
    for line in (Path(__file__).parent / "requirements.txt").read_text().splitlines()
    if line and not line.startswith("#")
)


def needs(distribution: str) -> pytest.MarkDecorator:
    """Skips tests where the distribution is absent or has another version, and says which."""
    try:
        found = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        found = ""
    wanted = PINNED[distribution]
    reason = (
        f"{distribution} is {found}, the tests are for {wanted}: run .ci/frameworks install"
        if found
        else f"{distribution} {wanted} is not installed: run .ci/frameworks install"
    )
    return pytest.mark.skipif(found != wanted, reason=reason)
