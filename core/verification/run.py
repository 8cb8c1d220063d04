"""Check every model, and that every model notices when a mechanism is taken out.

    python core/verification/run.py            # a few minutes on 2 cores
    python core/verification/run.py --full     # with the large configurations
    python core/verification/run.py --only counted

Exit code: 0 where each case came out as expected, 1 where one did not or a tool is missing.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))

from uccl_ep_verification.case import REMEDIES, Case, Limits, Outcome
from uccl_ep_verification.catalogue import all_cases

QUICK = Limits(time_s=60, memory_mb=1500)
FULL = Limits(time_s=1200, memory_mb=6000)


@dataclasses.dataclass(frozen=True)
class Row:
    case: Case
    outcome: Outcome
    seconds: float

    @property
    def as_expected(self) -> bool:
        return self.outcome.verdict == self.case.expect


def has_tool(tool: str) -> bool:
    if tool == "relacy":
        return any(
            (Path(root) / "relacy" / "relacy.hpp").exists()
            for root in ("/usr/include", "/usr/local/include", *os.environ.get("CPATH", "").split(":"))
        )
    if tool == "z3":
        return importlib.util.find_spec("z3") is not None
    return shutil.which(tool) is not None


def run_case(case: Case, shared: Path, limits: Limits, missing: set[str]) -> Row:
    lacking = [tool for tool in case.tools if tool in missing]
    if lacking:
        return Row(case, Outcome("unknown", 0, f"not run: {', '.join(lacking)} is missing"), 0.0)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=shared) as scratch:
        outcome = case.check(Path(scratch), shared, limits)
    return Row(case, outcome, time.monotonic() - start)


def show(rows: list[Row], console: Console) -> None:
    table = Table(title="Models of the channel and of the ordering plans")
    table.add_column("model", no_wrap=True)
    table.add_column("configuration or mutation")
    table.add_column("expected", no_wrap=True)
    table.add_column("outcome")
    table.add_column("states", justify="right", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    for row in rows:
        words = row.outcome.verdict + (f": {row.outcome.reason}" if row.outcome.reason else "")
        style = "green" if row.as_expected else "bold red"
        size = f"{row.outcome.size:,}" if row.outcome.size else ""
        case = row.case
        table.add_row(case.model, case.variant, case.expect, f"[{style}]{words[:70]}[/]", size, f"{row.seconds:.1f}")
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--full", action="store_true", help="also the large configurations")
    parser.add_argument("--only", metavar="NAME", help="only the cases whose model or variant contains NAME")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1), help="cases at a time")
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 150)

    cases = [case for case in all_cases() if arguments.full or not case.full]
    if arguments.only:
        cases = [case for case in cases if arguments.only in f"{case.model} {case.variant}"]
        if not cases:
            names = ", ".join(sorted({case.model for case in all_cases()}))
            console.print(f"no case is called {arguments.only!r}; models are {names}")
            return 1
    missing = {tool for case in cases for tool in case.tools if not has_tool(tool)}
    limits = FULL if arguments.full else QUICK
    start = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="uccl_ep_verify_") as shared,
        concurrent.futures.ThreadPoolExecutor(max(1, arguments.jobs)) as pool,
    ):
        # z3's default context belongs to one thread at a time, so the lemmas run here.
        futures = {
            index: pool.submit(run_case, case, Path(shared), limits, missing)
            for index, case in enumerate(cases)
            if "z3" not in case.tools
        }
        rows = [
            futures[index].result() if index in futures else run_case(case, Path(shared), limits, missing)
            for index, case in enumerate(cases)
        ]
    show(rows, console)
    wrong = [row for row in rows if not row.as_expected]
    mutants = sum(row.case.expect == "fail" for row in rows)
    console.print(
        f"{len(rows) - len(wrong)} of {len(rows)} as expected ({mutants} mutants) in {time.monotonic() - start:.0f} s"
    )
    for tool in sorted(missing):
        console.print(f"{tool} is missing: {REMEDIES[tool]}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
