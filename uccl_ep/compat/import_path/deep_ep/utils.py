"""What callers take from `deep_ep.utils`."""

from uccl_ep.events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
