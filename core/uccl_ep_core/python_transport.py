"""A transport whose data half is Python too: the quickest way from a NIC to a first run.

It is slow: proxy threads take the GIL for every batch, about 10 microseconds each, and leave an idle
transport alone for 50 microseconds at a time. When the kit passes, write the data half against
``uccl_ep/transport.h``; the set-up half stays as it is.

A subclass gives the set-up half of `Transport` (``probe``, ``open``, ``capabilities``, ``address``,
``connect``, ``close``) except ``register`` and ``native_ops``, calls ``super().connect(...)`` at the end
of its own, and gives the methods below. None of them may block. An exception in one of them breaks the
lane: the group fails with its words. ``post_signals``, ``poll_arrivals`` and ``peer_alive`` are given
only where the capabilities promise ``native_signal``, ``imm_bits`` and a ``peer_failure`` notice::

    def post_signals(self, lane: int, signals: list[Signal]) -> int: ...
    def poll_arrivals(self, lane: int, capacity: int) -> list[tuple[int, int]]: ...   # (immediate, rank or -1)
    def peer_alive(self, peer: int) -> bool: ...

``renew_lane`` is given where a lane can begin anew after an error (``transport.h`` says what that promises): whether it
has, and nothing of what failed on it can land any more; False: ask again. An exception: it cannot::

    def renew_lane(self, lane: int) -> bool: ...
"""

from __future__ import annotations

import abc
import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from . import _native
from .errors import TransportError
from .transport import Memory, Transport


class Write(NamedTuple):
    """A one-sided write; `uccl_ep_write` in ``transport.h`` has every promise.

    Attributes:
        peer: rank to write to.
        local_region: 0: data window, 1: control window; order of the `register` calls.
        local_offset: in bytes.
        remote_region: of the peer.
        remote_offset: in bytes.
        nbytes: 0 is legal with an immediate.
        immediate: for the peer's ``poll_arrivals``, or None.
        fenced: complete only when the bytes are placed at the peer.
        token: what ``poll_completions`` returns, exactly once.
    """

    peer: int
    local_region: int
    local_offset: int
    remote_region: int
    remote_offset: int
    nbytes: int
    immediate: int | None
    fenced: bool
    token: int


class Signal(NamedTuple):
    """Raise the 64-bit word at ``remote_offset`` of the peer's region to ``value``, after all writes
    posted before on this lane to this peer."""

    peer: int
    remote_region: int
    remote_offset: int
    value: int
    token: int


class PythonTransport(Transport):
    """Base of transports whose data half is written in Python."""

    _ops: _native.PythonOps | None = None

    @abc.abstractmethod
    def post_writes(self, lane: int, writes: list[Write]) -> int:
        """Take the first n of the writes and return n; 0 when nothing can be taken now."""

    @abc.abstractmethod
    def poll_completions(self, lane: int, capacity: int) -> list[tuple[int, int]]:
        """At most ``capacity`` pairs (token, status); status 0, or a negative errno."""

    def register(self, memory: Memory) -> int:
        """Keep host memory; `view` gives its bytes."""
        if memory.device is not None:
            raise TransportError("a Python transport can register host memory only: its capabilities say so")
        regions = self._regions
        regions.append(memory)
        return len(regions) - 1

    @property
    def _regions(self) -> list[Memory]:
        regions: list[Memory] = self.__dict__.setdefault("_registered", [])
        return regions

    def connect(
        self, rank: int, addresses: Sequence[bytes], peers: Sequence[int], lanes: int, timeout_s: float
    ) -> None:
        """Make the table of functions; a subclass calls this when its own connections stand."""
        self._ops = _native.PythonOps(self, Write, Signal, lanes, len(addresses))

    @property
    def native_ops(self) -> int:
        if self._ops is None:
            raise TransportError("native_ops before connect()")
        return int(self._ops.address)

    def view(self, region: int, offset: int, nbytes: int) -> memoryview:
        """Bytes of registered memory, writable.

        Raises:
            TransportError: they lie outside the region, which a peer's message must never reach.
        """
        regions = self._regions
        if not (0 <= region < len(regions) and offset >= 0 and 0 <= nbytes <= regions[region].nbytes - offset):
            raise TransportError(f"{nbytes} bytes at {offset} lie outside region {region} of {len(regions)}")
        array = (ctypes.c_char * nbytes).from_address(regions[region].pointer + offset)
        return memoryview(array).cast("B")

    def raise_word(self, region: int, offset: int, value: int) -> None:
        """Store a 64-bit word at once: what an arriving `Signal`, or a write of 8 bytes, must do."""
        if offset % 8 != 0:
            raise TransportError(f"a word at {offset}: must be a multiple of 8")
        self.view(region, offset, 8)  # checks the bounds
        ctypes.c_uint64.from_address(self._regions[region].pointer + offset).value = value
