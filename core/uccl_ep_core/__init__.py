"""The contracts and the engine that every plugin meets. Importing it loads no plugin and no vendor library."""

from .errors import (
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
from .files import include_directory, kernels_directory

__all__ = [
    "ArgumentError",
    "BackendUnavailableError",
    "BufferClosedError",
    "CapabilityError",
    "ConfigurationError",
    "EPError",
    "HandleError",
    "PeerFailure",
    "TransportError",
    "include_directory",
    "kernels_directory",
]
