"""A rank process for engine tests: windows, shm transport, channel and engine, driven by commands from the test."""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.connection
import time
import traceback
from typing import Any

from uccl_ep_core import _native, shared_memory
from uccl_ep_core.transport import Memory, Transport
from uccl_ep_shm import ShmTransport

SPAWN = multiprocessing.get_context("spawn")
WAIT_S = 30.0


class Rank:
    """One rank of a group in which every other rank is reached through the transport."""

    def __init__(self, rank: int, num_ranks: int, transport: Transport, *, num_channels: int = 2) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.layout = _native.Layout(
            num_ranks=num_ranks,
            ranks_per_domain=1,
            num_channels=num_channels,
            num_slots=8,
            slot_bytes=4096,
            has_remote=True,
        )
        self.data = shared_memory.create(self.layout.data_bytes())
        self.control = shared_memory.create(self.layout.control_bytes())
        self.transport = transport
        for memory in (self.data, self.control):
            transport.register(Memory(memory.pointer, memory.nbytes, share_handle=memory.handle()))
        self.engine: _native.Engine | None = None

    def connect(
        self,
        addresses: list[bytes],
        plan: str,
        num_proxies: int,
        *,
        options: dict[str, Any] | None = None,
        capabilities: Any = None,
        num_rings: int = 2,
        capacity: int = 64,
    ) -> None:
        peers = [peer for peer in range(self.num_ranks) if peer != self.rank]
        self.transport.connect(self.rank, addresses, peers, num_proxies, WAIT_S)
        self.ring_memory = shared_memory.create(_native.Channel.host_bytes(num_rings, capacity))
        self.state_memory = shared_memory.create(_native.Channel.state_bytes(num_rings))
        self.channel = _native.Channel(
            num_rings, capacity, self.ring_memory.pointer, self.ring_memory.pointer, self.state_memory.pointer
        )
        self.verdicts = _native.Verdicts(self.rank, self.layout, self.control.pointer)
        self.engine = _native.Engine(
            self.rank,
            self.layout,
            self.data.pointer,
            self.control.pointer,
            self.transport.native_ops,
            plan,
            capabilities or self.transport.capabilities,
            peers,
            self.channel,
            num_proxies,
            self.verdicts,
            {"timeout_s": WAIT_S, **(options or {})},
        )
        self.engine.start()

    def push(self, ring: int, **fields: Any) -> int:
        deadline = time.monotonic() + WAIT_S
        while (ticket := self.channel.push(ring, **fields)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError("the ring stayed full")
        return int(ticket)

    def word(self, offset: int) -> int:
        return ctypes.c_uint64.from_address(self.control.pointer + offset).value

    def wait_signal(self, signal: int, value: int) -> int:
        deadline = time.monotonic() + WAIT_S
        while (seen := self.word(self.layout.signal_offset(signal))) < value:
            if self.verdicts.aborted:
                raise RuntimeError(f"aborted: {self.verdicts.agree(0.05)}; {self.engine and self.engine.error()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"signal {signal} is at {seen}, not {value}; {self.engine and self.engine.stats()}")
        return seen

    def wait_completed(self, ring: int, count: int) -> None:
        deadline = time.monotonic() + WAIT_S
        while self.channel.completed(ring) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"ring {ring}: {self.channel.completed(ring)} of {count} commands completed")

    def close(self) -> bool:
        ended = True
        if self.engine is not None:
            ended = self.engine.stop(5.0)
        self.transport.close()
        return ended


def exchange(rank: int, num_rounds: int, plan: str, num_proxies: int, pipe: Any) -> None:
    """Send `num_rounds` messages of three writes per channel to the other rank and check its own."""
    try:
        me = Rank(rank, 2, ShmTransport.open(None, {}))
        pipe.send(me.transport.address())
        me.connect(pipe.recv(), plan, num_proxies)
        pipe.send("ready")
        pipe.recv()
        peer = 1 - rank
        layout = me.layout
        data = me.data.view()
        for number in range(1, num_rounds + 1):
            for channel in range(2):
                slot = (number - 1) % 8
                # The peer's slot is free when it has credited message number - 8.
                credit = layout.signal_index(_native.SignalKind.DIRECT_CREDIT, peer, channel)
                me.wait_signal(credit, max(0, number - 8))
                source = layout.direct_outbox(peer, channel) + slot * 4096
                target = layout.direct_ring(rank, channel) + slot * 4096
                me.wait_completed(channel, max(0, 4 * (number - 8)))
                for part in range(3):
                    fill = (number * 7 + channel * 3 + part * 11 + rank) % 251 + 1
                    data[source + part * 1024 : source + part * 1024 + 1000] = bytes([fill]) * 1000
                    me.push(
                        channel,
                        peer=peer,
                        local_offset=source + part * 1024,
                        remote_offset=target + part * 1024,
                        bytes=1000,
                        signal=layout.signal_index(_native.SignalKind.DIRECT_DATA, rank, channel),
                        value=number,
                        last=part == 2,
                    )
                me.wait_signal(layout.signal_index(_native.SignalKind.DIRECT_DATA, peer, channel), number)
                arrived = layout.direct_ring(peer, channel) + slot * 4096
                for part in range(3):
                    fill = (number * 7 + channel * 3 + part * 11 + peer) % 251 + 1
                    got = bytes(data[arrived + part * 1024 : arrived + part * 1024 + 1000])
                    if got != bytes([fill]) * 1000:
                        raise AssertionError(f"message {number} channel {channel} part {part}: {got[:8]!r}, not {fill}")
                data[arrived : arrived + 4096] = bytes(4096)
                me.push(
                    channel,
                    peer=peer,
                    local_offset=0,
                    remote_offset=0,
                    bytes=0,
                    signal=layout.signal_index(_native.SignalKind.DIRECT_CREDIT, rank, channel),
                    value=number,
                )
        for channel in range(2):
            me.wait_completed(channel, 4 * num_rounds)
            me.wait_signal(layout.signal_index(_native.SignalKind.DIRECT_CREDIT, peer, channel), num_rounds)
        pipe.send("done")
        pipe.recv()
        ended = me.close()
        assert me.engine is not None
        pipe.send((ended, me.engine.stats(), me.engine.error(), me.verdicts.aborted, me.verdicts.peer_closed(peer)))
        data.release()
    except BaseException:  # the test shows it
        pipe.send(traceback.format_exc())
        raise


def wait_for_death(rank: int, plan: str, pipe: Any) -> None:
    """Connect, then wait for a verdict about the other rank."""
    try:
        me = Rank(rank, 2, ShmTransport.open(None, {}))
        pipe.send(me.transport.address())
        me.connect(pipe.recv(), plan, 1)
        pipe.send("ready")
        deadline = time.monotonic() + WAIT_S
        while not me.verdicts.aborted and time.monotonic() < deadline:
            time.sleep(0.001)
        verdict = me.verdicts.agree(1.0)
        me.close()
        pipe.send(None if verdict is None else (verdict.culprit, verdict.reason.name, verdict.reporter))
    except BaseException:
        pipe.send(traceback.format_exc())
        raise


def receive(pipe: multiprocessing.connection.Connection) -> Any:
    """The next answer of a rank, or a failure that shows its traceback."""
    assert pipe.poll(WAIT_S), "no answer from a rank"
    answer = pipe.recv()
    assert not (isinstance(answer, str) and "Traceback" in answer), answer
    return answer
