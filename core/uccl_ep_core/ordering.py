"""Contract 3: the ordering plan, chosen from capabilities alone."""

from __future__ import annotations

import dataclasses
from typing import Literal

from .capabilities import Capabilities
from .errors import CapabilityError, ConfigurationError

Plan = Literal["native", "counted", "fenced"]
PLANS: tuple[Plan, ...] = ("native", "counted", "fenced")


@dataclasses.dataclass(frozen=True)
class OrderingPlan:
    """How data-before-signal is kept on a transport.

    Attributes:
        name: ``"native"``, ``"counted"`` or ``"fenced"``.
        reason: one sentence for people: why this plan, and which promise ruled out the one before.
    """

    name: Plan
    reason: str


def missing_promises(capabilities: Capabilities, plan: Plan, *, signal_in_device_memory: bool = False) -> list[str]:
    """The promises that ``plan`` needs and ``capabilities`` lacks, in words; empty where it would hold."""
    missing = []
    if plan == "native":
        if not capabilities.write_order:
            missing.append("write_order")
        if not capabilities.signal_order:
            missing.append("signal_order")
        if capabilities.native_signal == "none":
            missing.append("native_signal")
        elif signal_in_device_memory and capabilities.native_signal != "device":
            missing.append("native_signal in device memory")
        if capabilities.max_ordered_bytes and capabilities.max_ordered_bytes < capabilities.max_message:
            missing.append(f"write_order above {capabilities.max_ordered_bytes} bytes")
    elif plan == "counted":
        if capabilities.imm_bits < 32:
            missing.append("imm_bits >= 32")
        if not capabilities.imm_after_payload:
            missing.append("imm_after_payload")
    elif not capabilities.delivery_complete and capabilities.flush == "none":
        missing.append("delivery_complete or flush")
    return missing


def choose_plan(
    capabilities: Capabilities, requested: str = "auto", *, signal_in_device_memory: bool = False
) -> OrderingPlan:
    """The first of native, counted, fenced whose promises hold, or the requested one.

    Raises:
        CapabilityError: no plan holds, or not the requested one; names every missing promise.
        ConfigurationError: ``requested`` is no plan.
    """
    if requested != "auto" and requested not in PLANS:
        raise ConfigurationError(f"ordering plan {requested!r} is unknown: use one of auto, {', '.join(PLANS)}")
    candidates = [plan for plan in PLANS if requested in ("auto", plan)]
    refused: list[str] = []
    for plan in candidates:
        missing = missing_promises(capabilities, plan, signal_in_device_memory=signal_in_device_memory)
        if not missing:
            why = "requested" if requested != "auto" else "its promises hold on this transport"
            return OrderingPlan(plan, "; ".join([f"{plan}: {why}", *refused]))
        refused.append(f"not {plan}: lacks {' and '.join(missing)}")
    raise CapabilityError("no ordering plan can keep data before signal on this transport: " + "; ".join(refused))
