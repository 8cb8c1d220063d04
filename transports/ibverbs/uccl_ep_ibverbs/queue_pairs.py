"""Reliable connected queue pairs: creation, and the walk from RESET to RTS."""

from __future__ import annotations

import dataclasses
import ipaddress
import threading
from typing import Any

from uccl_ep_core.errors import TransportError

from .addressing import RailAddress, same_subnet
from .rail import MTU_CODES, Rail


@dataclasses.dataclass
class QueuePair:
    """One end of one lane to one peer."""

    lane: int
    peer: int
    rail: Rail
    qp: Any
    psn: int
    send_queue: Any
    receive_queue: Any
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock, repr=False)
    """Held while ``qp`` is exchanged or used by another thread than the one that exchanges it."""

    @property
    def number(self) -> int:
        return int(self.qp.qp_num)

    def fail(self) -> None:
        """Move the queue pair to its error state: all that was posted on it comes back, and nothing more arrives."""
        enums = self.rail.verbs.enums
        with self.lock:
            self.qp.modify(self.rail.verbs.qp.QPAttr(qp_state=enums.IBV_QPS_ERR), enums.IBV_QP_STATE)

    def __str__(self) -> str:
        return f"{self.rail.name}, towards rank {self.peer} (lane {self.lane}, queue pair {self.number})"


def create(
    rail: Rail, send_queue: Any, receive_queue: Any, lane: int, peer: int, psn: int, depths: tuple[int, int]
) -> QueuePair:
    """A queue pair in state INIT, in which receives can be posted."""
    verbs, enums = rail.verbs, rail.verbs.enums
    cap = verbs.qp.QPCap(
        max_send_wr=depths[0],
        max_recv_wr=depths[1],
        max_send_sge=1,
        max_recv_sge=1,
        max_inline_data=rail.inline_bytes,
    )
    init = verbs.qp.QPInitAttr(qp_type=enums.IBV_QPT_RC, scq=send_queue, rcq=receive_queue, cap=cap, sq_sig_all=0)
    try:
        pair = QueuePair(lane, peer, rail, verbs.qp.QP(rail.domain, init), psn, send_queue, receive_queue)
        attr = verbs.qp.QPAttr(qp_state=enums.IBV_QPS_INIT, port_num=rail.port)
        attr.qp_access_flags = enums.IBV_ACCESS_REMOTE_WRITE | enums.IBV_ACCESS_REMOTE_READ
        mask = enums.IBV_QP_STATE | enums.IBV_QP_ACCESS_FLAGS
        if rail.kind != "iwarp":
            mask |= enums.IBV_QP_PKEY_INDEX | enums.IBV_QP_PORT
        pair.qp.modify(attr, mask)
    except Exception as error:
        raise TransportError(
            f"{rail.name} cannot make a queue pair with {depths[0]} sends and {depths[1]} receives towards rank "
            f"{peer}: {error}; lower the options send_depth, receive_depth or lanes"
        ) from error
    return pair


def address_handle(rail: Rail, peer: RailAddress) -> Any:
    """The route to a peer: by GID on RoCE and between InfiniBand subnets, else by LID."""
    verbs, settings = rail.verbs, rail.settings
    assert rail.gid is not None
    route = verbs.addr.GlobalRoute(
        dgid=verbs.addr.GID(_gid_text(peer.gid)),
        sgid_index=rail.gid.index,
        hop_limit=64,
        traffic_class=settings.traffic_class,
    )
    by_gid = rail.kind == "roce" or not peer.lid or not same_subnet(str(rail.gid.gid), peer.gid)
    return verbs.addr.AHAttr(
        dlid=peer.lid, sl=settings.service_level, port_num=rail.port, is_global=int(by_gid), gr=route
    )


def _gid_text(gid: str) -> str:
    """pyverbs reads a GID as eight full groups."""
    return ipaddress.IPv6Address(gid).exploded


def connect(pair: QueuePair, peer: RailAddress, remote_number: int, remote_psn: int) -> None:
    """INIT to RTR to RTS, towards a queue pair of an InfiniBand or RoCE peer."""
    rail, verbs, enums, settings = pair.rail, pair.rail.verbs, pair.rail.verbs.enums, pair.rail.settings
    try:
        attr = verbs.qp.QPAttr(qp_state=enums.IBV_QPS_RTR, port_num=rail.port)
        attr.path_mtu = MTU_CODES[min(rail.mtu, peer.mtu)]
        attr.dest_qp_num = remote_number
        attr.rq_psn = remote_psn
        attr.max_dest_rd_atomic = rail.reads
        attr.min_rnr_timer = 12  # 0.64 ms between retries of a sender that met an empty receive queue
        attr.ah_attr = address_handle(rail, peer)
        pair.qp.modify(
            attr,
            enums.IBV_QP_STATE
            | enums.IBV_QP_AV
            | enums.IBV_QP_PATH_MTU
            | enums.IBV_QP_DEST_QPN
            | enums.IBV_QP_RQ_PSN
            | enums.IBV_QP_MAX_DEST_RD_ATOMIC
            | enums.IBV_QP_MIN_RNR_TIMER,
        )
        attr = verbs.qp.QPAttr(qp_state=enums.IBV_QPS_RTS, port_num=rail.port)
        attr.timeout = settings.timeout
        attr.retry_cnt = settings.retry
        attr.rnr_retry = settings.rnr_retry
        attr.sq_psn = pair.psn
        attr.max_rd_atomic = min(rail.reads, peer.reads)
        pair.qp.modify(
            attr,
            enums.IBV_QP_STATE
            | enums.IBV_QP_TIMEOUT
            | enums.IBV_QP_RETRY_CNT
            | enums.IBV_QP_RNR_RETRY
            | enums.IBV_QP_SQ_PSN
            | enums.IBV_QP_MAX_QP_RD_ATOMIC,
        )
    except Exception as error:
        raise TransportError(
            f"{pair} cannot be connected to {peer.device} at {peer.gid}: {error}; see that the two can reach each "
            f"other ('ping' between their addresses for RoCE) and that gid_index and mtu suit both"
        ) from error
