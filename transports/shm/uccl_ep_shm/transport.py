"""Set-up half of the shm transport; the data half is ``native/endpoint.cpp``.

A write is a memcpy by the proxy thread into the peer's mapped window, so a post takes as long as
memory allows; one post accepts at most ``BYTES_PER_POST`` bytes and then fewer writes than asked.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from uccl_ep_core import shared_memory
from uccl_ep_core.capabilities import Capabilities
from uccl_ep_core.errors import BackendUnavailableError, TransportError
from uccl_ep_core.transport import Device, Memory, Option, Transport

from . import _native

_DEVICE = "shm"


def _boot_id() -> str:
    """What tells one running host from another."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return os.uname().nodename


def _start_time(pid: int) -> int:
    """Start of a process in clock ticks after boot: with the pid, it names one process for good."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        return int(file.read().rpartition(")")[2].split()[19])


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


class ShmTransport(Transport):
    """Shared memory of one host, with every promise that an ordering plan can ask for."""

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "lanes": Option(8, "most lanes to each peer", minimum=1, maximum=16),
        "max_peers": Option(64, "largest group, which sizes the arrival rings", minimum=1, maximum=4096),
        "named": Option(False, "keep memory under names in /dev/shm while connecting (other pid namespaces)"),
    }

    def __init__(self, options: Mapping[str, Any]) -> None:
        def value(name: str) -> Any:
            return options.get(name, self.OPTIONS[name].default)

        self._max_lanes = int(value("lanes"))
        self._max_peers = int(value("max_peers"))
        self._named = bool(value("named"))
        self._regions: list[Memory] = []
        self._arrivals: shared_memory.SharedMemory | None = None
        self._mapped: list[shared_memory.SharedMemory] = []
        self._endpoint: _native.Endpoint | None = None
        self._peers: list[int] = []
        self._lanes = 0

    @classmethod
    def probe(cls, options: Mapping[str, Any]) -> Sequence[Device]:
        try:
            shared_memory.create(1).close()
        except (OSError, RuntimeError) as error:
            return [Device(_DEVICE, False, str(error), "run on Linux 3.17 or later, with memory to spare")]
        return [Device(_DEVICE, True, "shared memory of this host", details={"host": os.uname().nodename})]

    @classmethod
    def open(cls, device: str | None, options: Mapping[str, Any]) -> ShmTransport:
        if device not in (None, _DEVICE):
            raise BackendUnavailableError(f"the shm transport has no device {device!r}: use {_DEVICE!r} or none")
        return cls(options)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            write_order=True,
            signal_order=True,
            imm_bits=64,
            imm_after_payload=True,
            delivery_complete=True,
            exactly_once=True,
            peer_failure="event",
            native_signal="host",
            max_message=int(_native.BYTES_PER_POST),
            send_queue_depth=int(_native.QUEUE_DEPTH),
            lanes=self._max_lanes,
        )

    def register(self, memory: Memory) -> int:
        if memory.share_handle is None:
            raise TransportError(
                "the shm transport can register only memory that another process can map: "
                "host memory from uccl_ep_core.shared_memory"
            )
        self._regions.append(memory)
        return len(self._regions) - 1

    def address(self) -> bytes:
        if self._arrivals is None:
            nbytes = self._max_peers * self._max_lanes * int(_native.ARRIVAL_RING_BYTES)
            self._arrivals = shared_memory.create(nbytes, named=self._named)  # untouched pages cost nothing
        regions = [[memory.share_handle.hex(), memory.nbytes] for memory in self._regions if memory.share_handle]
        return json.dumps(
            {
                "boot": _boot_id(),
                "pid": os.getpid(),
                "start": _start_time(os.getpid()),
                "namespace": _pid_namespace(),
                "max_peers": self._max_peers,
                "max_lanes": self._max_lanes,
                "arrivals": self._arrivals.handle().hex(),
                "regions": regions,
            }
        ).encode()

    def connect(
        self, rank: int, addresses: Sequence[bytes], peers: Sequence[int], lanes: int, timeout_s: float
    ) -> None:
        if self._arrivals is None:
            raise TransportError("connect() before address()")
        if not 1 <= lanes <= self._max_lanes:
            raise TransportError(f"{lanes} lanes asked for: use 1 to {self._max_lanes}, or raise the option 'lanes'")
        if len(addresses) > self._max_peers:
            raise TransportError(
                f"a group of {len(addresses)} ranks: set the shm option 'max_peers' to at least {len(addresses)}"
            )
        endpoint = _native.Endpoint(len(addresses), lanes)
        for memory in self._regions:
            endpoint.add_local_region(memory.pointer, memory.nbytes)
        ring_bytes = int(_native.ARRIVAL_RING_BYTES)
        for peer in peers:
            try:
                address = json.loads(addresses[peer])
                if address["boot"] != _boot_id():
                    raise RuntimeError("it runs on another host; use a network transport")
                if (address["max_peers"], address["max_lanes"]) != (self._max_peers, self._max_lanes):
                    raise RuntimeError("its options 'max_peers' or 'lanes' differ; give all ranks the same")
                for handle, nbytes in address["regions"]:
                    endpoint.add_peer_region(peer, self._attach(bytes.fromhex(handle)), nbytes)
                theirs = self._attach(bytes.fromhex(address["arrivals"]))
                for lane in range(lanes):
                    endpoint.set_rings(
                        peer,
                        lane,
                        theirs + (rank * self._max_lanes + lane) * ring_bytes,
                        self._arrivals.pointer + (peer * self._max_lanes + lane) * ring_bytes,
                    )
                self._watch(endpoint, peer, address)
            except (KeyError, ValueError, OSError, RuntimeError) as error:
                raise TransportError(f"shm: cannot reach rank {peer}: {error}") from error
        self._endpoint = endpoint
        self._peers = list(peers)
        self._lanes = lanes

    def _attach(self, handle: bytes) -> int:
        memory = shared_memory.attach(handle)
        self._mapped.append(memory)
        return int(memory.pointer)

    def _watch(self, endpoint: _native.Endpoint, peer: int, address: Mapping[str, Any]) -> None:
        if address["namespace"] != _pid_namespace():
            raise RuntimeError("it runs in another pid namespace, where its death could not be noticed; share it")
        pidfd = os.pidfd_open(address["pid"])
        endpoint.watch(peer, pidfd)
        if _start_time(address["pid"]) != address["start"]:
            raise RuntimeError(f"its process {address['pid']} is gone")

    @property
    def native_ops(self) -> int:
        if self._endpoint is None:
            raise TransportError("native_ops before connect()")
        return int(self._endpoint.ops)

    def close(self) -> None:
        self._endpoint = None
        mapped, self._mapped = self._mapped, []
        for memory in mapped:
            with contextlib.suppress(RuntimeError):
                memory.close()
        if self._arrivals is not None:
            self._arrivals.close()
            self._arrivals = None

    def describe(self) -> Mapping[str, Any]:
        return {"device": _DEVICE, "peers": self._peers, "lanes": self._lanes, "host": os.uname().nodename}
