"""The conformance kit on each kind of device: every promise that the transport makes is tested as one."""

from __future__ import annotations

import pytest
from devices import STEP

from uccl_ep_core import conformance

OPTIONS = {"default": {}, "relaxed": {"relaxed_ordering": "1"}, "no-inline": {"inline_bytes": "0"}}


@pytest.mark.parametrize(
    "options", [pytest.param(options, id=name) for name, options in OPTIONS.items() if STEP == 1 or not options]
)
def test_every_promise_is_kept(device: str, options: dict[str, str]) -> None:
    # A guest has one CPU for all ranks: what must happen has longer than on a real host.
    report = conformance.run("ibverbs", {"device": device, **options}, seeds=range(1, 2), checks=[], limit_s=30.0)
    broken = [f"{result.check}: {result.message}" for result in report.results if result.outcome == "broken"]
    assert report.passed, "\n".join(broken)
