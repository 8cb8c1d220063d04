"""One row of the table: a model, what was taken out of it, and what must come of that."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Literal

Verdict = Literal["pass", "fail", "unknown"]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a checker found.

    Attributes:
        verdict: ``"unknown"`` where the search did not end within its limits; it satisfies nobody.
        size: states, executions or cases looked at, 0 where the checker does not count.
        reason: for a failure, what broke.
    """

    verdict: Verdict
    size: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Limits:
    time_s: float
    memory_mb: int


@dataclasses.dataclass(frozen=True)
class Case:
    """A check and its expectation.

    Attributes:
        model: what is checked, e.g. ``"counted"``.
        variant: the configuration, or the mechanism taken out.
        expect: ``"pass"`` for the protocol, ``"fail"`` for a mutant of it.
        tools: what it needs, keys of ``REMEDIES``.
        check: does it in a scratch folder of its own; ``shared`` is a folder for what several cases build.
        full: part of the long run only.
    """

    model: str
    variant: str
    expect: Verdict
    tools: tuple[str, ...]
    check: Callable[[Path, Path, Limits], Outcome]
    full: bool = False


REMEDIES = {
    "spin": "apt-get install -y spin",
    "relacy": "apt-get install -y relacy-dev",
    "gcc": "apt-get install -y gcc",
    "g++": "apt-get install -y g++",
    "z3": "pip install z3-solver",
}
