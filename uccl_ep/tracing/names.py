"""Kernels and activities in words, by their numbers in core/kernels/spans.hpp."""

from __future__ import annotations

KERNELS = (
    "barrier",
    "notify",
    "dispatch",
    "combine",
    "ll_dispatch",
    "ll_dispatch_send",
    "ll_dispatch_receive",
    "ll_combine",
    "ll_combine_send",
    "ll_combine_receive",
    "ll_direct_dispatch",
    "ll_direct_dispatch_send",
    "ll_direct_dispatch_receive",
    "ll_direct_combine",
    "ll_direct_combine_send",
    "ll_direct_combine_receive",
)
"""``enum class TracedKernel``; kernels are launched under these names with ``uccl_ep_`` in front."""

ACTIVITIES = (
    "kernel",
    "sends",
    "receives",
    "forwards",
    "keeps",
    "sums",
    "waits for room",
    "waits until sent",
    "waits for rows",
    "meets blocks",
    "counts",
    "places",
    "reads heads",
    "copies",
    "copies own",
    "adds up",
    "adds up own",
    "hands over",
    "gives back",
    "sends words",
    "gathers picks",
)
"""``enum class Activity``."""

KERNEL = 0
ROLES = range(1, 6)
"""Activities that hold others: the roles of high throughput, and the halves of low latency."""

NOBODY = 0xFFFFFFFF
"""``kNobody``: no rank is at the other end."""
