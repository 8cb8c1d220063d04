"""A pytest plugin with one test for each promise of a transport.

    pytest -p uccl_ep_core.conformance.pytest_plugin --uccl-ep-transport mynic --uccl-ep-option rails=2

Each test fails with the words of the report; a promise that is not claimed is skipped.
"""

from __future__ import annotations

from typing import Any

import pytest

from uccl_ep_core.errors import BackendUnavailableError

from .checks import CHECKS, Check
from .runner import Session

SESSION = pytest.StashKey[Session]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("uccl_ep conformance")
    group.addoption("--uccl-ep-transport", metavar="NAME", help="transport to test: a plugin's name, or module:Class")
    group.addoption("--uccl-ep-option", metavar="NAME=VALUE", action="append", default=[], help="may be repeated")
    group.addoption("--uccl-ep-seed", type=int, default=1, help="first seed")
    group.addoption("--uccl-ep-seeds", type=int, default=3, help="number of seeds")
    group.addoption("--uccl-ep-limit", type=float, default=10.0, help="seconds for what must happen")


class Promise(pytest.Item):
    """One check as a test."""

    check: Check

    def runtest(self) -> None:
        """Run the check under all seeds."""
        config = self.config
        if SESSION not in config.stash:
            seed = config.getoption("--uccl-ep-seed")
            config.stash[SESSION] = Session(
                config.getoption("--uccl-ep-transport"),
                dict(item.split("=", 1) for item in config.getoption("--uccl-ep-option")),
                range(seed, seed + config.getoption("--uccl-ep-seeds")),
                config.getoption("--uccl-ep-limit"),
            )
        session = config.stash[SESSION]
        try:
            result = session.run(self.check)
        except BackendUnavailableError as error:
            pytest.fail(str(error), pytrace=False)
        if result.outcome in ("not claimed", "not tested"):
            pytest.skip(f"{result.outcome}: {result.message}" if result.message else result.outcome)
        if result.outcome == "broken":
            repeat = session.report([result]).reproduce(result)
            pytest.fail(f"{result.message}\nseed {result.seed}; repeat it: {repeat}", pytrace=False)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Where pytest says the test is."""
        return self.path, None, f"{self.check.promise} ({self.check.name})"


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add one test a check, where a transport was named."""
    if not config.getoption("--uccl-ep-transport"):
        return
    for check in CHECKS.values():
        item = Promise.from_parent(session, name=f"promise[{check.name}]")
        item.check = check
        items.append(item)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the processes."""
    session = config.stash.get(SESSION, None)
    if session is not None:
        session.close()
