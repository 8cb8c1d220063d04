"""What `Buffer` and `ElasticBuffer` have in common: a communicator, its facts and its end."""

from __future__ import annotations

from typing import Any

import torch

from uccl_ep_core.errors import ArgumentError

from .communicator import Communicator
from .events import EventHandle, EventOverlap, communication_stream
from .high_throughput import Biases
from .tracing import Profile

Payload = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
AnyEvent = EventHandle | EventOverlap


class GroupBuffer:
    """A buffer that the ranks of a group have in common."""

    _communicator: Communicator

    def describe(self) -> dict[str, Any]:
        """The chosen plugins, the ordering plan and the domains, each with its reason."""
        return self._communicator.describe()

    def stats(self) -> dict[str, Any]:
        """Counts since the start: operations, kernels by name, and what the proxies did."""
        return self._communicator.stats()

    def profile(self) -> Profile:
        """What the kernels of this rank did since the last call, and for how long: which step bounds which. Waits for
        torch's current stream; not collective. Its text is a table, `Profile.as_dict` is for a file.

        Raises:
            ArgumentError: the buffer was created without the option ``trace_kernels``, or a graph is being captured.
            BufferClosedError: it was destroyed.
        """
        return self._communicator.profile()

    def check(self) -> None:
        """Raise the group's failure, if there is one (`PeerFailure`), or `BufferClosedError` after `destroy`."""
        self._communicator.ensure_usable()

    def destroy(self) -> None:
        """Release memory, threads and connections. Not collective; may be called twice.

        Peers that still wait for this rank get an error that says that it closed its buffer.
        """
        self._communicator.close()

    def get_comm_stream(self) -> Any:
        """The stream communication runs on when it does not run on the current one; None on the host."""
        self._communicator.ensure_open()
        return communication_stream(self._communicator.backend)


def default_device() -> str:
    """The current GPU where torch has one, else the CPU."""
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"


def wait_for(event: AnyEvent | None) -> None:
    """Make torch's current stream wait for the event, if there is one."""
    if event is not None:
        event.current_stream_wait()


def event_if(asked_for: bool) -> EventOverlap:
    """An event of what torch's current stream holds now, or an empty one."""
    return EventOverlap(EventHandle() if asked_for else None)


def split_payload(x: Payload, scales: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``x`` as (x, scales or None).

    Args:
        scales: what the interface calls them.

    Raises:
        ArgumentError: a tuple of another length.
    """
    if not isinstance(x, tuple):
        return x, None
    if len(x) != 2:
        raise ArgumentError(f"x is a tuple of {len(x)}: give one tensor, or (x, {scales})")
    return x


def join_payload(x: torch.Tensor, scales: torch.Tensor | None) -> Payload:
    """The inverse of `split_payload`."""
    return x if scales is None else (x, scales)


def two_biases(bias: torch.Tensor | Biases | None) -> Biases:
    """``bias`` of a combine as two, each of which may be None.

    Raises:
        ArgumentError: a tuple of another length.
    """
    biases = bias if isinstance(bias, tuple) else (bias, None)
    if len(biases) != 2:
        raise ArgumentError(f"bias has {len(biases)} tensors: give one, or a tuple of two")
    return biases
