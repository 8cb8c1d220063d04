"""Finds plugins by entry point alone, through stevedore, and keeps a broken one from harming the others.

Loading never raises for a third party's mistake: a plugin that cannot be imported, is no class of
the contract, or has a name that cannot be selected, is returned with its `failure`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import inspect
import re
from typing import Any

from stevedore.extension import Extension, ExtensionManager
from stevedore.named import NamedExtensionManager

from .errors import BackendUnavailableError, ConfigurationError
from .options import did_you_mean

GPU_BACKENDS = "uccl_ep.gpu_backends"
TRANSPORTS = "uccl_ep.transports"
GROUPS = (GPU_BACKENDS, TRANSPORTS)

# A name is also part of environment variables (UCCL_EP_<NAME>_<OPTION>) and a table of TOML files.
VALID_NAME = re.compile(r"[a-z][a-z0-9_-]*")
RESERVED_NAMES = ("auto",)


@dataclasses.dataclass(frozen=True)
class Plugin:
    """One entry point of a group, loaded or failed.

    Attributes:
        group: `GPU_BACKENDS` or `TRANSPORTS`.
        name: what users select it by.
        target: ``module:attribute`` of the entry point.
        distribution: name and version of the package that publishes it.
        loaded: the class, or None where ``failure`` says why there is none.
        failure: words for people, "" where it loaded.
        error: the exception behind the failure, if there was one.
    """

    group: str
    name: str
    target: str
    distribution: str
    loaded: type[Any] | None
    failure: str = ""
    error: BaseException | None = None


class _Manager(NamedExtensionManager[Any]):
    """stevedore lets assertion errors and exits of a plugin's import through; here they fail like the rest."""

    def _load_one_plugin(self, ep: Any, *args: Any, **kwargs: Any) -> Extension[Any] | None:
        try:
            return super()._load_one_plugin(ep, *args, **kwargs)
        except (AssertionError, SystemExit) as error:
            raise ImportError(f"{type(error).__name__} during import: {error}") from error


def refresh() -> None:
    """Forget the list of installed entry points, for programs that install plugins while they run."""
    ExtensionManager.ENTRY_POINT_CACHE.clear()
    _distribution.cache_clear()
    _distribution.cache_clear()


def names(group: str) -> list[str]:
    """The names of all installed plugins of a group, sorted. Imports none of them."""
    return sorted({point.name for point in _manager(group, []).list_entry_points()})


def plugins(group: str) -> list[Plugin]:
    """Every installed plugin of a group by name, loaded or failed; a name that two packages claim appears twice."""
    return [plugin for name in names(group) for plugin in _load_all(group, name)]


def find(group: str, name: str, origin: str = "call argument") -> Plugin:
    """The plugin that ``name`` selects, loaded or failed.

    Raises:
        ConfigurationError: no installed plugin has that name; names the nearest one and ``origin``.
    """
    candidates = _load_all(group, name) if name in names(group) else []
    if not candidates:
        kind = group.rpartition(".")[2].rstrip("s").replace("_", " ")
        raise ConfigurationError(f"{kind} {name!r} ({origin}) is not installed: {did_you_mean(name, names(group))}")
    return next((plugin for plugin in candidates if plugin.loaded is not None), candidates[0])


def load(group: str, name: str, origin: str = "call argument") -> type[Any]:
    """The class of the plugin that ``name`` selects.

    Raises:
        ConfigurationError: no installed plugin has that name.
        BackendUnavailableError: it is installed but broken; ``__cause__`` is what its import raised.
    """
    plugin = find(group, name, origin)
    if plugin.loaded is None:
        raise BackendUnavailableError(
            f"{name} ({origin}) of {plugin.distribution} is broken: {plugin.failure}. "
            f"Repair or remove that package, or select another: "
            f"{', '.join(other for other in names(group) if other != name)}"
        ) from plugin.error
    return plugin.loaded


def _manager(group: str, wanted: list[str], on_failure: Any = None) -> _Manager:
    if group not in GROUPS:
        raise ConfigurationError(f"plugin group {group!r} is unknown: {did_you_mean(group, GROUPS)}")
    return _Manager(group, wanted, on_load_failure_callback=on_failure, on_missing_entrypoints_callback=None)


def _load_all(group: str, name: str) -> list[Plugin]:
    failures: dict[str, BaseException] = {}

    def on_failure(manager: Any, point: importlib.metadata.EntryPoint, error: BaseException) -> None:
        failures[point.value] = error

    manager = _manager(group, [name], on_failure)
    loaded = {extension.entry_point.value: extension.plugin for extension in manager.extensions}
    found: list[Plugin] = []
    # One package can be seen twice (an editable install beside its metadata): equal targets are one plugin.
    targets = dict.fromkeys(point.value for point in manager.list_entry_points() if point.name == name)
    for target in targets:
        found.append(_judge(group, name, target, loaded.get(target), failures.get(target), found))
    return found


def _judge(
    group: str, name: str, target: str, loaded: Any, error: BaseException | None, earlier: list[Plugin]
) -> Plugin:
    distribution = _distribution(group, name, target)

    def failed(why: str) -> Plugin:
        return Plugin(group, name, target, distribution, None, why, error)

    if not VALID_NAME.fullmatch(name) or name in RESERVED_NAMES:
        return failed(f"its name {name!r} cannot be selected; use lower-case letters, digits, '_' and '-', not 'auto'")
    if error is not None:
        return failed(f"{target} cannot be loaded: {type(error).__name__}: {error}")
    contract = _contract(group)
    if not (isinstance(loaded, type) and issubclass(loaded, contract)):
        return failed(f"{target} is {loaded!r}, not a class derived from {contract.__module__}.{contract.__name__}")
    if inspect.isabstract(loaded):
        missing = ", ".join(sorted(getattr(loaded, "__abstractmethods__", ())))
        return failed(f"{target} lacks {missing} of {contract.__module__}.{contract.__name__}")
    winner = next((plugin for plugin in earlier if plugin.loaded is not None), None)
    if winner is not None:
        return failed(f"the name {name!r} is taken by {winner.distribution}, which comes first on sys.path")
    return Plugin(group, name, target, distribution, loaded)


def _contract(group: str) -> type[Any]:
    # Imported late: the contract of GPU backends needs torch, and listing plugins does not.
    if group == GPU_BACKENDS:
        from .gpu_backend import GpuBackend

        return GpuBackend
    from .transport import Transport

    return Transport


@functools.cache  # reads the metadata of every installed package: 20 ms, 25 times a buffer
def _distribution(group: str, name: str, target: str) -> str:
    for point in importlib.metadata.entry_points(group=group, name=name):
        if point.value == target and point.dist is not None:
            return f"{point.dist.metadata['Name']} {point.dist.version}"
    return "an unknown distribution"
