"""What a backend needs of torch: the device, its current stream, and memory that the caller owns."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class TorchDevice:
    """One device under torch's name for accelerators of this kind (CUDA and ROCm builds both say "cuda")."""

    def __init__(self, ordinal: int) -> None:
        self.device = torch.device("cuda", ordinal)

    @staticmethod
    def unavailable_because() -> str:
        """Why torch cannot use such a device, "" where it can."""
        if not torch.backends.cuda.is_built():
            return f"torch {torch.__version__} is a build without GPU support"
        if not torch.cuda.is_available():
            return f"torch {torch.__version__} sees no device"
        return ""

    @staticmethod
    def current_ordinal() -> int:
        return torch.cuda.current_device()

    def initialize(self) -> None:
        """Make torch create its context before the backend keeps it, so both share one."""
        torch.empty(1, device=self.device)

    def current_stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)
