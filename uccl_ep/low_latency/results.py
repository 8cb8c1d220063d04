"""What a low-latency dispatch leaves to its caller: the handle, and receive buffers that are used in turn."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch

from uccl_ep_core.gpu_backend import GpuBackend
from uccl_ep_core.kernel_parameters import LowLatencyShape

from .path import DIRECT, PACKED, DirectPath

LIVE_RESULTS = 2
"""Results that are valid at the same time: one a parity."""


class LowLatencyHandle(tuple[Any, ...]):
    """What a low-latency dispatch decided. Opaque, but unpacks as DeepEP's does:
    ``(source_index, layout_range, max_tokens, hidden, num_experts)``, where ``layout_range`` is int64
    [local experts, num_ranks] of ``begin << 32 | count``.

    Valid until the second dispatch after the one that made it.
    """

    state: HandleState

    @property
    def rounding(self) -> str:
        """In which order a combine adds up: ``"increasing k"``; or ``"by rank"``: each rank's rows in increasing k,
        then those sums in the order of ranks. Both in float32 (float64 for float64), rounded once."""
        return "by rank" if self.state.path == DIRECT else "increasing k"

    @classmethod
    def of(cls, state: HandleState) -> LowLatencyHandle:
        shape = state.shape
        handle = cls((state.source_index, state.layout_range, shape.max_tokens, shape.hidden, shape.num_experts))
        handle.state = state
        return handle


_PART_ALIGNMENT = 32  # elements: 128 bytes


@dataclasses.dataclass(eq=False, slots=True)
class KernelMemory:
    """What a dispatch writes for its combine and no caller sees: one allocation, and the addresses of its parts.

    Parts are int32, named as in LowLatencyDispatchParameters of core/kernels/parameters.hpp; the address of one without
    elements is 0.
    """

    tensor: torch.Tensor
    combine_row: int
    own_row: int
    begin: int
    count: int
    combine_base: int
    rows_before: int
    rows_home: int
    picks: int

    @classmethod
    def of(cls, backend: GpuBackend, sizes: tuple[int, ...]) -> KernelMemory:
        """Memory for parts of as many elements, in the order of the attributes."""
        padded = [-(-size // _PART_ALIGNMENT) * _PART_ALIGNMENT for size in sizes]
        tensor = backend.empty((sum(padded),), torch.int32)
        address, addresses = tensor.data_ptr(), []
        for size, room in zip(sizes, padded, strict=True):
            addresses.append(address if size else 0)
            address += 4 * room
        return cls(tensor, *addresses)


@dataclasses.dataclass(eq=False)
class HandleState:
    """What combine needs of a dispatch; tensors as in LowLatencyDispatchParameters of core/kernels/parameters.hpp.

    Attributes:
        direct: sizes of the direct kernels, where its rows travelled so; None: they were packed. As the combine's will.
    """

    owner: weakref.ref[Any]
    generation: int
    shape: LowLatencyShape
    dtype: torch.dtype
    num_tokens: int
    topk_idx: torch.Tensor
    source_index: torch.Tensor
    memory: KernelMemory
    layout_range: torch.Tensor
    direct: DirectPath | None

    @property
    def path(self) -> str:
        """How its rows travelled, and those of the combine will."""
        return PACKED if self.direct is None else DIRECT

    def rows_shape(self, num_ranks: int) -> tuple[int, int, int]:
        """[local experts, num_ranks * max_tokens, hidden]: rows as they were received, and as combine takes them."""
        return self.shape.num_experts // num_ranks, num_ranks * self.shape.max_tokens, self.shape.hidden


class Results:
    """The receive buffers of one parity; kept as long as the shape stays."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, backend: GpuBackend) -> torch.Tensor:
        tensor = self._kept.get(name)
        if tensor is None or tensor.shape != shape or tensor.dtype != dtype:
            tensor = self._kept[name] = backend.empty(shape, dtype)
        return tensor
