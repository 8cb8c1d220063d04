"""The CUDA backend of uccl_ep; the driver and the compiler are found at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import CudaBackend

__all__ = ["CudaBackend"]


def __getattr__(name: str) -> Any:
    # Late, because the backend needs torch, and compiling the kernels during a build must not.
    if name == "CudaBackend":
        from .backend import CudaBackend

        return CudaBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
