"""What ``uccl-ep info`` shows of one NIC or interface."""

from __future__ import annotations

from typing import Any

from uccl_ep_core.transport import Device

from . import topology
from .library import Library
from .providers import AUTO


def facts_of(answer: Any, near: str = "") -> dict[str, Any]:
    gpu = near or topology.current_gpu()
    facts: dict[str, Any] = {"domain": answer.text("domain"), "address": answer.text("source")}
    if answer.pci:
        facts["pci"] = answer.pci
        if gpu:
            facts["PCIe distance to GPU"] = topology.distance(answer.pci, gpu)
    if answer.info.link_bits_per_second:
        facts["link"] = f"{answer.info.link_bits_per_second / 1e9:g} Gbit/s"
    return facts


def device_of(library: Library, provider: str, domain: str, answer: Any) -> Device:
    usable = answer.info.link_up != 0
    auto = provider in AUTO
    reason = f"{library}, {answer.text('protocol')}" + ("" if auto else "; only by option provider")
    return Device(
        f"{provider}:{domain}",
        usable,
        reason if usable else "its link is down",
        "" if usable else "bring the link up, or choose another NIC by the option interface",
        facts_of(answer),
    )
