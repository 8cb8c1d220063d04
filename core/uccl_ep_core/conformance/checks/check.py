"""What a check is, and the words checks share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from uccl_ep_core.capabilities import Capabilities

from ..context import Context

OUTBOX = 3 << 20
"""Where sources lie in a data window; what peers write lies below."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One promise and the code that tests it.

    Attributes:
        name: as ``--check`` takes it; a field of `Capabilities` where it tests that field.
        promise: in words, for the report.
        run: runs on every rank; returns words for the report or None; raises `PromiseBroken`.
        claimed: whether a transport with these capabilities promises it at all.
        size: ranks needed.
        seeded: whether another seed tries anything else.
    """

    name: str
    promise: str
    run: Callable[[Context], str | None]
    claimed: Callable[[Capabilities], bool] = lambda _: True
    size: int = 2
    seeded: bool = True


@dataclasses.dataclass(frozen=True)
class Message:
    """A payload on its way from one place of a sender's data window to one of the receiver's."""

    index: int
    remote_offset: int
    local_offset: int
    content: bytes

    @property
    def nbytes(self) -> int:
        return len(self.content)

    def is_at(self, view: memoryview) -> bool:
        """Whether every byte of it is in that window."""
        return view[self.remote_offset : self.remote_offset + self.nbytes] == self.content

    def what_is_missing(self, view: memoryview) -> str:
        """Which of its bytes are not there, in words."""
        seen = bytes(view[self.remote_offset : self.remote_offset + self.nbytes])
        wrong = [at for at, (want, got) in enumerate(zip(self.content, seen, strict=True)) if want != got]
        if not wrong:
            return "all of it by now: it came late"
        if len(wrong) >= self.nbytes - self.nbytes // 64 - 1:
            return "nothing of it"
        if wrong[-1] == self.nbytes - 1 and len(wrong) >= (self.nbytes - wrong[0]) * 7 // 8:
            return f"its tail from byte {wrong[0]} on"
        return f"{len(wrong)} of its bytes, the first at {wrong[0]}"


def make_messages(context: Context, count: int, *, largest: int = 16 << 10, source: bool = True) -> list[Message]:
    """Messages of random sizes with gaps between them; ``source``: this rank sends them, so fill its outbox.

    All ranks must call this alike, since the random numbers are common.
    """
    messages = []
    remote, local = 0, OUTBOX
    for index in range(count):
        nbytes = context.random_size(largest)
        content = context.rng.randbytes(nbytes)
        remote += context.rounded(context.rng.randint(0, 96))
        messages.append(Message(index, remote, local, content))
        if source:
            assert context.windows is not None
            context.windows.views[0][local : local + nbytes] = content
        remote += nbytes
        local += context.rounded(nbytes)
    return messages
