"""Open a shared library at run time and give every function its exact argument types.

A missing prototype lets ctypes pass a 64-bit handle as a 32-bit int, which works until an address
is above 4 GiB; so a function can only be called here if it was declared.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Prototype = tuple[Any, ...]


class LibraryNotFoundError(OSError):
    """None of the candidate libraries could be opened; says what the loader said of each."""


class Library:
    """A shared library whose functions all return a status code.

    Args:
        candidates: names or paths, tried in order.
        prototypes: argument types by function name.
        optional: names of ``prototypes`` that older releases lack; calling one raises.
    """

    def __init__(
        self, candidates: Sequence[str], prototypes: Mapping[str, Prototype], optional: Iterable[str] = ()
    ) -> None:
        self.path, self._library = _open_first(candidates)
        missing = []
        for name, argument_types in prototypes.items():
            try:
                function = getattr(self._library, name)
            except AttributeError:
                if name not in set(optional):
                    missing.append(name)
                continue
            function.argtypes = list(argument_types)
            function.restype = ctypes.c_int
            setattr(self, name, function)  # found without a call of `__getattr__`
        if missing:
            raise LibraryNotFoundError(f"{self.path} is too old: it lacks {', '.join(missing)}")

    def has(self, name: str) -> bool:
        """Whether this release has an optional function."""
        return name in self.__dict__

    def __getattr__(self, name: str) -> Any:
        raise LibraryNotFoundError(f"{self.__dict__.get('path', 'the library')} has no function {name}")


def _open_first(candidates: Sequence[str]) -> tuple[str, ctypes.CDLL]:
    reasons = []
    for candidate in candidates:
        try:
            return candidate, ctypes.CDLL(candidate)
        except OSError as error:
            reasons.append(str(error))
    raise LibraryNotFoundError("; ".join(reasons) or "no candidate library was named")
