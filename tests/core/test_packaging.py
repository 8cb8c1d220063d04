"""What an installation promises: importable without hardware, no vendor library linked, files in their places."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import uccl_ep_core
from uccl_ep_core import registry
from uccl_ep_core.options import GENERAL_OPTIONS

PACKAGES = [
    "uccl_ep",
    "uccl_ep_core",
    *(f"uccl_ep_{name}" for name in ("host", "cuda", "hip", "shm", "sim", "libfabric", "ibverbs")),
]
VENDOR = r"torch|c10|cuda|cudart|nvrtc|amdhip|hiprtc|hsa|rocm|fabric|ibverbs|rdmacm|efa|mlx"
CHECKOUT = Path(__file__).parents[2]


def native_modules() -> list[Path]:
    """Every native file of the installed packages."""
    script = f"import {', '.join(PACKAGES)}\n" + "".join(f"print(*{name}.__path__, sep=chr(10))\n" for name in PACKAGES)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=240)
    folders = {Path(line) for line in done.stdout.splitlines()}
    folders |= {Path(entry) / name for entry in sys.path if entry for name in PACKAGES}
    return sorted({file for folder in folders if folder.is_dir() for file in folder.rglob("*.so")})


def test_native_modules_link_no_vendor_library() -> None:
    modules = native_modules()
    assert modules, "no native module found: the package is not built"
    for module in modules:
        listing = subprocess.run(["readelf", "-d", module], capture_output=True, text=True, check=True).stdout
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", listing)
        assert not [name for name in needed if re.search(VENDOR, name)], (module, needed)


def test_import_loads_no_vendor_library() -> None:
    script = (
        f"import re, sys, {', '.join(name for name in PACKAGES if name != 'uccl_ep')}\n"
        "maps = {line.split()[-1].rsplit('/', 1)[-1] for line in open('/proc/self/maps') if '.so' in line}\n"
        "bad = [m for m in maps if re.match('lib(cuda|cudart|nvrtc|amdhip64|fabric|ibverbs|efa|rdmacm)[-.]', m)]\n"
        "sys.exit(f'loaded: {bad}' if bad else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_configuration_imports_where_there_is_no_torch() -> None:
    script = (
        "import sys\n"
        "sys.modules['torch'] = None  # any import of it fails now\n"
        "import uccl_ep, uccl_ep.cli, uccl_ep_core.config as config\n"
        "config.Configuration.resolve({'timeout_s': 3}, {})\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_headers_and_kernels_are_where_plugin_authors_are_told() -> None:
    assert (uccl_ep_core.include_directory() / "uccl_ep" / "transport.h").is_file()
    assert (uccl_ep_core.kernels_directory() / "parameters.hpp").is_file()


@pytest.mark.parametrize("compiler", [["gcc", "-std=c11", "-x", "c"], ["g++", "-std=c++20", "-x", "c++"]], ids=str)
def test_transport_header_compiles_alone(compiler: list[str]) -> None:
    flags = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only", "-I", str(uccl_ep_core.include_directory())]
    source = '#include "uccl_ep/transport.h"\nint main(void) { return 0; }\n'
    done = subprocess.run([*compiler, *flags, "-"], input=source, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_core_names_no_plugin() -> None:
    core = CHECKOUT / "core" / "uccl_ep_core"
    if not core.is_dir():
        pytest.skip("needs the checkout")
    names = "|".join(sorted({name for group in registry.GROUPS for name in registry.names(group)}))
    pattern = re.compile(rf"(from|import)\s+uccl_ep_({names})\b")
    offenders = [path for path in core.rglob("*.py") if pattern.search(path.read_text())]
    assert offenders == []


def test_every_environment_variable_in_the_sources_is_an_option() -> None:
    """A variable that the configuration does not know is refused, so none may be read behind its back."""
    folders = [CHECKOUT / name for name in ("uccl_ep", "core/uccl_ep_core", "gpu_backends", "transports")]
    if not folders[1].is_dir():
        pytest.skip("needs the checkout")
    pattern = re.compile(r"(?:environ(?:\.get|\.pop)?|getenv)\s*[\[(]\s*[\"'](UCCL_EP_[A-Z0-9_]+)[\"']")
    known = {"UCCL_EP_CONFIG", *(f"UCCL_EP_{name.upper()}" for name in GENERAL_OPTIONS)}
    for group in registry.GROUPS:
        for plugin in registry.plugins(group):
            options = plugin.loaded.OPTIONS if plugin.loaded else {}
            known |= {f"UCCL_EP_{plugin.name.upper()}_{name.upper()}" for name in options}
    read = {
        (str(path.relative_to(CHECKOUT)), name)
        for folder in folders
        for path in folder.rglob("*")
        if path.suffix in (".py", ".c", ".cpp", ".hpp")
        for name in pattern.findall(path.read_text())
    }
    strangers = {(path, name) for path, name in read if name not in known and not name.startswith("UCCL_EP_BUILD_")}
    assert strangers == set()


def test_long_steps_of_make_say_how_it_goes() -> None:
    step = str(Path(__file__).parents[2] / ".ci" / "step")
    done = subprocess.run([step, "counting: a moment", "echo", "counted"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout.splitlines()[0] == "counting: a moment" and "counted" in done.stdout and "done in" in done.stdout
    done = subprocess.run([step, "failing", "sh", "-c", "exit 3"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3 and "failed after" in done.stderr
