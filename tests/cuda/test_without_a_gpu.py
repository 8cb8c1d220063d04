"""On a machine without the driver the plugin says so, and says what helps; it never raises or aborts."""

from __future__ import annotations

import pytest

from uccl_ep_core import registry
from uccl_ep_core.errors import BackendUnavailableError


@pytest.mark.parametrize(("name", "library"), [("cuda", "libcuda.so.1"), ("hip", "libamdhip64.so")])
def test_plugin_says_why_it_is_unavailable(name: str, library: str) -> None:
    backend = registry.load(registry.GPU_BACKENDS, name)
    devices = backend.probe({})
    assert devices
    if any(device.usable for device in devices):
        pytest.skip(f"this machine has a {name} device")
    assert all(device.reason and device.remedy for device in devices)
    if devices[0].name == name:
        assert library in devices[0].reason or "failed" in devices[0].reason or "no device" in devices[0].reason
    with pytest.raises(BackendUnavailableError, match="cannot be used"):
        backend.open(None, {})


@pytest.mark.parametrize("name", ["cuda", "hip"])
def test_options_have_valid_defaults(name: str) -> None:
    from uccl_ep_core.options import convert

    for option, declared in registry.load(registry.GPU_BACKENDS, name).OPTIONS.items():
        assert convert(declared, declared.default, option, "test") == declared.default
