"""High-throughput operations of a communicator: layout, dispatch, combine."""

from .announcing import announce
from .combining import Biases, check_biases, combine
from .dispatching import Dispatched, dispatch, dispatch_cached
from .handle import DispatchHandle, check_handle
from .layout import Layout, get_layout
from .teams import dispatch_grid

__all__ = [
    "Biases",
    "DispatchHandle",
    "Dispatched",
    "Layout",
    "announce",
    "check_biases",
    "check_handle",
    "combine",
    "dispatch",
    "dispatch_cached",
    "dispatch_grid",
    "get_layout",
]
