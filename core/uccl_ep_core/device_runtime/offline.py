"""Compiling kernels without a device: for objects that ship with a package, and to check all of them.

As a program it writes a backend's objects and their manifest; a build runs it:
``python -m uccl_ep_core.device_runtime.offline PACKAGE FOLDER [ARCHITECTURE ...]``.
"""

from __future__ import annotations

import abc
import argparse
import dataclasses
import importlib
from collections.abc import Sequence
from pathlib import Path

from .compiler import CompileError
from .objects import write_manifest
from .sources import Unit


@dataclasses.dataclass(frozen=True)
class KernelResources:
    """What one thread (registers, stack, spills) or block (shared memory) of a kernel takes.

    Attributes:
        registers: vector registers.
        stack_bytes: memory per thread for arrays that are indexed at run time, and for spills.
        spills: vector registers, or bytes of them, kept in memory for want of registers.
        scalar_spills: scalar registers kept in vector registers, which is cheap.
    """

    registers: int
    stack_bytes: int = 0
    spills: int = 0
    scalar_spills: int = 0
    shared_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class OfflineBuild:
    """The machine code of a unit for one architecture, and what each of its kernels takes."""

    image: bytes
    resources: dict[str, KernelResources]


class OfflineCompiler(abc.ABC):
    """How a backend's kernels are compiled on a machine without its devices.

    Attributes:
        architectures: what is compiled unless asked for otherwise.
        suffix: of object files.
        table: file with the figures of the last accepted compilation.
    """

    architectures: tuple[str, ...]
    suffix: str
    table: Path

    @abc.abstractmethod
    def unavailable_because(self) -> str:
        """Why it cannot run here, with the remedy; "" where it can."""

    @abc.abstractmethod
    def units(self) -> Sequence[Unit]: ...

    @abc.abstractmethod
    def compile(self, unit: Unit, architecture: str) -> OfflineBuild:
        """Compile and link. Raises `CompileError` for an error, an undefined symbol or a missing kernel."""


def check_complete(unit: Unit, architecture: str, build: OfflineBuild) -> OfflineBuild:
    """The build, if it has every kernel of its unit."""
    missing = sorted(set(unit.kernels) - set(build.resources))
    if missing:
        raise CompileError(f"{unit.name} for {architecture} lacks the kernels {', '.join(missing)}")
    return build


def write_objects(compiler: OfflineCompiler, folder: Path, architectures: Sequence[str] = ()) -> list[Path]:
    """Compile every unit and describe the objects in a manifest; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    entries: list[dict[str, str]] = []
    for unit in compiler.units():
        for architecture in architectures or compiler.architectures:
            file = folder / f"{unit.name}.{architecture}.{compiler.suffix}"
            file.write_bytes(compiler.compile(unit, architecture).image)
            files.append(file)
            entries.append({"unit": unit.name, "digest": unit.digest, "architecture": architecture, "file": file.name})
    write_manifest(folder, entries)
    return files


def offline_compiler(package: str) -> OfflineCompiler:
    """The compiler that a backend package has in its module ``build``, under the name ``OFFLINE``."""
    found = importlib.import_module(f"{package}.build").OFFLINE
    assert isinstance(found, OfflineCompiler)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the kernel objects of a GPU backend.")
    parser.add_argument("package", help="import name of the backend, e.g. uccl_ep_cuda")
    parser.add_argument("folder", type=Path)
    parser.add_argument("architectures", nargs="*", help="default: all that the backend lists")
    parser.add_argument("--optional", action="store_true", help="write no object where no compiler is found")
    chosen = parser.parse_args(arguments)
    compiler = offline_compiler(chosen.package)
    reason = compiler.unavailable_because()
    if reason and chosen.optional:
        chosen.folder.mkdir(parents=True, exist_ok=True)
        write_manifest(chosen.folder, [])
        print(f"{chosen.package}: no kernel objects, they are compiled at first use ({reason})")
        return 0
    if reason:
        parser.error(reason)
    for file in write_objects(compiler, chosen.folder, chosen.architectures):
        print(f"{file.name}: {file.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
