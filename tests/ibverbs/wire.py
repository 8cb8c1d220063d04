"""Drives a transport through its C function table, the way a proxy does, from Python."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from uccl_ep_core.transport import Memory, Transport
from uccl_ep_ibverbs import IbverbsTransport
from uccl_ep_ibverbs.loader import data_plane

DATA, CONTROL = 0, 1
IMMEDIATE, FENCED = 1, 2
LIMIT_S = 30.0


class Write(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("peer", "flags", "local_region", "remote_region")),
        *((name, ctypes.c_uint64) for name in ("local_offset", "remote_offset", "bytes", "immediate", "token")),
    ]


class Signal(ctypes.Structure):
    _fields_ = [
        ("peer", ctypes.c_uint32),
        ("remote_region", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in ("remote_offset", "value", "token")),
    ]


class Completion(ctypes.Structure):
    _fields_ = [("token", ctypes.c_uint64), ("peer", ctypes.c_uint32), ("status", ctypes.c_int32)]


class Arrival(ctypes.Structure):
    _fields_ = [("immediate", ctypes.c_uint64), ("peer", ctypes.c_uint32), ("reserved", ctypes.c_uint32)]


_BATCH = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint64)


class Table(ctypes.Structure):
    _fields_ = [
        ("magic", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("post_writes", _BATCH),
        ("post_signals", _BATCH),
        ("poll_completions", _BATCH),
        ("poll_arrivals", _BATCH),
        ("peer_state", ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint32)),
        ("last_error", ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p, ctypes.c_uint32)),
        ("renew_lane", ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_uint32)),
    ]


class Endpoint:
    """One rank: a transport with a data and a control window."""

    def __init__(self, device: str, options: Mapping[str, Any], data_bytes: int = 1 << 20) -> None:
        self.transport: Transport = IbverbsTransport.open(device, options)
        self.data = ctypes.create_string_buffer(data_bytes)
        self.control = ctypes.create_string_buffer(4096)
        for window in (self.data, self.control):
            self.transport.register(Memory(ctypes.addressof(window), len(window)))
        self.table: Table | None = None

    def connect(self, rank: int, addresses: Sequence[bytes], lanes: int, timeout_s: float = LIMIT_S) -> None:
        peers = [peer for peer in range(len(addresses)) if peer != rank]
        self.transport.connect(rank, addresses, peers, lanes, timeout_s)
        self.table = Table.from_address(self.transport.native_ops)

    def write(self, *writes: Write, lane: int = 0) -> int:
        assert self.table is not None
        return int(self.table.post_writes(self.table.context, lane, (Write * len(writes))(*writes), len(writes)))

    def signal(self, *signals: Signal, lane: int = 0) -> int:
        assert self.table is not None
        return int(self.table.post_signals(self.table.context, lane, (Signal * len(signals))(*signals), len(signals)))

    def completions(self, lane: int = 0, capacity: int = 64) -> list[tuple[int, int, int]]:
        assert self.table is not None
        out = (Completion * capacity)()
        count = self.table.poll_completions(self.table.context, lane, out, capacity)
        assert count >= 0, self.error(lane)
        return [(it.token, it.peer, it.status) for it in out[:count]]

    def arrivals(self, lane: int = 0, capacity: int = 64) -> list[tuple[int, int]]:
        assert self.table is not None
        out = (Arrival * capacity)()
        count = self.table.poll_arrivals(self.table.context, lane, out, capacity)
        assert count >= 0, self.error(lane)
        return [(it.immediate, it.peer) for it in out[:count]]

    def error(self, lane: int = 0) -> str:
        assert self.table is not None
        return bytes(self.table.last_error(self.table.context, lane)).decode()

    def renew(self, lane: int = 0) -> int:
        assert self.table is not None
        return int(self.table.renew_lane(self.table.context, lane))

    def dead(self, peer: int) -> bool:
        assert self.table is not None
        return bool(self.table.peer_state(self.table.context, peer))

    def settle(self, count: int, lane: int = 0, limit_s: float = LIMIT_S) -> list[tuple[int, int, int]]:
        """Poll until ``count`` completions came."""
        found: list[tuple[int, int, int]] = []
        wait(lambda: found.extend(self.completions(lane)) or len(found) >= count, limit_s, f"{count} completions")
        assert len(found) == count, f"{len(found)} completions for {count} posts"
        return found

    def ping_pong(self, peer: int, nbytes: int, count: int, first: bool, yields: bool) -> list[float]:
        """One end of a ping-pong as ib_write_lat plays it; of the end that begins, half the seconds of each exchange.

        Bytes are sent from the first half of the data window and land in the second.
        """
        half = len(self.data) // 2
        assert nbytes <= half
        start = ctypes.addressof(self.data)
        found = data_plane().ping_pong(
            table=self.transport.native_ops,
            peer=peer,
            bytes=nbytes,
            count=count,
            local_offset=0,
            remote_offset=half,
            sent=start + nbytes - 1,
            landed=start + half + nbytes - 1,
            first=first,
            yields=yields,
        )
        return list(found)

    def close(self) -> None:
        self.transport.close()


def wait(condition: Callable[[], Any], limit_s: float, what: str) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {limit_s} s"
        os.sched_yield()


def connect_all(endpoints: Sequence[Endpoint], lanes: int = 1, timeout_s: float = LIMIT_S) -> None:
    """Connect the ranks of one process with each other, each in a thread, since connecting is collective."""
    addresses = [it.transport.address() for it in endpoints]
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            endpoints[rank].connect(rank, addresses, lanes, timeout_s)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(endpoints))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s + 30)
        assert not thread.is_alive(), "connect did not end within its time-out"
    if failures:
        raise failures[0]
