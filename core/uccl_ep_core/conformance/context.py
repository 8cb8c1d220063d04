"""What a check sees on one rank: a connected transport, windows, its peers' windows, and the other ranks."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from uccl_ep_core import shared_memory
from uccl_ep_core.capabilities import Capabilities
from uccl_ep_core.transport import Memory, Transport

from . import abi
from .driver import Driver, PromiseBroken

DATA_BYTES = 4 << 20
CONTROL_BYTES = 64 << 10


class Stopped(Exception):
    """Another rank has already found what breaks the promise."""


class NotStarted(Exception):
    """The transport did not open.

    Attributes:
        error: what it raised.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Windows:
    """This rank's data and control windows, and views of every other rank's: the kit's second pair of eyes.

    All ranks of the kit run on one host and their windows are shared memory, so that a sender can look
    at the target's bytes at the very moment of a completion.
    """

    def __init__(self, data_bytes: int, control_bytes: int = CONTROL_BYTES) -> None:
        self.shared = [shared_memory.create(data_bytes), shared_memory.create(control_bytes)]
        self.views = [self._view(memory) for memory in self.shared]
        self._attached: list[Any] = []

    @staticmethod
    def _view(memory: Any) -> memoryview:
        return memoryview((ctypes.c_ubyte * memory.nbytes).from_address(memory.pointer)).cast("B")

    def memories(self) -> list[Memory]:
        """As a transport registers them."""
        return [Memory(memory.pointer, memory.nbytes, share_handle=memory.handle()) for memory in self.shared]

    def attach(self, handles: list[bytes]) -> list[memoryview]:
        """Views of another rank's windows."""
        attached = [shared_memory.attach(handle) for handle in handles]
        self._attached += attached
        return [self._view(memory) for memory in attached]

    def close(self) -> None:
        """Unmap everything; no view may be used afterwards."""
        for memory in [*self._attached, *self.shared]:
            memory.close()
        self._attached.clear()


class Context:
    """One rank of one check under one seed. `rng` gives equal numbers on all ranks."""

    def __init__(
        self,
        connection: Connection,
        rank: int,
        size: int,
        seed: int,
        check: str,
        transport_class: type[Transport],
        options: Mapping[str, Any],
        settings: Mapping[str, Any],
    ) -> None:
        self.connection = connection
        self.rank = rank
        self.size = size
        self.rng = random.Random(f"{check}/{seed}")
        self.transport_class = transport_class
        self.options = options
        self.settings = settings
        self.transport: Transport | None = None
        self.driver: Driver | None = None
        self.windows: Windows | None = None
        self.peers: list[list[memoryview]] = []
        self.capabilities = Capabilities()

    # ---- life ----

    def new_transport(self) -> Transport:
        """Open the transport under test."""
        device = str(self.options.get("device", "")) or None
        try:
            return self.transport_class.open(device, self.options)
        except Exception as error:
            raise NotStarted(error) from error

    def open(self, *, data_bytes: int = DATA_BYTES, lanes: int = 1) -> Driver:
        """Open, register, exchange addresses, connect; the windows are zeroed."""
        self.transport = self.new_transport()
        self.capabilities = self.transport.capabilities
        self.windows = Windows(data_bytes)
        for expected, memory in enumerate(self.windows.memories()):
            region = self.transport.register(memory)
            if region != expected:
                raise PromiseBroken(f"register returned region {region} for call {expected}: regions count from 0")
        self.connect(self.transport, lanes)
        handles = self.exchange("windows", [memory.handle() for memory in self.windows.shared])
        self.peers = [
            self.windows.views if rank == self.rank else self.windows.attach(handles[rank]) for rank in range(self.size)
        ]
        self.barrier("opened")
        assert self.driver is not None
        return self.driver

    def connect(self, transport: Transport, lanes: int) -> None:
        """The collective half of `open`."""
        addresses = self.exchange("addresses", transport.address())
        others = [rank for rank in range(self.size) if rank != self.rank]
        limit = float(self.settings["limit_s"])
        transport.connect(self.rank, addresses, others, lanes, limit)
        self.driver = Driver(transport.native_ops, lanes)

    def close(self) -> None:
        """Close what `open` opened; also after a failure."""
        self.driver = None
        self.peers = []
        if self.transport is not None:
            self.transport.close()
            self.transport.close()  # idempotent, says the contract
            self.transport = None
        if self.windows is not None:
            self.windows.close()
            self.windows = None

    # ---- the other ranks ----

    def exchange(self, phase: str, value: Any = None, *, progress: bool = True) -> list[Any]:
        """Every rank's value; keeps the transport going meanwhile, unless told not to (or it is not there yet)."""
        self.connection.send(("meet", phase, value))
        idle = 0
        while not self.connection.poll(0.0005 if idle > 200 else 0):
            if progress and self.driver is not None:
                self.driver.progress()
                idle += 1
            else:
                idle = 201
        answer = self.connection.recv()
        if answer is None:
            raise Stopped
        return list(answer)

    def barrier(self, phase: str, *, progress: bool = True) -> None:
        """All ranks are here."""
        self.exchange(phase, None, progress=progress)

    def kill(self, rank: int) -> None:
        """SIGKILL another rank."""
        self.connection.send(("kill", rank, None))
        self.connection.recv()

    # ---- small tools ----

    @property
    def limit_s(self) -> float:
        """How long anything may take that has to happen."""
        return float(self.settings["limit_s"])

    def eventually(self, condition: Callable[[], bool], limit_s: float | None = None) -> bool:
        """Whether the condition came true in time, with the transport kept going."""
        end = time.monotonic() + (self.limit_s if limit_s is None else limit_s)
        while not condition():
            if self.driver is not None:
                self.driver.progress()
            if time.monotonic() > end:
                return False
        return True

    def linger(self, seconds: float) -> None:
        """Keep the transport going for a while, for what must not happen."""
        self.eventually(lambda: False, seconds)

    def rounded(self, nbytes: int) -> int:
        """Up to a multiple of what the transport can move."""
        alignment = max(self.capabilities.alignment, 1)
        return (nbytes + alignment - 1) // alignment * alignment

    def random_size(self, largest: int = 32 << 10) -> int:
        """Bytes of a write: small, middling and large ones equally often."""
        ceiling = self.rng.choice([64, 2048, largest])
        return min(self.rounded(self.rng.randint(1, ceiling)), self.capabilities.max_message)

    def write(
        self,
        peer: int,
        remote_offset: int,
        local_offset: int,
        nbytes: int,
        *,
        immediate: int | None = None,
        fenced: bool = False,
        remote_region: int = abi.DATA,
        local_region: int = abi.DATA,
    ) -> abi.Write:
        """One entry for `Driver.post`."""
        flags = (abi.IMMEDIATE if immediate is not None else 0) | (abi.FENCED if fenced else 0)
        return abi.Write(
            peer, flags, local_region, remote_region, local_offset, remote_offset, nbytes, immediate or 0, 0
        )

    def fill(self, offset: int, nbytes: int) -> bytes:
        """Put random bytes at an offset of this rank's data window; equal on all ranks for equal `rng` use."""
        content = self.rng.randbytes(nbytes)
        assert self.windows is not None
        self.windows.views[abi.DATA][offset : offset + nbytes] = content
        return content
