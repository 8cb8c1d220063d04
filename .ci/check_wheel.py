"""Checks a wheel: entry points, package data, folders it claims, and that no native file links a vendor library.

Usage: check_wheel.py FILE
"""

from __future__ import annotations

import configparser
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PLUGINS = {
    "uccl_ep.gpu_backends": {"host", "cuda", "hip"},
    "uccl_ep.transports": {"shm", "sim", "libfabric", "ibverbs"},
    "vllm.general_plugins": {"uccl_ep"},
    "sglang.srt.plugins": {"uccl_ep"},
}
DATA = [
    "uccl_ep_core/plugins.toml",
    "uccl_ep_core/include/uccl_ep/transport.h",
    "uccl_ep_core/include/uccl_ep/command.hpp",
    "uccl_ep_core/kernels/parameters.hpp",
    "uccl_ep/compat/import_path/deep_ep/__init__.py",
    "uccl_ep/compat/import_path/deep_ep/utils.py",
]
SYSTEM_LIBRARIES = ("libc.", "libm.", "libdl.", "libpthread.", "librt.", "libgcc_s.", "libstdc++.", "ld-linux")


def needed(library: Path) -> list[str]:
    """The shared libraries that a native file is linked to."""
    listing = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    return [line.split("[")[1].rstrip("]") for line in listing.splitlines() if "(NEEDED)" in line]


def problems(wheel: Path) -> list[str]:
    """What is wrong with the wheel, in words; empty where nothing is."""
    found: list[str] = []
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        names = archive.namelist()
        archive.extractall(folder)
        points = configparser.ConfigParser()
        points.read_string(archive.read(next(n for n in names if n.endswith("/entry_points.txt"))).decode())
        for group, plugins in PLUGINS.items():
            missing = plugins - set(points[group] if points.has_section(group) else ())
            found += [f"no entry point {name} in {group}" for name in sorted(missing)]
        found += [f"{name} is not in the wheel" for name in DATA if name not in names]
        if not any(name.endswith("/LICENSE") for name in names):
            found.append("no LICENSE in the wheel")
        for top in sorted({name.split("/")[0] for name in names}):
            if not (top == "uccl_ep" or top.startswith(("uccl_ep_", "uccl_ep-", "uccl_ep."))):
                found.append(f"claims the generic name {top} in site-packages")
        natives = [name for name in names if name.endswith(".so")]
        if not natives:
            found.append("holds no native module")
        for native in natives:
            for library in needed(Path(folder) / native):
                if not library.startswith(SYSTEM_LIBRARIES):
                    found.append(f"{native} is linked to {library}")
        print(f"{wheel.name}: {wheel.stat().st_size / 1024:.0f} kB, {len(names)} files, {len(natives)} native")
    return found


if __name__ == "__main__":
    report = problems(Path(sys.argv[1]))
    print("\n".join(report) or "wheel: entry points, package data and links are as they should be")
    sys.exit(bool(report))
