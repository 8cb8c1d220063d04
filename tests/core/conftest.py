from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_plugins import Install, installed


@pytest.fixture
def install(tmp_path: Path) -> Iterator[Install]:
    """Installs fake third-party plugins for one test."""
    with installed(tmp_path) as function:
        yield function
