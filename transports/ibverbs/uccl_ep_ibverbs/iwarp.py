"""Connecting iWARP queue pairs, which only rdma_cm can.

The queue pairs are ordinary ones of the rail; rdma_cm is told their numbers. Of two ranks the lower
listens, at the port in its address, and the higher connects, once for each lane; private data of
the request say which. An iWARP acceptor must not send before the initiator has: so the initiator
sends one message, and the acceptor waits for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

from uccl_ep_core.errors import TransportError

from . import raw
from .addressing import Address
from .queue_pairs import QueuePair
from .rail import Rail

_REQUEST = struct.Struct("<4sIIIQQ")  # magic, from, to, lane, nonce of the sender, nonce of the receiver
_MAGIC = b"UEPW"
_TRIES = 5
GREETING_OFFSET = 64  # in the flush buffer, behind the byte that fencing reads land in
_RESOLVE_MS = 2000


@dataclasses.dataclass
class _Call:
    """One connection that this rank initiates."""

    pair: QueuePair
    address: tuple[str, int]
    channel: Any = None
    cmid: Any = None
    tries: int = 0
    done: bool = False


class Listener:
    """The rdma_cm side of one iWARP device."""

    def __init__(self, rail: Rail) -> None:
        self._rail = rail
        cmid = rail.verbs.cmid
        self._channel = cmid.CMEventChannel()
        self._listener = cmid.CMID(creator=self._channel)
        self._fd = raw.event_channel_fd(self._channel)
        self._listener.bind_addr(cmid.AddrInfo(src=rail.ip))
        found = _text(self._listener.dev_name)
        if found != rail.nic.name:
            raise TransportError(
                f"rdma_cm finds {found}, not {rail.nic.name}, by the address {rail.ip}: two devices lie on "
                f"{rail.interface}; put them on different interfaces, or use {found}"
            )
        self._listener.listen(backlog=512)
        self.port = raw.source_port(self._listener)
        self._accepted: dict[int, tuple[QueuePair, Any]] = {}  # by rdma_cm id
        self._calls: list[_Call] = []

    def expect(self, pair: QueuePair) -> None:
        """Post the receive of the initiator's first message, before any other receive."""
        pair.qp.post_recv(self._rail.verbs.wr.RecvWR(0, 1, [self._greeting()]))

    def connect(
        self,
        rank: int,
        nonce: int,
        addresses: Mapping[int, Address],
        rail_index: int,
        pairs: Sequence[QueuePair],
        deadline: float,
    ) -> None:
        """Connect all queue pairs of this rail."""
        self._nonce, self._rank, self._addresses = nonce, rank, addresses
        waiting = {(pair.peer, pair.lane): pair for pair in pairs if pair.peer > rank}
        established: set[int] = set()
        expected = len(waiting)
        self._calls = []
        for pair in pairs:
            if pair.peer < rank:
                where = addresses[pair.peer].rails[rail_index]
                call = _Call(pair, (where.ip, where.cm_port))
                self._calls.append(call)
                self._start(call)
        while len(established) < expected or not all(call.done for call in self._calls):
            self._check(deadline, waiting, established)
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            by_fd = {raw.event_channel_fd(call.channel): call for call in self._calls if not call.done}
            for fd in by_fd:
                poll.register(fd, select.POLLIN)
            left = max(1, int(1000 * min(1.0, deadline - time.monotonic())))
            for fd, _ in poll.poll(left):
                if fd == self._fd:
                    self._serve(waiting, established)
                else:
                    self._advance(by_fd[fd])
        self._greet([call.pair for call in self._calls], [pair for pair, _ in self._accepted.values()], deadline)

    def _check(self, deadline: float, waiting: Mapping[Any, QueuePair], established: set[int]) -> None:
        if time.monotonic() < deadline:
            return
        late = [call.pair for call in self._calls if not call.done] or list(waiting.values())
        late += [pair for cm_id, (pair, _) in self._accepted.items() if cm_id not in established]
        raise TransportError(
            f"{late[0]} was not connected in time: see that this rank's process and host are up, and that "
            f"{self._rail.ip} can reach its address"
        )

    # --- the side that connects ---

    def _start(self, call: _Call) -> None:
        cmid = self._rail.verbs.cmid
        self._drop(call)
        call.tries += 1
        call.channel = cmid.CMEventChannel()
        call.cmid = cmid.CMID(creator=call.channel)
        target = cmid.AddrInfo(src=self._rail.ip, dst=call.address[0], dst_service=str(call.address[1]))
        call.cmid.resolve_addr(target, _RESOLVE_MS)

    def _advance(self, call: _Call) -> None:
        verbs, events = self._rail.verbs, self._rail.verbs.cm_enums
        event = verbs.cmid.CMEvent(call.channel)
        kind, words = event.event_type, event.event_str()
        event.ack_cm_event()
        if kind == events.RDMA_CM_EVENT_ADDR_RESOLVED:
            call.cmid.resolve_route(_RESOLVE_MS)
        elif kind == events.RDMA_CM_EVENT_ROUTE_RESOLVED:
            call.cmid.connect(self._request(call.pair))
        elif kind == events.RDMA_CM_EVENT_ESTABLISHED:
            call.done = True
        elif call.tries < _TRIES and kind != events.RDMA_CM_EVENT_REJECTED:
            self._start(call)
        else:
            raise TransportError(
                f"{call.pair} cannot be connected to {call.address[0]} port {call.address[1]}: {_text(words)}; see "
                f"that this rank runs the same version and that the address can be reached"
            )

    def _request(self, pair: QueuePair) -> Any:
        reads = self._rail.reads
        private = _REQUEST.pack(_MAGIC, self._rank, pair.peer, pair.lane, self._nonce, self._addresses[pair.peer].nonce)
        parameters = self._rail.verbs.cmid.ConnParam(
            resources=reads, depth=reads, qp_num=pair.number, data_len=len(private)
        )
        parameters.set_private_data(private)
        return parameters

    # --- the side that accepts ---

    def _serve(self, waiting: dict[tuple[int, int], QueuePair], established: set[int]) -> None:
        verbs, events = self._rail.verbs, self._rail.verbs.cm_enums
        event = verbs.cmid.CMEvent(self._channel)
        kind = event.event_type
        if kind == events.RDMA_CM_EVENT_CONNECT_REQUEST:
            cm_id = raw.event_id(event, raw.handle(self._listener))
            private = bytes(event.private_data)[: _REQUEST.size]
            request = verbs.cmid.CMID(creator=event, listen_id=self._listener)
            pair = self._named(private, waiting)
            if pair is None:
                request.reject()  # a stray, or of an earlier buffer that had this port
            else:
                del waiting[pair.peer, pair.lane]
                self._accepted[cm_id] = (pair, request)
                reads = self._rail.reads
                request.accept(verbs.cmid.ConnParam(resources=reads, depth=reads, qp_num=pair.number))
        else:
            cm_id = raw.event_id(event)
            pair_and_id = self._accepted.get(cm_id)
            if kind == events.RDMA_CM_EVENT_ESTABLISHED:
                established.add(cm_id)
            elif pair_and_id is not None and cm_id not in established:
                words = _text(event.event_str())
                event.ack_cm_event()
                raise TransportError(f"{pair_and_id[0]} could not be accepted: {words}; the other rank may have died")
        event.ack_cm_event()

    def _named(self, private: bytes, waiting: Mapping[tuple[int, int], QueuePair]) -> QueuePair | None:
        if len(private) < _REQUEST.size:
            return None
        magic, sender, receiver, lane, nonce, my_nonce = _REQUEST.unpack(private)
        known = magic == _MAGIC and receiver == self._rank and sender in self._addresses
        if not known or (nonce, my_nonce) != (self._addresses[sender].nonce, self._nonce):
            return None
        return waiting.get((sender, lane))

    def _greet(self, initiated: Sequence[QueuePair], accepted: Sequence[QueuePair], deadline: float) -> None:
        verbs, enums = self._rail.verbs, self._rail.verbs.enums
        for pair in initiated:
            pair.qp.post_send(verbs.wr.SendWR(0, opcode=enums.IBV_WR_SEND, num_sge=1, sg=[self._greeting()]))
        for pair in initiated:
            self._await_one(pair, pair.send_queue, deadline)
        for pair in accepted:
            self._await_one(pair, pair.receive_queue, deadline)

    def _greeting(self) -> Any:
        """One byte that means nothing: pyverbs posts no empty messages."""
        buffer = self._rail.flush_buffer
        return self._rail.verbs.wr.SGE(buffer.buf + GREETING_OFFSET, 1, buffer.lkey)

    def _await_one(self, pair: QueuePair, queue: Any, deadline: float) -> None:
        count, completions = queue.poll(1)
        while not count:
            if time.monotonic() > deadline:
                raise TransportError(f"{pair}: the first message did not come through in time")
            os.sched_yield()
            count, completions = queue.poll(1)
        if completions[0].status != self._rail.verbs.enums.IBV_WC_SUCCESS:
            raise TransportError(f"{pair}: the first message failed with status {completions[0].status}")

    # --- the end ---

    def _drop(self, call: _Call) -> None:
        for thing in (call.cmid, call.channel):
            if thing is not None:
                with contextlib.suppress(Exception):
                    thing.close()
        call.cmid = call.channel = None

    def close(self) -> None:
        """Disconnect all that this listener connected; the queue pairs are closed afterwards."""
        for call in self._calls:
            if call.done and call.cmid is not None:
                with contextlib.suppress(Exception):
                    call.cmid.disconnect()
            self._drop(call)
        for _, cmid in self._accepted.values():
            with contextlib.suppress(Exception):
                cmid.disconnect()
            with contextlib.suppress(Exception):
                cmid.close()
        self._calls, self._accepted = [], {}
        for thing in (self._listener, self._channel):
            with contextlib.suppress(Exception):
                thing.close()


def _text(words: Any) -> str:
    return words.decode(errors="replace") if isinstance(words, bytes) else str(words)
