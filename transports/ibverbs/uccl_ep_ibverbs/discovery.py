"""RDMA devices of this host, from sysfs: which can be used, and which is best."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import ipaddress
import os
import pathlib
import re
import socket
import struct
import sys
from typing import Any, Literal

from .settings import Settings

Kind = Literal["infiniband", "roce", "iwarp"]

SYSFS = pathlib.Path("/sys")
NO_DEVICE_REMEDY = (
    "load the NIC's driver, or make a software device on a network interface: 'modprobe rdma_rxe; rdma link add "
    "rxe0 type rxe netdev eth0'; 'make softroce' tests on such devices without touching this kernel"
)


@dataclasses.dataclass(frozen=True)
class Port:
    number: int
    active: bool
    state: str
    gbits: float


@dataclasses.dataclass(frozen=True)
class Nic:
    """One RDMA device as sysfs describes it."""

    name: str
    kind: Kind | None
    """None: no connected queue pairs (for example EFA)."""
    driver: str
    pci_path: tuple[str, ...]
    """Folders of sysfs from the root complex to the device; empty for software devices."""
    ports: tuple[Port, ...]
    reason: str
    remedy: str

    @property
    def usable(self) -> bool:
        return not self.reason


def read(path: pathlib.Path) -> str:
    """A file of sysfs without its newline; "" where it cannot be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def names() -> list[str]:
    folder = SYSFS / "class/infiniband"
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def _pci_path(name: str) -> tuple[str, ...]:
    device = SYSFS / "class/infiniband" / name / "device"
    return pathlib.Path(os.path.realpath(device)).parts if device.exists() else ()


def _ports(name: str) -> tuple[Port, ...]:
    folder = SYSFS / "class/infiniband" / name / "ports"
    found = []
    for entry in sorted(folder.iterdir(), key=lambda path: int(path.name)) if folder.is_dir() else []:
        state = read(entry / "state")
        rate = re.match(r"([\d.]+)", read(entry / "rate"))
        found.append(Port(int(entry.name), "ACTIVE" in state, state, float(rate.group(1)) if rate else 0.0))
    return tuple(found)


def _character_device(name: str) -> pathlib.Path | None:
    for entry in sorted((SYSFS / "class/infiniband_verbs").glob("uverbs*")):
        if read(entry / "ibdev") == name:
            return pathlib.Path("/dev/infiniband") / entry.name
    return None


def _obstacle(name: str, kind: Kind | None, driver: str, ports: tuple[Port, ...], wanted_port: int) -> tuple[str, str]:
    if kind is None:
        return (
            f"its driver ({driver or 'unknown'}) offers no reliable connected queue pairs",
            "use the transport libfabric; for EFA with provider=efa",
        )
    node = _character_device(name)
    if node is None:
        return "the kernel offers no verbs for it", "load the kernel module ib_uverbs"
    if not os.access(node, os.R_OK | os.W_OK):
        return f"{node} cannot be opened by this user", f"give this user (or container) read and write access to {node}"
    chosen = [port for port in ports if wanted_port in (0, port.number)]
    if not chosen:
        numbers = ", ".join(str(port.number) for port in ports)
        return f"it has no port {wanted_port}", f"use one of its ports: {numbers}"
    if not any(port.active for port in chosen):
        remedy = "check cable, switch and 'ip link'; for InfiniBand also the subnet manager"
        return f"no port is active ({chosen[0].state})", remedy
    return "", ""


def nic(name: str, settings: Settings) -> Nic:
    folder = SYSFS / "class/infiniband" / name
    node_type = read(folder / "node_type").partition(":")[0]
    link_layers = {read(path / "link_layer") for path in (folder / "ports").glob("*")}
    kind: Kind | None = None
    if node_type == "4":
        kind = "iwarp"
    elif node_type == "1":
        kind = "infiniband" if "InfiniBand" in link_layers else "roce"
    driver = os.path.basename(os.path.realpath(folder / "device/driver")) if (folder / "device/driver").exists() else ""
    ports = _ports(name)
    reason, remedy = _obstacle(name, kind, driver, ports, settings.port)
    return Nic(name, kind, driver or "software", _pci_path(name), ports, reason, remedy)


def gpu_pci_path(near: str) -> tuple[str, ...]:
    """Where in the PCIe tree the GPU sits; empty where that is unknown or there is none."""
    address = near
    torch = sys.modules.get("torch")
    if not address and torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        if hasattr(properties, "pci_bus_id"):
            domain, bus, device = (getattr(properties, f"pci_{part}_id") for part in ("domain", "bus", "device"))
            address = f"{domain:04x}:{bus:02x}:{device:02x}.0"
    device = SYSFS / "bus/pci/devices" / address.lower()
    return pathlib.Path(os.path.realpath(device)).parts if address and device.exists() else ()


def distance(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """Links between two places of the PCIe tree: up to the common bridge and down again."""
    common = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        common += 1
    return len(one) + len(other) - 2 * common


def rank_devices(nics: list[Nic], gpu: tuple[str, ...]) -> list[Nic]:
    """Usable devices, best first: hardware before software, immediates before iWARP, near before far, then speed."""

    def cost(it: Nic) -> tuple[bool, bool, int, float, str]:
        far = distance(gpu, it.pci_path) if gpu and it.pci_path else 0
        speed = max((port.gbits for port in it.ports if port.active), default=0.0)
        return (not it.pci_path, it.kind == "iwarp", far, -speed, it.name)

    return sorted((it for it in nics if it.usable), key=cost)


@dataclasses.dataclass(frozen=True)
class Gid:
    index: int
    gid: ipaddress.IPv6Address
    version: str
    interface: str

    @property
    def ipv4(self) -> ipaddress.IPv4Address | None:
        return self.gid.ipv4_mapped


GID_TYPES = {0: "InfiniBand", 1: "RoCE v1", 2: "RoCE v2"}


def gids(context: Any, port: int, capacity: int) -> list[Gid]:
    """The filled entries of a port's GID table. In one call of the opened device: sysfs has a file for
    each of up to thousands of entries, nearly all of them empty."""
    found = []
    for entry in context.query_gid_table(max(1, capacity)):
        interface = ""
        if entry.ndev_ifindex:
            with contextlib.suppress(OSError):
                interface = socket.if_indextoname(entry.ndev_ifindex)
        if entry.port_num == port:
            version = GID_TYPES.get(entry.gid_type, str(entry.gid_type))
            text = entry.gid_str() if callable(entry.gid_str) else entry.gid_str
            found.append(Gid(entry.gid_index, ipaddress.IPv6Address(text), version, interface))
    return found


def choose_gid(table: list[Gid], kind: Kind, settings: Settings) -> Gid:
    """The source GID: what the options say, else RoCE v2 by IPv4, by IPv6, link-local, then RoCE v1.

    Raises:
        LookupError: nothing fits; the message lists what there is.
    """
    listing = "; ".join(f"{it.index}: {it.gid} {it.version} {it.interface}".strip() for it in table) or "none"
    fitting = [it for it in table if settings.interface in ("", it.interface)]
    if settings.gid_index >= 0:
        fitting = [it for it in fitting if it.index == settings.gid_index]
    if not fitting:
        wanted = f"gid_index={settings.gid_index}, interface={settings.interface!r}"
        raise LookupError(f"no GID fits {wanted}; the port has {listing}")

    def cost(it: Gid) -> tuple[bool, bool, bool, int]:
        return (kind == "roce" and "v2" not in it.version, it.ipv4 is None, it.gid.is_link_local, it.index)

    return fitting[0] if kind == "infiniband" else min(fitting, key=cost)


def interface_of_mac(mac: bytes) -> str:
    """The network interface with this hardware address; an iWARP device's GID holds it."""
    wanted = ":".join(f"{byte:02x}" for byte in mac)
    for entry in sorted((SYSFS / "class/net").iterdir()):
        if read(entry / "address") == wanted:
            return entry.name
    return ""


def ipv4_of(interface: str) -> str:
    """The first IPv4 address of a network interface; "" where it has none."""
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])
