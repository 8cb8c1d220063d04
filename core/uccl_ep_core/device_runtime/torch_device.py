"""What a backend needs of torch: the device, its current stream, and memory that the caller owns."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class TorchDevice:
    """One device under torch's name for accelerators, which is the same in the builds of all vendors.

    Args:
        build: the member of ``torch.version`` that is set in builds for this vendor.
    """

    def __init__(self, ordinal: int, build: str) -> None:
        self.device = torch.device("cuda", ordinal)
        self._build = build

    def unavailable_because(self) -> str:
        """Why torch cannot use such a device, "" where it can."""
        if getattr(torch.version, self._build, None) is None:
            return f"torch {torch.__version__} is not a build for {self._build}"
        if not torch.cuda.is_available():
            return f"torch {torch.__version__} sees no device"
        return ""

    def current_ordinal(self) -> int:
        return torch.cuda.current_device()

    def initialize(self) -> None:
        """Make torch create its context before the backend keeps it, so both share one."""
        torch.empty(1, device=self.device)

    def current_stream(self) -> int:
        # What torch.cuda.current_stream() asks, without the object that it makes of the answer: every launch asks.
        # So does the code that torch.compile writes, on the builds of all vendors.
        return torch._C._cuda_getCurrentRawStream(self.device.index)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)
