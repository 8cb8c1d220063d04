"""A transport alone: the bytes of an operation between host windows, in its pieces, by a thread a lane, no kernels."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from uccl_ep_core import numa
from uccl_ep_core.conformance import abi
from uccl_ep_core.gpu_backend import GpuBackend

LIMIT_S = 60.0
PLACES = 2  # of a message, taken in turn, as its two parities are
POLLED = 64  # completions or arrivals at once


@dataclasses.dataclass(frozen=True)
class Cut:
    """How the bytes of an operation for one peer are divided.

    Attributes:
        nbytes: of all pieces.
        piece: bytes of a piece; the last one has the rest.
    """

    nbytes: int
    piece: int

    def pieces(self, lane: int, lanes: int) -> list[tuple[int, int]]:
        """(offset, bytes) of the pieces that a lane moves: they are dealt to the lanes in turn."""
        starts = range(0, self.nbytes, self.piece)
        return [(start, min(self.piece, self.nbytes - start)) for start in starts[lane::lanes]]


class RawTransport:
    """A second endpoint of the transport that a group uses, between the same ranks, with windows of its own.

    Args:
        plugin, device, options: as the group opened it.
        backend: whose host windows are used, so that they are as a device needs them.
        peers: ranks to write to, and to receive from.
        lanes: threads.
        window_bytes: most that one operation moves to a peer.
        home: NUMA node of the windows and CPUs of the threads, as the group's proxies have them; or None.

    Collective; so is every call.
    """

    def __init__(
        self,
        plugin: Any,
        device: str | None,
        options: Any,
        backend: GpuBackend,
        rank: int,
        peers: Sequence[int],
        lanes: int,
        window_bytes: int,
        group: Any,
        home: tuple[int, list[int]] | None = None,
    ) -> None:
        self._cpus = home[1] if home else []
        self._rank, self._peers, self._lanes, self._group = rank, list(peers), lanes, group
        num_ranks = dist.get_world_size(group)
        self._room = (window_bytes + 4095) // 4096 * 4096
        self._transport = plugin.open(device, options)
        self._immediates = self._transport.capabilities.imm_bits > 0
        # From: a place for each parity and peer. To: likewise for each source, behind them.
        with numa.preferring(home[0] if home else None):
            self._windows = [
                backend.allocate_host_window(nbytes) for nbytes in (2 * PLACES * num_ranks * self._room, 4096)
            ]
        self._inboxes = PLACES * num_ranks * self._room
        for window in self._windows:
            self._transport.register(window.memory)
        addresses: list[Any] = [None] * num_ranks
        dist.all_gather_object(addresses, self._transport.address(), group=group)
        self._transport.connect(rank, addresses, self._peers, lanes, LIMIT_S)
        self._ops = abi.Ops.from_address(self._transport.native_ops)

    def microseconds(self, cut: Cut, rounds: int) -> float:
        """Of one operation, of ``rounds`` that follow one another, all ranks at once: until all that this rank wrote is
        complete and all that its peers wrote has arrived.

        Raises:
            RuntimeError: the transport refused a write, or was not done in `LIMIT_S`.
        """
        if cut.nbytes > self._room:
            raise ValueError(f"{cut.nbytes} bytes for a peer: the windows hold {self._room}")
        failures: list[str] = []
        start = threading.Barrier(self._lanes + 1)
        threads = [
            threading.Thread(target=self._lane, args=(lane, cut, rounds, start, failures))
            for lane in range(self._lanes)
        ]
        for thread in threads:
            thread.start()
        dist.barrier(self._group)
        start.wait()
        begun = time.perf_counter()
        for thread in threads:
            thread.join()
        taken = time.perf_counter() - begun
        if failures:
            raise RuntimeError(failures[0])
        return taken * 1e6 / rounds

    def _lane(self, lane: int, cut: Cut, rounds: int, start: threading.Barrier, failures: list[str]) -> None:
        writes = [
            abi.Write(
                peer, abi.IMMEDIATE if self._immediates else 0, abi.DATA, abi.DATA,
                (turn % PLACES * len(self._peers) + number) * self._room + offset,
                self._inboxes + (turn % PLACES * dist.get_world_size(self._group) + self._rank) * self._room + offset,
                nbytes, lane, 0,
            )
            for turn in range(rounds)
            for number, peer in enumerate(self._peers)
            for offset, nbytes in cut.pieces(lane, self._lanes)
        ]  # fmt: skip
        array = (abi.Write * len(writes))(*writes)
        completions, arrivals = (abi.Completion * POLLED)(), (abi.Arrival * POLLED)()
        ops, context = self._ops, self._ops.context
        if self._cpus:
            os.sched_setaffinity(0, self._cpus)  # of this thread
        posted = completed = arrived = 0
        awaited = len(writes) if self._immediates else 0  # every rank sends as many as it gets
        start.wait()
        end = time.monotonic() + LIMIT_S
        while completed < len(writes) or arrived < awaited:
            if posted < len(writes):
                rest = ctypes.byref(array, posted * ctypes.sizeof(abi.Write))
                accepted = int(ops.post_writes(context, lane, ctypes.cast(rest, ctypes.POINTER(abi.Write)),
                                               len(writes) - posted))  # fmt: skip
                if accepted < 0:
                    failures.append(f"the transport refused a write of {array[posted].bytes} bytes: {accepted}")
                    return
                posted += accepted
            done = int(ops.poll_completions(context, lane, completions, POLLED))
            came = int(ops.poll_arrivals(context, lane, arrivals, POLLED)) if self._immediates else 0
            failed = [one.status for one in completions[: max(done, 0)] if one.status]
            if done < 0 or came < 0 or failed or time.monotonic() > end:
                why = f"after {posted} of {len(writes)} writes, {completed} complete, {arrived} arrived"
                failures.append(f"lane {lane} of the transport is not done {why}: {done}, {came}, {failed}")
                return
            completed, arrived = completed + done, arrived + came

    def close(self) -> None:
        dist.barrier(self._group)
        self._transport.close()
        for window in self._windows:
            window.close()
