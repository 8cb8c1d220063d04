"""The table of buffers by name: an operator takes no Python object, so it is given a name."""

from __future__ import annotations

import itertools
import weakref

import torch

from uccl_ep_core.errors import ArgumentError

from ..buffer import Buffer
from ..communicator import Communicator

_by_name: weakref.WeakValueDictionary[str, Buffer] = weakref.WeakValueDictionary()
_names: weakref.WeakKeyDictionary[Buffer, str] = weakref.WeakKeyDictionary()
_numbers = itertools.count()


def register(buffer: Buffer, name: str | None = None) -> str:
    """Name a buffer, which the functions of this package take in its place. Does not keep it alive.

    Args:
        name: any string that no living buffer has; None: the one it has, or ``uccl_ep_0``, ``uccl_ep_1`` and so on.

    Raises:
        ArgumentError: the name is taken, or the buffer has another.
    """
    known = _names.get(buffer)
    if known is not None and name in (None, known):
        return known
    if known is not None:
        raise ArgumentError(f"this buffer is registered as {known!r} already: use that name")
    if name is None:
        name = next(free for number in _numbers if (free := f"uccl_ep_{number}") not in _by_name)
    if name in _by_name:
        raise ArgumentError(f"another buffer is registered as {name!r}: leave the name out, or give another")
    _by_name[name] = buffer
    _names[buffer] = name
    return name


@torch.compiler.assume_constant_result
def name_of(buffer: Buffer) -> str:
    """The name of a buffer, given at its first use; a constant for torch.compile, which cannot trace the table."""
    return register(buffer)


def communicator_of(name: str) -> Communicator:
    """The communicator of a registered buffer.

    Raises:
        ArgumentError: there is none.
    """
    buffer = _by_name.get(name)
    if buffer is None:
        known = ", ".join(sorted(_by_name)) or "none"
        raise ArgumentError(f"no living buffer is registered as {name!r}: use register(buffer) (registered: {known})")
    return buffer._communicator
