"""One opened device: context, protection domain, registered memory. A transport has one or several."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
from typing import Any

from uccl_ep_core.errors import BackendUnavailableError, TransportError
from uccl_ep_core.transport import Memory

from . import discovery
from .loader import Verbs
from .settings import Settings

CHUNK_BYTES = 1 << 30
"""Length of the parts of memory that a device refuses as a whole; some refuse dma-bufs over 2 GiB."""

MAX_READS = 16
"""Reads in flight on a queue pair; only the fencing reads of the fenced plan are."""

MTU_CODES = {256: 1, 512: 2, 1024: 3, 2048: 4, 4096: 5}
RELAXED_ORDERING = 1 << 20  # IBV_ACCESS_RELAXED_ORDERING; ignored by devices that do not know it


@dataclasses.dataclass(frozen=True)
class Registration:
    """Memory as its owner (lkeys) and its writers (rkeys) name it."""

    base: int
    nbytes: int
    chunk_bytes: int
    lkeys: list[int]
    rkeys: list[int]
    readable: bool


class Rail:
    """An opened device with everything that its lanes share."""

    def __init__(self, verbs: Verbs, nic: discovery.Nic, settings: Settings) -> None:
        if nic.kind is None or not nic.usable:
            raise BackendUnavailableError(f"RDMA device {nic.name}: {nic.reason}; {nic.remedy}")
        self.verbs = verbs
        self.nic = nic
        self.kind = nic.kind
        self.settings = settings
        self._regions: list[Any] = []
        try:
            self.context = verbs.device.Context(name=nic.name)
            self.limits = self.context.query_device()
            self.port = next(port.number for port in nic.ports if port.active and settings.port in (0, port.number))
            self.port_limits = self.context.query_port(self.port)
            self.domain = verbs.pd.PD(self.context)
        except Exception as error:
            raise BackendUnavailableError(
                f"RDMA device {nic.name} cannot be opened: {error}; see that its user-space driver is installed "
                f"(ibverbs-providers) and that 'ulimit -l' allows locking memory"
            ) from error
        self.interface, self.ip, self.gid = self._address()
        self.mtu = self._mtu()
        enums = verbs.enums
        # The answer of a read is a remote write into this memory, as iWARP sees it.
        self.flush_buffer = verbs.mr.MR(self.domain, 4096, enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE)
        self.inline_bytes = self._inline_limit()
        self.dmabuf = self._has_dmabuf()

    @property
    def name(self) -> str:
        return f"{self.nic.name} port {self.port}"

    @property
    def reads(self) -> int:
        return max(1, min(MAX_READS, self.limits.max_qp_rd_atom, self.limits.max_qp_init_rd_atom or MAX_READS))

    def _address(self) -> tuple[str, str, discovery.Gid | None]:
        table = discovery.gids(self.context, self.port, self.port_limits.gid_tbl_len * len(self.nic.ports))
        if self.kind != "iwarp":
            try:
                gid = discovery.choose_gid(table, self.kind, self.settings)
            except LookupError as error:
                raise BackendUnavailableError(f"RDMA device {self.nic.name}: {error}") from None
            return gid.interface, str(gid.ipv4 or ""), gid
        interface = self.settings.interface
        if not interface and table:
            interface = discovery.interface_of_mac(table[0].gid.packed[:6])
        ip = discovery.ipv4_of(interface) if interface else ""
        if not ip:
            raise BackendUnavailableError(
                f"iWARP device {self.nic.name} connects by IP address, and its network interface "
                f"({interface or 'unknown: set the option interface'}) has none; give it an IPv4 address"
            )
        return interface, ip, None

    def _mtu(self) -> int:
        active = {code: nbytes for nbytes, code in MTU_CODES.items()}.get(self.port_limits.active_mtu, 1024)
        return min(active, self.settings.mtu or active)

    def _inline_limit(self) -> int:
        """The most bytes, up to the option's, that a queue pair of this device takes inline."""
        enums = self.verbs.enums
        wanted = self.settings.inline_bytes
        for nbytes in [size for size in (wanted, 256, 128, 64, 32, 16, 8) if size <= wanted and size >= 8]:
            with contextlib.suppress(Exception):
                queue = self.verbs.cq.CQ(self.context, 16)
                cap = self.verbs.qp.QPCap(
                    max_send_wr=8, max_recv_wr=1, max_send_sge=1, max_recv_sge=1, max_inline_data=nbytes
                )
                init = self.verbs.qp.QPInitAttr(qp_type=enums.IBV_QPT_RC, scq=queue, rcq=queue, cap=cap)
                probe = self.verbs.qp.QP(self.domain, init)
                probe.close()
                queue.close()
                return nbytes
        return 0

    def _has_dmabuf(self) -> bool:
        """Whether kernel and driver know dma-bufs: a bad descriptor is refused as such only by those that do."""
        if not hasattr(self.verbs.mr, "DmaBufMR"):
            return False
        try:
            access = self.verbs.enums.IBV_ACCESS_LOCAL_WRITE
            self.verbs.mr.DmaBufMR(self.domain, 4096, access, dmabuf=-1, offset=0).close()
        except Exception as error:
            return getattr(error, "error_code", errno.EOPNOTSUPP) == errno.EBADF
        return True

    @property
    def gpu_memory(self) -> str:
        """How GPU memory is registered: "dma-buf", "peer memory", or "" where it cannot be."""
        if self.settings.gpu_memory == "staged":
            return ""
        if self.dmabuf:
            return "dma-buf"
        modules = ("module/nvidia_peermem", "module/nv_peer_mem", "kernel/mm/memory_peers/amdkfd")
        return "peer memory" if any((discovery.SYSFS / module).exists() for module in modules) else ""

    @property
    def max_registration(self) -> int:
        return self.settings.max_registration

    def register(self, memory: Memory) -> Registration:
        """Register memory, in parts where the device refuses the whole."""
        if memory.device is not None and not self.gpu_memory:
            raise TransportError(
                f"{self.nic.name} cannot register GPU memory (no dma-buf support, no peer memory module): use host "
                f"memory, or load nvidia_peermem"
            )
        limit = self.max_registration
        sizes = [limit] if limit and limit < memory.nbytes else [memory.nbytes]
        if sizes[0] > CHUNK_BYTES:
            sizes.append(CHUNK_BYTES)
        failure: Exception | None = None
        for chunk in sizes:
            parts: list[Any] = []
            try:
                for offset in range(0, memory.nbytes, chunk):
                    parts.append(self._register_part(memory, offset, min(chunk, memory.nbytes - offset)))
            except Exception as error:
                failure = error
                for part in parts:
                    part.close()
                continue
            self._regions += parts
            by_fd = memory.device is not None and self.gpu_memory == "dma-buf"
            lkeys, rkeys = [part.lkey for part in parts], [part.rkey for part in parts]
            return Registration(
                0 if by_fd else memory.pointer, memory.nbytes, chunk, lkeys, rkeys, memory.device is None
            )
        where = "host memory" if memory.device is None else f"memory of GPU {memory.device} ({self.gpu_memory})"
        raise TransportError(
            f"{self.nic.name} cannot register {memory.nbytes} bytes of {where}: {failure}; for host memory raise "
            f"'ulimit -l', for GPU memory set gpu_memory=staged"
        )

    def _register_part(self, memory: Memory, offset: int, nbytes: int) -> Any:
        enums = self.verbs.enums
        access = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE | enums.IBV_ACCESS_REMOTE_READ
        if self.settings.relaxed_ordering:
            access |= RELAXED_ORDERING
        if memory.device is not None and self.gpu_memory == "dma-buf":
            if memory.dmabuf_fd is None:
                raise TransportError("the GPU backend exported no dma-buf for this window")
            return self.verbs.mr.DmaBufMR(self.domain, nbytes, access, dmabuf=memory.dmabuf_fd, offset=offset)
        return self.verbs.mr.MR(self.domain, nbytes, access, address=memory.pointer + offset)

    def close(self) -> None:
        """Release all that this object made; queue pairs and completion queues are closed before."""
        for part in self._regions:
            with contextlib.suppress(Exception):
                part.close()
        self._regions = []
        for thing in (self.flush_buffer, self.domain, self.context):
            with contextlib.suppress(Exception):
                thing.close()
