"""The ibverbs transport: InfiniBand, RoCE and iWARP devices by libibverbs."""

from .transport import IbverbsTransport

__all__ = ["IbverbsTransport"]
