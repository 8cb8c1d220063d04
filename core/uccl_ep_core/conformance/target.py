"""The transport that a name stands for."""

from __future__ import annotations

import importlib

from uccl_ep_core import registry
from uccl_ep_core.errors import ConfigurationError
from uccl_ep_core.transport import Transport


def transport_class(name: str) -> type[Transport]:
    """The transport of an entry point's name, or of ``module:Class``."""
    if ":" not in name:
        return registry.load(registry.TRANSPORTS, name)
    module_name, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:  # ValueError: no name before the colon
        raise ConfigurationError(f"transport {name!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Transport)):
        raise ConfigurationError(f"transport {name!r} is no subclass of uccl_ep_core.transport.Transport")
    return found
