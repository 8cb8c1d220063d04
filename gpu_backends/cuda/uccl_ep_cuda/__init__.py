"""The CUDA backend of uccl_ep; the driver and the compiler are found at run time."""

from .backend import CudaBackend

__all__ = ["CudaBackend"]
