"""What ``uccl-ep info`` shows, as data: `collect` gathers it without touching more than it must."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
from collections.abc import Mapping
from typing import Any

from uccl_ep_core import numa, registry
from uccl_ep_core.config import SECTIONS, Configuration
from uccl_ep_core.errors import EPError
from uccl_ep_core.ordering import choose_plan
from uccl_ep_core.selection import Selection, probe

Facts = dict[str, Any]


def collect(overrides: Mapping[str, Any] | None = None, *, one_host: bool = True) -> Facts:
    """Versions, plugins with their devices, what would be chosen and why, and every setting with its origin.

    Args:
        overrides: as in `Configuration.resolve`.
        one_host: whether all ranks of the group are on one host.

    Raises:
        ConfigurationError: as `Configuration.resolve`. Nothing else: what cannot be used is part of the answer.
    """
    configuration = Configuration.resolve(overrides)
    chosen = {
        "gpu_backend": _chosen(lambda: configuration.select_gpu_backend(_default_device())),
        "transport": _chosen(lambda: configuration.select_transport(one_host=one_host)),
    }
    return {
        "versions": _versions(),
        "chosen": chosen,
        "gpu_backends": _plugins(configuration, "gpu_backends", chosen["gpu_backend"].get("name")),
        "transports": _plugins(configuration, "transports", chosen["transport"].get("name")),
        "configuration": [dataclasses.asdict(setting) for setting in configuration.explain()],
    }


def _versions() -> Facts:
    facts: Facts = {}
    for package in ("uccl_ep", "torch", "numpy", "stevedore"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "not installed"
    facts["python"] = platform.python_version()
    facts["system"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    facts["cores"] = len(os.sched_getaffinity(0))
    facts["NUMA nodes"] = numa.describe()
    return facts


def _default_device() -> str:
    try:
        import torch
    except ImportError:
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def _chosen(select: Any) -> Facts:
    try:
        selection: Selection = select()
    except EPError as error:
        return {"name": None, "device": None, "reason": str(error)}
    return {"name": selection.name, "device": selection.device, "reason": selection.reason}


def _plugins(configuration: Configuration, section: str, chosen: str | None) -> list[Facts]:
    result = []
    for plugin in registry.plugins(SECTIONS[section]):
        facts: Facts = {
            "name": plugin.name,
            "distribution": plugin.distribution,
            "chosen": plugin.name == chosen and plugin.loaded is not None,
            "failure": plugin.failure,
            "devices": [],
        }
        if plugin.loaded is not None:
            options = configuration.options(section, plugin.name)
            facts["devices"] = [dataclasses.asdict(device) for device in probe(plugin.loaded, options)]
            usable = any(device["usable"] for device in facts["devices"])
            if section == "transports" and usable:
                facts |= _opened(plugin.loaded, options)
        result.append(facts)
    return result


def _opened(plugin: type[Any], options: Mapping[str, Any]) -> Facts:
    """What can be known only of an opened transport: its capabilities and the plan they lead to."""
    try:
        transport = plugin.open(options.get("device") or None, options)
    except Exception as error:
        return {"open_error": f"{type(error).__name__}: {error}"}
    try:
        capabilities = transport.capabilities
        facts: Facts = {
            "capabilities": dataclasses.asdict(capabilities),
            "describe": {name: _plain(value) for name, value in transport.describe().items()},
        }
        try:
            plan = choose_plan(capabilities, options["plan"])
            facts["plan"] = {"name": plan.name, "reason": plan.reason}
        except EPError as error:
            facts["plan"] = {"name": None, "reason": str(error)}
        return facts
    except Exception as error:
        return {"open_error": f"{type(error).__name__}: {error}"}
    finally:
        transport.close()


def _plain(value: Any) -> Any:
    """Something JSON can hold."""
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_plain(entry) for entry in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
