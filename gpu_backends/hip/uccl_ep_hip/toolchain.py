"""The compilers: a clang that comes as a pip package, for any architecture, and hipRTC, found at run time."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from uccl_ep_core.device_runtime.compiler import Compiled, CompileError, CompilerLibrary
from uccl_ep_core.device_runtime.sources import Unit

REMEDY = "install it with: pip install 'ziglang>=0.17,<0.18'"

_COMMON = ("-nogpulib", "-O3", "-std=c++20", "-ffp-contract=off", "-mcode-object-version=5")
"""-ffp-contract=off: rounding is part of the contract. Code object version 5 loads from ROCm 5.7 on."""

_DEVICE = (
    "-x", "hip", "--cuda-device-only", "-nogpuinc", "-fgpu-rdc", "-emit-llvm", "-DUCCL_EP_NO_STANDARD_HEADERS",
    "-Wall", "-Werror", "-Wno-unused-function", "-Wno-pragma-once-outside-header",
)  # fmt: skip

RTC_OPTIONS = ("-O3", "-std=c++20", "-ffp-contract=off")

_HIPRTC = re.compile(r"libhiprtc\.so(\.\d+)?$")


def pip_clang_missing() -> bool:
    """Whether the package with clang and lld is absent."""
    return importlib.util.find_spec("ziglang") is None


def compile_with_clang(unit: Unit, architecture: str, timeout_s: float = 600.0) -> Compiled:
    """A linked code object, by way of LLVM's form; the linker refuses undefined symbols."""
    with tempfile.TemporaryDirectory(prefix="uccl_ep_hip_") as name:
        folder = Path(name)
        source = folder / "sources" / f"{unit.name}.hip"
        for header, text in {source.name: unit.source, **unit.headers}.items():
            path = folder / "sources" / header
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        bitcode, machine, linked = folder / "k.bc", folder / "k.o", folder / "k.co"
        steps = (
            ("clang", *_DEVICE, *_COMMON, f"--offload-arch={architecture}", f"-I{source.parent}", "-c", str(source),
             "-o", str(bitcode)),
            ("clang", "-x", "ir", "-target", "amdgcn-amd-amdhsa", f"-mcpu={architecture}", *_COMMON,
             "-Rpass-analysis=kernel-resource-usage", "-c", str(bitcode), "-o", str(machine)),
            ("ld.lld", "-shared", "--no-undefined", str(machine), "-o", str(linked)),
        )  # fmt: skip
        log = "".join(_run(step, architecture, unit.name, folder, timeout_s) for step in steps)
        return Compiled(linked.read_bytes(), log)


def _run(step: Sequence[str], architecture: str, name: str, folder: Path, timeout_s: float) -> str:
    # The package keeps caches, by default in the home folder, which may not be writable.
    environment = os.environ | {"ZIG_GLOBAL_CACHE_DIR": str(folder / "z"), "ZIG_LOCAL_CACHE_DIR": str(folder / "z")}
    command = (sys.executable, "-m", "ziglang", *step)
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise CompileError(f"{step[0]} took more than {timeout_s:g} s for {name} on {architecture}") from None
    log = (done.stdout + done.stderr).decode(errors="replace")
    if done.returncode != 0:
        raise CompileError(f"{step[0]} failed for {name} on {architecture} with status {done.returncode}", log)
    return log


def find_hiprtc(chosen: str = "", beside: str = "") -> CompilerLibrary | None:
    """The hipRTC to use, or None.

    Args:
        chosen: path given by the user; then it is taken as it is.
        beside: path of the HIP runtime in use; the hipRTC of the same release lies next to it.
    """
    if chosen:
        return CompilerLibrary((chosen,), "hiprtc", "Code")
    roots = [Path(beside).resolve().parent] if os.sep in beside else []
    roots += [Path(os.environ[name]) / "lib" for name in ("ROCM_PATH", "HIP_PATH") if os.environ.get(name)]
    roots += [Path("/opt/rocm/lib"), Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib64")]
    for root in roots:
        found = sorted((path for path in root.glob("libhiprtc.so*") if _HIPRTC.search(path.name)), reverse=True)
        if found:
            return CompilerLibrary((str(found[0]),), "hiprtc", "Code")
    return None
