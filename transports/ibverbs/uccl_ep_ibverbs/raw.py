"""Addresses of the C handles inside pyverbs objects.

pyverbs has no public way to them. Each of its classes keeps the handle as its first C field, right
behind the fields of its base class, whose size Python knows. That this holds is never taken on
trust: the data plane compares every handle with what pyverbs says and with what the other handles
say before it uses one (``native/plane.cpp``), and refuses the device otherwise.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from uccl_ep_core.errors import TransportError

_POINTER = ctypes.sizeof(ctypes.c_void_p)


def handle(thing: Any) -> int:
    """The first C field of a pyverbs object: its ``ibv_*`` or ``rdma_*`` pointer."""
    kind = type(thing)
    base = kind.__base__
    if not kind.__module__.startswith("pyverbs.") or base is None:
        raise TransportError(f"{kind.__module__}.{kind.__qualname__} is not a class of pyverbs")
    # Cython puts a class's table of methods in front of its fields, unless a base class has one already:
    # PyverbsCM has, PyverbsObject has not.
    offset = base.__basicsize__ + (0 if base.__name__ == "PyverbsCM" else _POINTER)
    if kind.__basicsize__ < offset + _POINTER:
        raise TransportError(f"{kind.__module__}.{kind.__qualname__} has no C handle behind its base class")
    return ctypes.c_void_p.from_address(id(thing) + offset).value or 0


def event_channel_fd(channel: Any) -> int:
    """The descriptor of an rdma_cm event channel, whose only field it is."""
    address = handle(channel)
    fd = ctypes.c_int.from_address(address).value if address else -1
    try:
        target = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        target = "nothing"
    if "rdma_cm" not in target:
        raise TransportError(
            f"the event channel of this pyverbs names descriptor {fd}, which is {target}: its layout is unknown"
        )
    return fd


def event_id(event: Any, listener: int = 0) -> int:
    """The ``rdma_cm_id`` that an rdma_cm event is about."""
    address = handle(event)
    if not address:
        raise TransportError("pyverbs returned an empty rdma_cm event")
    if listener and ctypes.c_void_p.from_address(address + _POINTER).value != listener:
        raise TransportError("an rdma_cm request names another listener: the layout of this pyverbs is unknown")
    return ctypes.c_void_p.from_address(address).value or 0


def data_in_order(queue_pair: Any) -> str:
    """What the device says of the order of bytes within one write: "whole message", "128-byte blocks" or "none".

    For people only: no plan relies on it, since it says nothing about one write after another.
    """
    library = ctypes.CDLL("libibverbs.so.1")
    if not hasattr(library, "ibv_query_qp_data_in_order"):
        return "unknown to this libibverbs"
    query = library.ibv_query_qp_data_in_order
    query.restype = ctypes.c_int
    query.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32]
    write, plain, return_caps = 0, 0, 1  # older versions of the library know only the plain question
    if query(handle(queue_pair), write, plain) == 1:
        return "whole message"
    return "128-byte blocks" if int(query(handle(queue_pair), write, return_caps)) & 2 else "none"


def source_port(cmid: Any) -> int:
    """The port that an rdma_cm id is bound to."""
    library = ctypes.CDLL("librdmacm.so.1")
    library.rdma_get_src_port.restype = ctypes.c_uint16
    library.rdma_get_src_port.argtypes = [ctypes.c_void_p]
    return int.from_bytes(int(library.rdma_get_src_port(handle(cmid))).to_bytes(2, "little"), "big")
