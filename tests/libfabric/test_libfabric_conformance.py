"""The conformance kit over each library and provider, and over rails."""

from __future__ import annotations

from typing import Any

import pytest
from variants import VARIANTS, Variant

from uccl_ep_core.conformance import runner


def broken(options: dict[str, Any], checks: list[str] | None = None) -> list[str]:
    report = runner.run("libfabric", options, seeds=(1,), checks=checks or [])
    return [f"{result}" for result in report.results if result.outcome == "broken"]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_promise_is_kept(variant: Variant) -> None:
    assert broken({**variant.options, "lanes": 2}) == []


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_promise_is_kept_over_two_rails(variant: Variant) -> None:
    checks = ["table", "placement", "completions", "imm_bits", "imm_after_payload", "delivery_complete", "max_message",
              "bounds", "send_queue_depth", "lanes", "peer_failure"]  # fmt: skip
    assert broken({**variant.options, "lanes": 2, "rails": 2, "stripe_bytes": 16384}, checks) == []
