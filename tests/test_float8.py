"""e4m3 in the encoding of gfx942's matrix instructions: the same numbers, and carried between ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cases
import closed_form
from ranks import Context, RankPool, check_equal
from uccl_ep import ArgumentError, reference
from uccl_ep.float8 import to_fnuz


@pytest.mark.parametrize("scale", [1.0, 0.75, 2.0**-20])
def test_every_code_keeps_its_value(scale: float) -> None:
    q = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn)
    converted, doubled = to_fnuz(q, torch.full((256,), scale))
    assert converted.dtype == torch.float8_e4m3fnuz
    assert doubled.tolist() == [2 * scale] * 256
    # -0 compares equal to 0; NaN stays NaN
    assert torch.equal((converted.float() * doubled).nan_to_num(nan=-1e9), (q.float() * scale).nan_to_num(nan=-1e9))
    assert converted.float().isnan().sum() == 2
    assert converted.float().nan_to_num().abs().max() == 224, "half of 448"


@pytest.mark.parametrize("use_ue8m0", [False, True])
@pytest.mark.parametrize("hidden", [128, 200, 640])
def test_rows_keep_their_values(hidden: int, use_ue8m0: bool) -> None:
    x = closed_form.rows(7, hidden, rank=1, seed=3, dtype=torch.bfloat16) * 300
    x[2] = 0
    q, scales = reference.quantize_fp8(x, use_ue8m0=use_ue8m0)
    before = q.clone(), scales.clone()
    converted = to_fnuz(q, scales)
    check_equal("values", reference.dequantize_fp8(*converted), reference.dequantize_fp8(q, scales))
    check_equal("q", q, before[0])
    check_equal("scales", scales, before[1])


def test_strides_of_scales_stay() -> None:
    scales = reference.column_major(torch.ones(2, 6, 3))
    q = torch.zeros(2, 6, 384, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert to_fnuz(q, scales)[1].stride() == scales.stride()
    packed = torch.full((2, 6, 1), 0x007F8001, dtype=torch.int32)
    assert to_fnuz(q, packed)[1].unique().tolist() == [0x00808102], "an exponent of 0 is a group that is not there"


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ArgumentError, match="float8_e4m3fn is converted"):
        to_fnuz(torch.zeros(2), torch.zeros(2))
    with pytest.raises(ArgumentError, match="float32, or int32"):
        to_fnuz(torch.zeros(2, dtype=torch.uint8).view(torch.float8_e4m3fn), torch.zeros(2, dtype=torch.float64))


def carried(ctx: Context, tokens: list[int]) -> None:
    """What a caller gives in that encoding arrives in it, bit for bit, through get_dispatch_layout and dispatch."""
    buffer, rank, n = ctx.buffer(), ctx.rank, ctx.num_ranks
    inputs = cases.make_inputs(n, tokens, hidden=256, experts=8, topk=2, dtype="fp8", seed=5)
    assert inputs.scales is not None and inputs.weights is not None
    pairs = [to_fnuz(q, s) for q, s in zip(inputs.xs, inputs.scales, strict=True)]
    per_rank, per_rdma_rank, per_expert, in_rank, _ = buffer.get_dispatch_layout(inputs.ids[rank], 8)
    result: Any = buffer.dispatch(
        pairs[rank], num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_rdma_rank,
        is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=inputs.ids[rank],
        topk_weights=inputs.weights[rank],
    )  # fmt: skip
    got, got_scales = result[0]
    rows = [reference.rows_for_rank(ids, rank, 8, n) for ids in inputs.ids]
    check_equal("dtype of recv_x", got.dtype, torch.float8_e4m3fnuz)
    want = torch.cat([q.view(torch.uint8)[r] for (q, _), r in zip(pairs, rows, strict=True)])
    check_equal("recv_x", got.view(torch.uint8), want)
    check_equal("recv_scales", got_scales, torch.cat([s[r] for (_, s), r in zip(pairs, rows, strict=True)]))


@pytest.mark.parametrize("domain", [0, 1])
def test_dispatch_carries_it(pool: RankPool, domain: int) -> None:
    pool.run(carried, ranks=2, domain=domain, arguments={"tokens": [20, 9]})
