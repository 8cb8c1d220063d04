"""Draws what `uccl_ep.info.collect` found, for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .info import Facts


def show(facts: Facts, console: Console, *, every_option: bool = False) -> None:
    """Write everything to the console: what is chosen first, then why, then the details.

    Args:
        every_option: also the options of plugins that are not chosen and that nobody has set.
    """
    console.print(" | ".join(f"{name} {value}" for name, value in facts["versions"].items()), highlight=False)
    for kind, title in (("gpu_backend", "GPU backend"), ("transport", "transport")):
        _show_choice(title, facts["chosen"][kind], console)
    plan = next((plugin["plan"] for plugin in facts["transports"] if plugin["chosen"] and "plan" in plugin), None)
    if plan:
        console.print(f"\n[bold]ordering plan:[/] [green]{plan['name'] or 'none'}[/]")
        console.print(f"  why: {escape(plan['reason'])}", highlight=False)
    _show_plugins("GPU backends", facts["gpu_backends"], console)
    _show_plugins("transports", facts["transports"], console)
    _show_capabilities(facts["transports"], console)
    chosen = (
        f"gpu_backends.{facts['chosen']['gpu_backend']['name']}.",
        f"transports.{facts['chosen']['transport']['name']}.",
    )
    settings = [
        setting
        for setting in facts["configuration"]
        if every_option or setting["layer"] > 0 or setting["name"].startswith(("general.", "preference.", *chosen))
    ]
    _show_configuration(settings, console)
    if len(settings) < len(facts["configuration"]):
        console.print("  --all shows the options of the other plugins too", highlight=False)


def _show_choice(title: str, choice: Facts, console: Console) -> None:
    if choice["name"] is None:
        console.print(f"\n[bold]{title}:[/] [red]none can be used[/]")
    else:
        device = f", device {escape(choice['device'])}" if choice["device"] else ""
        console.print(f"\n[bold]{title}:[/] [green]{escape(choice['name'])}[/]{device}")
    console.print(f"  why: {escape(choice['reason'])}", highlight=False)


def _show_plugins(title: str, plugins: list[Facts], console: Console) -> None:
    table = Table(title=f"\n{title}", title_justify="left", title_style="bold")
    for column in ("plugin", "device", "usable", "why, or why not", "remedy"):
        table.add_column(column, overflow="fold")
    for plugin in plugins:
        mark = " *" if plugin["chosen"] else ""
        name = f"{escape(plugin['name'])}{mark}"
        if plugin["failure"]:
            table.add_row(
                name,
                "",
                "[red]broken[/]",
                escape(plugin["failure"]),
                escape(f"repair or remove {plugin['distribution']}"),
            )
        for device in plugin["devices"]:
            details = _phrase(device["details"], " ")
            why = device["reason"] + (f" ({details})" if details else "")
            usable = "[green]yes[/]" if device["usable"] else "[yellow]no[/]"
            table.add_row(name, escape(device["name"]), usable, escape(why), escape(device["remedy"]))
            name = ""
        if not plugin["failure"] and not plugin["devices"]:
            table.add_row(name, "", "[yellow]no[/]", "found no device", "")
    console.print(table)
    console.print("  * would be chosen now", highlight=False)


def _show_capabilities(transports: list[Facts], console: Console) -> None:
    opened = [plugin for plugin in transports if "capabilities" in plugin]
    for plugin in transports:
        if "open_error" in plugin:
            console.print(f"  {escape(plugin['name'])} could not be opened: {escape(plugin['open_error'])}")
    if not opened:
        return
    table = Table(title="\nwhat the usable transports promise", title_justify="left", title_style="bold")
    table.add_column("promise or limit")
    for plugin in opened:
        table.add_column(plugin["name"], overflow="fold")
    for name in opened[0]["capabilities"]:
        table.add_row(name, *(_word(plugin["capabilities"][name]) for plugin in opened))
    table.add_row("[bold]ordering plan[/]", *(f"[bold]{plugin['plan']['name'] or 'none'}[/]" for plugin in opened))
    console.print(table)
    for plugin in opened:
        console.print(f"  {escape(plugin['name'])}: {escape(_phrase(plugin['describe'], ': '))}", highlight=False)


def _show_configuration(settings: list[Facts], console: Console) -> None:
    table = Table(title="\nconfiguration in force", title_justify="left", title_style="bold")
    for column in ("option", "value", "set by"):
        table.add_column(column, overflow="fold")
    for setting in settings:
        style = None if setting["layer"] == 0 else "bold"
        table.add_row(escape(setting["name"]), escape(_word(setting["value"])), escape(setting["origin"]), style=style)
    console.print(table)


def _phrase(facts: Facts, between: str) -> str:
    """Names and values in a line; what is nested stands in brackets."""
    return ", ".join(f"{name.replace('_', ' ')}{between}{_word(value)}" for name, value in facts.items())


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "none"
    if isinstance(value, dict):
        return f"({_phrase(value, ' ')})"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_word, value)) or "none"
    return '""' if value == "" else str(value)
