"""Files of the installed package and of the user: where they are, and where in them a value stands."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import ConfigurationError
from .options import did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_PACKAGE = Path(__file__).resolve().parent


def _installed_or_checkout(installed: str, checkout: str) -> Path:
    # An editable install runs from the checkout, where these files keep their own folders.
    path = _PACKAGE / installed
    return path if path.exists() else _PACKAGE.parents[1] / checkout


def shipped_plugins_toml() -> Path:
    """The shipped configuration."""
    return _installed_or_checkout("plugins.toml", "plugins.toml")


def include_directory() -> Path:
    """For ``-I``: the public C and C++ headers, ``#include "uccl_ep/transport.h"``."""
    return _installed_or_checkout("include", "core/native/include")


def kernels_directory() -> Path:
    """The kernel sources that GPU backends compile."""
    return _installed_or_checkout("kernels", "core/kernels")


class Table:
    """One table of a TOML file, which knows the line of each of its values."""

    def __init__(
        self, content: dict[str, Any], path: tuple[str, ...], file: str, lines: dict[tuple[str, ...], int]
    ) -> None:
        self._content, self._path, self._file, self._lines = content, path, file, lines
        self.origin = self._origin(path)

    def items(self, valid: set[str] | None = None) -> Iterator[tuple[str, Table]]:
        """The tables inside by name; anything else, or a name that is not ``valid``, is an error."""
        for name, value in self._content.items():
            path = (*self._path, name)
            if valid is not None and name not in valid:
                raise ConfigurationError(
                    f"{'.'.join(path)} ({self._origin(path)}) is unknown: {did_you_mean(name, valid)}"
                )
            if not isinstance(value, dict):
                raise ConfigurationError(f"{'.'.join(path)} ({self._origin(path)}) must be a table: [{'.'.join(path)}]")
            yield name, Table(value, path, self._file, self._lines)

    def values(self) -> Iterator[tuple[str, Any, str]]:
        """Name, value and origin of each value."""
        for name, value in self._content.items():
            yield name, value, self._origin((*self._path, name))

    def _origin(self, path: tuple[str, ...]) -> str:
        line = self._lines.get(path)
        return f"{self._file}, line {line}" if line else f"{self._file}, {'.'.join(path)}"


def read_toml(path: str | Path, origin: str, label: str = "") -> Table:
    """Parse a file.

    Args:
        origin: who named the file.
        label: what origins of its values call it; "": its path.

    Raises:
        ConfigurationError: it cannot be read or parsed; names ``origin``.
    """
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
        return Table(tomllib.loads(text), (), label or f"file {file}", _line_numbers(text))
    except OSError as error:
        raise ConfigurationError(f"configuration file {file} ({origin}) cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"configuration file {file} ({origin}) is not valid TOML: {error}") from error


def _line_numbers(text: str) -> dict[tuple[str, ...], int]:
    """The line, counted from 1, that sets each table and value; what a simple search does not find is left out."""
    found: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\s*([^\[\]]+?)\s*\]", line):
            table = tuple(part.strip(" \"'") for part in header[1].split("."))
            found.setdefault(table, number)
        elif key := re.match(r"\s*([A-Za-z0-9_.\"' -]+?)\s*=", line):
            found.setdefault((*table, *(part.strip(" \"'") for part in key[1].split("."))), number)
    return found
