"""The host backend of uccl_ep: kernels run on CPU threads, on any machine."""

from .backend import HostBackend

__all__ = ["HostBackend"]
