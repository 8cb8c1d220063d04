"""Plugins are found by entry point alone, and a broken one is reported and harms nobody."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fake_plugins import Install, transport
from uccl_ep_core import BackendUnavailableError, ConfigurationError, registry

BROKEN = {
    "import error": ("import a_module_that_nobody_has", "Fake", "No module named 'a_module_that_nobody_has'"),
    "syntax error": ("class Fake(:", "Fake", "SyntaxError"),
    "no such class": ("x = 1", "Fake", "has no attribute 'Fake'"),
    "wrong class": ("class Fake: pass", "Fake", "not a class derived from uccl_ep_core.transport.Transport"),
    "no class at all": ("Fake = 7", "Fake", "is 7, not a class"),
    "unfinished class": (
        "from uccl_ep_core.transport import Transport\nclass Fake(Transport): pass",
        "Fake",
        "lacks address, capabilities, close, connect, native_ops, open, probe, register",
    ),
    "assertion in import": ("assert False, 'not on this host'", "Fake", "not on this host"),
    "exit in import": ("raise SystemExit(3)", "Fake", "SystemExit"),
    "exception of its own": ("raise RuntimeError('no licence')", "Fake", "RuntimeError: no licence"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_plugin_is_reported_and_leaves_the_others_alone(install: Install, case: str) -> None:
    source, attribute, words = BROKEN[case]
    before = {plugin.name: plugin.loaded for plugin in registry.plugins(registry.TRANSPORTS)}
    install("rotten", source, attribute=attribute)
    install("sound", transport())

    after = {plugin.name: plugin for plugin in registry.plugins(registry.TRANSPORTS)}
    assert after["rotten"].loaded is None
    assert words in after["rotten"].failure
    assert after["rotten"].distribution == "stranger_rotten 1.5"
    assert after["sound"].loaded is not None
    assert after["sound"].failure == ""
    assert {name: after[name].loaded for name in before} == before

    with pytest.raises(BackendUnavailableError, match=r"stranger_rotten 1\.5 is broken"):
        registry.load(registry.TRANSPORTS, "rotten")
    assert registry.load(registry.TRANSPORTS, "sound").__name__ == "Fake"


@pytest.mark.parametrize("name", ["auto", "Loud", "with.dot"])
def test_name_that_cannot_be_selected_is_reported(install: Install, name: str) -> None:
    install(name, transport(), package="stranger_named")
    (plugin,) = [plugin for plugin in registry.plugins(registry.TRANSPORTS) if plugin.name == name]
    assert plugin.loaded is None
    assert "cannot be selected" in plugin.failure


def test_second_claim_to_a_name_loses_and_is_reported(install: Install) -> None:
    install("twice", transport(), package="stranger_first")
    install("twice", transport(), package="stranger_second")
    first, second = (plugin for plugin in registry.plugins(registry.TRANSPORTS) if plugin.name == "twice")
    assert first.distribution == "stranger_first 1.5"
    assert first.loaded is not None
    assert second.loaded is None
    assert "taken by stranger_first 1.5" in second.failure
    assert registry.load(registry.TRANSPORTS, "twice") is first.loaded


def test_broken_claim_to_a_name_does_not_shadow_a_sound_one(install: Install) -> None:
    install("twice", "import a_module_that_nobody_has", package="stranger_first")
    install("twice", transport(), package="stranger_second")
    assert registry.load(registry.TRANSPORTS, "twice").__module__ == "stranger_second"


def test_unknown_name_names_the_nearest_one_and_the_origin(install: Install) -> None:
    install("warpnet", transport())
    with pytest.raises(ConfigurationError, match=r"'warpnets' \(the test\).*did you mean 'warpnet'"):
        registry.load(registry.TRANSPORTS, "warpnets", "the test")
    with pytest.raises(ConfigurationError, match=r"did you mean 'uccl_ep\.transports'"):
        registry.names("uccl_ep.transport")


def test_in_tree_plugins_are_all_found_and_sound() -> None:
    assert {"shm", "sim", "libfabric", "ibverbs"} <= set(registry.names(registry.TRANSPORTS))
    assert {"host", "cuda", "hip"} <= set(registry.names(registry.GPU_BACKENDS))
    failures = [
        f"{plugin.name}: {plugin.failure}"
        for group in registry.GROUPS
        for plugin in registry.plugins(group)
        if plugin.distribution.startswith("uccl_ep ") and plugin.failure
    ]
    assert failures == []


def test_importing_registry_and_configuration_imports_no_plugin_and_no_torch() -> None:
    script = (
        "import sys, uccl_ep_core.config, uccl_ep_core.registry as r\n"
        "r.names(r.TRANSPORTS)\n"
        "bad = [m for m in sys.modules if m == 'torch' or (m.startswith('uccl_ep_') and 'core' not in m)]\n"
        "bad = [m for m in bad if not m.startswith('uccl_ep_editable')]\n"
        "sys.exit(f'imported: {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
