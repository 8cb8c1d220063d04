"""The structs of ``uccl_ep/transport.h`` for ctypes: how the kit meets a transport, as a proxy would."""

from __future__ import annotations

import ctypes

MAGIC = 0x5543434C45505431
IMMEDIATE = 1
FENCED = 2
DATA = 0
CONTROL = 1
PEER_UNKNOWN = 0xFFFFFFFF
PEER_ALIVE = 0
PEER_DEAD = 1


class Write(ctypes.Structure):
    """``uccl_ep_write``."""

    _fields_ = [
        ("peer", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("local_region", ctypes.c_uint32),
        ("remote_region", ctypes.c_uint32),
        ("local_offset", ctypes.c_uint64),
        ("remote_offset", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("immediate", ctypes.c_uint64),
        ("token", ctypes.c_uint64),
    ]


class Signal(ctypes.Structure):
    """``uccl_ep_signal``."""

    _fields_ = [
        ("peer", ctypes.c_uint32),
        ("remote_region", ctypes.c_uint32),
        ("remote_offset", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("token", ctypes.c_uint64),
    ]


class Completion(ctypes.Structure):
    """``uccl_ep_completion``."""

    _fields_ = [("token", ctypes.c_uint64), ("peer", ctypes.c_uint32), ("status", ctypes.c_int32)]


class Arrival(ctypes.Structure):
    """``uccl_ep_arrival``."""

    _fields_ = [("immediate", ctypes.c_uint64), ("peer", ctypes.c_uint32), ("reserved", ctypes.c_uint32)]


PostWrites = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_uint32, ctypes.POINTER(Write), ctypes.c_uint64)
PostSignals = ctypes.CFUNCTYPE(
    ctypes.c_int64, ctypes.c_void_p, ctypes.c_uint32, ctypes.POINTER(Signal), ctypes.c_uint64
)
PollCompletions = ctypes.CFUNCTYPE(
    ctypes.c_int64, ctypes.c_void_p, ctypes.c_uint32, ctypes.POINTER(Completion), ctypes.c_uint64
)
PollArrivals = ctypes.CFUNCTYPE(
    ctypes.c_int64, ctypes.c_void_p, ctypes.c_uint32, ctypes.POINTER(Arrival), ctypes.c_uint64
)
PeerState = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint32)
# The result stays an address: a callback written in Python cannot return a c_char_p.
LastError = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32)
RenewLane = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_uint32)


class Ops(ctypes.Structure):
    """``uccl_ep_transport_ops``."""

    _fields_ = [
        ("magic", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("post_writes", PostWrites),
        ("post_signals", PostSignals),
        ("poll_completions", PollCompletions),
        ("poll_arrivals", PollArrivals),
        ("peer_state", PeerState),
        ("last_error", LastError),
        ("renew_lane", RenewLane),
    ]


OLDEST_SIZE = Ops.renew_lane.offset
"""Bytes of the first version of the table: a plugin's ``size`` is at least this."""


def provides(ops: Ops, name: str) -> bool:
    """Whether the table has this function: neither beyond the plugin's ``size`` nor NULL."""
    field = getattr(Ops, name)
    return bool(ops.size >= field.offset + field.size and getattr(ops, name))
