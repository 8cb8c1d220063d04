"""Ranks of one process over a network that does what the test says; the network is scripted_fabric.c.

Every rank drives the transport's table as a proxy does, each in its turn, so that a seed gives one and the same run.
"""

from __future__ import annotations

import ctypes
import functools
import random
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from uccl_ep_core.conformance import abi
from uccl_ep_core.conformance.driver import Driver, Posted

WINDOW = 1 << 18
OUTBOX = WINDOW // 2
LATE = 8  # versions; of 32 that the counted plan tells apart


@functools.cache
def scripted() -> ctypes.CDLL:
    """The network, compiled with the headers that the transport was compiled with."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler: install gcc")
    file = Path(tempfile.mkdtemp()) / "scripted_fabric.so"
    source = Path(__file__).with_name("scripted_fabric.c")
    command = [compiler, "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    done = subprocess.run(
        [*command, str(source), "-o", str(file)], capture_output=True, text=True, timeout=120, check=False
    )
    if "rdma/fabric.h" in done.stderr:
        pytest.skip("needs the headers of libfabric: install libfabric-dev")
    assert done.returncode == 0, done.stderr
    library = ctypes.CDLL(str(file))
    library.scripted_step.restype = ctypes.c_uint64
    library.scripted_begin.argtypes = [ctypes.c_uint64] + [ctypes.c_int] * 4
    return library


class Network:
    """Ranks with ``rails`` endpoints each, connected.

    Args:
        manual: what is under way lands only in the receiver's calls, whatever keys it has, as within one machine;
            otherwise at any time, and only under a valid key.
        refusal: errno of a write whose key is not valid any more.
        window: writes and messages under way from an endpoint to another, at most.
        again: thousandths of posts that are refused for now.
        revoke_s: option revoke_timeout_s.
    """

    def __init__(
        self,
        ranks: int,
        rails: int,
        *,
        seed: int = 1,
        manual: bool = False,
        refusal: int = 104,
        window: int = 1 << 20,
        again: int = 0,
        send_depth: int = 16,
        stripe_bytes: int = 8192,
        revoke_s: float = 100.0,
    ) -> None:
        from uccl_ep_libfabric.library import _open, native

        self.wire = scripted()
        self.wire.scripted_begin(seed, manual, refusal, window, again)
        self.random = random.Random(seed)
        self.ffi, self.lib = native().ffi, native().lib
        library = _open(str(self.wire._name), "test")
        self.ranks, self.rails = ranks, rails
        self.windows = [(ctypes.c_ubyte * WINDOW)() for _ in range(ranks)]
        self.memory = [memoryview(window).cast("B") for window in self.windows]
        self.contexts: list[Any] = []
        query = self.ffi.new("fab_query *")
        for window in self.windows:
            context = self.lib.fab_create(library.handle, 1, rails, send_depth, 1024, stripe_bytes, 1 << 20)
            self.lib.fab_set_delivery(context, rails > 1, not manual)
            for rail in range(rails):
                assert self.lib.fab_open_rail(context, rail, query, 0) == 0
            assert self.lib.fab_register(context, 0, ctypes.addressof(window), WINDOW, -1, -1) == 0
            self.contexts.append(context)
        for rank, context in enumerate(self.contexts):
            assert self.lib.fab_begin_connect(context, rank, ranks, 1, 7) == 0
            for peer in range(ranks):
                for rail in range(rails if peer != rank else 0):
                    name = self.endpoint(peer, rail).to_bytes(4, "little")
                    assert self.lib.fab_add_peer(context, 0, rail, peer, name, 4, 1, [0], [0], [WINDOW]) == 0
        ready: set[int] = set()
        while len(ready) < ranks:
            ready |= {rank for rank, context in enumerate(self.contexts) if self.lib.fab_handshake(context, 1) == 1}
            self.wire.scripted_step(100)
        self.drivers = []
        for context in self.contexts:
            self.lib.fab_set_revoke_limit(context, int(revoke_s * 1e9))
            operations = int(self.ffi.cast("uintptr_t", self.lib.fab_operations(context)))
            self.drivers.append(Driver(operations, 1))

    def endpoint(self, rank: int, rail: int) -> int:
        """The network's number of an endpoint: they are opened in this order."""
        return rank * self.rails + rail

    def give_up(self, rank: int, rail: int) -> None:
        self.lib.fab_break_rail(self.contexts[rank], 0, rail)

    def cut(self, one: int, other: int, rail: int) -> None:
        self.wire.scripted_cut(self.endpoint(one, rail), self.endpoint(other, rail))

    def statistics(self, rank: int) -> Any:
        values = self.ffi.new("fab_statistics *")
        self.lib.fab_get_statistics(self.contexts[rank], values)
        return values

    def close(self) -> None:
        for context in self.contexts:
            self.lib.fab_close(context)
        self.contexts = []


class Slot:
    """A place in a peer's window, written again only when its last write is complete and has arrived."""

    def __init__(self, number: int, peer: int, source: int, offset: int, nbytes: int) -> None:
        self.number, self.peer, self.source, self.offset, self.nbytes = number, peer, source, offset, nbytes
        self.version = 0
        self.complete = self.arrived = True

    def content(self) -> bytes:
        return bytes([self.version % 251 + 1]) * self.nbytes


class Traffic:
    """Every rank writes to every other, over and over, and every byte and immediate is checked at every step.

    Large writes, which are cut over the rails, small ones, and writes of nothing, each with an immediate.
    """

    SIZES = (12288, 64, 64, 0, 0, 200)

    def __init__(self, network: Network) -> None:
        self.network = network
        self.slots: list[dict[int, Slot]] = []
        self.owners: list[dict[int, Slot]] = [{} for _ in range(network.ranks)]  # [receiver][number]
        self.tokens: list[dict[int, Slot]] = [{} for _ in range(network.ranks)]
        self.failed = 0
        for rank in range(network.ranks):
            mine: dict[int, Slot] = {}
            source = OUTBOX
            for peer in range(network.ranks):
                # Of the half of the receiver's window that is no outbox, each sender has a part.
                at = OUTBOX // network.ranks * rank
                for index, nbytes in enumerate(self.SIZES if peer != rank else ()):
                    number = rank * 16 + index
                    slot = Slot(number, peer, source, at, nbytes)
                    mine[peer * 16 + index] = slot
                    self.owners[peer][number] = slot
                    at += nbytes
                    source += nbytes
            self.slots.append(mine)
            driver = network.drivers[rank]
            driver.on_completion = functools.partial(self.completed, rank)
            driver.on_arrival = functools.partial(self.arrived, rank)

    def place(self, rank: int, slot: Slot) -> memoryview:
        return self.network.memory[slot.peer][slot.offset : slot.offset + slot.nbytes]

    def post(self, rank: int) -> None:
        free = [slot for slot in self.slots[rank].values() if slot.complete and slot.arrived]
        if not free:
            return
        slot = self.network.random.choice(free)
        before = slot.version
        slot.version += 1
        self.network.memory[rank][slot.source : slot.source + slot.nbytes] = slot.content()
        immediate = slot.number << 24 | slot.version
        write = abi.Write(slot.peer, abi.IMMEDIATE, 0, 0, slot.source, slot.offset, slot.nbytes, immediate, 0)
        driver = self.network.drivers[rank]
        token = driver._next_token
        if driver.post_once(0, [write]) == 1:
            self.tokens[rank][token] = slot
            slot.complete = slot.arrived = False
        else:
            slot.version = before

    def completed(self, rank: int, token: int, posted: Posted) -> None:
        slot = self.tokens[rank].pop(token)
        if posted.status:
            self.failed += 1
            slot.arrived = False  # nothing is known: it is never written again
            slot.complete = True
            return
        slot.complete = True
        assert bytes(self.place(rank, slot)) == slot.content(), "complete before its bytes are placed"

    def arrived(self, rank: int, immediate: int, _peer: int) -> None:
        slot = self.owners[rank][immediate >> 24]
        version = immediate & 0xFFFFFF
        # A copy may wait in another rail's queue while newer writes arrive, but not for long.
        assert slot.version - LATE <= version <= slot.version, f"version {version} arrived, {slot.version} is written"
        if version == slot.version:
            assert bytes(self.place(rank, slot)) == slot.content(), "arrived before its bytes are placed"
            slot.arrived = True

    def check(self) -> None:
        """What is complete stays as it is."""
        for rank, mine in enumerate(self.slots):
            for slot in mine.values():
                if slot.complete and slot.arrived and slot.version:
                    assert bytes(self.place(rank, slot)) == slot.content(), "overwritten by an older write"

    def step(self, living: set[int], post: bool = True) -> None:
        chance = self.network.random
        rank = chance.choice(sorted(living))
        what = chance.random()
        if what < 0.35:
            self.network.wire.scripted_step(chance.randrange(1, 12))
        elif what < 0.6 and post:
            self.post(rank)
        elif what < 0.8:
            self.network.drivers[rank].poll(0)
        else:
            self.network.drivers[rank].poll_arrivals(0)
        self.check()

    def finish(self, living: set[int], limit_s: float = 5.0) -> list[str]:
        """Go on until nothing is under way; what never ended, in words."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            self.network.wire.scripted_step(50)
            for rank in living:
                self.network.drivers[rank].progress()
            if all(self.network.drivers[rank].outstanding == 0 for rank in living):
                break
        for _ in range(200):
            self.network.wire.scripted_step(50)
            for rank in living:
                self.network.drivers[rank].progress()
        self.check()
        left = []
        for rank in living:
            for slot in self.tokens[rank].values():
                left.append(f"rank {rank}: {slot.nbytes} bytes to rank {slot.peer} never completed")
            for slot in self.slots[rank].values():
                if self.failed == 0 and slot.complete and not slot.arrived and slot.peer in living:
                    left.append(f"rank {rank}: {slot.nbytes} bytes to rank {slot.peer} completed and never arrived")
        return left
