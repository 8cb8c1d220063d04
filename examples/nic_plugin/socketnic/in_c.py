"""The same NIC with its data half in C (data.c): what changes once the Python version passes the kit."""

import ctypes
import pathlib
import shlex
from typing import Any

from uccl_ep_core.errors import BackendUnavailableError, TransportError
from uccl_ep_core.files import include_directory
from uccl_ep_core.transport import Device

from . import SocketNic

HERE = pathlib.Path(__file__).parent
LIBRARY = HERE / "libdata.so"


def build_command(output: pathlib.Path = LIBRARY) -> list[str]:
    """How the data half is compiled."""
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-fPIC", "-shared", f"-I{include_directory()}"]
    return ["cc", *flags, str(HERE / "data.c"), "-o", str(output)]


class SocketNicC(SocketNic):
    """Set-up is inherited; `native_ops` is the table that data.c fills."""

    _nic: int | None = None

    @classmethod
    def probe(cls, options: Any) -> list[Device]:
        if not LIBRARY.exists():
            return [Device("sockets", False, f"{LIBRARY.name} is not built", shlex.join(build_command()))]
        return [Device("sockets", True, "TCP sockets, data half in C")]

    @classmethod
    def open(cls, device: str | None, options: Any) -> "SocketNicC":
        if not LIBRARY.exists():
            raise BackendUnavailableError(f"socketnic_c is not built: run {shlex.join(build_command())}")
        return cls(options.get("host", "127.0.0.1"))

    def connect(self, rank: int, addresses: Any, peers: Any, lanes: int, timeout_s: float) -> None:
        super().connect(rank, addresses, peers, lanes, timeout_s)
        self._library = library = ctypes.CDLL(str(LIBRARY))
        library.socketnic_new.restype = library.socketnic_ops.restype = ctypes.c_void_p
        nic = library.socketnic_new(len(addresses), lanes)
        if nic is None:
            raise TransportError(f"socketnic_c: {len(addresses)} ranks, at most 64")
        self._nic = nic
        for memory in self._regions:
            library.socketnic_region(
                ctypes.c_void_p(nic), ctypes.c_uint64(memory.pointer), ctypes.c_uint64(memory.nbytes)
            )
        for lane, links in enumerate(self.links):
            for peer, link in links.items():
                library.socketnic_link(ctypes.c_void_p(nic), lane, peer, link.sock.detach())  # closed by C from now on

    @property
    def native_ops(self) -> int:
        if self._nic is None:
            raise TransportError("socketnic_c: native_ops before connect()")
        return int(self._library.socketnic_ops(ctypes.c_void_p(self._nic)))

    def close(self) -> None:
        nic, self._nic = self._nic, None
        if nic is not None:
            self._library.socketnic_free(ctypes.c_void_p(nic))
        super().close()
