"""Whether the threads of this host that poll have a core each: where they have not, they look away between looks."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where a rank runs.

    Attributes:
        host: the same for two processes of one boot of one host: those can at least try shared memory.
        cpus: that the process may use.
    """

    host: str
    cpus: frozenset[int]

    @classmethod
    def here(cls) -> Place:
        try:
            with open("/proc/sys/kernel/random/boot_id") as file:
                host = file.read().strip()
        except OSError:
            host = socket.gethostname()
        return cls(host, frozenset(os.sched_getaffinity(0)))


@dataclass(frozen=True)
class Cores:
    """Of one host.

    Attributes:
        threads: that poll, of all ranks together: proxies, and threads that run kernels on the CPU.
        cores: that these ranks may use, all together.
    """

    threads: int
    cores: int

    @classmethod
    def of(cls, places: Sequence[Place], rank: int, threads_per_rank: int) -> Cores:
        """Of the host of ``rank``; ``places`` by rank."""
        here = [place for place in places if place.host == places[rank].host]
        return cls(threads_per_rank * len(here), len(frozenset[int]().union(*(place.cpus for place in here))))

    @property
    def for_each_thread(self) -> int:
        """Cores that each of the threads could have."""
        return self.cores // self.threads

    @property
    def crowded(self) -> bool:
        return self.threads > self.cores

    def describe(self) -> dict[str, str]:
        return {
            "name": "look away" if self.crowded else "poll",
            "reason": f"{self.threads} threads of this host's ranks may wait at once, on {self.cores} cores",
        }
