"""Rank processes for the frameworks: four in one group, which is the world that Megatron wants."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ranks import RankPool


@pytest.fixture(scope="session")
def four() -> Iterator[RankPool]:
    """Four rank processes, started once; a case of fewer ranks runs on the first ones."""
    quiet = {"PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    ranks = RankPool(4, {**{k: v for k, v in os.environ.items() if k.startswith("UCCL_EP_")}, **quiet})
    try:
        yield ranks
    finally:
        ranks.stop()
