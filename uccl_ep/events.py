"""Events as the frameworks know them from DeepEP."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch


class EventHandle:
    """A point in torch's current stream, recorded at construction. On a machine without GPU it is always past."""

    def __init__(self, event: Any = None) -> None:
        if event is None and torch.cuda.is_available():
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream())
        self.event = event

    def current_stream_wait(self) -> None:
        """Make torch's current stream wait for this point."""
        if self.event is None:
            return
        if hasattr(self.event, "wait"):
            self.event.wait()


class EventOverlap:
    """An event with the tensors that must live until it has passed; a context manager that waits at its end.

    Attributes:
        event: an `EventHandle`, or None for work that was already done when the call returned.
    """

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[torch.Tensor | None, ...] | None = None):
        self.event = event
        self.extra_tensors = extra_tensors
        self._after_wait: list[Callable[[], None]] = []

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Make torch's current stream wait for the event.

        Args:
            release_handle: also drop the event, so that it is waited for once.
        """
        if self.event is not None:
            self.event.current_stream_wait()
        if release_handle:
            self.event = None
        hooks, self._after_wait = self._after_wait, []
        for hook in hooks:
            hook()

    def register_hook_after_wait(self, hook: Callable[[], None]) -> None:
        """Call ``hook`` once, after the next wait."""
        self._after_wait.append(hook)

    def __call__(self) -> None:
        self.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.event is not None:
            self.current_stream_wait()
