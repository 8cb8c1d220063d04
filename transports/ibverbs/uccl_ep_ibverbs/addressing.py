"""What a rank tells its peers about itself; carried by the library as opaque bytes."""

from __future__ import annotations

import dataclasses
import ipaddress
import json

from uccl_ep_core.errors import TransportError

VERSION = 1


@dataclasses.dataclass(frozen=True)
class RegionAddress:
    """A registered region of a peer: address of its first byte, length, and a key for each chunk."""

    base: int
    nbytes: int
    chunk_bytes: int
    keys: list[int]


@dataclasses.dataclass(frozen=True)
class RailAddress:
    """One device of a peer.

    Attributes:
        kind: "infiniband", "roce" or "iwarp".
        gid: as text; "" for iWARP.
        lid: InfiniBand local identifier, 0 for the others.
        hello_qp: number of the datagram queue pair that exchanges queue pair numbers; 0 for iWARP.
        ip, cm_port: where rdma_cm listens; iWARP only.
        mtu: of the port, in bytes.
        reads: reads it can serve at a time on one queue pair.
    """

    device: str
    kind: str
    gid: str
    lid: int
    hello_qp: int
    ip: str
    cm_port: int
    mtu: int
    reads: int
    regions: list[RegionAddress]


@dataclasses.dataclass(frozen=True)
class Address:
    """A rank. The nonce tells this buffer's messages from those of an earlier one with the same numbers."""

    host: str
    nonce: int
    rails: list[RailAddress]

    def pack(self) -> bytes:
        return json.dumps({"version": VERSION, **dataclasses.asdict(self)}).encode()

    @classmethod
    def unpack(cls, data: bytes, rank: int) -> Address:
        try:
            fields = json.loads(data)
            if fields["version"] != VERSION:
                raise ValueError(f"version {fields['version']}, not {VERSION}")
            rails = [
                RailAddress(**{**rail, "regions": [RegionAddress(**region) for region in rail["regions"]]})
                for rail in fields["rails"]
            ]
            return cls(fields["host"], fields["nonce"], rails)
        except (ValueError, KeyError, TypeError) as error:
            raise TransportError(
                f"the address of rank {rank} is not one of this ibverbs transport ({error}): all ranks must use the "
                f"same version of uccl_ep"
            ) from error


def same_subnet(one: str, other: str) -> bool:
    """Whether two GIDs share their 64-bit prefix, so that InfiniBand needs no global header between them."""
    return ipaddress.IPv6Address(one).packed[:8] == ipaddress.IPv6Address(other).packed[:8]
