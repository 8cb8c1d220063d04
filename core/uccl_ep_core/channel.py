"""The GPU-to-CPU command channel: rings in memory that the GPU backend allocated.

``Channel.host_bytes`` and ``Channel.state_bytes`` say how much to allocate; both memories must be
zeroed. ``views()`` are the bytes that kernels take: one ``RingView`` per ring, device-side addresses.
"""

from __future__ import annotations

from ._native import Channel, Layout

__all__ = ["Channel", "Layout"]
