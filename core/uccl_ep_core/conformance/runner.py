"""Runs the checks: on fresh processes, seed after seed, until a promise breaks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from uccl_ep_core.capabilities import Capabilities
from uccl_ep_core.errors import BackendUnavailableError, CapabilityError, ConfigurationError
from uccl_ep_core.options import SHARED_TRANSPORT_OPTIONS, convert, did_you_mean
from uccl_ep_core.ordering import choose_plan

from .checks import CHECKS, Check
from .group import Group
from .report import Outcome, Report, Result
from .target import transport_class


class Session:
    """One transport with one set of options; owns the processes between checks.

    Args:
        transport: an entry point's name, or ``module:Class``.
        options: the transport's options; text values are parsed.
        seeds: seeds to try; where the transport itself has an option ``seed`` that is not given, it gets them too.
        limit_s: how long anything may take that has to happen.
        hang_s: how long all ranks may stay silent before a call is held to hang; None: plenty.
    """

    def __init__(
        self,
        transport: str,
        options: Mapping[str, Any] | None = None,
        seeds: Iterable[int] = (1, 2, 3),
        limit_s: float = 10.0,
        hang_s: float | None = None,
    ) -> None:
        self.transport = transport
        self.given = dict(options or {})
        self.seeds = tuple(seeds)
        self.limit_s = limit_s
        self.hang_s = 3 * limit_s + 20 if hang_s is None else hang_s
        declared = dict(SHARED_TRANSPORT_OPTIONS) | dict(transport_class(transport).OPTIONS)
        unknown = [name for name in self.given if name not in declared]
        if unknown:
            hint = did_you_mean(unknown[0], declared)
            raise ConfigurationError(f"option {unknown[0]!r} is unknown to transport {transport!r}: {hint}")
        self.options = {name: option.default for name, option in declared.items()}
        for name, value in self.given.items():
            self.options[name] = convert(declared[name], value, name, "option of the conformance kit")
        self._passes_seed = "seed" in declared and "seed" not in self.given
        self._groups: dict[int, Group] = {}
        self._not_started = ""
        self.capabilities: Capabilities | None = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        for group in self._groups.values():
            group.close()
        self._groups.clear()

    @property
    def plan(self) -> str:
        """The ordering plan of these capabilities, or why there is none."""
        if self.capabilities is None:
            return "unknown: the transport did not open"
        try:
            return choose_plan(self.capabilities).reason
        except CapabilityError as error:
            return f"refused: {error}"

    def run(self, check: Check) -> Result:
        """Test one promise under every seed, up to the first under which it breaks.

        Raises:
            BackendUnavailableError: the transport does not open, so it has no promise to test; says why.
        """
        begin = time.monotonic()
        if check.name != "table" and self.capabilities is None:
            opened = self._run_once(CHECKS["table"], self.seeds[0])
            if opened[0] != "kept":
                return Result(check.name, check.promise, "broken", opened[1], self.seeds[0], time.monotonic() - begin)
        if self.capabilities is not None and not check.claimed(self.capabilities):
            return Result(check.name, check.promise, "not claimed", "", self.seeds[0], 0.0)
        outcome: Outcome = "not tested"
        message, seed = "", self.seeds[0]
        for seed in self.seeds if check.seeded else self.seeds[:1]:
            found, words = self._run_once(check, seed)
            if found == "not tested" and outcome == "kept":
                continue  # another seed had something to test
            outcome, message = found, words
            if outcome in ("broken", "not claimed"):
                break
        return Result(check.name, check.promise, outcome, message, seed, time.monotonic() - begin)

    def _run_once(self, check: Check, seed: int) -> tuple[Outcome, str]:
        if self._not_started:
            raise self._unavailable()  # as at the first time: no other check would find another machine
        group = self._groups.get(check.size)
        if group is None or not group.usable:
            if group is not None:
                group.close()
            group = self._groups[check.size] = Group(check.size)
        request = {
            "check": check.name,
            "seed": seed,
            "transport": self.transport,
            "options": self.options | ({"seed": seed} if self._passes_seed else {}),
            "settings": {"limit_s": self.limit_s},
        }
        outcome, message = group.run(request, self.hang_s)
        if outcome == "not started":
            if self.capabilities is not None:  # it has opened before: that it does no more is a fault of its own
                return "broken", f"open failed, which it did not before: {message}"
            self._not_started = message
            raise self._unavailable()
        if check.name == "table" and outcome == "kept":
            self.capabilities = Capabilities(**json.loads(message))
            message = ""
        return outcome, message

    def _unavailable(self) -> BackendUnavailableError:
        return BackendUnavailableError(
            f"transport {self.transport!r} could not be started, so no promise was tested: {self._not_started}"
        )

    def report(self, results: Iterable[Result]) -> Report:
        """The report of these results."""
        capabilities = vars(self.capabilities) if self.capabilities is not None else {}
        return Report(self.transport, self.given, capabilities, self.plan, tuple(results))


def run(
    transport: str,
    options: Mapping[str, Any] | None = None,
    *,
    seeds: Iterable[int] = (1, 2, 3),
    checks: Iterable[str] = (),
    limit_s: float = 10.0,
    hang_s: float | None = None,
    on_result: Callable[[Result], None] | None = None,
) -> Report:
    """Test a transport.

    Args:
        transport: an entry point's name, or ``module:Class``.
        options: the transport's options.
        seeds: seeds to try.
        checks: names of the checks to run; none: all.
        limit_s: how long anything may take that has to happen, e.g. noticing a dead peer.
        hang_s: how long all ranks may stay silent before a call is held to hang; None: plenty.
        on_result: called with each result as it comes.

    Raises:
        ConfigurationError: an unknown transport, option or check.
        BackendUnavailableError: the transport cannot be started here; says why.
    """
    wanted = list(checks) or list(CHECKS)
    for name in wanted:
        if name not in CHECKS:
            raise ConfigurationError(f"check {name!r} is unknown: {did_you_mean(name, CHECKS)}")
    results = []
    with Session(transport, options, seeds, limit_s, hang_s) as session:
        for name in wanted:
            result = session.run(CHECKS[name])
            results.append(result)
            if on_result is not None:
                on_result(result)
            if name == "table" and result.outcome == "broken":
                break
        return session.report(results)
