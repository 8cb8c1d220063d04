"""Checks and conversions of the tensors that a call is given; all before any rank communicates."""

from __future__ import annotations

from typing import SupportsIndex

import torch

from uccl_ep_core.errors import ArgumentError
from uccl_ep_core.kernel_parameters import PayloadType

REDUCIBLE = {
    torch.bfloat16: PayloadType.BFLOAT16,
    torch.float16: PayloadType.FLOAT16,
    torch.float32: PayloadType.FLOAT32,
    torch.float64: PayloadType.FLOAT64,
}
CARRIED = {
    **REDUCIBLE,
    torch.float8_e4m3fn: PayloadType.FLOAT8,
    torch.float8_e5m2: PayloadType.FLOAT8_E5M2,
    torch.float8_e4m3fnuz: PayloadType.FLOAT8_E4M3FNUZ,
    torch.float8_e5m2fnuz: PayloadType.FLOAT8_E5M2FNUZ,
    torch.uint8: PayloadType.UINT8,
    torch.int8: PayloadType.INT8,
}
"""What a high-throughput dispatch moves."""
NUMBERED = {
    **CARRIED,
    torch.int16: PayloadType.INT16,
    torch.int32: PayloadType.INT32,
    torch.int64: PayloadType.INT64,
}
"""Types whose difference between ranks is noticed; others (as scales) are told apart by their size alone."""
COLUMN_ALIGNMENT = 16  # bytes between columns of scale factors that bulk copies can read
INDEX_DTYPES = (torch.int32, torch.int64)


def names(dtypes: object) -> str:
    """Dtypes as people write them."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)  # type: ignore[attr-defined]


def check_tensor(name: str, tensor: object) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise ArgumentError(f"{name} is {tensor.layout}: give a dense tensor, as {name}.to_dense() makes")
    return tensor


def check_matrix(name: str, tensor: torch.Tensor, device: torch.device, columns: int | None = None) -> torch.Tensor:
    """A 2-D tensor on the right device, made contiguous (a copy, where it was not)."""
    check_tensor(name, tensor)
    if tensor.dim() != 2:
        raise ArgumentError(f"{name} must have 2 dimensions, not shape {tuple(tensor.shape)}")
    if tensor.device.type != device.type:
        raise ArgumentError(f"{name} is on {tensor.device}: this buffer works on {device}")
    if columns is not None and tensor.shape[1] != columns:
        raise ArgumentError(f"{name} has {tensor.shape[1]} columns, {columns} were expected")
    return plain(tensor)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its elements in memory as they read: contiguous, and no view that only stands for a negation."""
    return tensor.resolve_neg().contiguous()


def check_vector(
    name: str, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype, length: int | None = None
) -> torch.Tensor:
    """A 1-D tensor of a dtype on the right device, made contiguous."""
    check_tensor(name, tensor)
    if tensor.dtype != dtype:
        raise ArgumentError(f"{name} is {tensor.dtype}: use {names([dtype])}")
    if tensor.dim() != 1 or (length is not None and tensor.shape[0] != length):
        raise ArgumentError(f"{name} has shape {tuple(tensor.shape)}: ({'n' if length is None else length},) is needed")
    if tensor.device.type != device.type:
        raise ArgumentError(f"{name} is on {tensor.device}: this buffer works on {device}")
    return plain(tensor)


def check_statistics(name: str, tensor: torch.Tensor | None, dtype: torch.dtype, length: int) -> None:
    """A vector that a kernel adds to, or None: the caller's own memory, so a copy would not do."""
    if tensor is None:
        return
    check_tensor(name, tensor)
    if tensor.dtype != dtype or tuple(tensor.shape) != (length,) or not tensor.is_contiguous():
        raise ArgumentError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}: a contiguous {dtype} tensor of shape ({length},) "
            "is needed"
        )


def check_rows(name: str, tensor: torch.Tensor, rows: int, what: str) -> None:
    if tensor.shape[0] != rows:
        raise ArgumentError(f"{name} has {tensor.shape[0]} rows, but {what} has {rows}")


def check_topk_idx(topk_idx: torch.Tensor, device: torch.device, num_experts: int | None = None) -> torch.Tensor:
    """A matrix of indices of experts, -1 for none.

    On a GPU a look at the indices would cost a host wait: there kernels refuse one that is no expert's, and all ranks
    raise `PeerFailure` that names this one.
    """
    topk_idx = check_matrix("topk_idx", topk_idx, device)
    if topk_idx.dtype not in INDEX_DTYPES:
        raise ArgumentError(f"topk_idx is {topk_idx.dtype}: use {names(INDEX_DTYPES)}")
    if num_experts is not None and topk_idx.numel() and topk_idx.device.type == "cpu":
        low, high = (int(value) for value in torch.aminmax(topk_idx))
        if high >= num_experts or low < -1:
            bad = high if high >= num_experts else low
            raise ArgumentError(f"topk_idx holds {bad}: indices are 0 to {num_experts - 1}, or -1 for none")
    return topk_idx


def check_expert_rows(topk_idx: torch.Tensor, max_tokens: int) -> None:
    """No expert is named more often than the layout has rows for it, one for each of ``max_tokens``.

    Only tokens that name an expert more than once can do that. On a GPU the look would cost a host wait: there
    the kernel refuses, and all ranks raise `PeerFailure` that names this one.
    """
    if topk_idx.device.type != "cpu" or topk_idx.numel() <= max_tokens:
        return
    named = topk_idx.flatten().to(torch.int64)
    rows = torch.bincount(named[named >= 0])
    if rows.numel() and int(rows.max()) > max_tokens:
        expert = int(rows.argmax())
        raise ArgumentError(
            f"topk_idx names expert {expert} {int(rows[expert])} times, and num_max_dispatch_tokens_per_rank = "
            f"{max_tokens} rows fit: let a token name an expert once, with -1 in place of the others, or pass at least "
            f"{int(rows[expert])}"
        )


def check_topk_weights(
    weights: torch.Tensor, shape: torch.Size | tuple[int, ...], device: torch.device
) -> torch.Tensor:
    weights = check_matrix("topk_weights", weights, device)
    if weights.dtype != torch.float32:
        raise ArgumentError(f"topk_weights is {weights.dtype}: use float32")
    if tuple(weights.shape) != tuple(shape):
        raise ArgumentError(f"topk_weights has shape {tuple(weights.shape)}, {tuple(shape)} was expected")
    return weights


def check_experts(num_experts: int, num_ranks: int) -> None:
    if not isinstance(num_experts, int):
        raise ArgumentError(f"num_experts = {num_experts!r}: must be an int, not {type(num_experts).__name__}")
    if num_experts <= 0 or num_experts % num_ranks:
        lower = max(num_experts, 0) // num_ranks * num_ranks
        would = f"{lower} or {lower + num_ranks}" if lower else f"{num_ranks}"
        raise ArgumentError(f"{num_experts} experts on {num_ranks} ranks: must be divisible, use {would}")


def check_reducible(name: str, tensor: torch.Tensor) -> PayloadType:
    if tensor.dtype not in REDUCIBLE:
        raise ArgumentError(f"{name} is {tensor.dtype}: combine reduces {names(REDUCIBLE)}")
    return REDUCIBLE[tensor.dtype]


def pointer(tensor: torch.Tensor | None) -> int:
    """Address of a contiguous tensor. An empty tensor's is 0, which kernels never follow."""
    return 0 if tensor is None else tensor.data_ptr()


def round_up(count: int, alignment: int) -> int:
    return (count + alignment - 1) // alignment * alignment


def check_distinct(topk_idx: torch.Tensor, num_local_experts: int) -> None:
    """Without counts, a token has room for each expert of a rank once. Only looked at on the CPU: it costs a host wait.

    A top-k of no more than the experts of a rank has room for any picks.
    """
    if topk_idx.device.type != "cpu" or topk_idx.numel() == 0 or topk_idx.shape[1] <= num_local_experts:
        return
    ordered = topk_idx.sort(dim=1).values
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).nonzero()
    if len(twice):
        token, k = (int(value) for value in twice[0])
        raise ArgumentError(
            f"topk_idx names expert {int(ordered[token, k])} more than once for token {token}: without do_cpu_sync an "
            f"expanded dispatch of top-k {topk_idx.shape[1]} to {num_local_experts} experts a rank takes each once; "
            "put -1 in place of the others, or pass do_cpu_sync=True"
        )


def column_major(scales: torch.Tensor) -> torch.Tensor:
    """The same values with stride 1 along rows; a column takes a multiple of 16 bytes, as bulk copies read it."""
    rows, columns = scales.shape
    pitch = round_up(rows, max(1, COLUMN_ALIGNMENT // scales.element_size()))
    out = scales.new_empty((columns, pitch)).t()[:rows]
    return out.copy_(scales)


def check_sizes(**sizes: object) -> None:
    """Whole numbers, none negative; each is named in the error."""
    for name, size in sizes.items():
        if type(size) is int and size >= 0:
            continue  # without asking for a protocol, which takes microseconds
        if not isinstance(size, SupportsIndex):
            raise ArgumentError(f"{name} = {size!r}: must be an int, not {type(size).__name__}")
        if size.__index__() < 0:
            raise ArgumentError(f"{name} = {size}: must not be negative, use 0 or more")
