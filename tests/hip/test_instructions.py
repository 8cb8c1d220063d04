"""What the compiler makes of the primitives that carry memory order, read from its assembly. Needs the pip clang."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ziglang") is None, reason="clang is not installed as a Python package"
)

SOURCE = """
#include "primitives.hpp"
using namespace uccl_ep;
struct P { uint64_t *a, *b; };
UCCL_EP_KERNEL(acquire, P) { *parameters.b = device::load_acquire_system(parameters.a); }
UCCL_EP_KERNEL(release, P) { device::store_release_system(parameters.a, 1); }
UCCL_EP_KERNEL(fenced, P) { device::fence_system(); device::store_relaxed_system(parameters.a, 1); }
UCCL_EP_KERNEL(copied, P) { device::copy(parameters.a, parameters.b, 14336); }
"""

# In this order, other instructions between them.
EXPECTED = {
    "gfx942": {
        "acquire": [
            "global_load_dwordx2",
            "sc0 sc1",
            "s_waitcnt vmcnt(0)",
            "buffer_inv sc0 sc1",
            "global_store_dwordx2",
        ],
        "release": ["buffer_wbl2 sc0 sc1", "s_waitcnt vmcnt(0)", "global_store_dwordx2", "sc0 sc1"],
        "fenced": ["buffer_wbl2 sc0 sc1", "s_waitcnt vmcnt(0)", "buffer_inv sc0 sc1", "global_store_dwordx2"],
    },
    "gfx90a": {
        "acquire": ["global_load_dwordx2", "glc", "s_waitcnt vmcnt(0)", "buffer_invl2", "global_store_dwordx2"],
        "release": ["buffer_wbl2", "s_waitcnt vmcnt(0)", "global_store_dwordx2"],
        "fenced": ["buffer_wbl2", "s_waitcnt vmcnt(0)", "global_store_dwordx2"],
    },
    "gfx1201": {
        "acquire": [
            "global_load_b64",
            "SCOPE_SYS",
            "s_wait_loadcnt 0x0",
            "global_inv scope:SCOPE_SYS",
            "global_store_b64",
        ],
        "release": ["global_wb scope:SCOPE_SYS", "s_wait_storecnt 0x0", "global_store_b64", "SCOPE_SYS"],
        "fenced": [
            "global_wb scope:SCOPE_SYS",
            "s_wait_storecnt 0x0",
            "global_inv scope:SCOPE_SYS",
            "global_store_b64",
        ],
    },
}
EXPECTED["gfx950"] = EXPECTED["gfx942"]


@pytest.mark.parametrize("architecture", sorted(EXPECTED))
def test_order_of_instructions(architecture: str, tmp_path: Path) -> None:
    (tmp_path / "k.hip").write_text(SOURCE)
    clang = [sys.executable, "-m", "ziglang", "clang", "-x", "hip", "--cuda-device-only", "-nogpuinc", "-nogpulib"]
    flags = [f"--offload-arch={architecture}", "-O3", "-std=c++20", "-DUCCL_EP_NO_STANDARD_HEADERS"]
    include = [f"-I{ROOT}/{folder}" for folder in ("gpu_backends/hip/native", "core/kernels", "core/native/include")]
    command = [*clang, *flags, *include, "-S", "k.hip", "-o", "k.s"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120)
    assembly = (tmp_path / "k.s").read_text()
    for kernel, wanted in EXPECTED[architecture].items():
        body = assembly[assembly.index(f"\n{kernel}:") :]
        body = body[: body.index("s_endpgm")]
        position = 0
        for instruction in wanted:
            position = body.find(instruction, position)
            assert position >= 0, f"{kernel} lacks {instruction!r} in its place:\n{body}"
    wide = "_load_dwordx4" if architecture != "gfx1201" else "_load_b128"
    assert wide in assembly, "copies load 16 bytes at a time"
