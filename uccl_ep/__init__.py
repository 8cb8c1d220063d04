"""Portable expert-parallel communication: `Buffer` dispatches tokens to experts and combines their outputs."""

from importlib.metadata import PackageNotFoundError, version

import torch

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

from .buffer import Buffer
from .events import EventHandle, EventOverlap
from .tuning import Config

try:
    __version__ = version("uccl_ep")
except PackageNotFoundError:  # used from a source tree that was never installed
    __version__ = "0+unknown"

topk_idx_t = torch.int64
"""The index type that DeepEP was built with; here int32 works as well."""

__all__ = [
    "ArgumentError",
    "BackendUnavailableError",
    "Buffer",
    "BufferClosedError",
    "CapabilityError",
    "Config",
    "ConfigurationError",
    "EPError",
    "EventHandle",
    "EventOverlap",
    "HandleError",
    "PeerFailure",
    "TransportError",
    "topk_idx_t",
]
