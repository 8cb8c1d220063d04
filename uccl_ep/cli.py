"""The command line, ``uccl-ep``. A command is listed only where the module that does its work is installed."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console

from uccl_ep_core.errors import EPError

app = typer.Typer(
    name="uccl-ep",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Expert-parallel dispatch and combine over any GPU and any NIC, or none.\n\n"
    "Start with uccl-ep info: it lists what this machine can use, and for everything else why not "
    "and what to do about it.",
)
bench_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

# Commands whose work is done elsewhere: each module has ``main(arguments) -> int | None`` with its own --help.
BENCHES = {
    "ep": ("uccl_ep.bench.ep", "Dispatch and combine, against an all-to-all of the same run."),
    "channel": ("uccl_ep.bench.channel", "Commands a second from kernels to proxies."),
    "ordering": ("uccl_ep.bench.ordering", "What an emulated ordering plan costs against the native one."),
    "proxied": ("uccl_ep.bench.proxied", "Dispatch and combine through proxies, against the steps of their bytes."),
    "transport": ("uccl_ep.bench.transport", "Messages a second, latency and bandwidth of a transport."),
}
COMMANDS = {
    "conformance": ("uccl_ep_core.conformance", "Test whether a transport keeps each promise that it makes."),
    "run": ("uccl_ep.compat", "Run a script that imports deep_ep with uccl_ep in its place."),
}
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command()
def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
    gpu_backend: Annotated[str | None, typer.Option(help="Show what would be if this backend were asked for.")] = None,
    transport: Annotated[str | None, typer.Option(help="Likewise for a transport.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Any option, e.g. plan=counted or shm.lanes=4; repeatable."),
    ] = None,
    several_hosts: Annotated[
        bool, typer.Option("--several-hosts", help="Choose the transport as for ranks on several hosts.")
    ] = False,
    every_option: Annotated[bool, typer.Option("--all", help="Show the options of every plugin.")] = False,
) -> None:
    """Show versions, backends, transports, what would be chosen and why, and every setting with its origin.

    Exits with status 1 where the backend or the transport that is asked for cannot be used.
    """
    from .info import collect
    from .info_view import show

    overrides: dict[str, Any] = {"gpu_backend": gpu_backend, "transport": transport, **parse_options(option or [])}
    facts = collect(overrides, one_host=not several_hosts)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        console = Console()
        show(facts, console if console.is_terminal else Console(width=140), every_option=every_option)
    if any(choice["name"] is None for choice in facts["chosen"].values()):
        raise typer.Exit(1)


def parse_options(items: list[str]) -> dict[str, str]:
    """``["plan=counted"]`` as overrides of `Configuration.resolve`."""
    result = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals:
            raise typer.BadParameter(f"{item!r} is not of the form NAME=VALUE, for example timeout_s=10")
        result[name] = value
    return result


def exists(module: str) -> bool:
    """Whether a module is installed, found without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it does not exist
        return False


def _add(to: typer.Typer, name: str, module: str, summary: str) -> bool:
    """Register a command whose module exists; its arguments and its help are the module's own."""
    if not exists(module):
        return False

    @to.command(name, help=summary, short_help=summary, context_settings=PASS_ON, add_help_option=False)
    def command(context: typer.Context) -> None:
        main_of: Callable[[list[str]], int | None] = importlib.import_module(module).main
        sys.argv[0] = context.command_path  # what argparse shows as the name of the program
        raise typer.Exit(main_of(context.args) or 0)

    return True


def _build() -> None:
    found = [_add(bench_app, name, module, summary) for name, (module, summary) in BENCHES.items()]
    if any(found):
        app.add_typer(bench_app, name="bench", help="Measure, and compare with a baseline of the same run.")
    for name, (module, summary) in COMMANDS.items():
        _add(app, name, module, summary)


_build()


@app.callback()
def _root() -> None:
    """Keeps `info` a command of its own even where it is the only one."""


def main() -> None:
    """Entry point; an error of this library is a message and status 2, not a traceback."""
    try:
        app(prog_name="uccl-ep")
    except EPError as error:
        Console(stderr=True).print(f"uccl-ep: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
