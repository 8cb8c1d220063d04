"""The fake vendor libraries, built once a session."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import fakes


@pytest.fixture(scope="session", params=["hip", "cuda"])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> fakes.FakeFiles:
    return fakes.build(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def fake(files: fakes.FakeFiles, monkeypatch: pytest.MonkeyPatch) -> fakes.Fake:
    monkeypatch.setenv("FAKE_COMPILER_IMAGE", str(files.image))
    return fakes.Fake(files)


@pytest.fixture
def backend(fake: fakes.Fake, tmp_path: Path) -> Iterator[Any]:
    """An opened backend of the vendor, with a compile cache of its own."""
    opened = fakes.backend_class(fake).open("0", fakes.options_of(fake, tmp_path))
    yield opened
    opened.close()
