"""Send halves that were started, and the receive halves that belong to them."""

from __future__ import annotations

import collections
import ctypes
import dataclasses
from collections.abc import Callable

from uccl_ep_core.errors import ArgumentError

from ..communicator import Communicator
from .results import LIVE_RESULTS


@dataclasses.dataclass(eq=False)
class _ReceiveHalf:
    """Attributes:
    kind: ``"dispatch"`` or ``"combine"``.
    generation: of the dispatch whose result it is, or which it combines.
    keep: what the kernel refers to by address, whatever the caller keeps of the results.
    """

    kind: str
    generation: int
    run: Callable[[], None]
    keep: object


class ReceiveHalves:
    """Those that were not run yet, in order: messages are taken in the order they were sent."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._pending: collections.deque[_ReceiveHalf] = collections.deque()

    def check_room(self, kind: str) -> None:
        """Raise `ArgumentError` where as many messages of this kind wait to be taken as a peer has inboxes for."""
        outstanding = sum(half.kind == kind for half in self._pending)
        if outstanding >= LIVE_RESULTS:
            raise ArgumentError(
                f"{outstanding} low-latency {kind} results are not received yet: call the hook of an earlier {kind} "
                f"first (at most {LIVE_RESULTS} are in flight)"
            )

    def check_received(self, generation: int) -> None:
        """Raise `ArgumentError` where the dispatch of this generation was not received yet."""
        if any(half.kind == "dispatch" and half.generation <= generation for half in self._pending):
            raise ArgumentError("this dispatch was not received yet: call its hook before combine")

    def start(
        self,
        kind: str,
        kernel: str,
        generation: int,
        parameters: ctypes.Structure,
        grid: dict[str, int],
        *,
        send_bytes: int,
        receive_bytes: int,
        at_once: bool,
        keep: object,
    ) -> Callable[[], None]:
        """Run the send half, and return the hook that receives.

        Args:
            kind: ``"dispatch"`` or ``"combine"``.
            kernel: name of the kernel that does both halves.
            send_bytes, receive_bytes: shared memory of each half.
            at_once: the hook is called before anything else: where no earlier message waits to be taken, one kernel
                does both halves.
            keep: what ``parameters`` refers to by address.
        """
        launch = self._communicator.launch
        if at_once and not self._pending:
            launch(kernel, parameters, shared_bytes=max(send_bytes, receive_bytes), **grid)
            return self._communicator.ensure_usable
        launch(f"{kernel}_send", parameters, shared_bytes=send_bytes, **grid)

        def receive() -> None:
            launch(f"{kernel}_receive", parameters, shared_bytes=receive_bytes, **grid)

        mine = _ReceiveHalf(kind, generation, receive, keep)
        self._pending.append(mine)

        def hook() -> None:
            self._communicator.ensure_usable()  # also when called again: a receive that failed has brought nothing
            while mine in self._pending:
                self._run_first()

        return hook

    def run_all(self) -> None:
        """Take in all that is waiting, as their hooks would."""
        while self._pending:
            self._run_first()

    def _run_first(self) -> None:
        self._communicator.ensure_usable()
        half = self._pending.popleft()  # keeps what its kernel needs until that is launched
        half.run()
