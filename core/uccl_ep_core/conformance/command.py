"""``uccl-ep conformance``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from uccl_ep_core.argument_types import at_least, output_file, seconds
from uccl_ep_core.errors import EPError

from .checks import CHECKS
from .runner import run


def file_or_terminal(text: str) -> str:
    return text if text == "-" else output_file(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="uccl-ep conformance", description="Test every promise of a transport with real processes."
    )
    parser.add_argument("--transport", required=True, help="name of an installed plugin, or module:Class")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="option of the transport; may be repeated"
    )
    parser.add_argument("--check", action="append", default=[], choices=list(CHECKS), help="only this; may be repeated")
    parser.add_argument("--seed", type=at_least(0), default=1, help="first seed")
    parser.add_argument("--seeds", type=at_least(1), default=3, help="number of seeds")
    parser.add_argument(
        "--limit", type=seconds, default=10.0, help="seconds within which what must happen has happened"
    )
    parser.add_argument(
        "--json", metavar="FILE", type=file_or_terminal, help="write the report here as JSON; - for the terminal"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the kit as a command; the exit status is 0, 1 (a promise broke) or 2 (could not run)."""
    arguments = _parser().parse_args(argv)
    options = {}
    for item in arguments.option:
        name, equals, value = item.partition("=")
        if not equals:
            print(f"--option {item!r}: expected NAME=VALUE, for example seed=1", file=sys.stderr)
            return 2
        options[name] = value
    seeds = range(arguments.seed, arguments.seed + arguments.seeds)
    try:
        report = run(arguments.transport, options, seeds=seeds, checks=arguments.check, limit_s=arguments.limit)
    except EPError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.json == "-":
        print(report.to_json())
    else:
        report.print()
        if arguments.json:
            with open(arguments.json, "w", encoding="utf-8") as file:
                file.write(report.to_json())
    return 0 if report.passed else 1
