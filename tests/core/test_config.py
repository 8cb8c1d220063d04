"""Precedence, origins, and errors that name the nearest valid value and who set the bad one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fake_plugins import UNUSABLE, Install, transport
from uccl_ep_core import BackendUnavailableError, ConfigurationError, registry
from uccl_ep_core.config import Configuration
from uccl_ep_core.files import shipped_plugins_toml, tomllib
from uccl_ep_core.options import GENERAL_OPTIONS

Environment = dict[str, str]


def resolve(overrides: dict[str, Any] | None = None, environment: Environment | None = None) -> Configuration:
    """`Configuration.resolve` without the variables of whoever runs the tests."""
    return Configuration.resolve(overrides, environment or {})


def test_each_layer_overrides_the_one_below(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[general]\ntimeout_s = 20\n")
    environment = {"UCCL_EP_CONFIG": str(file)}

    assert resolve().general.timeout_s == 300.0
    assert "plugins.toml, line" in resolve().origin("general.timeout_s")

    configuration = resolve(None, environment)
    assert configuration.general.timeout_s == 20.0
    assert configuration.origin("general.timeout_s") == f"file {file}, line 2"

    environment["UCCL_EP_TIMEOUT_S"] = "30"
    configuration = resolve(None, environment)
    assert configuration.general.timeout_s == 30.0
    assert configuration.origin("general.timeout_s") == "environment variable UCCL_EP_TIMEOUT_S"

    configuration = resolve({"timeout_s": 40}, environment)
    assert configuration.general.timeout_s == 40.0
    assert configuration.origin("general.timeout_s") == "call argument timeout_s"

    assert resolve({"timeout_s": None}, environment).general.timeout_s == 30.0


def test_config_argument_replaces_the_variable(tmp_path: Path) -> None:
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_text("[general]\nnum_slots = 4\n")
    second.write_text("[general]\nnum_channels = 3\n")
    general = resolve({"config": second}, {"UCCL_EP_CONFIG": str(first)}).general
    assert (general.num_slots, general.num_channels) == (resolve().general.num_slots, 3)


def test_plugin_options_from_each_layer(install: Install, tmp_path: Path) -> None:
    install("warpnet", transport())
    file = tmp_path / "mine.toml"
    file.write_text('[transports.warpnet]\nrails = 3\nmode = "exact"\n')
    environment = {"UCCL_EP_CONFIG": str(file), "UCCL_EP_WARPNET_RAILS": "4"}
    configuration = resolve({"warpnet.verbose": "yes"}, environment)
    options = configuration.options("transports", "warpnet")
    assert options == {
        "rails": 4, "mode": "exact", "verbose": True, "plan": "auto", "timeout_s": 300.0, "device": ""
    }  # fmt: skip
    origins = {setting.name: setting.origin for setting in configuration.explain()}
    assert origins["transports.warpnet.rails"] == "environment variable UCCL_EP_WARPNET_RAILS"
    assert origins["transports.warpnet.mode"] == f"file {file}, line 3"
    assert origins["transports.warpnet.verbose"] == "call argument warpnet.verbose"
    assert origins["transports.warpnet.device"] == "default of plugin warpnet"
    assert resolve({"warpnet": {"rails": 8}}, environment).options("transports", "warpnet")["rails"] == 8
    assert resolve({"transports": {"warpnet.rails": 7}}).options("transports", "warpnet")["rails"] == 7


def test_shared_options_can_be_set_for_one_transport(install: Install) -> None:
    install("warpnet", transport())

    def plan(overrides: dict[str, Any], environment: Environment) -> Any:
        return resolve(overrides, environment).options("transports", "warpnet")["plan"]

    assert plan({}, {"UCCL_EP_PLAN": "fenced"}) == "fenced"
    assert plan({}, {"UCCL_EP_PLAN": "fenced", "UCCL_EP_WARPNET_PLAN": "native"}) == "native"
    # A call's argument outranks the environment, however special the variable is.
    assert plan({"plan": "counted"}, {"UCCL_EP_WARPNET_PLAN": "native"}) == "counted"


ERRORS: list[tuple[dict[str, Any], Environment, str]] = [
    ({"timeout": 5}, {}, r"'timeout' \(call argument timeout\).*did you mean 'timeout_s'"),
    ({"plan": "counter"}, {}, r"general\.plan = 'counter' \(call argument plan\).*did you mean 'counted'"),
    ({}, {"UCCL_EP_PLAN": "nativ"}, r"environment variable UCCL_EP_PLAN.*did you mean 'native'"),
    ({}, {"UCCL_EP_TIMEOUTS": "3"}, r"UCCL_EP_TIMEOUTS = '3' sets nothing.*did you mean 'UCCL_EP_TIMEOUT_S'"),
    ({}, {"UCCL_EP_WARPNET_RAIL": "3"}, r"UCCL_EP_WARPNET_RAIL = .*did you mean 'UCCL_EP_WARPNET_RAILS'"),
    ({}, {"UCCL_EP_TRANSPORT": "warpnot"}, r"'warpnot' \(environment variable UCCL_EP_TRANSPORT\).*mean 'warpnet'"),
    ({"gpu_backend": "hots"}, {}, r"gpu backend 'hots' \(call argument gpu_backend\).*did you mean 'host'"),
    ({"warpnut.rails": 3}, {}, r"plugin 'warpnut' \(call argument warpnut\.rails\).*did you mean 'warpnet'"),
    ({"warpnet.rials": 3}, {}, r"'rials' of warpnet \(call argument warpnet\.rials\).*did you mean 'rails'"),
    ({"warpnet": {"mode": "fsat"}}, {}, r"'fsat' \(call argument warpnet\.mode\).*did you mean 'fast'"),
    ({"warpnet.rails": 9}, {}, r"rails = 9 .*too large, the greatest valid value is 8"),
    ({}, {"UCCL_EP_WARPNET_RAILS": "0"}, r"UCCL_EP_WARPNET_RAILS.*too small, the least valid value is 1"),
    ({}, {"UCCL_EP_WARPNET_RAILS": "two"}, r"UCCL_EP_WARPNET_RAILS.*expected an integer, for example 2"),
    ({"warpnet.rails": 2.5}, {}, r"expected an integer"),
    ({"warpnet.rails": True}, {}, r"expected an integer"),
    ({"warpnet.verbose": "perhaps"}, {}, r"expected true or false"),
    ({"timeout_s": float("inf")}, {}, r"infinite"),
    ({"timeout_s": float("nan")}, {}, r"infinite and undefined"),
    ({"timeout_s": 0}, {}, r"least valid value is 0\.01"),
    ({"slot_bytes": 100000}, {}, r"multiple of 64, use 99968"),
    ({"ring_capacity": 1000}, {}, r"power of two, use 512 or 1024"),
    ({}, {"UCCL_EP_CONFIG": "/nowhere/a.toml"}, r"/nowhere/a\.toml \(environment variable UCCL_EP_CONFIG\) cannot"),
]


@pytest.mark.parametrize(("overrides", "environment", "words"), ERRORS, ids=[words[:40] for *_, words in ERRORS])
def test_bad_value_is_refused(install: Install, overrides: Any, environment: Environment, words: str) -> None:
    install("warpnet", transport())
    with pytest.raises(ConfigurationError) as caught:
        resolve(overrides, environment)
    assert re.search(words, str(caught.value)), str(caught.value)


FILE_ERRORS = [
    ("[genral]\nplan = 'auto'\n", r"genral \(file .*, line 1\) is unknown: did you mean 'general'"),
    ("[general]\nplan = 'auto'\n\nlog_lvel = 'info'\n", r"'log_lvel' \(file .*, line 4\).*did you mean 'log_level'"),
    ("[general]\nlog_level = 'inof'\n", r"line 2\): did you mean 'info'"),
    ("[transports.warpnat]\nrails = 1\n", r"'warpnat' \(file .*, line 1\).*did you mean 'warpnet'"),
    ("[transports.warpnet]\nrail = 1\n", r"'rail' of warpnet \(file .*, line 2\).*did you mean 'rails'"),
    ("[transports]\nwarpnet.rails = 99\n", r"rails = 99 \(file .*, line 2\): too large"),
    ("[transports]\nwarpnet = 1\n", r"must be a table"),
    ("[preference.transports]\none_hots = []\n", r"did you mean 'one_host'"),
    ("[preference.transports]\none_host = ['warpnte']\n", r"did you mean 'warpnet'"),
    ("[preference.transports]\none_host = 'shm'\n", r"expected a list"),
    ("[general\n", r"not valid TOML"),
]


@pytest.mark.parametrize(("content", "words"), FILE_ERRORS, ids=[words[:40] for _, words in FILE_ERRORS])
def test_bad_file_is_refused(install: Install, tmp_path: Path, content: str, words: str) -> None:
    install("warpnet", transport())
    file = tmp_path / "mine.toml"
    file.write_text(content)
    with pytest.raises(ConfigurationError) as caught:
        resolve({"config": str(file)})
    assert re.search(words, str(caught.value)), str(caught.value)


def test_empty_and_reserved_variables_set_nothing() -> None:
    environment = {"UCCL_EP_PLAN": "", "UCCL_EP_BUILD_X": "1", "UCCL_EP_TEST_Y": "1", "PATH": "/bin"}
    assert resolve({}, environment).explain() == resolve().explain()


def test_options_of_a_broken_plugin_harm_nobody(install: Install) -> None:
    install("rotten", "import a_module_that_nobody_has")
    configuration = resolve({"rotten.speed": 3}, {"UCCL_EP_ROTTEN_COLOUR": "blue"})
    assert configuration.general == resolve().general


def test_selection_in_order_of_preference_says_why(install: Install, tmp_path: Path) -> None:
    install("first", transport(UNUSABLE))
    install("rotten", "import a_module_that_nobody_has")
    install("rude", transport("1 / 0"))
    install("warpnet", transport())
    file = tmp_path / "mine.toml"
    file.write_text('[preference.transports]\none_host = ["first", "rotten", "rude", "warpnet"]\n')
    selection = resolve({"config": file}).select_transport(one_host=True)
    assert selection.name == "warpnet"
    assert selection.device is None
    assert f"preferred for ranks of one host by file {file}, line 2" in selection.reason
    assert "not first: nic0: cable is out (remedy: plug it in)" in selection.reason
    assert "No module named 'a_module_that_nobody_has'" in selection.reason
    assert "its probe raised ZeroDivisionError" in selection.reason
    plugin, device, options, reason = selection
    assert (plugin, device, options, reason) == (
        selection.plugin, selection.device, selection.options, selection.reason
    )  # fmt: skip


def test_nothing_usable_lists_every_plugin_with_its_remedy(install: Install, tmp_path: Path) -> None:
    install("first", transport(UNUSABLE))
    install("second", transport("[]"))
    file = tmp_path / "mine.toml"
    file.write_text('[preference.transports]\nseveral_hosts = ["first", "second"]\n')
    with pytest.raises(BackendUnavailableError) as caught:
        resolve({"config": file}).select_transport(one_host=False)
    assert "first: nic0: cable is out (remedy: plug it in)" in str(caught.value)
    assert "second: found no device" in str(caught.value)


def test_requested_transport_is_not_replaced_by_another(install: Install) -> None:
    install("first", transport(UNUSABLE))
    with pytest.raises(BackendUnavailableError, match="environment variable UCCL_EP_TRANSPORT"):
        resolve({}, {"UCCL_EP_TRANSPORT": "first"}).select_transport()


def test_device_by_name(install: Install) -> None:
    install("warpnet", transport())
    assert resolve({"transport": "warpnet", "warpnet.device": "nic0"}).select_transport().device == "nic0"
    with pytest.raises(BackendUnavailableError, match="nic1: cable is out"):
        resolve({"transport": "warpnet", "warpnet.device": "nic1"}).select_transport()
    with pytest.raises(BackendUnavailableError, match=r"'nic7' \(environment variable .*devices: nic0, nic1"):
        resolve({"transport": "warpnet"}, {"UCCL_EP_WARPNET_DEVICE": "nic7"}).select_transport()


def test_star_stands_for_strangers_only(install: Install) -> None:
    install("warpnet", transport())
    order = resolve().preference("transports", "several_hosts")
    assert order[-1] == "warpnet"
    assert "sim" not in order
    assert "shm" not in order


def test_default_selection_needs_no_hardware() -> None:
    configuration = resolve()
    assert configuration.select_gpu_backend("cpu").name == "host"
    assert configuration.select_transport(one_host=True).name == "shm"


def test_shipped_file_holds_every_option_with_its_default() -> None:
    shipped = tomllib.loads(shipped_plugins_toml().read_text())
    expected: dict[str, Any] = {"general": {name: option.default for name, option in GENERAL_OPTIONS.items()}}
    for section, group in (("gpu_backends", registry.GPU_BACKENDS), ("transports", registry.TRANSPORTS)):
        expected[section] = {
            plugin.name: {name: option.default for name, option in plugin.loaded.OPTIONS.items()}
            for plugin in registry.plugins(group)
            if plugin.loaded is not None and plugin.loaded.OPTIONS and plugin.distribution.startswith("uccl_ep ")
        }
    preference = shipped.pop("preference")
    for section in ("gpu_backends", "transports"):
        shipped.setdefault(section, {})
    assert shipped == expected
    assert set(preference) == {"gpu_backends", "transports"}
