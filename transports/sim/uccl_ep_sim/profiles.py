"""What each profile imitates: the promises it claims and the faults by which it keeps no more than those."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from uccl_ep_core.capabilities import Capabilities, Flush, NativeSignal

MAX_BOUNCE_BYTES = 1 << 34
SIGNAL_REACH: tuple[NativeSignal, ...] = ("none", "host", "device")


@dataclasses.dataclass(frozen=True)
class Profile:
    """One imitated device.

    Times are means of ``distribution``, in polls of the lane or in microseconds (``clock``).

    Attributes:
        summary: what it imitates, one line.
        ordered: operations of one lane to one peer are placed in the order posted.
        imm_bits: immediate data of a write.
        imm_after_payload: the immediate shows after its payload; otherwise before it.
        delivery_complete: the completion of a fenced write proves that it is placed.
        flush: likewise where the device needs an operation of its own for that.
        native_signal: where the device raises signals itself.
    """

    summary: str
    ordered: bool
    imm_bits: int
    imm_after_payload: bool
    delivery_complete: bool
    flush: Flush
    native_signal: NativeSignal
    clock: str = "polls"
    distribution: str = "exponential"
    delay: float = 6.0
    completion_delay: float = 2.0
    arrival_delay: float = 2.0
    early_completion: float = 0.0
    max_segments: int = 4
    duplicate: float = 0.0
    drop: float = 0.02
    retry_delay: float = 40.0
    report_drops: bool = False
    stall: float = 0.005
    stall_time: float = 60.0
    refuse: float = 0.05
    send_queue_depth: int = 256
    inflight_limit: int = 0
    collapse: float = 12.0
    kill_peer: int = -1
    kill_after: int = 0
    break_every: int = 0
    name_peers: bool = True

    @property
    def can_fence(self) -> bool:
        """Whether a fenced write is possible at all."""
        return self.delivery_complete or self.flush != "none"

    def override(self, options: Mapping[str, Any]) -> Profile:
        """This profile with every fault that an option sets; an unset option is -1 or ""."""
        changes: dict[str, Any] = {}
        for name in OVERRIDES:
            value = options.get(name, UNSET[name])
            if value == UNSET[name]:
                continue
            changes[name] = bool(value) if isinstance(getattr(self, name), bool) else value
        return dataclasses.replace(self, **changes)

    def claims(self, inner: Capabilities) -> Capabilities:
        """Never more than both this device and the inner transport keep."""
        inner_can_fence = inner.delivery_complete or inner.flush != "none"
        native = min(self.native_signal, inner.native_signal, key=SIGNAL_REACH.index)
        imm_bits = min(self.imm_bits, inner.imm_bits)
        return dataclasses.replace(
            inner,
            write_order=self.ordered and inner.write_order,
            signal_order=self.ordered and inner.signal_order and native != "none",
            imm_bits=imm_bits,
            imm_after_payload=imm_bits > 0 and self.imm_after_payload and inner.imm_after_payload,
            delivery_complete=self.delivery_complete and inner_can_fence,
            flush=self.flush if inner_can_fence else "none",
            exactly_once=inner.exactly_once and self.duplicate == 0,
            native_signal=native,
            device_memory=False,
            max_inflight=self.inflight_limit or inner.max_inflight,
            send_queue_depth=self.send_queue_depth,
            inline_bytes=0,
        )


PROFILES: dict[str, Profile] = {
    "rc": Profile(
        "InfiniBand or RoCE reliable connection: everything in order, signals by the NIC",
        ordered=True,
        imm_bits=32,
        imm_after_payload=True,
        delivery_complete=False,
        flush="read_after_write",
        native_signal="device",
        # The acknowledgement comes from the peer's NIC; the bytes may still be on their way to memory.
        early_completion=0.25,
        send_queue_depth=512,
    ),
    "srd": Profile(
        "AWS EFA: reliable but in no order, 32 bits of immediate data, a short send queue",
        ordered=False,
        imm_bits=32,
        imm_after_payload=True,
        delivery_complete=True,
        flush="none",
        native_signal="none",
        delay=12.0,
        early_completion=0.25,
        max_segments=8,
        send_queue_depth=64,
        name_peers=False,
    ),
    "iwarp": Profile(
        "iWARP: no immediate data, completions say nothing about placement, a read behind a write does",
        ordered=False,
        imm_bits=0,
        imm_after_payload=False,
        delivery_complete=False,
        flush="read_after_write",
        native_signal="none",
        early_completion=0.9,
        completion_delay=1.0,
    ),
    "bnxt": Profile(
        "a reliable connection that collapses above a limit of bytes in flight, signals in host memory only",
        ordered=True,
        imm_bits=32,
        imm_after_payload=True,
        delivery_complete=False,
        flush="read_after_write",
        native_signal="host",
        early_completion=0.25,
        inflight_limit=256 << 10,
        send_queue_depth=256,
    ),
    "none": Profile(
        "a device that keeps no promise; must be refused",
        ordered=False,
        imm_bits=32,
        imm_after_payload=False,
        delivery_complete=False,
        flush="none",
        native_signal="none",
        early_completion=0.5,
        name_peers=False,
    ),
}

CHOICES: dict[str, tuple[str, ...]] = {
    "clock": ("", "polls", "microseconds"),
    "distribution": ("", "constant", "uniform", "exponential", "heavy"),
}

OVERRIDES: dict[str, str] = {
    "clock": "unit of all times: polls of the lane (reproducible) or microseconds",
    "distribution": "of all times: constant, uniform, exponential or heavy (a long tail)",
    "delay": "mean time from post to placement",
    "completion_delay": "mean time from placement to completion",
    "arrival_delay": "mean time that an immediate waits at the receiver",
    "early_completion": "probability that an unfenced write completes without regard to its placement",
    "max_segments": "most pieces that a payload is placed in, each at its own time (16 at most)",
    "duplicate": "probability that an operation lands twice; takes exactly_once away",
    "drop": "probability that one attempt is lost and retried",
    "retry_delay": "time that each loss costs",
    "report_drops": "1: do not retry a loss but complete with an error",
    "stall": "probability that an operation stalls its lane",
    "stall_time": "time of one stall",
    "refuse": "probability that an operation is refused a few times before it is accepted",
    "send_queue_depth": "operations that fit a lane's send queue",
    "inflight_limit": "bytes towards one peer above which delays grow by the factor collapse; 0: none",
    "collapse": "that factor",
    "kill_peer": "rank that appears dead after kill_after operations towards it",
    "kill_after": "operations towards kill_peer that still succeed",
    "break_every": "operations after which a lane breaks, failing what is under way, to be renewed; 0: never",
    "name_peers": "0: arrivals do not say who sent them",
}
"""Fields of a profile that an option of the same name overrides, with its help."""

UNSET: dict[str, Any] = {
    name: "" if name in CHOICES else (-1.0 if isinstance(getattr(PROFILES["rc"], name), float) else -1)
    for name in OVERRIDES
}
"""The value of each such option that leaves the profile's own."""
