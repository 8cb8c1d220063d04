"""Ranks of one process over connections that do what the test says; the device is scripted_verbs.c.

The data plane and the replacement of queue pairs are the shipped ones; of pyverbs there is nothing, of the datagrams
only a list, from which any may be lost or overtaken. A seed gives one and the same run.
"""

from __future__ import annotations

import ctypes
import functools
import os
import random
import shutil
import subprocess
import tempfile
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from uccl_ep_core.conformance import abi
from uccl_ep_core.conformance.driver import Driver, Posted
from uccl_ep_ibverbs import renewal
from uccl_ep_ibverbs.loader import VerbsMissingError, data_plane

WINDOW = 1 << 15
OUTBOX = WINDOW // 2
CELL = 512
CELLS = 6
SECONDS_A_STEP = 0.005


@functools.cache
def scripted() -> ctypes.CDLL:
    """The device, compiled with the headers that the transport was compiled with."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler: install gcc")
    try:
        data_plane()
    except VerbsMissingError as missing:
        pytest.skip(": ".join(missing.args))
    file = Path(tempfile.mkdtemp()) / "scripted_verbs.so"
    command = [compiler, "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    source = Path(__file__).with_name("scripted_verbs.c")
    subprocess.run([*command, str(source), "-o", str(file)], timeout=120, check=True)
    library = ctypes.CDLL(str(file))
    for name in ("scripted_domain", "scripted_queue", "scripted_pair"):
        getattr(library, name).restype = ctypes.c_void_p
    for name in ("scripted_number", "scripted_fail", "scripted_destroy"):
        getattr(library, name).argtypes = [ctypes.c_void_p]
    library.scripted_pair.argtypes = [ctypes.c_void_p] * 2
    library.scripted_connect.argtypes = [ctypes.c_void_p, ctypes.c_uint32]
    library.scripted_begin.argtypes = [ctypes.c_uint64, ctypes.c_int]
    return library


class Handle:
    """What pyverbs' QP is elsewhere."""

    def __init__(self, send_queue: int, receive_queue: int) -> None:
        self.address = scripted().scripted_pair(send_queue, receive_queue)
        self.qp_num = scripted().scripted_number(self.address)

    def close(self) -> None:
        scripted().scripted_destroy(self.address)


class Pair:
    """What queue_pairs.QueuePair is elsewhere."""

    def __init__(self, lane: int, peer: int, send_queue: int, receive_queue: int, psn: int = 0) -> None:
        self.lane, self.peer, self.send_queue, self.receive_queue, self.psn = lane, peer, send_queue, receive_queue, psn
        self.qp = Handle(send_queue, receive_queue)
        self.lock = threading.Lock()

    @property
    def number(self) -> int:
        return int(self.qp.qp_num)

    def fail(self) -> None:
        scripted().scripted_fail(self.qp.address)


def replace_pyverbs(patch: pytest.MonkeyPatch) -> None:
    def create(_rail: Any, send_queue: int, receive_queue: int, lane: int, peer: int, psn: int, _depths: Any) -> Pair:
        return Pair(lane, peer, send_queue, receive_queue, psn)

    def connect(pair: Pair, _remote: Any, number: int, _psn: int) -> None:
        scripted().scripted_connect(pair.qp.address, number)

    def handle(thing: Any) -> int:
        return int(thing.address) if isinstance(thing, Handle) else int(thing)

    patch.setattr(renewal, "queue_pairs", types.SimpleNamespace(create=create, connect=connect))
    patch.setattr(renewal, "raw", types.SimpleNamespace(handle=handle))


class Cell:
    """A place in a peer's window, written again only when its last write is complete and has arrived."""

    def __init__(self, number: int, peer: int, source: int, offset: int, nbytes: int) -> None:
        self.number, self.peer, self.source, self.offset, self.nbytes = number, peer, source, offset, nbytes
        self.version = self.order = 0
        self.complete = self.arrived = True

    @property
    def quiet(self) -> bool:
        return self.complete and self.arrived

    def content(self) -> bytes:
        return bytes([self.version % 251 + 1]) * self.nbytes


class End:
    """One rank: its data plane, its thread for queue pairs, and a proxy that posts again what failed."""

    def __init__(self, group: Group, rank: int) -> None:
        self.group, self.rank = group, rank
        native, wire, ranks = data_plane(), scripted(), range(group.ranks)
        self.memory = (ctypes.c_ubyte * WINDOW)()
        self.bytes = memoryview(self.memory).cast("B")
        self.plane = native.Plane(num_ranks=group.ranks, max_message=1 << 20, immediates=True, signals=False,
                                  renewals=True)  # fmt: skip
        self.queues = wire.scripted_queue(), wire.scripted_queue()
        wake = os.open(os.devnull, os.O_WRONLY)  # the thread looks again and again by itself
        group.files.append(wake)
        self.plane.add_lane(device="scripted", local=[self.region(self)], flush_address=ctypes.addressof(self.memory),
                            flush_key=1, send_queue=self.queues[0], receive_queue=self.queues[1],
                            wake_fd=wake)  # fmt: skip
        self.pairs = {peer: Pair(0, peer, *self.queues) for peer in ranks if peer != rank}
        self.cells = [
            Cell(rank * 16 + i, peer, OUTBOX + (peer * CELLS + i) * CELL, (rank * CELLS + i) * CELL,
                 group.chance.choice([0, 8, 64, 500]))
            for peer in self.pairs for i in range(CELLS)
        ]  # fmt: skip
        self.tokens: dict[int, Cell] = {}
        self.failed: list[Cell] = []
        self.again: list[Cell] = []
        self.down = False
        self.errors = 0

    @staticmethod
    def region(end: End) -> Any:
        return data_plane().Region(base=ctypes.addressof(end.memory), bytes=WINDOW, chunk_bytes=WINDOW, keys=[1])

    def add_pairs(self) -> None:
        group = self.group
        for peer, pair in self.pairs.items():
            self.plane.add_pair(lane=0, peer=peer, queue_pair=pair.qp.address,
                                protection_domain=scripted().scripted_domain(), qp_num=pair.number,
                                send_depth=group.depths[0], receive_depth=group.depths[1], inline_bytes=0,
                                remote=[self.region(group.ends[peer])])  # fmt: skip
            scripted().scripted_connect(pair.qp.address, group.ends[peer].pairs[self.rank].number)
        rail: Any = types.SimpleNamespace(domain=scripted().scripted_domain())
        remotes: Any = dict.fromkeys(self.pairs)
        pairs: Any = self.pairs.values()
        self.renewals = renewal.Renewals(rail, data_plane(), self.plane, pairs, remotes, group.depths, group.limit_s,
                                         functools.partial(group.send, self.rank))  # fmt: skip
        self.driver = Driver(self.plane.ops_address, 1)
        self.driver.on_completion, self.driver.on_arrival = self.completed, self.arrived

    def place(self, cell: Cell) -> bytes:
        return bytes(self.group.ends[cell.peer].bytes[cell.offset : cell.offset + cell.nbytes])

    def completed(self, token: int, posted: Posted) -> None:
        cell = self.tokens.pop(token)
        if posted.status:
            self.failed.append(cell)
            self.down = True
            self.errors += 1
            return
        cell.complete = True
        assert self.place(cell) == cell.content(), "complete before its bytes are placed"

    def arrived(self, immediate: int, sender: int) -> None:
        cell = next(it for it in self.group.ends[sender].cells if (it.number, it.peer) == (immediate >> 24, self.rank))
        version = immediate & 0xFFFFFF
        assert cell.version - 1 <= version <= cell.version, f"version {version} arrived, {cell.version} is written"
        if version == cell.version:
            assert self.place(cell) == cell.content(), "arrived before its bytes are placed"
            cell.arrived = True

    def put(self, cell: Cell) -> bool:
        flags = abi.IMMEDIATE | (abi.FENCED if self.group.chance.random() < 0.2 else 0)
        write = abi.Write(cell.peer, flags, 0, 0, cell.source, cell.offset, cell.nbytes,
                          cell.number << 24 | cell.version, 0)  # fmt: skip
        token = self.driver._next_token
        taken = self.driver.post_once(0, [write]) == 1
        if taken:
            self.tokens[token] = cell
        return taken

    def proxy(self, post: bool) -> None:
        self.driver.poll(0)
        if self.down and not self.tokens:
            answer = self.driver.renew(0)
            assert answer >= 0
            if answer:
                self.down = False
                self.again, self.failed = sorted(self.failed, key=lambda cell: cell.order), []
        self.driver.poll_arrivals(0)
        while self.again and not self.down:
            if self.driver.peer_state(self.again[0].peer) != 1 and not self.put(self.again[0]):
                break
            self.again.pop(0)
        free = [cell for cell in self.cells if cell.quiet]
        if not post or self.down or self.again or not free:
            return
        cell = self.group.chance.choice(free)
        cell.version += 1
        self.bytes[cell.source : cell.source + cell.nbytes] = cell.content()
        if self.put(cell):
            self.group.posted += 1
            cell.order = self.group.posted
            cell.complete = cell.arrived = False
        else:
            cell.version -= 1


class Group:
    """Connected ranks.

    Args:
        refused: thousandths of work requests that the device refuses.
        lost: part of the datagrams that are lost.
        limit_s: option renew_timeout_s, of a clock that goes on by SECONDS_A_STEP with each step.
    """

    def __init__(self, seed: int, *, refused: int = 0, lost: float = 0.3, limit_s: float = 1e9) -> None:
        self.chance = random.Random(seed * 13 + 5)
        scripted().scripted_begin(seed, refused)
        self.ranks = self.chance.choice([2, 2, 3])
        self.depths = self.chance.choice([16, 32]), self.chance.choice([8, 16, 64])
        self.lost, self.limit_s = lost, limit_s
        self.now, self.posted, self.faults = 0.0, 0, 0
        self.mail: list[tuple[int, int, bytes]] = []
        self.files: list[int] = []
        self.ends: list[End] = []
        self.ends += [End(self, rank) for rank in range(self.ranks)]
        for end in self.ends:
            end.add_pairs()
        self.living = set(range(self.ranks))

    def send(self, sender: int, rank: int, data: bytes) -> None:
        if self.chance.random() >= self.lost:
            self.mail.append((sender, rank, data))

    def deliver(self) -> None:
        if self.mail:
            sender, rank, data = self.mail.pop(self.chance.randrange(len(self.mail)))
            if rank in self.living:
                self.ends[rank].renewals.take(sender, data, self.now)

    def step(self, faults: float, post: bool) -> None:
        chance, wire = self.chance, scripted()
        end = self.ends[chance.choice(sorted(self.living))]
        self.now += SECONDS_A_STEP
        what = chance.random()
        if what < 0.45:
            wire.scripted_step(chance.randrange(1, 40))
        elif what < 0.7:
            end.proxy(post)
        elif what < 0.85:
            end.renewals.look(self.now)
            end.renewals.work(self.now)
        else:
            self.deliver()
        if chance.random() < faults:  # also of one that is not connected yet, or was destroyed
            number = chance.randrange(max(1, wire.scripted_pairs() - 8), wire.scripted_pairs())
            wire.scripted_fail_number(number, chance.randrange(2))
            self.faults += 1
        for it in self.ends:
            for cell in it.cells:
                assert not cell.quiet or not cell.version or it.place(cell) == cell.content(), "an older write landed"

    def kill(self, rank: int) -> None:
        """Its queue pairs go with its process."""
        self.living.discard(rank)
        for pair in self.ends[rank].pairs.values():
            pair.qp.close()

    def unfinished(self) -> list[str]:
        return [
            f"rank {rank}: {cell.nbytes} bytes to rank {cell.peer}"
            + (" never arrived" if cell.complete else " never completed")
            for rank in self.living
            for cell in self.ends[rank].cells
            if not cell.quiet and cell.peer in self.living
        ]

    def close(self) -> None:
        for file in self.files:
            os.close(file)
