"""Portable expert-parallel communication: `Buffer` dispatches tokens to experts and combines their outputs.

Importing it loads neither torch nor a plugin: names that need torch are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from uccl_ep_core.errors import (
    ArgumentError,
    BackendUnavailableError,
    BufferClosedError,
    CapabilityError,
    ConfigurationError,
    EPError,
    HandleError,
    PeerFailure,
    TransportError,
)

if TYPE_CHECKING:
    from .buffer import Buffer
    from .compat import install_as_deep_ep
    from .elastic import ElasticBuffer
    from .ep_handle import EPHandle
    from .events import EventHandle, EventOverlap
    from .tuning import Config
    from .utils import topk_idx_t

_LAZY = {
    "Buffer": "buffer",
    "Config": "tuning",
    "EPHandle": "ep_handle",
    "ElasticBuffer": "elastic",
    "EventHandle": "events",
    "EventOverlap": "events",
    "install_as_deep_ep": "compat",
    "topk_idx_t": "utils",
}

try:
    __version__ = version("uccl_ep")
except PackageNotFoundError:  # used from a source tree that was never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


__all__ = [
    "ArgumentError",
    "BackendUnavailableError",
    "Buffer",
    "BufferClosedError",
    "CapabilityError",
    "Config",
    "ConfigurationError",
    "EPError",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "HandleError",
    "PeerFailure",
    "TransportError",
    "install_as_deep_ep",
    "topk_idx_t",
]
