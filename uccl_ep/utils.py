"""The names that DeepEP keeps in its `utils`."""

from .events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
