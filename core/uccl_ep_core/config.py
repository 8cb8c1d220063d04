"""What was configured, by whom, and which plugins that selects.

Precedence, highest first: argument of the call, environment, the user's TOML file, the shipped
plugins.toml. Every value keeps its origin, for `Configuration.explain` and for error messages.
An unknown plugin, option or value is a `ConfigurationError`, never ignored.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any

from . import registry
from .errors import ConfigurationError
from .files import Table, read_toml, shipped_plugins_toml
from .options import (
    GENERAL_OPTIONS,
    SHARED_BACKEND_OPTIONS,
    SHARED_TRANSPORT_OPTIONS,
    General,
    convert,
    did_you_mean,
)
from .selection import Selection, choose_gpu_backend, choose_transport
from .transport import Option

ENVIRONMENT_PREFIX = "UCCL_EP_"
AS_DEEP_EP = "UCCL_EP_AS_DEEP_EP"
"""Whether processes of frameworks find uccl_ep under the name deep_ep (`uccl_ep.compat`); no option of a buffer."""
RESERVED_ENVIRONMENT = ("UCCL_EP_BUILD_", "UCCL_EP_TEST_")
"""Variables of these names belong to the build and to the tests; they are no options."""
NO_OPTIONS = ("UCCL_EP_CONFIG", AS_DEEP_EP)

SECTIONS = {"gpu_backends": registry.GPU_BACKENDS, "transports": registry.TRANSPORTS}
PREFERENCES = {
    "gpu_backends": ("cpu", "cuda", "other"),
    "transports": ("one_host", "several_hosts", "explicit_only"),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One value in force.

    Attributes:
        name: ``general.timeout_s``, ``transports.shm.lanes``, ``preference.transports.one_host`` ...
        value: the validated value.
        origin: who set it, in words, e.g. ``environment variable UCCL_EP_SHM_LANES``.
        layer: 0 shipped, 1 the user's file, 2 environment, 3 call argument.
    """

    name: str
    value: Any
    origin: str
    layer: int = 0


class Configuration:
    """All values in force. Made by `resolve`; never changes."""

    def __init__(self, settings: Mapping[str, Setting]) -> None:
        self._settings = dict(settings)
        self.general = General(**{name: self._settings[f"general.{name}"].value for name in GENERAL_OPTIONS})

    @classmethod
    def resolve(
        cls, overrides: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None
    ) -> Configuration:
        """Put the layers together.

        Args:
            overrides: the call's arguments: a general option (``{"timeout_s": 5}``), a plugin's options
                (``{"shm": {"lanes": 2}}``), one of them (``{"shm.lanes": 2}``), or ``{"config": path}``.
                None as a value means "not given".
            environment: variables; None: those of the process. An empty variable counts as not set.

        Raises:
            ConfigurationError: an unknown plugin, option or value; names the nearest valid one and the origin.
        """
        variables = os.environ if environment is None else environment
        given = {name: value for name, value in (overrides or {}).items() if value is not None}
        layers = _Layers()
        shipped = read_toml(shipped_plugins_toml(), "part of the package", "the shipped plugins.toml")
        layers.add_file(shipped, strict=False)
        for origin, path in (("call argument config", given.pop("config", None)), *_config_variable(variables)):
            if path is not None:
                layers.add_file(read_toml(path, origin), strict=True)
                break
        layers.add_environment(variables)
        layers.add_overrides(given)
        for option, group in (("gpu_backend", registry.GPU_BACKENDS), ("transport", registry.TRANSPORTS)):
            setting = layers.settings[f"general.{option}"]
            if setting.value != "auto":
                registry.find(group, setting.value, setting.origin)
        return cls(layers.settings)

    def origin(self, name: str) -> str:
        """Who set a value, e.g. ``origin("general.plan")``."""
        return self._settings[name].origin

    def preference(self, section: str, place: str) -> tuple[str, ...]:
        """Names in the order they are tried, ``"*"`` written out."""
        order: tuple[str, ...] = self._settings[f"preference.{section}.{place}"].value
        named = {name for key in PREFERENCES[section] for name in self._settings[f"preference.{section}.{key}"].value}
        others = [name for name in registry.names(SECTIONS[section]) if name not in named]
        expanded = [name for entry in order for name in (others if entry == "*" else [entry])]
        return tuple(dict.fromkeys(expanded))

    def options(self, section: str, name: str) -> dict[str, Any]:
        """The options of one plugin, its own and the shared ones, as `probe` and `open` receive them.

        Args:
            section: ``"gpu_backends"`` or ``"transports"``.
        """
        return {setting.name.rpartition(".")[2]: setting.value for setting in self.explain_plugin(section, name)}

    def select_gpu_backend(self, torch_device: Any = "cpu") -> Selection:
        """The GPU backend for tensors on ``torch_device``.

        Raises:
            BackendUnavailableError: none can be used; lists each with its reason and remedy.
        """
        return choose_gpu_backend(self, torch_device)

    def select_transport(self, *, one_host: bool = True) -> Selection:
        """The transport for a group whose ranks all run on one host, or on several.

        Raises:
            BackendUnavailableError: none can be used; lists each with its reason and remedy.
        """
        return choose_transport(self, one_host)

    def explain(self) -> list[Setting]:
        """Every value in force with its origin; loads all plugins to know their options."""
        result = [self._settings[f"general.{name}"] for name in GENERAL_OPTIONS]
        result += [setting for name, setting in self._settings.items() if name.startswith("preference.")]
        for section, group in SECTIONS.items():
            for name in registry.names(group):
                result += self.explain_plugin(section, name)
        return result

    def explain_plugin(self, section: str, name: str) -> Iterator[Setting]:
        """Every option of one plugin with its origin."""
        plugin = registry.find(SECTIONS[section], name)
        own = plugin.loaded.OPTIONS if plugin.loaded is not None else {}
        shared = _shared(section)
        for option_name, option in {**shared, **own}.items():
            path = f"{section}.{name}.{option_name}"
            specific = self._settings.get(path)
            general = self._settings.get(f"general.{option_name}") if option_name in shared else None
            if specific and not (general and general.layer > specific.layer):
                yield specific
            elif general:
                yield Setting(path, general.value, f"general.{option_name}, {general.origin}", general.layer)
            else:
                yield Setting(path, option.default, f"default of plugin {name}")


def _shared(section: str) -> dict[str, Option]:
    return SHARED_TRANSPORT_OPTIONS if section == "transports" else SHARED_BACKEND_OPTIONS


def _config_variable(variables: Mapping[str, str]) -> Iterator[tuple[str, str | None]]:
    yield "environment variable UCCL_EP_CONFIG", variables.get("UCCL_EP_CONFIG") or None


def environment_name(*words: str) -> str:
    """The variable that sets an option: ``environment_name("shm", "lanes")`` is ``UCCL_EP_SHM_LANES``."""
    return ENVIRONMENT_PREFIX + "_".join(words).upper().replace("-", "_")


def plugin_options(section: str, name: str) -> dict[str, Option] | None:
    """All options of an installed plugin by name; None where it is broken, so that nothing is known."""
    loaded = registry.find(SECTIONS[section], name).loaded
    return None if loaded is None else {**_shared(section), **loaded.OPTIONS}


class _Layers:
    """Settings by name; a later layer replaces an earlier one's."""

    def __init__(self) -> None:
        self.settings: dict[str, Setting] = {}
        self._layer = 0

    def add_file(self, tables: Table, strict: bool) -> None:
        """A TOML file. The shipped one is not strict: it names plugins that may have been removed."""
        self._layer = 1 if strict else 0
        for section, table in tables.items({"general", "preference", *SECTIONS}):
            if section == "general":
                for name, value, origin in table.values():
                    self._set_general(name, value, origin)
            elif section == "preference":
                for kind, orders in table.items(set(PREFERENCES)):
                    for place, value, origin in orders.values():
                        self._set_preference(kind, place, value, origin, strict)
            else:
                for name, options in table.items():
                    if not strict and name not in registry.names(SECTIONS[section]):
                        continue
                    registry.find(SECTIONS[section], name, options.origin)
                    for option, value, origin in options.values():
                        self._set_plugin(section, name, option, value, origin)

    def add_environment(self, variables: Mapping[str, str]) -> None:
        self._layer = 2
        for variable in sorted(variables):
            value = variables[variable]
            if not variable.startswith(ENVIRONMENT_PREFIX) or variable in NO_OPTIONS or not value:
                continue
            if not variable.startswith(RESERVED_ENVIRONMENT):
                self._set_variable(variable, value, f"environment variable {variable}")

    def add_overrides(self, overrides: Mapping[str, Any]) -> None:
        self._layer = 3
        for key, value in overrides.items():
            origin = f"call argument {key}"
            if isinstance(value, Mapping):
                for option, one in value.items():
                    self._set_any(key, option, one, f"{origin}.{option}")
            elif "." in key:
                plugin, option = key.split(".", 1)
                self._set_any(plugin, option, value, origin)
            else:
                self._set_general(key, value, origin, also=[*self._plugin_names(), "config"])

    def _plugin_names(self) -> list[str]:
        return [name for group in SECTIONS.values() for name in registry.names(group)]

    def _set_general(self, name: str, value: Any, origin: str, also: list[str] | None = None) -> None:
        option = GENERAL_OPTIONS.get(name)
        if option is None:
            words = [*GENERAL_OPTIONS, *(also or [])]
            raise ConfigurationError(f"option {name!r} ({origin}) is unknown: {did_you_mean(name, words)}")
        self._store(f"general.{name}", convert(option, value, f"general.{name}", origin), origin)

    def _set_preference(self, section: str, place: str, value: Any, origin: str, strict: bool) -> None:
        name = f"preference.{section}.{place}"
        if place not in PREFERENCES[section]:
            raise ConfigurationError(f"{name} ({origin}) is unknown: {did_you_mean(place, PREFERENCES[section])}")
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise ConfigurationError(f'{name} = {value!r} ({origin}): expected a list of names, e.g. ["shm", "*"]')
        for entry in value:
            if strict and entry != "*":
                registry.find(SECTIONS[section], entry, origin)
        self._store(name, tuple(value), origin)

    def _set_any(self, plugin: str, option: str, value: Any, origin: str) -> None:
        """An option of a plugin of either kind, or with the kind in front: ``transports.shm``, ``lanes``."""
        head, _, rest = option.partition(".")
        if plugin == "general":
            return self._set_general(option, value, origin)
        if plugin in SECTIONS and rest:
            registry.find(SECTIONS[plugin], head, origin)
            return self._set_plugin(plugin, head, rest, value, origin)
        sections = [section for section, group in SECTIONS.items() if plugin in registry.names(group)]
        if not sections:
            raise ConfigurationError(
                f"plugin {plugin!r} ({origin}) is not installed: {did_you_mean(plugin, self._plugin_names())}"
            )
        takers = [section for section in sections if option in (plugin_options(section, plugin) or {})]
        for section in takers or sections:
            self._set_plugin(section, plugin, option, value, origin)

    def _set_plugin(self, section: str, plugin: str, option: str, value: Any, origin: str) -> None:
        options = plugin_options(section, plugin)
        if options is None:  # broken: reported where it is selected or listed, and its options cannot be checked
            return
        path = f"{section}.{plugin}.{option}"
        if option not in options:
            raise ConfigurationError(
                f"option {option!r} of {plugin} ({origin}) is unknown: {did_you_mean(option, options)}"
            )
        self._store(path, convert(options[option], value, path, origin), origin)

    def _set_variable(self, variable: str, value: str, origin: str) -> None:
        for name in GENERAL_OPTIONS:
            if variable == environment_name(name):
                return self._set_general(name, value, origin)
        known = [environment_name(name) for name in GENERAL_OPTIONS] + [*NO_OPTIONS]
        matched = False
        for section, group in SECTIONS.items():
            for plugin in registry.names(group):
                options = plugin_options(section, plugin)
                if options is None:
                    matched |= variable.startswith(environment_name(plugin, ""))
                    continue
                by_variable = {environment_name(plugin, option): option for option in options}
                known += by_variable
                if variable in by_variable:
                    self._set_plugin(section, plugin, by_variable[variable], value, origin)
                    matched = True
        if not matched:
            raise ConfigurationError(f"{origin} = {value!r} sets nothing: {did_you_mean(variable, known)}")

    def _store(self, name: str, value: Any, origin: str) -> None:
        self.settings[name] = Setting(name, value, origin, self._layer)
