"""Finds NVRTC, in the packages that torch brings or in an installed toolkit, and nvcc where there is one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from uccl_ep_core.device_runtime.compiler import Compiled, CompileError, CompilerLibrary
from uccl_ep_core.device_runtime.sources import Unit

OLDEST = (12, 8)
"""Earlier releases crash on valid sources for sm_90 (12.4 and 12.6 were seen to)."""

REMEDY = "install it with: pip install 'nvidia-cuda-nvrtc>=13,<14' (CUDA 12: nvidia-cuda-nvrtc-cu12>=12.8)"

_MAJOR = re.compile(r"libnvrtc\.so\.(\d+)$")


def find_nvrtc(chosen: str = "", newest_major: int | None = None) -> CompilerLibrary | None:
    """The NVRTC to use, or None.

    Args:
        chosen: path given by the user; then it is taken as it is.
        newest_major: CUDA major version of the driver, which may not load code of a newer compiler.
    """
    if chosen:
        return _with_builtins(Path(chosen))
    best: tuple[int, int, Path] | None = None
    for rank, path in enumerate(_candidates()):
        match = _MAJOR.search(path.name)
        if match is None or (newest_major is not None and int(match[1]) > newest_major):
            continue
        # Newest major first, then the order of the search.
        entry = (int(match[1]), -rank, path)
        if best is None or entry[:2] > best[:2]:
            best = entry
    return None if best is None else _with_builtins(best[2])


def _with_builtins(path: Path) -> CompilerLibrary:
    builtins = sorted(path.parent.glob("libnvrtc-builtins.so.*"))
    return CompilerLibrary((*map(str, builtins[:1]), str(path)), "nvrtc", "CUBIN")


def _candidates() -> Iterator[Path]:
    for folder in _folders():
        yield from sorted(folder.glob("libnvrtc.so.*"), reverse=True)


def _folders() -> Iterable[Path]:
    for entry in sys.path:
        packages = Path(entry or ".") / "nvidia"
        if packages.is_dir():
            yield from sorted(packages.glob("cu*/lib"), reverse=True)
            yield packages / "cuda_nvrtc" / "lib"
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / "lib64"
    yield from sorted(Path("/usr/local").glob("cuda*/lib64"), reverse=True)
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        if folder:
            yield Path(folder)
    yield from (Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib/aarch64-linux-gnu"), Path("/usr/lib64"))


def find_nvcc() -> Path | None:
    """nvcc on the path or in an installed toolkit; it also needs a C++ compiler, which it finds itself."""
    found = shutil.which("nvcc")
    if found:
        return Path(found)
    return next((path for path in sorted(Path("/usr/local").glob("cuda*/bin/nvcc"), reverse=True)), None)


def compile_with_nvcc(nvcc: Path, unit: Unit, options: Sequence[str], timeout_s: float) -> Compiled:
    """Compile a unit to machine code, from files in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="uccl_ep_nvcc_") as name:
        folder = Path(name)
        source, image = folder / f"{unit.name}.cu", folder / "image.cubin"
        for header, text in {source.name: unit.source.replace("#pragma once", ""), **unit.headers}.items():
            (folder / header).parent.mkdir(parents=True, exist_ok=True)
            (folder / header).write_text(text)
        command = [str(nvcc), *options, f"-I{folder}", "-cubin", str(source), "-o", str(image)]
        try:
            done = subprocess.run(command, capture_output=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise CompileError(f"{nvcc} took more than {timeout_s:g} s for {unit.name}") from None
        log = (done.stdout + done.stderr).decode(errors="replace")
        if done.returncode != 0:
            raise CompileError(f"{' '.join(command)} failed with status {done.returncode}", log)
        return Compiled(image.read_bytes(), log)
