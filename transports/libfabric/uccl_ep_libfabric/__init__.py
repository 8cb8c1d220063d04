"""The libfabric transport: one plugin from a laptop's loopback to AWS EFA and Slingshot."""

from .transport import LibfabricTransport

__all__ = ["LibfabricTransport"]
