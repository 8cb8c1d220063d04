"""Compiling kernels without a device: for objects that ship with a package, and to check all of them."""

from __future__ import annotations

import abc
import dataclasses
import importlib
from collections.abc import Sequence
from pathlib import Path

from .compiler import CompileError
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
    def units(self, traced: bool = False) -> Sequence[Unit]:
        """What is compiled; ``traced``: instead, the kernels that record what they do."""

    @abc.abstractmethod
    def compile(self, unit: Unit, architecture: str) -> OfflineBuild:
        """Compile and link. Raises `CompileError` for an error, an undefined symbol or a missing kernel."""


def check_complete(unit: Unit, architecture: str, build: OfflineBuild) -> OfflineBuild:
    """The build, if it has every kernel of its unit."""
    missing = sorted(set(unit.kernels) - set(build.resources))
    if missing:
        raise CompileError(f"{unit.name} for {architecture} lacks the kernels {', '.join(missing)}")
    return build


def offline_compiler(package: str) -> OfflineCompiler:
    """The compiler that a backend package has in its module ``build``, under the name ``OFFLINE``."""
    found = importlib.import_module(f"{package}.build").OFFLINE
    if not isinstance(found, OfflineCompiler):
        raise TypeError(f"{package}.build.OFFLINE is {found!r}, not an OfflineCompiler")
    return found
