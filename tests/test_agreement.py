"""Ranks whose calls differ in what lengths do not show: every rank's error names a rank and both values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ranks import Context, RankPool
from uccl_ep_core.errors import ArgumentError, PeerFailure

TOKENS, EXPERTS, TOPK, HIDDEN, MOST = 20, 12, 2, 128, 32
SHORT = {"UCCL_EP_TIMEOUT_S": "4"}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def routes() -> torch.Tensor:
    """Every rank has tokens for every rank."""
    return torch.arange(TOPK * TOKENS).view(TOKENS, TOPK) % EXPERTS


def rows(dtype: torch.dtype, hidden: int = HIDDEN) -> torch.Tensor:
    return torch.ones(TOKENS, hidden, dtype=dtype)


def dispatch(buffer: Any, x: Any, experts: int = EXPERTS, topk: int = TOPK) -> Any:
    ids = routes()[:, :topk]
    layout = buffer.get_dispatch_layout(ids, experts)
    return buffer.dispatch(x, topk_idx=ids, is_token_in_rank=layout[3], num_tokens_per_expert=layout[2])


def ll_dispatch(buffer: Any, dtype: torch.dtype = BF16, **changes: Any) -> Any:
    arguments = {"num_max_dispatch_tokens_per_rank": MOST, "num_experts": EXPERTS, "use_fp8": False, **changes}
    topk, hidden = arguments.pop("topk", TOPK), arguments.pop("hidden", HIDDEN)
    return buffer.low_latency_dispatch(rows(dtype, hidden), routes()[:, :topk], **arguments)


Call = Callable[[Any, bool, Any], Any]
# What the odd rank does otherwise, by what differs: (call, words of both values). `earlier` is a dispatch of all ranks.
CALLS: dict[str, tuple[Call, tuple[str, str]]] = {
    "dtype": (lambda b, odd, earlier: dispatch(b, rows(FP16 if odd else BF16)), ("float16", "bfloat16")),
    "signs of bytes": (
        lambda b, odd, earlier: dispatch(b, rows(torch.int8 if odd else torch.uint8)), ("is int8", "rank {} uint8")
    ),
    "dtype of scales": (
        lambda b, odd, earlier: dispatch(b, (rows(torch.float8_e4m3fn), rows(torch.int32 if odd else FP32, 1))),
        ("scales of int32", "scales of float32"),
    ),
    "hidden": (lambda b, odd, earlier: dispatch(b, rows(BF16, HIDDEN + odd)), ("256", "258")),
    "top-k": (lambda b, odd, earlier: dispatch(b, rows(BF16), topk=1 + odd), ("top-k", "is ")),
    "experts": (lambda b, odd, earlier: dispatch(b, rows(BF16), experts=EXPERTS * (1 + odd)), ("12", "24")),
    "dtype of a cached dispatch": (
        lambda b, odd, earlier: b.dispatch(rows(FP16 if odd else BF16), handle=earlier[4]), ("float16", "bfloat16")
    ),
    "dtype of combine": (
        lambda b, odd, earlier: b.combine(earlier[0].to(FP16 if odd else BF16), earlier[4]), ("float16", "bfloat16")
    ),
    "low latency, dtype": (lambda b, odd, earlier: ll_dispatch(b, FP16 if odd else BF16), ("float16", "bfloat16")),
    "low latency, dtype behind a cast": (
        lambda b, odd, earlier: ll_dispatch(b, FP32 if odd else BF16, use_fp8=True), ("float32", "bfloat16")
    ),
    "low latency, cast": (
        lambda b, odd, earlier: ll_dispatch(b, use_fp8=True, round_scale=bool(odd)),
        ("use_fp8=True, round_scale=True", "cast is use_fp8=True"),
    ),
    "low latency, hidden": (lambda b, odd, earlier: ll_dispatch(b, hidden=HIDDEN * (1 + odd)), ("256", "512")),
    "low latency, most tokens": (
        lambda b, odd, earlier: ll_dispatch(b, num_max_dispatch_tokens_per_rank=MOST + odd), ("32", "33")
    ),
    "low latency, top-k": (lambda b, odd, earlier: ll_dispatch(b, topk=1 + odd), ("top-k", "is ")),
    "low latency, experts": (lambda b, odd, earlier: ll_dispatch(b, num_experts=EXPERTS * (1 + odd)), ("12", "24")),
}  # fmt: skip


def differ(ctx: Context, about: str, odd: int) -> dict[str, Any]:
    buffer = ctx.new_buffer()
    earlier = dispatch(buffer, rows(BF16))
    ctx.barrier()
    try:
        for _ in range(3):  # a rank that only sent may learn of it with its next call
            CALLS[about][0](buffer, ctx.rank == odd, earlier)
    except PeerFailure as error:
        buffer.destroy()
        ctx.barrier()
        return {"text": str(error), "culprit": error.rank, "reporter": error.reporter, "reason": error.reason}
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize("domain", [0, 1])
@pytest.mark.parametrize("about", CALLS)
def test_ranks_differ(pool: RankPool, about: str, domain: int) -> None:
    reports = pool.run(differ, ranks=3, domain=domain, options=SHORT, arguments={"about": about, "odd": 1})
    assert {(r["culprit"], r["reporter"]) for r in reports} == {(reports[0]["culprit"], reports[0]["reporter"])}
    assert 1 in (reports[0]["culprit"], reports[0]["reporter"]), reports
    for report in reports:
        assert report["reason"] == "mismatch", report
        if report["culprit"] == 1 or "rank {}" not in CALLS[about][1][1]:
            missing = [w for w in CALLS[about][1] if w.format(report["reporter"]) not in report["text"]]
            assert not missing, (missing, report["text"])


def combine_in_another_dtype(ctx: Context, who: int) -> None:
    """Refused on that rank, before anybody communicates; the call with the right one follows."""
    buffer = ctx.buffer()
    for use_fp8 in (False, True):
        _, _, handle, *_ = ll_dispatch(buffer, use_fp8=use_fp8)
        y = torch.ones(EXPERTS // ctx.num_ranks, ctx.num_ranks * MOST, HIDDEN)
        weights = torch.ones(TOKENS, TOPK)
        if ctx.rank == who:
            with pytest.raises(ArgumentError, match=r"float32.*bfloat16"):
                buffer.low_latency_combine(y, routes(), weights, handle)
        out, *_ = buffer.low_latency_combine(y.to(BF16), routes(), weights, handle)
        assert torch.equal(out, torch.full((TOKENS, HIDDEN), TOPK, dtype=BF16))


@pytest.mark.parametrize("domain", [0, 1])
def test_low_latency_combine_in_another_dtype(pool: RankPool, domain: int) -> None:
    pool.run(combine_in_another_dtype, ranks=3, domain=domain, arguments={"who": 2})


def experts_named_twice(ctx: Context, most: int) -> None:
    """A token may name an expert more than once: each gets a row, and comes home with its own weight."""
    buffer = ctx.buffer()
    ids = torch.tensor([[ctx.rank, ctx.rank, 3], [3, 3, 3], [-1, 5, 5]])
    weights = torch.tensor([[0.5, 0.25, 1.0], [1.0, 2.0, 4.0], [8.0, 0.5, 0.25]])
    x = torch.arange(3 * HIDDEN, dtype=FP32).view(3, HIDDEN) + ctx.rank
    received, count, handle, *_ = buffer.low_latency_dispatch(x, ids, most, 6, use_fp8=False)
    everyone = [torch.tensor([[r, r, 3], [3, 3, 3], [-1, 5, 5]]) for r in range(ctx.num_ranks)]
    want = torch.bincount(torch.cat(everyone)[torch.cat(everyone) >= 0], minlength=6)
    assert count.tolist() == want[2 * ctx.rank : 2 * ctx.rank + 2].tolist()
    out, *_ = buffer.low_latency_combine(received, ids, weights, handle)
    terms = torch.where(ids >= 0, weights, 0.0)
    assert torch.equal(out, x * terms.sum(1, keepdim=True))  # powers of two: exact in any order


@pytest.mark.parametrize("domain", [0, 1])
def test_experts_named_twice(pool: RankPool, domain: int) -> None:
    pool.run(experts_named_twice, ranks=3, domain=domain, arguments={"most": 4})


def expert_named_too_often(ctx: Context, who: int) -> tuple[int, str]:
    """What the host's check of arguments refuses, the kernel refuses where there is none (on a GPU)."""
    from uccl_ep.low_latency import dispatching

    buffer, ids = ctx.new_buffer(), routes()
    if ctx.rank == who:
        ids = torch.full_like(ids, 3)
        with pytest.raises(ArgumentError, match=rf"expert 3 40 times.*{MOST}"):
            buffer.low_latency_dispatch(rows(BF16), ids, MOST, EXPERTS, use_fp8=False)
    check, dispatching.check_expert_rows = dispatching.check_expert_rows, lambda *_: None
    try:
        for _ in range(3):
            buffer.low_latency_dispatch(rows(BF16), ids, MOST, EXPERTS, use_fp8=False)
    except PeerFailure as error:
        return error.rank, str(error)
    finally:
        dispatching.check_expert_rows = check
        buffer.destroy()
        ctx.barrier()
    raise AssertionError("the kernel accepted more rows than fit")


@pytest.mark.parametrize("domain", [0, 1])
def test_expert_named_too_often(pool: RankPool, domain: int) -> None:
    for culprit, text in pool.run(expert_named_too_often, ranks=3, domain=domain, options=SHORT, arguments={"who": 1}):
        assert culprit == 1 and "40 times" in text and "32 rows fit" in text, text


def no_expert(ctx: Context, who: int, index: int, mode: str) -> tuple[int, str]:
    """An index that names no expert: what the host's look at it refuses, the kernels refuse where there is none."""
    from uccl_ep.high_throughput import dispatching, layout
    from uccl_ep.low_latency import dispatching as low_latency

    buffer, ids = ctx.new_buffer(), routes()
    if ctx.rank == who:
        ids[TOKENS - 1, 1] = index
    call = {"high throughput": dispatch_of, "low latency": ll_dispatch_of}[mode]
    if ctx.rank == who:
        with pytest.raises(ArgumentError, match=rf"topk_idx holds {index}: indices are 0 to {EXPERTS - 1}, or -1"):
            call(buffer, ids)
    with pytest.MonkeyPatch.context() as patch:
        for module in (dispatching, layout, low_latency):
            look = module.check_topk_idx  # type: ignore[attr-defined]
            patch.setattr(module, "check_topk_idx", lambda ids, device, experts=None, look=look: look(ids, device))
        patch.setattr(low_latency, "check_expert_rows", lambda *_: None)
        try:
            for _ in range(3):
                call(buffer, ids)
        except PeerFailure as error:
            return error.rank, str(error)
        finally:
            buffer.destroy()
            ctx.barrier()
    raise AssertionError("the kernels accepted an index that names no expert")


def dispatch_of(buffer: Any, ids: torch.Tensor) -> Any:
    layout = buffer.get_dispatch_layout(ids, EXPERTS)
    return buffer.dispatch(rows(BF16), topk_idx=ids, is_token_in_rank=layout[3], num_tokens_per_expert=layout[2])


def ll_dispatch_of(buffer: Any, ids: torch.Tensor) -> Any:
    return buffer.low_latency_dispatch(rows(BF16), ids, MOST, EXPERTS, use_fp8=False)


# The last two are those of expert 3 to who keeps 16 or 32 of their bits.
@pytest.mark.parametrize("index", [EXPERTS, -2, 3 + (1 << 16), 3 + (1 << 32)])
@pytest.mark.parametrize(
    ("mode", "domain", "path"),
    [("high throughput", 0, "auto"), ("high throughput", 1, "auto"), ("low latency", 0, "packed"),
     ("low latency", 0, "direct"), ("low latency", 1, "auto")],
)  # fmt: skip
def test_an_index_that_names_no_expert(pool: RankPool, mode: str, domain: int, path: str, index: int) -> None:
    options = SHORT | {"UCCL_EP_LOW_LATENCY_PATH": path}
    arguments = {"who": 1, "index": index, "mode": mode}
    for culprit, text in pool.run(no_expert, ranks=3, domain=domain, options=options, arguments=arguments):
        assert culprit == 1 and f"topk_idx holds {index}: indices are 0 to {EXPERTS - 1}, or -1 for none" in text, text
