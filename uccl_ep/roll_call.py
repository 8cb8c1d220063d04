"""Who has come to a stage of the set-up: so that an error can name the rank that has not.

A collective of torch.distributed that misses a rank waits for minutes, or fails in words of sockets. Here every rank
says in the group's store where it is, and waits for the others with a limit; a process of this host that ends
is noticed at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import time
from typing import Any, NamedTuple

import torch.distributed as dist

from uccl_ep_core.errors import EPError, PeerFailure, TransportError

SLICES_MS = (1, 2, 5, 10, 20, 50)
"""Time between looks into the store; the last one repeats."""
COMPLETE = "all"
DEATH_GRACE_S = 2.0
"""After an exchange failed: how long the kernel may take to show which process is gone."""


class ProcessName(NamedTuple):
    """Names a process for good: its number may be another's later, its start time not."""

    boot: str
    namespace: int
    pid: int
    start_time: int

    @classmethod
    def own(cls) -> ProcessName:
        try:
            with open("/proc/sys/kernel/random/boot_id") as file:
                boot = file.read().strip()
            return cls(boot, os.stat("/proc/self/ns/pid").st_ino, os.getpid(), _start_time(os.getpid()))
        except OSError:
            return cls("", 0, os.getpid(), 0)


def _start_time(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[19])


class RollCall:
    """One set-up of one rank.

    Args:
        store: the group's; None where torch does not give it: then only deaths on this host are noticed.
        timeout_s: how long a rank is waited for.
    """

    def __init__(self, store: Any, rank: int, num_ranks: int, timeout_s: float) -> None:
        self._rank, self._num_ranks, self._timeout_s = rank, num_ranks, timeout_s
        self._store = store
        self._number = 0
        self._prefix = ""
        self._watched: dict[int, int] = {}  # pidfd: rank
        self._gone: dict[int, int] = {}  # rank: 1, from the names
        if store is not None:
            # The how manieth buffer of this group: all ranks create them in the same order.
            self._prefix = f"uccl_ep/{store.add(f'uccl_ep/buffers/{rank}', 1)}"

    def watch(self, names: list[ProcessName]) -> None:
        """Notice the end of those that run on this host."""
        own = names[self._rank]
        for rank, name in enumerate(names):
            if rank == self._rank or not name.boot or name[:2] != own[:2] or not hasattr(os, "pidfd_open"):
                continue
            try:
                fd = os.pidfd_open(name.pid)
            except ProcessLookupError:
                self._gone[rank] = 1
                continue
            except OSError:  # too old a kernel, no descriptor left: then the limit tells
                continue
            self._watched[fd] = rank
            with contextlib.suppress(OSError):
                if _start_time(name.pid) != name.start_time:
                    self._gone[rank] = 1

    def close(self) -> None:
        while self._watched:
            os.close(self._watched.popitem()[0])

    def answer(self, stage: str) -> None:
        """Say that this rank is at a stage, and wait until all are.

        Raises:
            PeerFailure: naming the rank that ended, or did not come within the limit.
            TransportError: the store failed.
        """
        if self._store is None:
            return
        self._number += 1
        try:
            self._wait(stage)
        except EPError:
            raise
        except Exception as error:  # the store's own: its server may be the rank that is gone
            self.explain(stage, error)

    def explain(self, stage: str, error: Exception) -> None:
        """Raise what an exchange that failed at a stage comes from."""
        limit = time.monotonic() + DEATH_GRACE_S
        while time.monotonic() < limit:
            gone = self._dead(SLICES_MS[-1])
            if gone is not None:
                raise self._failure(stage, gone, "dead", self._rank, []) from error
        raise TransportError(
            f"set-up stopped at {stage!r} on rank {self._rank}, where the group's own exchange failed: {error}"
        ) from error

    def _wait(self, stage: str) -> None:
        store = self._store
        store.set(f"{self._prefix}/at/{self._rank}", str(self._number))
        if store.add(f"{self._prefix}/count/{self._number}", 1) == self._num_ranks:
            self._settle(COMPLETE)
        limit, looks = time.monotonic() + self._timeout_s, 0
        while not self._settled():
            gone = self._dead(SLICES_MS[min(looks, len(SLICES_MS) - 1)])
            looks += 1
            if gone is not None:
                self._settle(json.dumps([gone, "dead", self._rank, []]))
            elif time.monotonic() > limit:
                missing = [rank for rank in range(self._num_ranks) if not self._has_come(rank)]
                if missing:
                    self._settle(json.dumps([missing[0], "timeout", self._rank, missing[1:]]))
        outcome = self._settle(COMPLETE)
        if outcome != COMPLETE:
            raise self._failure(stage, *json.loads(outcome))

    def _outcome_key(self) -> str:
        return f"{self._prefix}/outcome/{self._number}"

    def _settled(self) -> bool:
        return bool(self._store.check([self._outcome_key()]))

    def _settle(self, outcome: str) -> str:
        """What this stage came to: the first word of any rank counts, for all of them."""
        return str(self._store.compare_set(self._outcome_key(), "", outcome).decode())

    def _has_come(self, rank: int) -> bool:
        key = f"{self._prefix}/at/{rank}"
        return bool(self._store.check([key])) and int(self._store.get(key)) >= self._number

    def _dead(self, wait_ms: int) -> int | None:
        """The lowest rank whose process has ended; waits so long for one."""
        poll = select.poll()
        for fd in self._watched:
            poll.register(fd, select.POLLIN)
        ended = {self._watched[fd] for fd, _ in poll.poll(wait_ms)} | set(self._gone)
        return min(ended) if ended else None

    def _failure(self, stage: str, rank: int, reason: str, reporter: int, others: list[int]) -> PeerFailure:
        also = f" (nor did {', '.join(map(str, others))})" if others else ""
        tail = {
            "dead": "its process is gone",
            "timeout": f"it did not come within {self._timeout_s} s{also}; is it late, stuck, or does it not create "
            "this Buffer? (a longer wait: timeout_s)",
        }[reason]
        return PeerFailure(
            f"rank {rank} is at fault ({reason}), as rank {reporter} noticed in the set-up, at {stage!r}: {tail} "
            f"(raised on rank {self._rank})",
            rank=rank,
            reason=reason,
            phase=f"set-up: {stage}",
            reporter=reporter,
        )


def store_of(group: dist.ProcessGroup) -> Any:
    """The store of a group, or None: torch has no public name for it."""
    find = getattr(dist.distributed_c10d, "_get_process_group_store", None)
    if find is None:
        return None
    try:
        return find(group)
    except (KeyError, ValueError, AssertionError):
        return None
