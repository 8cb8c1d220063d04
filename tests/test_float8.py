"""e4m3: what a cast makes of no numbers; and the encoding of gfx942's matrix instructions, carried between ranks."""

from __future__ import annotations

import itertools
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


def cast_of_no_numbers(ctx: Context) -> None:
    """NaN and infinities in the first, last and middle element, beside zeros and the largest numbers."""
    buffer, n, most = ctx.new_buffer(), ctx.num_ranks, 10
    ids = [torch.arange(most)[:, None] % (2 * n)] * n
    special = ((0, -1, torch.nan), (1, 0, -torch.nan), (2, -1, torch.inf), (3, 0, -torch.inf))
    for dtype, hidden, cast in itertools.product(
        (torch.bfloat16, torch.float16, torch.float32), (1, 130, 640), ("fp8", "round", "ue8m0")
    ):
        xs = [closed_form.rows(most, hidden, rank=rank, seed=4, dtype=dtype) for rank in range(n)]
        for x in xs:
            for number, place, value in special:
                x[number, place] = value
            x[4, hidden // 2], x[4, 0] = torch.inf, torch.nan  # NaN is above infinity
            x[5], x[6], x[7, -1] = 0.0, -0.0, torch.finfo(dtype).max / 2  # q * scale may be above
            x[8] = torch.finfo(dtype).tiny
        casts = {"use_fp8": True, "round_scale": cast != "fp8", "use_ue8m0": cast == "ue8m0"}
        (got, scales), _, _, _, hook = buffer.low_latency_dispatch(
            xs[ctx.rank], ids[ctx.rank], most, 2 * n, return_recv_hook=True, **casts
        )
        hook()
        want = reference.ll_dispatch(ctx.rank, xs, ids, most, 2 * n, **casts)
        assert want.scales is not None
        used = want.source_rank >= 0
        what = f"{dtype} x {hidden}, {cast}: "
        pairs = [("is NaN", got[used].float().isnan(), want.x[used].float().isnan())]
        pairs += [("numbers", got[used].float().nan_to_num(nan=1e9), want.x[used].float().nan_to_num(nan=1e9))]
        if cast == "ue8m0":
            pairs += [("scales", scales[used], want.scales[used])]
        else:
            pairs += [("scale is NaN", scales[used].isnan(), want.scales[used].isnan())]
            pairs += [("scales", scales[used].nan_to_num(nan=-1.0), want.scales[used].nan_to_num(nan=-1.0))]
        for name, mine, theirs in pairs:
            check_equal(what + name, mine, theirs)
        # What a receiver makes of it: a group with a NaN or an infinity is NaN throughout.
        values = reference.dequantize_fp8(got[used], scales[used])
        first_group = values[:, : reference.FP8_GROUP]
        last_group = values[:, (hidden - 1) // reference.FP8_GROUP * reference.FP8_GROUP :]
        token = want.source_index[used]
        for number, place, _ in special:
            assert (last_group if place else first_group)[token == number].isnan().all(), what + str(number)
        assert values[token > 4].isfinite().all(), what
    ctx.barrier()
    buffer.destroy()


@pytest.mark.parametrize("path", ["direct", "packed"])
@pytest.mark.parametrize("lanes", ["1", "32"])
def test_a_cast_of_no_number_is_nan(pool: RankPool, lanes: str, path: str) -> None:
    options = {"UCCL_EP_HOST_LANES": lanes, "UCCL_EP_LOW_LATENCY_PATH": path}
    pool.run(cast_of_no_numbers, ranks=2, options=options)


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
