"""Builds the fake vendor libraries and gives backends that run on them, with tensors of CPU torch."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import re
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from uccl_ep_core import kernel_parameters
from uccl_ep_core.device_runtime.torch_device import TorchDevice

_TESTS = Path(__file__).resolve().parents[1]


def _declared_kernels() -> dict[str, type[ctypes.Structure]]:
    """The kernels of core/kernels with their parameter structs."""
    found: dict[str, type[ctypes.Structure]] = {}
    for path in sorted((_TESTS.parent / "core" / "kernels").glob("*.hpp")):
        for name, parameters in re.findall(r"^UCCL_EP_KERNEL\((\w+), (\w+)\)", path.read_text(), re.MULTILINE):
            found[name] = getattr(kernel_parameters, parameters)
    return found


KERNELS = _declared_kernels()

LAUNCHER = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_int
)


class CpuTorchDevice(TorchDevice):
    """Tensors in host memory, which is where the fakes have their devices."""

    def __init__(self, ordinal: int) -> None:
        self.device = torch.device("cpu")

    def unavailable_because(self) -> str:
        return ""

    def current_ordinal(self) -> int:
        return 0

    def initialize(self) -> None:
        return

    def current_stream(self) -> int:
        return 0

    def empty(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)


@dataclasses.dataclass(frozen=True)
class FakeFiles:
    """The built libraries of one vendor.

    Attributes:
        driver: the fake driver.
        compiler: the fake run-time compiler.
        image: what it compiles to, an object with all kernels.
        longer: the same, but dispatch takes a struct that is 8 bytes longer.
        split: the same, but dispatch takes its struct as two arguments.
    """

    vendor: str
    driver: Path
    compiler: Path
    image: Path

    @property
    def longer(self) -> Path:
        return self.image.with_suffix(".longer")

    @property
    def split(self) -> Path:
        return self.image.with_suffix(".split")

    @property
    def options(self) -> dict[str, str]:
        return {"library": str(self.driver), "hiprtc" if self.vendor == "hip" else "nvrtc": str(self.compiler)}


def build(vendor: str, folder: Path) -> FakeFiles:
    """Compile the fakes of a vendor into a folder."""
    prefix, code = ("hiprtc", "Code") if vendor == "hip" else ("nvrtc", "CUBIN")
    driver, compiler = folder / f"libfake_{vendor}.so", folder / f"libfake_{prefix}.so"
    files = FakeFiles(vendor, driver, compiler, folder / f"{vendor}.image")
    _compile(_TESTS / vendor / "fake" / f"fake_{vendor}.cpp", files.driver)
    _compile(_TESTS / "hip" / "fake" / "fake_compiler.cpp", files.compiler, f"-DPREFIX={prefix}", f"-DCODE={code}")
    _assemble(vendor, files.image)
    if vendor == "hip":
        size = ctypes.sizeof(KERNELS["uccl_ep_dispatch"])
        _assemble(vendor, files.longer, [_argument(0, size + 8)])
        _assemble(vendor, files.split, [_argument(0, size - 8), _argument(size - 8, 8)])
    return files


def _assemble(vendor: str, image: Path, dispatch: list[dict[str, Any]] | None = None) -> None:
    assembly = image.with_suffix(".s")
    assembly.write_text(_object_source(vendor, dispatch))
    command = ["gcc", "-shared", "-nostdlib", "-Wl,--build-id=none", str(assembly), "-o", str(image)]
    subprocess.run(command, check=True, timeout=60)


def _compile(source: Path, library: Path, *flags: str) -> None:
    command = ["g++", "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", *flags, str(source)]
    subprocess.run([*command, "-o", str(library)], check=True, timeout=120)


def _object_source(vendor: str, dispatch: list[dict[str, Any]] | None) -> str:
    """An object with a symbol for each kernel and, for AMD, the note that describes their parameters.

    ``dispatch`` is what it says of the arguments of uccl_ep_dispatch, None for the truth.
    """
    lines = [".data"]
    for name in KERNELS:
        symbol = f'"{name}.kd"' if vendor == "hip" else f'"{name}"'
        lines += [f".globl {symbol}", f"{symbol}: .quad 0"]
    if vendor == "hip":
        kernels = [
            _describe(
                name, dispatch if dispatch and name == "uccl_ep_dispatch" else [_argument(0, ctypes.sizeof(kind))]
            )
            for name, kind in KERNELS.items()
        ]
        metadata = encode({"amdhsa.version": [1, 2], "amdhsa.kernels": kernels})
        note = struct.pack("<III", 7, len(metadata), 32) + b"AMDGPU\0\0" + metadata + b"\0" * (-len(metadata) % 4)
        lines += ['.section .note,"a",@note', ".byte " + ",".join(map(str, note))]
    return "\n".join([*lines, '.section .note.GNU-stack,"",@progbits', ""])


def _argument(offset: int, size: int) -> dict[str, Any]:
    return {".offset": offset, ".size": size, ".value_kind": "by_value"}


def _describe(name: str, arguments: list[dict[str, Any]]) -> dict[str, Any]:
    end = arguments[-1][".offset"] + arguments[-1][".size"]
    hidden = {".offset": -(-end // 8) * 8, ".size": 4, ".value_kind": "hidden_block_count_x"}
    return {".name": name, ".args": [*arguments, hidden]}


def encode(value: Any) -> bytes:
    """MessagePack, as far as the note needs it."""
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, int):
        return bytes([value]) if value < 128 else b"\xcd" + struct.pack(">H", value)
    if isinstance(value, str):
        data = value.encode()
        return (bytes([0xA0 | len(data)]) if len(data) < 32 else b"\xd9" + bytes([len(data)])) + data
    if isinstance(value, dict):
        return bytes([0x80 | len(value)]) + b"".join(encode(k) + encode(v) for k, v in value.items())
    head = bytes([0x90 | len(value)]) if len(value) < 16 else b"\xdc" + struct.pack(">H", len(value))
    return head + b"".join(map(encode, value))


class Fake:
    """A loaded fake driver, with what tests ask of it."""

    def __init__(self, files: FakeFiles) -> None:
        self.files = files
        self.library = ctypes.CDLL(str(files.driver))
        self.library.fake_count.restype = ctypes.c_uint64
        self.library.fake_journal.restype = ctypes.c_char_p
        self.library.fake_kind.argtypes = [ctypes.c_uint64]
        self.library.fake_kind.restype = ctypes.c_uint32
        self.library.fake_reaches.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
        self.configure()

    def configure(
        self, *, devices: int = 2, peer_access: bool = True, cooperative: bool = True, architecture: str = ""
    ) -> None:
        self.library.fake_set_launcher(None)
        self.library.fake_set_capturing(0)
        self.library.fake_set_not_ready(0)
        self.library.fake_fail_next(b"", 0)
        self.library.fake_configure(
            devices,
            peer_access,
            cooperative,
            64 if self.files.vendor == "hip" else 32,
            (architecture or "gfx942:sramecc+:xnack-").encode(),
        )

    def count(self, what: str) -> int:
        return int(self.library.fake_count(what.encode()))

    def journal(self) -> list[str]:
        calls = self.library.fake_journal().decode().split()
        self.library.fake_clear_journal()
        return list(calls)

    def fail_next(self, call: str, status: int) -> None:
        self.library.fake_fail_next(call.encode(), status)

    def set_launcher(self, run: Callable[[str, int, int, int, int], int]) -> None:
        """``run(kernel, address of its parameters, blocks, threads, shared bytes)`` executes launches."""

        def call(name: bytes, at: int, blocks: int, threads: int, shared: int, together: int) -> int:
            return run(name.decode(), at, blocks, threads, shared)

        self._launcher = LAUNCHER(call)  # kept, since the library keeps its address
        self.library.fake_set_launcher(self._launcher)


def backend_class(fake: Fake) -> Any:
    """The vendor's backend with CPU tensors."""
    package = {"hip": "uccl_ep_hip:HipBackend", "cuda": "uccl_ep_cuda:CudaBackend"}[fake.files.vendor]
    module, _, name = package.partition(":")
    real = getattr(importlib.import_module(module), name)
    return type(f"Fake{name}", (real,), {"torch_device_of": classmethod(lambda cls, ordinal: CpuTorchDevice(ordinal))})


def options_of(fake: Fake, tmp_path: Path) -> dict[str, Any]:
    """Options with which the vendor's backend opens the fake, and keeps what it compiles under ``tmp_path``."""
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700, exist_ok=True)
    return {**fake.files.options, "cache_dir": str(cache)}
