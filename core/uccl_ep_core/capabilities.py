"""What a transport promises. Each field is tested by the conformance kit as a promise."""

from __future__ import annotations

import dataclasses
from typing import Literal

Flush = Literal["none", "read_after_write", "send_after_write"]
PeerFailureNotice = Literal["error_completion", "event", "none"]
NativeSignal = Literal["none", "host", "device"]


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """The promises and limits of one opened transport.

    A transport claims only what holds on the device at hand; the ordering plan is chosen from these
    fields alone (`uccl_ep_core.ordering.choose_plan`), never from a name.
    """

    write_order: bool = False
    """Writes on one lane to one peer become visible there in the order posted. Where ``exactly_once`` is
    false this covers the copies too: none lands after a write that was posted behind its original."""

    signal_order: bool = False
    """A native signal posted after writes on a lane lands after them."""

    imm_bits: int = 0
    """Bits of immediate data that a write can carry: 0, 32 or 64."""

    imm_after_payload: bool = False
    """When the receiver sees the immediate, the payload of that write is visible."""

    delivery_complete: bool = False
    """The completion of a write posted with ``WRITE_FENCED`` proves that its bytes are visible at the target."""

    flush: Flush = "none"
    """How a ``WRITE_FENCED`` write proves placement where ``delivery_complete`` is false: the
    transport itself issues this operation behind the write and completes the write when it returns."""

    exactly_once: bool = False
    """No write arrives twice, also after an error on its lane."""

    peer_failure: PeerFailureNotice = "none"
    """How the death of a peer shows. ``"none"``: the library sends heartbeats."""

    native_signal: NativeSignal = "none"
    """Where the transport itself can raise a 64-bit word: nowhere, in host memory, or also in device memory."""

    device_memory: bool = False
    """Can register GPU memory; otherwise data windows are staged in pinned host memory."""

    max_message: int = 16 << 20
    """Bytes of the largest single write."""

    max_ordered_bytes: int = 0
    """Largest write, in bytes, for which ``write_order`` holds; 0: no limit."""

    max_inflight: int = 0
    """Bytes in flight per peer above which the device slows down; 0: no limit known."""

    send_queue_depth: int = 1024
    """Writes that can be posted on one lane before completions must be polled."""

    remote_queue_depth: int = 0
    """Arrivals a lane of the receiver holds before they must be polled; 0: no limit.
    Where there is a limit, the library keeps the immediates in flight towards a lane below it."""

    lanes: int = 1
    """Most lanes the transport can open; one proxy thread drives one lane."""

    inline_bytes: int = 0
    """Bytes that can be posted without keeping the source unchanged (informative)."""

    alignment: int = 1
    """Offsets and sizes of writes must be multiples of this, in bytes."""
