"""Options that reach every Buffer through the environment, and the pool of rank processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
# Before torch is imported anywhere: rank processes share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pairwise import sample
from ranks import RankPool


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("uccl_ep")
    group.addoption("--transport", default=None, help="transport plugin under test (default: what is chosen)")
    group.addoption(
        "--transport-option", action="append", default=[], metavar="KEY=VALUE", help="option of --transport; repeatable"
    )
    group.addoption("--profile", default=None, help="profile of the sim transport")
    group.addoption("--seed", default=None, help="seed of the sim transport")
    group.addoption("--plan", default=None, help="ordering plan: native, counted or fenced")
    group.addoption("--lanes", default=None, type=int, help="lanes of the host GPU backend, e.g. 1, 32 or 64")
    group.addoption(
        "--sample", default=None, type=int, metavar="TIMES",
        help="of a matrix take so few cases that each value of each parameter occurs TIMES times (default: all cases)",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: the larger matrix; `make test-full` runs it, `make test` does not")
    transport = config.getoption("--transport")
    plugin = (transport or "shm").upper()
    values = {
        "UCCL_EP_TRANSPORT": transport,
        "UCCL_EP_SIM_PROFILE": config.getoption("--profile"),
        "UCCL_EP_SIM_SEED": config.getoption("--seed"),
        f"UCCL_EP_{plugin}_PLAN": config.getoption("--plan"),
        "UCCL_EP_HOST_LANES": config.getoption("--lanes"),
    }
    for pair in config.getoption("--transport-option"):
        key, found, value = pair.partition("=")
        if not found:
            raise pytest.UsageError(f"--transport-option takes KEY=VALUE, got {pair!r}")
        values[f"UCCL_EP_{plugin}_{key.upper()}"] = value
    os.environ.update({name: str(value) for name, value in values.items() if value is not None})


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "full" not in (config.getoption("-m") or ""):
        skip = pytest.mark.skip(reason="of the larger matrix: run with -m full, or `make test-full`")
        for item in items:
            if "full" in item.keywords:
                item.add_marker(skip)


@pytest.hookimpl(trylast=True, specname="pytest_collection_modifyitems")
def pytest_sample_items(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Last, so that the values are counted among the cases that -k has left."""
    times = config.getoption("--sample")
    if times is None:
        return
    if times < 1:
        raise pytest.UsageError(f"--sample takes 1 or more, got {times}")
    by_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec") and "row" in item.callspec.params:
            by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    dropped: set[pytest.Item] = set()
    for cases in by_test.values():
        kept = sample([case.callspec.params["row"] for case in cases], times)  # type: ignore[attr-defined]
        dropped |= set(cases) - {cases[i] for i in kept}
    config.hook.pytest_deselected(items=[item for item in items if item in dropped])
    items[:] = [item for item in items if item not in dropped]


@pytest.fixture(scope="session")
def ranks_of_session() -> Iterator[RankPool]:
    """Six rank processes, started once."""
    ranks = RankPool(6, {k: v for k, v in os.environ.items() if k.startswith("UCCL_EP_")})
    try:
        yield ranks
    finally:
        ranks.stop()


@pytest.fixture(scope="module")
def pool(ranks_of_session: RankPool) -> Iterator[RankPool]:
    """The same for all; modules that need no ranks have the cores to themselves."""
    yield ranks_of_session
    ranks_of_session.drop()
