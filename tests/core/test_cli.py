"""The command line, as a person types it."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from fake_plugins import UNUSABLE, Install, transport
from uccl_ep import cli
from uccl_ep.info import collect


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """``uccl-ep`` in this process, with none of the caller's own UCCL_EP_ variables."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UCCL_EP_")} | variables
    out, error = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, environment, clear=True),
        mock.patch.object(sys, "argv", ["uccl-ep", *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(error),
        pytest.raises(SystemExit) as end,
    ):
        cli.main()
    assert isinstance(end.value.code, int), end.value.code
    return subprocess.CompletedProcess(arguments, end.value.code, out.getvalue(), error.getvalue())


def test_info_for_people() -> None:
    """As it is installed."""
    command = [str(Path(sys.executable).parent / "uccl-ep"), "info"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UCCL_EP_")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    for words in ("GPU backend: host", "transport: shm", "ordering plan: native", "configuration in force"):
        assert words in done.stdout
    assert "the shipped plugins.toml, line" in done.stdout


def test_info_for_machines() -> None:
    done = run("info", "--json", UCCL_EP_TIMEOUT_S="12")
    facts = json.loads(done.stdout)
    assert facts["chosen"]["gpu_backend"]["name"] == "host"
    assert facts["chosen"]["transport"]["name"] == "shm"
    shm = next(plugin for plugin in facts["transports"] if plugin["name"] == "shm")
    assert shm["devices"][0]["usable"] is True
    assert shm["capabilities"]["write_order"] is True
    assert shm["plan"]["name"] == "native"
    settings = {setting["name"]: setting for setting in facts["configuration"]}
    assert settings["general.timeout_s"]["value"] == 12.0
    assert settings["general.timeout_s"]["origin"] == "environment variable UCCL_EP_TIMEOUT_S"
    # Whatever is refused says why, and what to do about it.
    for plugin in facts["transports"] + facts["gpu_backends"]:
        for device in plugin["devices"]:
            assert device["usable"] or (device["reason"] and device["remedy"]), (plugin["name"], device)


def test_plan_follows_the_simulated_device() -> None:
    for profile, plan in (("rc", "native"), ("srd", "counted"), ("iwarp", "fenced")):
        facts = collect({"sim.profile": profile, "transport": "sim"})
        assert facts["chosen"]["transport"]["name"] == "sim"
        sim = next(plugin for plugin in facts["transports"] if plugin["name"] == "sim")
        assert sim["plan"]["name"] == plan, sim["plan"]["reason"]


def test_info_shows_broken_and_unusable_plugins(install: Install) -> None:
    install("rotten", "import a_module_that_nobody_has")
    install("cold", transport(UNUSABLE))
    install("rude", transport().replace("return cls()", "raise OSError('open went wrong')"))
    facts = collect()
    plugins = {plugin["name"]: plugin for plugin in facts["transports"]}
    assert "a_module_that_nobody_has" in plugins["rotten"]["failure"]
    assert plugins["cold"]["devices"][0]["remedy"] == "plug it in"
    assert plugins["rude"]["open_error"] == "OSError: open went wrong"
    assert facts["chosen"]["transport"]["name"] == "shm"


def test_info_is_for_people_and_tells_by_its_status() -> None:
    done = run("info", "--option", "sim.profile=iwarp", "--transport", "sim")
    assert done.returncode == 0, done.stderr
    assert "{" not in done.stdout and "None" not in done.stdout and "True" not in done.stdout
    done = run("info", "--transport", "sim", "--gpu-backend", "cuda")
    if _importable("torch.cuda") and collect({"gpu_backend": "cuda"})["chosen"]["gpu_backend"]["name"] is None:
        assert done.returncode == 1 and "none can be used" in done.stdout
        assert "transport: sim" in done.stdout  # all else is shown as ever


def test_only_near_words_are_suggested() -> None:
    done = run("info", "--transport", "foo")
    assert done.returncode == 2
    assert "did you mean" not in done.stderr and "shm" in done.stderr and "libfabric" in done.stderr


def test_error_is_one_message_without_traceback() -> None:
    done = run("info", "--transport", "smh")
    assert done.returncode == 2
    assert "did you mean 'shm'?" in done.stderr
    assert "Traceback" not in done.stderr
    done = run("info", UCCL_EP_TRANSPROT="shm")
    assert done.returncode == 2
    assert "did you mean 'UCCL_EP_TRANSPORT'?" in done.stderr
    done = run("info", "--option", "timeout_s")
    assert done.returncode == 2
    assert "NAME=VALUE" in done.stderr


def test_help_lists_only_commands_that_exist() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert "info" in done.stdout
    for name, (module, _) in cli.COMMANDS.items():
        assert (f"\n  {name} " in done.stdout) == _importable(module), name
    assert ("\n  bench " in done.stdout) == any(_importable(module) for module, _ in cli.BENCHES.values())


@pytest.mark.parametrize(
    "arguments",
    [(name,) for name, (module, _) in cli.COMMANDS.items() if cli.exists(module)]
    + [("bench", name) for name, (module, _) in cli.BENCHES.items() if cli.exists(module)],
    ids=" ".join,
)
def test_every_command_that_is_listed_has_help(arguments: tuple[str, ...]) -> None:
    done = run(*arguments, "--help")
    assert done.returncode == 0, done.stderr
    assert f"usage: uccl-ep {' '.join(arguments)}" in done.stdout.replace("Usage:", "usage:")
    assert "`" not in done.stdout


def _importable(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def test_options_of_the_command_line(tmp_path: Path) -> None:
    assert cli.parse_options(["plan=counted", "sim.inner_options=lanes=2"]) == {
        "plan": "counted",
        "sim.inner_options": "lanes=2",
    }
