"""What one rank tells the others: its endpoints, and the keys of its memory on each."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Sequence

from uccl_ep_core.errors import TransportError

from . import network
from .leftovers import Process

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """One rail of one lane.

    Attributes:
        name: the provider's address of the endpoint.
        keys: remote key of each region.
        bases: address of each region in its process, used where the provider addresses virtually.
        sizes: bytes of each region.
    """

    name: bytes
    keys: tuple[int, ...]
    bases: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Address:
    """One rank's address.

    Attributes:
        provider: libfabric's name of the provider; must be equal on all ranks.
        protocol: its wire protocol; likewise.
        library: version of libfabric, for error messages.
        process: the process behind it.
        host: the machine's name, for people.
        local_only: bound to loopback or to shared memory, so that only this machine reaches it.
        lanes: endpoints by lane, then by rail.
    """

    provider: str
    protocol: str
    library: str
    process: Process
    host: str
    local_only: bool
    lanes: tuple[tuple[Endpoint, ...], ...]

    def pack(self) -> bytes:
        lanes = [
            [[base64.b64encode(end.name).decode(), list(end.keys), list(end.bases), list(end.sizes)] for end in lane]
            for lane in self.lanes
        ]
        fields = {**dataclasses.asdict(self), "format": FORMAT, "lanes": lanes}
        return json.dumps(fields, separators=(",", ":")).encode()


def unpack(data: bytes, rank: int) -> Address:
    """Read `Address.pack`.

    Raises:
        TransportError: it is no address of this transport; names the rank.
    """
    try:
        fields = json.loads(data)
        version = fields.pop("format")
        if version != FORMAT:
            raise TransportError(
                f"libfabric: rank {rank} runs another version of uccl_ep (address format {version}, here {FORMAT}): "
                "install the same version on all ranks"
            )
        lanes: Sequence[Sequence[Sequence[object]]] = fields.pop("lanes")
        fields["process"] = Process(**fields["process"])
        ends = tuple(
            tuple(
                Endpoint(base64.b64decode(str(name)), tuple(keys), tuple(bases), tuple(sizes))  # type: ignore[arg-type]
                for name, keys, bases, sizes in lane
            )
            for lane in lanes
        )
        return Address(lanes=ends, **fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TransportError(
            f"libfabric: the address of rank {rank} is not one of this transport ({error}): "
            "all ranks must use transport libfabric"
        ) from error


def check_peer(mine: Address, peer: int, other: Address) -> None:
    """Refuse a peer that cannot be written to.

    Raises:
        TransportError: names the rank, what differs, and the option that would do.
    """
    where = f"rank {peer} on {other.host}"
    if (mine.provider, mine.protocol) != (other.provider, other.protocol):
        raise TransportError(
            f"libfabric: {where} uses provider {other.provider} ({other.protocol}, libfabric {other.library}), "
            f"this rank {mine.provider} ({mine.protocol}, libfabric {mine.library}): "
            "set the option provider alike on all ranks"
        )
    if [len(lane) for lane in mine.lanes] != [len(lane) for lane in other.lanes]:
        raise TransportError(
            f"libfabric: {where} has {len(other.lanes)} lanes of {len(other.lanes[0])} rails, this rank "
            f"{len(mine.lanes)} of {len(mine.lanes[0])}: set the options lanes and rails alike on all ranks"
        )
    example = next((name for name in network.interfaces() if name != "lo"), "eth0")
    if (mine.local_only or other.local_only) and mine.process.boot != other.process.boot:
        raise TransportError(
            f"libfabric: {where} is another machine, but loopback and shared memory reach only ranks of one "
            f"machine: bind to an address that both can reach, e.g. option interface={example}"
        )
