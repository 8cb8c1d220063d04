"""The compiled data half; its own docstrings describe it (native/bindings.cpp)."""

from typing import Any

def __getattr__(name: str) -> Any: ...
