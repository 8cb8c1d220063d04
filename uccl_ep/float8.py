"""The two encodings of e4m3, for devices whose matrix instructions take the one that dispatch does not give."""

from __future__ import annotations

import torch

from uccl_ep_core.errors import ArgumentError

_EXPONENTS = (0, 8, 16, 24)  # where the four biased exponents of a packed scale begin, in bits


def to_fnuz(q: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same numbers with ``q`` as float8_e4m3fnuz, which the matrix instructions of gfx942 take.

    A code of e4m3fn is half as much in e4m3fnuz, so codes stay and scales double: exact, in a pass over ``q`` and
    one over ``scales``. Only -0 becomes 0, which e4m3fnuz lacks, and NaN has another code.

    Args:
        q: float8_e4m3fn of any shape, as low_latency_dispatch gives it with ``use_fp8``.
        scales: float32 of any shape, or int32 of four biased exponents each (``use_ue8m0``).

    Returns:
        (float8_e4m3fnuz of q's shape, scales as they were given but doubled); both new tensors.

    Raises:
        ArgumentError: other dtypes.
    """
    if q.dtype != torch.float8_e4m3fn:
        raise ArgumentError(f"q is {q.dtype}: float8_e4m3fn is converted")
    if scales.dtype not in (torch.float32, torch.int32):
        raise ArgumentError(f"scales are {scales.dtype}: float32, or int32 of four exponents, are needed")
    codes = q.view(torch.int8)
    negative_zero = torch.full((), -128, dtype=torch.int8, device=q.device)  # in e4m3fnuz this code is NaN
    kept = torch.where(codes == negative_zero, torch.zeros_like(negative_zero), codes)
    # 0x7f and 0xff; torch compares no 8-bit floats, so codes are compared.
    converted = torch.where((codes == 127) | (codes == -1), negative_zero, kept).view(torch.float8_e4m3fnuz)
    if scales.dtype == torch.float32:
        return converted, scales * 2
    used = [((scales >> shift) & 0xFF != 0).to(torch.int32) << shift for shift in _EXPONENTS]  # 0: a group that is not
    return converted, scales + used[0] + used[1] + used[2] + used[3]
