"""The compiled engine; its own docstrings describe it (core/native/bindings)."""

from typing import Any

def __getattr__(name: str) -> Any: ...
