"""The HIP backend of uccl_ep; the runtime and the compiler are found at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import HipBackend

__all__ = ["HipBackend"]


def __getattr__(name: str) -> Any:
    # Late, because the backend needs torch, and compiling the kernels during a build must not.
    if name == "HipBackend":
        from .backend import HipBackend

        return HipBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
