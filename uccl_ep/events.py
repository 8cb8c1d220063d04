"""Events as the frameworks know them from DeepEP."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from uccl_ep_core.errors import ArgumentError
from uccl_ep_core.gpu_backend import GpuBackend


def communication_stream(backend: GpuBackend) -> Any:
    """torch's object for the stream of a backend's own work, or None on a host."""
    if backend.torch_device.type == "cpu":
        return None
    return torch.cuda.ExternalStream(backend.communication_stream(), device=backend.torch_device)


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
        extra_tensors: kept as long as this object.
    """

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[torch.Tensor | None, ...] | None = None):
        self.event = event
        self.extra_tensors = extra_tensors
        self._after_wait: Callable[[], Any] | None = None
        self._release_handle = False

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        """Make torch's current stream wait for the event.

        Args:
            release_handle: also drop the event, so that it is waited for once.

        Returns:
            What the hook of `register_hook_after_wait` returned, or None.
        """
        if self.event is not None:
            self.event.current_stream_wait()
        hook, self._after_wait = self._after_wait, None
        result = None if hook is None else hook()
        if release_handle:
            self.event = None
        return result

    def wait(self) -> Any:
        """The same as `current_stream_wait`."""
        return self.current_stream_wait()

    def register_hook_after_wait(self, hook_after_wait: Callable[[], Any]) -> None:
        """Call the hook once, after the next wait.

        Raises:
            ArgumentError: there is one already.
        """
        if self._after_wait is not None:
            raise ArgumentError("a hook is registered already: wait for the event before another one")
        self._after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """Itself, for ``with event(release_handle=True):``, which drops the event at the end."""
        self._release_handle = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.event is not None:
            self.current_stream_wait(release_handle=self._release_handle)
        self._release_handle = False
