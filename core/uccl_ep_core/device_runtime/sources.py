"""Finds the device sources, and names the kernels they declare.

The algorithm sources are one set for every backend; a backend adds the folder with its own
``primitives.hpp``. A kernel is declared by ``UCCL_EP_KERNEL(name, Parameters)`` at the start of a line.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from .. import files

ENTRY = "kernels.hpp"
TRACED_ENTRY = "traced_kernels.hpp"
"""The same kernels, which record what they do and when (core/kernels/spans.hpp)."""
_KERNEL = re.compile(r"^UCCL_EP_KERNEL\(\s*(\w+)\s*,", re.MULTILINE)
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Unit:
    """One file to compile, with all it includes.

    Attributes:
        name: file name without its suffix.
        source: the text given to the compiler.
        headers: text by the name under which it is included.
        kernels: names of the entry points.
    """

    name: str
    source: str
    headers: Mapping[str, str]
    kernels: tuple[str, ...]

    @functools.cached_property
    def digest(self) -> str:
        """Changes with any byte of the source or of a header it includes, directly or not."""
        state = hashlib.sha256()
        for name, text in (("", self.source), *sorted(self.headers.items())):
            for part in (name, text):
                data = part.encode()
                state.update(len(data).to_bytes(8, "little") + data)
        return state.hexdigest()


@dataclasses.dataclass(frozen=True)
class SourceTree:
    """The folders device code is compiled from.

    Attributes:
        kernels: the algorithms.
        include: headers shared with the CPU side (``uccl_ep/...``).
        native: the backend's own folder with ``primitives.hpp``.
    """

    kernels: Path
    include: Path
    native: Path

    @classmethod
    def of_package(cls, package_file: str) -> SourceTree:
        """The tree for a backend package, installed or in a checkout.

        Args:
            package_file: ``__file__`` of the backend's ``__init__``.
        """
        package = Path(package_file).resolve().parent
        installed = package / "native"
        native = installed if installed.is_dir() else package.parent / "native"
        return cls(files.kernels_directory(), files.include_directory(), native)

    def units(self, traced: bool = False) -> list[Unit]:
        """What to compile: one file, which includes all kernels behind the backend's primitives."""
        path = self.kernels / (TRACED_ENTRY if traced else ENTRY)
        text = path.read_text()
        headers = self._headers_of(path.name, text)
        names = [name for content in (text, *headers.values()) for name in _KERNEL.findall(content)]
        return [Unit(path.stem, text, headers, tuple(sorted(names)))]

    def _headers_of(self, name: str, text: str) -> dict[str, str]:
        headers: dict[str, str] = {}
        pending = [(name, text)]
        while pending:
            includer, content = pending.pop()
            for wanted in _INCLUDE.findall(content):
                path = self._resolve(wanted)
                if path is None:
                    raise FileNotFoundError(f"{includer} includes {wanted!r}, which is in none of {self._folders()}")
                if wanted not in headers:
                    headers[wanted] = path.read_text()
                    pending.append((wanted, headers[wanted]))
        return headers

    def _folders(self) -> tuple[Path, ...]:
        return (self.native, self.kernels, self.kernels.parent, self.include)

    def _resolve(self, wanted: str) -> Path | None:
        return next((folder / wanted for folder in self._folders() if (folder / wanted).is_file()), None)
