"""Every check by name, in the order in which they run."""

from __future__ import annotations

from . import basic, delivery, failure, immediates, limits, order, renewal
from .check import Check

CHECKS: dict[str, Check] = {
    check.name: check
    for module in (basic, order, immediates, delivery, limits, renewal, failure)
    for check in module.CHECKS
}

__all__ = ["CHECKS", "Check"]
