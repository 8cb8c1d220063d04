"""Which plugin serves a buffer, and why: the named one, or the first usable one in order of preference."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from . import registry
from .errors import BackendUnavailableError
from .transport import Device

if TYPE_CHECKING:
    from .config import Configuration


@dataclasses.dataclass(frozen=True)
class Selection:
    """A plugin that was selected; unpacks as ``(plugin, device, options, reason)``.

    Attributes:
        name: the plugin's name.
        plugin: its class.
        device: what to pass to `open`; None: the plugin's best device.
        options: what to pass to `open`. Those of a transport hold ``plan`` and ``timeout_s`` too, which may
            have been set for this transport alone.
        reason: why this one, and why none of those that were tried before it.
        skipped: plugins tried before it, each with why it cannot be used and the remedy.
    """

    name: str
    plugin: type[Any]
    device: str | None
    options: dict[str, Any]
    reason: str
    skipped: tuple[tuple[str, str], ...] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter((self.plugin, self.device, self.options, self.reason))


def probe(plugin: type[Any], options: dict[str, Any]) -> Sequence[Device]:
    """The plugin's devices. A probe that raises against its contract becomes an unusable device that says so."""
    try:
        return list(plugin.probe(options))
    except Exception as error:
        return [Device("-", False, f"its probe raised {type(error).__name__}: {error}", "report this to its author")]


def choose_gpu_backend(configuration: Configuration, torch_device: Any) -> Selection:
    """See `Configuration.select_gpu_backend`."""
    kind, _, index = str(torch_device).partition(":")
    place = kind if kind in ("cpu", "cuda") else "other"
    # The tensors decide the device, by any name a backend may give it.
    wanted = (f"{kind}:{index}", index) if index else ()
    return _choose(configuration, "gpu_backends", "gpu_backend", place, f"tensors on {torch_device}", wanted)


def choose_transport(configuration: Configuration, one_host: bool) -> Selection:
    """See `Configuration.select_transport`."""
    place = "one_host" if one_host else "several_hosts"
    where = "ranks of one host" if one_host else "ranks of several hosts"
    return _choose(configuration, "transports", "transport", place, where, ())


def _choose(
    configuration: Configuration, section: str, general_option: str, place: str, where: str, wanted: tuple[str, ...]
) -> Selection:
    requested: str = getattr(configuration.general, general_option)
    origin = configuration.origin(f"general.{general_option}")
    if requested != "auto":
        candidates: tuple[str, ...] = (requested,)
        why = f"requested by {origin}"
    else:
        candidates = configuration.preference(section, place)
        why = f"preferred for {where} by {configuration.origin(f'preference.{section}.{place}')}"
    skipped: list[tuple[str, str]] = []
    for name in candidates:
        selected = _try(configuration, section, name, wanted)
        if not isinstance(selected, str):
            plugin, device, options, detail = selected
            tried = "".join(f"; not {other}: {words}" for other, words in skipped)
            reason = f"{why}{f' ({detail})' if detail else ''}{tried}"
            return Selection(name, plugin, device, options, reason, tuple(skipped))
        skipped.append((name, selected))
    kind = general_option.replace("_", " ")
    listing = "".join(f"\n  {name}: {words}" for name, words in skipped) or "\n  none is installed"
    instead = ""
    if requested != "auto":
        others = [n for n in configuration.preference(section, place) if n != requested]
        usable = [n for n in others if not isinstance(_try(configuration, section, n, wanted), str)]
        instead = f"\n  usable here instead: {', '.join(usable) or 'none'}"
    raise BackendUnavailableError(f"no {kind} can be used for {where}, {why}:{listing}{instead}")


def _try(
    configuration: Configuration, section: str, name: str, wanted: tuple[str, ...]
) -> tuple[type[Any], str | None, dict[str, Any], str] | str:
    """What `Selection` needs, or the words that say why this plugin cannot be used."""
    group = registry.GPU_BACKENDS if section == "gpu_backends" else registry.TRANSPORTS
    if name not in registry.names(group):
        return "not installed"
    plugin = registry.find(group, name)
    if plugin.loaded is None:
        return f"broken plugin of {plugin.distribution}: {plugin.failure}"
    options = configuration.options(section, name)
    devices = probe(plugin.loaded, options)
    if not devices:
        return "found no device"
    named = str(options.get("device") or "")
    if named:
        origin = next(s.origin for s in configuration.explain_plugin(section, name) if s.name.endswith(".device"))
        matching = [device for device in devices if device.name == named]
        if not matching:
            known = ", ".join(device.name for device in devices)
            return f"device {named!r} ({origin}) does not exist; devices: {known}"
    else:
        matching = [device for device in devices if device.name in wanted] or list(devices)
    usable = next((device for device in matching if device.usable), None)
    if usable is None:
        return "; ".join(refusal(device) for device in matching)
    exact = bool(named) or usable.name in wanted
    return plugin.loaded, usable.name if exact else None, options, usable.reason


def refusal(device: Device) -> str:
    """Why a device is not usable, and the remedy, in one line."""
    remedy = f" (remedy: {device.remedy})" if device.remedy else ""
    return f"{device.name}: {device.reason or 'not usable'}{remedy}"
