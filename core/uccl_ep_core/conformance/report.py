"""What the kit found, for people and for machines."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping
from typing import Any, Literal

Outcome = Literal["kept", "broken", "not claimed", "not tested"]
Found = Literal[Outcome, "not started"]
"""What processes say of a check: also that the transport did not open, so that there was nothing to check."""


@dataclasses.dataclass(frozen=True)
class Result:
    """One promise, tested.

    Attributes:
        check: name of the check, as ``--check`` takes it.
        promise: what was tested, in words.
        outcome: ``"broken"`` fails the transport; ``"not claimed"`` does not, nor does ``"not tested"``, where
            nothing of what the promise is about could be made to happen.
        message: how it broke, or what was tested up to which limit.
        seed: the seed under which it broke; the last one tried where it was kept.
        seconds: time taken, all seeds together.
    """

    check: str
    promise: str
    outcome: Outcome
    message: str
    seed: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Report:
    """All results of one transport with one set of options."""

    transport: str
    options: Mapping[str, Any]
    capabilities: Mapping[str, Any]
    plan: str
    results: tuple[Result, ...]

    @property
    def passed(self) -> bool:
        """Whether no promise was broken."""
        return not self.broken

    @property
    def broken(self) -> tuple[Result, ...]:
        """The promises that broke."""
        return tuple(result for result in self.results if result.outcome == "broken")

    def reproduce(self, result: Result) -> str:
        """The command that repeats this result."""
        parts = ["uccl-ep", "conformance", "--transport", self.transport]
        for name, value in self.options.items():
            parts += ["--option", f"{name}={value}"]
        return shlex.join([*parts, "--check", result.check, "--seed", str(result.seed), "--seeds", "1"])

    def to_json(self) -> str:
        """The whole report as a JSON object."""
        document = dataclasses.asdict(self) | {"passed": self.passed}
        for entry, result in zip(document["results"], self.results, strict=True):
            entry["reproduce"] = self.reproduce(result)
        return json.dumps(document, indent=2, default=str)

    def print(self) -> None:
        """A table on the terminal, broken promises explained below it."""
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        options = " ".join(f"{name}={value}" for name, value in self.options.items())
        table = Table(title=escape(f"{self.transport} {options}".strip()), title_justify="left")
        for heading in ("check", "promise", "outcome", "seconds"):
            table.add_column(heading, justify="right" if heading == "seconds" else "left")
        colours = {"kept": "green", "broken": "bold red", "not claimed": "dim", "not tested": "yellow"}
        for result in self.results:
            colour = colours[result.outcome]
            table.add_row(
                result.check, escape(result.promise), f"[{colour}]{result.outcome}[/]", f"{result.seconds:.1f}"
            )
        console = Console()
        console.print(table)
        console.print(escape(f"ordering plan: {self.plan}"))
        for result in self.results:
            if result.outcome in ("not claimed", "not tested") and result.message:
                console.print(escape(f"{result.outcome}: {result.check}: {result.message}"))
        for result in self.broken:
            console.print(f"[bold red]BROKEN[/] {escape(f'{result.check} (seed {result.seed}): {result.message}')}")
            console.print(escape(f"    repeat it: {self.reproduce(result)}"), soft_wrap=True)
        console.print("every promise kept" if self.passed else f"{len(self.broken)} promise(s) broken")
