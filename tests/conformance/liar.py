"""A transport that wraps an honest one and can lie about any call: what liars.py builds on."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from uccl_ep_core import registry
from uccl_ep_core.capabilities import Capabilities
from uccl_ep_core.conformance import abi
from uccl_ep_core.transport import Device, Memory, Option, Transport


class Liar(Transport):
    """Passes everything through. A subclass changes ``CLAIMS`` or one of the functions of the table.

    The functions get arrays and counts as C does and may call ``self.inner_ops``.
    """

    INNER: ClassVar[str] = "shm"
    INNER_OPTIONS: ClassVar[Mapping[str, Any]] = {}
    CLAIMS: ClassVar[Mapping[str, Any]] = {}
    OPTIONS: ClassVar[Mapping[str, Option]] = {"seed": Option(1, "passed to an inner sim", minimum=0)}

    def __init__(self, inner: Transport) -> None:
        self.inner = inner

    @classmethod
    def probe(cls, options: Mapping[str, Any]) -> Sequence[Device]:
        return [Device("liar", True)]

    @classmethod
    def open(cls, device: str | None, options: Mapping[str, Any]) -> Liar:
        inner = registry.load(registry.TRANSPORTS, cls.INNER)
        defaults = {name: option.default for name, option in inner.OPTIONS.items()}
        seed = {"seed": options.get("seed", 1)} if "seed" in inner.OPTIONS else {}
        return cls(inner.open(None, defaults | dict(cls.INNER_OPTIONS) | seed))

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(**(vars(self.inner.capabilities) | dict(self.CLAIMS)))

    def register(self, memory: Memory) -> int:
        return self.inner.register(memory)

    def address(self) -> bytes:
        return self.inner.address()

    def connect(
        self, rank: int, addresses: Sequence[bytes], peers: Sequence[int], lanes: int, timeout_s: float
    ) -> None:
        self.inner.connect(rank, addresses, peers, lanes, timeout_s)
        self.inner_ops = ops = abi.Ops.from_address(self.inner.native_ops)
        self._callbacks = [
            abi.PostWrites(lambda _, lane, writes, count: self.post_writes(lane, writes, count)),
            abi.PostSignals(lambda _, lane, signals, count: self.post_signals(lane, signals, count)),
            abi.PollCompletions(lambda _, lane, out, capacity: self.poll_completions(lane, out, capacity)),
            abi.PollArrivals(lambda _, lane, out, capacity: self.poll_arrivals(lane, out, capacity)),
            abi.PeerState(lambda _, peer: self.peer_state(peer)),
            abi.LastError(lambda _, lane: ops.last_error(ops.context, lane)),
        ]
        if not ops.post_signals:
            self._callbacks[1] = abi.PostSignals()
        if not ops.poll_arrivals:
            self._callbacks[3] = abi.PollArrivals()
        self._table = abi.Ops(abi.MAGIC, ctypes.sizeof(abi.Ops), None, *self._callbacks)

    def post_writes(self, lane: int, writes: Any, count: int) -> int:
        return self.inner_ops.post_writes(self.inner_ops.context, lane, writes, count)

    def post_signals(self, lane: int, signals: Any, count: int) -> int:
        return self.inner_ops.post_signals(self.inner_ops.context, lane, signals, count)

    def poll_completions(self, lane: int, out: Any, capacity: int) -> int:
        return self.inner_ops.poll_completions(self.inner_ops.context, lane, out, capacity)

    def poll_arrivals(self, lane: int, out: Any, capacity: int) -> int:
        return self.inner_ops.poll_arrivals(self.inner_ops.context, lane, out, capacity)

    def peer_state(self, peer: int) -> int:
        return self.inner_ops.peer_state(self.inner_ops.context, peer) if self.inner_ops.peer_state else 0

    @property
    def native_ops(self) -> int:
        return ctypes.addressof(self._table)

    def close(self) -> None:
        self._callbacks = []
        self.inner.close()
