"""A NIC of one's own, in pure Python: one-sided writes over TCP sockets.

A write becomes a frame (header, payload); the peer places it when its proxy polls and answers with an
acknowledgement, which is the completion. TCP keeps order and delivers once, so these promises hold.
"""

import errno
import secrets
import socket
import struct
import time
from collections import deque
from typing import Any

from uccl_ep_core.capabilities import Capabilities
from uccl_ep_core.errors import TransportError
from uccl_ep_core.python_transport import PythonTransport, Write
from uccl_ep_core.transport import Device, Option

WRITE, WRITE_IMMEDIATE, ACKNOWLEDGE = range(3)
FRAME = struct.Struct("<IIQQQQ")  # kind, region (or status), offset, bytes, immediate, token
HELLO = struct.Struct("<16sII")  # the listener's secret; rank and lane of the caller
MAX_MESSAGE = 1 << 20  # bytes of one write
QUEUE_DEPTH = 256  # writes to one peer on a lane that are not acknowledged


class Link:
    """The connection of one lane to one peer."""

    def __init__(self, sock: socket.socket, peer: int) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        self.sock, self.peer, self.alive = sock, peer, True
        self.outgoing: deque[Any] = deque()
        self.incoming = bytearray()
        self.unacknowledged: set[int] = set()

    def transfer(self) -> None:
        """Move what the socket takes and gives right now."""
        for move in (self._send, self._receive):
            try:
                move()
            except BlockingIOError:
                pass
            except OSError:
                self.alive = False

    def _send(self) -> None:
        while self.outgoing:
            sent = self.sock.send(self.outgoing[0])
            self.outgoing[0] = self.outgoing[0][sent:]
            if not self.outgoing[0]:
                self.outgoing.popleft()

    def _receive(self) -> None:
        while len(self.incoming) < 4 * MAX_MESSAGE:
            received = self.sock.recv(1 << 18)
            if not received:
                raise ConnectionResetError
            self.incoming += received


class SocketNic(PythonTransport):
    """The transport; one object serves one rank."""

    OPTIONS = {"host": Option("127.0.0.1", "address of this host that peers reach")}  # noqa: RUF012

    def __init__(self, host: str) -> None:
        self.listener = socket.create_server((host, 0), backlog=1024)
        self.secret = secrets.token_bytes(16)
        self.links: list[dict[int, Link]] = []  # by lane, then peer

    @classmethod
    def probe(cls, options: Any) -> list[Device]:
        return [Device("sockets", True, "TCP sockets, for learning how a transport is made")]

    @classmethod
    def open(cls, device: str | None, options: Any) -> "SocketNic":
        return cls(options.get("host", "127.0.0.1"))

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            write_order=True,
            imm_bits=64,
            imm_after_payload=True,
            delivery_complete=True,
            exactly_once=True,
            peer_failure="error_completion",
            max_message=MAX_MESSAGE,
            send_queue_depth=QUEUE_DEPTH,
            lanes=4,
        )

    def address(self) -> bytes:
        host, port = self.listener.getsockname()[:2]
        return self.secret + struct.pack("<H", port) + host.encode()

    def connect(self, rank: int, addresses: Any, peers: Any, lanes: int, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        self.links = [{} for _ in range(lanes)]
        self.completions: list[deque[tuple[int, int]]] = [deque() for _ in range(lanes)]
        self.arrivals: list[deque[tuple[int, int]]] = [deque() for _ in range(lanes)]
        wanted = [(lane, peer) for lane in range(lanes) for peer in peers]
        try:
            for lane, peer in [pair for pair in wanted if pair[1] > rank]:  # its listener queues us
                secret, port, host = struct.unpack(f"<16sH{len(addresses[peer]) - 18}s", addresses[peer])
                sock = socket.create_connection((host.decode(), port), max(end - time.monotonic(), 0.1))
                sock.sendall(HELLO.pack(secret, rank, lane))
                self.links[lane][peer] = Link(sock, peer)
            while missing := [(lane, peer) for lane, peer in wanted if peer not in self.links[lane]]:
                self.listener.settimeout(max(end - time.monotonic(), 0.1))
                sock, _ = self.listener.accept()
                sock.settimeout(max(end - time.monotonic(), 0.1))
                secret, peer, lane = HELLO.unpack(sock.recv(HELLO.size, socket.MSG_WAITALL))
                if secret == self.secret and (lane, peer) in missing:
                    self.links[lane][peer] = Link(sock, peer)
                else:
                    sock.close()
        except (OSError, struct.error) as error:
            raise TransportError(f"socketnic: rank {rank} cannot connect ranks {list(peers)}: {error}") from error
        super().connect(rank, addresses, peers, lanes, timeout_s)

    def post_writes(self, lane: int, writes: list[Write]) -> int:
        for index, write in enumerate(writes):
            link = self.links[lane].get(write.peer)
            if link is None or write.nbytes > MAX_MESSAGE:
                return index or (-errno.EMSGSIZE if link else -errno.EINVAL)
            if len(link.unacknowledged) >= QUEUE_DEPTH:
                return index
            source = self.view(write.local_region, write.local_offset, write.nbytes)  # raises where out of bounds
            kind, immediate = (WRITE, 0) if write.immediate is None else (WRITE_IMMEDIATE, write.immediate)
            header = (kind, write.remote_region, write.remote_offset, write.nbytes, immediate, write.token)
            link.unacknowledged.add(write.token)
            link.outgoing.append(FRAME.pack(*header))
            if write.nbytes:
                link.outgoing.append(source)  # not copied: the caller keeps it unchanged until the completion
            link.transfer()
        return len(writes)

    def poll_completions(self, lane: int, capacity: int) -> list[tuple[int, int]]:
        self.progress(lane)
        done = self.completions[lane]
        return [done.popleft() for _ in range(min(capacity, len(done)))]

    def poll_arrivals(self, lane: int, capacity: int) -> list[tuple[int, int]]:
        self.progress(lane)
        arrived = self.arrivals[lane]
        return [arrived.popleft() for _ in range(min(capacity, len(arrived)))]

    def progress(self, lane: int) -> None:
        for link in self.links[lane].values():
            link.transfer()
            self.take_frames(lane, link)
            if not link.alive:
                self.completions[lane].extend((token, -errno.ENOTCONN) for token in link.unacknowledged)
                link.unacknowledged.clear()

    def take_frames(self, lane: int, link: Link) -> None:
        while len(link.incoming) >= FRAME.size:
            kind, region, offset, nbytes, immediate, token = FRAME.unpack_from(link.incoming)
            if len(link.incoming) < FRAME.size + nbytes:
                return
            payload = bytes(link.incoming[FRAME.size : FRAME.size + nbytes])
            del link.incoming[: FRAME.size + nbytes]
            if kind == ACKNOWLEDGE:
                link.unacknowledged.discard(token)
                self.completions[lane].append((token, -region))
                continue
            status = self.place(region, offset, payload)
            if kind == WRITE_IMMEDIATE and status == 0:
                self.arrivals[lane].append((immediate, link.peer))
            link.outgoing.append(FRAME.pack(ACKNOWLEDGE, status, 0, 0, 0, token))

    def place(self, region: int, offset: int, payload: bytes) -> int:
        try:
            if len(payload) == 8 and offset % 8 == 0:  # a word that somebody polls must not tear
                self.raise_word(region, offset, int.from_bytes(payload, "little"))
            else:
                self.view(region, offset, len(payload))[:] = payload
        except TransportError:
            return errno.EFAULT
        return 0

    def close(self) -> None:
        for link in [link for links in self.links for link in links.values()]:
            link.sock.close()
        self.links = []
        self.listener.close()
