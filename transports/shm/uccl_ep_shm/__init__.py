"""The shm transport: ranks of one host write into each other's shared memory."""

from .transport import ShmTransport

__all__ = ["ShmTransport"]
