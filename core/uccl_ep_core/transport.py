"""Contract 2: the transport. The set-up half is here; the data half is `uccl_ep/transport.h`.

A transport plugin is a class with this interface, published under the entry-point group
``uccl_ep.transports``; the entry point's name is the plugin's name::

    [project.entry-points."uccl_ep.transports"]
    mynic = "my_package:MyNicTransport"

Life of a transport object, the same on every rank of a group::

    transport = MyNicTransport.open(device, options)      # one object per buffer and rank
    transport.register(data_window)                       # region 0
    transport.register(control_window)                    # region 1
    address = transport.address()                         # any bytes; the library carries them
    transport.connect(rank, addresses)                    # addresses[i] is rank i's, own one included
    ... proxy threads use transport.native_ops ...
    transport.close()                                     # idempotent; the proxies have stopped

The library moves the addresses through the caller's process group: a transport listens on no port
for that, and `connect` finds every peer already past its `address()`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from .capabilities import Capabilities


@dataclasses.dataclass(frozen=True)
class Memory:
    """A piece of memory that a transport is asked to register.

    Attributes:
        pointer: address in this process, in bytes; a device address where ``device`` is set.
        nbytes: length in bytes.
        device: None for host memory, else the GPU's ordinal.
        share_handle: bytes with which another process of this host can map this memory through
            `uccl_ep_core.shared_memory.attach`, or None where it cannot be shared.
        dmabuf_fd: file descriptor of a dma-buf that covers device memory, or None.
    """

    pointer: int
    nbytes: int
    device: int | None = None
    share_handle: bytes | None = None
    dmabuf_fd: int | None = None


@dataclasses.dataclass(frozen=True)
class Device:
    """One device that `Transport.probe` found, usable or not.

    Attributes:
        name: what the user selects it by.
        usable: whether `open` would succeed.
        reason: why not, or what speaks for it.
        remedy: what the user can do about it ("" where usable).
        details: facts worth showing in ``uccl-ep info`` (link, address, PCIe place ...).
    """

    name: str
    usable: bool
    reason: str = ""
    remedy: str = ""
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of a plugin, as declared in its ``OPTIONS``.

    Attributes:
        default: the default value; its type is the option's type (bool, int, float or str).
        help: one line for people.
        choices: the only values allowed, or None.
        minimum: least value of a number, or None.
        maximum: greatest value of a number, or None.
    """

    default: bool | int | float | str
    help: str
    choices: tuple[Any, ...] | None = None
    minimum: float | None = None
    maximum: float | None = None


class Transport(abc.ABC):
    """The set-up half of a transport. One object serves one rank of one buffer."""

    OPTIONS: ClassVar[Mapping[str, Option]] = {}
    """The plugin's own options by name; values arrive validated in `open`."""

    @classmethod
    @abc.abstractmethod
    def probe(cls, options: Mapping[str, Any]) -> Sequence[Device]:
        """List the devices, each refused one with its reason and remedy. Never raises, opens nothing for long."""

    @classmethod
    @abc.abstractmethod
    def open(cls, device: str | None, options: Mapping[str, Any]) -> Transport:
        """Open a device (None: the best one). Raises `BackendUnavailableError` with the remedy."""

    @property
    @abc.abstractmethod
    def capabilities(self) -> Capabilities:
        """The promises of the opened device; final after `open`."""

    @abc.abstractmethod
    def register(self, memory: Memory) -> int:
        """Register memory and return its region number: 0, 1, ... in the order of calls.

        Raises `TransportError` where the memory cannot be registered, naming the kind that could.
        """

    @abc.abstractmethod
    def address(self) -> bytes:
        """All that a peer needs to write into the registered memory (endpoints, keys, base addresses)."""

    @abc.abstractmethod
    def connect(
        self, rank: int, addresses: Sequence[bytes], peers: Sequence[int], lanes: int, timeout_s: float
    ) -> None:
        """Make ``lanes`` lanes to each rank in ``peers``. Collective over the group.

        Args:
            rank: this rank.
            addresses: every rank's `address()`, indexed by rank.
            peers: ranks that will be written to and from; never contains ``rank``.
            lanes: lanes to make, at most ``capabilities.lanes``.
            timeout_s: give up after this many seconds with a `TransportError` that names the peer.
        """

    @property
    @abc.abstractmethod
    def native_ops(self) -> int:
        """Address of the ``uccl_ep_transport_ops`` of this object; valid from `connect` to `close`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release everything. May be called twice, and after a failed `connect`."""

    def break_lane(self, lane: int) -> bool:
        """Make a connected lane fail as an error of its device would, so that its renewal can be tested.

        For transports whose table has ``renew_lane`` (`uccl_ep/transport.h`); called by the thread that drives the
        lane. What is under way then completes with an error, soon or at the next poll.

        Returns:
            Whether that was done; False, the default, where the transport has no means of its own.
        """
        return False

    def describe(self) -> Mapping[str, Any]:
        """Facts for ``uccl-ep info``: device, addresses, rails, what was chosen and why."""
        return {}
