"""Capabilities, read from what the provider grants for the very endpoints that are opened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from uccl_ep_core.capabilities import Capabilities

from .library import Library, constants
from .providers import Answer, Choice, ask

MAX_MESSAGE = 1 << 30
DMABUF_VERSION = (1, 20)


def _same_endpoint(library: Library, answer: Answer, **more: Any) -> bool:
    """Whether the provider also grants ``more`` on the endpoint of ``answer``."""
    query = answer.query
    fields: dict[str, Any] = {
        "provider": answer.text("provider"),
        "fabric": answer.text("fabric"),
        "domain": answer.text("domain"),
        "order": query.order,
        "receive_mode": query.receive_mode,
        **more,
    }
    return any(other.text("provider") == fields["provider"] for other in ask(library, **fields))


def promises(library: Library, choice: Choice, options: Mapping[str, Any]) -> tuple[Capabilities, dict[str, str]]:
    """The capabilities, and one sentence for each that a person may wonder about."""
    rails = choice.rails
    notes: dict[str, str] = {}
    order, largest_ordered = _write_order(rails, notes)
    delivery = all(_same_endpoint(library, answer, default_flags=constants().delivery_complete) for answer in rails)
    # Endpoints with names instead of network addresses meet in the memory of one machine.
    reaches_others = all(answer.info.address_format != constants().address_string for answer in rails)
    immediate = all(answer.info.immediate_bytes >= 4 for answer in rails)
    max_message = min(MAX_MESSAGE, *(answer.info.max_message for answer in rails))
    if not reaches_others:
        notes["peer_failure"] = "a provider of one machine has no connection that could break: processes are watched"
    if len(rails) > 1:
        notes["exactly_once"] = "a write moved from a failed rail may arrive twice, the same bytes both times"
    depth = min(int(options["send_depth"]), *(max(int(answer.info.tx_size), 1) for answer in rails))
    return (
        Capabilities(
            write_order=order,
            signal_order=False,
            imm_bits=32 if immediate else 0,
            imm_after_payload=immediate,
            delivery_complete=delivery,
            flush="none",
            exactly_once=len(rails) == 1,
            peer_failure="error_completion" if reaches_others else "none",
            native_signal="none",
            device_memory=_device_memory(library, rails, options, notes),
            max_message=max_message,
            max_ordered_bytes=largest_ordered if largest_ordered < max_message else 0,
            send_queue_depth=depth,
            remote_queue_depth=int(options["receive_depth"]),
            lanes=int(options["lanes"]),
            inline_bytes=min(int(answer.info.inject_bytes) for answer in rails),
        ),
        notes,
    )


def _write_order(rails: tuple[Answer, ...], notes: dict[str, str]) -> tuple[bool, int]:
    """Whether writes land in order, and up to which size. FI_ORDER_WAW orders only the requests; the data
    are ordered where max_order_waw_size covers them too."""
    waw = constants().order_waw
    if len(rails) > 1:
        notes["write_order"] = "none: a lane spreads over several rails"
        return False, 0
    info = rails[0].info
    if not info.tx_order & waw or not info.rx_order & waw:
        notes["write_order"] = "none: the provider does not grant FI_ORDER_WAW"
        return False, 0
    if info.max_ordered_write == 0:
        notes["write_order"] = "none: the provider's max_order_waw_size is 0"
        return False, 0
    return True, int(info.max_ordered_write)


def _device_memory(
    library: Library, rails: tuple[Answer, ...], options: Mapping[str, Any], notes: dict[str, str]
) -> bool:
    if options["gpu_memory"] == "staged":
        why = "option gpu_memory is staged"
    elif not constants().dmabuf:
        version = constants().header_version
        why = (
            f"this installation was compiled with the headers of libfabric {version >> 16}.{version & 0xFFFF}, "
            "which lack dma-buf registration (1.20 has it)"
        )
    elif library.version < DMABUF_VERSION:
        why = f"{library} is older than 1.20, which brought dma-buf registration"
    elif not all(answer.pci for answer in rails):
        why = f"provider {rails[0].text('provider')} is software: it would copy GPU memory through the host"
    elif not all(_same_endpoint(library, answer, device_memory=1) for answer in rails):
        why = f"provider {rails[0].text('provider')} does not take GPU memory (FI_HMEM)"
    else:
        notes["device_memory"] = "GPU memory is registered through dma-buf"
        return True
    notes["device_memory"] = f"GPU memory is staged in the host: {why}"
    return False
