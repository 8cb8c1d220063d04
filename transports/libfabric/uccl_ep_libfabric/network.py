"""Local IP addresses: which one an endpoint binds to. Nothing here sends a packet."""

from __future__ import annotations

import fcntl
import ipaddress
import pathlib
import socket
import struct

SIOCGIFADDR = 0x8915
LOOPBACK = "127.0.0.1"


def address_of(interface: str) -> str | None:
    """The IPv4 address of an interface, else its first IPv6 address that is not link-local, else None."""
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24])
        except OSError:
            pass
    table = pathlib.Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else []:
        fields = line.split()
        address = ipaddress.IPv6Address(bytes.fromhex(fields[0]))
        if fields[5] == interface and not address.is_link_local:
            return str(address)
    return None


def interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def default_address() -> tuple[str, str]:
    """The address that packets to elsewhere would leave from, and why it was taken."""
    # Connecting a datagram socket only looks up the route. The address is of a documentation network.
    for family, elsewhere in ((socket.AF_INET, "198.51.100.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((elsewhere, 9))
                return str(probe.getsockname()[0]), "source of the default route"
        except OSError:
            continue
    return LOOPBACK, "this machine has no default route, so only ranks of this machine can be reached"


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
