"""What callers of the v1 `Buffer` rely on besides the data of dispatch and combine."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch

import cases
import closed_form
import uccl_ep
import uccl_ep.utils
from ranks import Context, RankPool, check_equal
from uccl_ep import ArgumentError, Buffer, Config, ElasticBuffer, EventHandle, EventOverlap, reference


def test_names() -> None:
    assert uccl_ep.topk_idx_t is torch.int64
    assert (uccl_ep.utils.EventHandle, uccl_ep.utils.EventOverlap) == (EventHandle, EventOverlap)
    assert isinstance(uccl_ep.__version__, str)
    assert not Buffer.is_sm90_compiled() or torch.cuda.is_available()


@pytest.mark.parametrize("kind", [Buffer, ElasticBuffer])
@pytest.mark.parametrize(
    ("value", "words"), [("x", "must be an int, not str"), (2.5, "must be an int, not float"), (-1, "use 0")]
)
def test_sizes_that_are_none(kind: type, value: Any, words: str) -> None:
    names: tuple[str, ...] = ("num_nvl_bytes", "num_rdma_bytes")
    if kind is ElasticBuffer:
        names = ("num_bytes", "num_max_tokens_per_rank", "hidden", "num_topk")
    for name in names:
        with pytest.raises(ArgumentError, match=f"{name} = {value!r}: .*{words}"):
            kind(**{name: value})


def test_configurations() -> None:
    for num_ranks in (1, 2, 3, 5, 7, 8, 12, 20, 100, 144, 160, 1024, 5000):
        for config in (Buffer.get_dispatch_config(num_ranks), Buffer.get_combine_config(num_ranks)):
            for hint in (config.get_nvl_buffer_size_hint, config.get_rdma_buffer_size_hint):
                assert isinstance(hint(7168 * 2, num_ranks), int) and hint(7168 * 2, num_ranks) > 0
                assert hint(7168 * 4, num_ranks) >= hint(7168 * 2, num_ranks)
    by_name = Config(
        num_sms=24, num_max_nvl_chunked_send_tokens=1, num_max_nvl_chunked_recv_tokens=2,
        num_max_rdma_chunked_send_tokens=3, num_max_rdma_chunked_recv_tokens=4, a_later_hint=5,
    )  # fmt: skip
    assert by_name == Config(24, 1, 2, 3, 4) != Config()
    before = Buffer.num_sms, Buffer._most_sms
    try:
        Buffer.set_num_sms(24)
        assert Buffer.num_sms == 24 == Buffer.get_dispatch_config(8).num_sms
        for bad, would in ((7, 6), (0, 2), (1, 2), (-1, 2), (-8, 2), (4098, 4096), (10**9, 4096)):
            with pytest.raises(ArgumentError, match=f"= {bad}: must .*, use (0 or more|{would})$"):
                Buffer.set_num_sms(bad)
        for no_int in (24.0, "24", None):
            with pytest.raises(ArgumentError, match="must be an int"):
                Buffer.set_num_sms(no_int)  # type: ignore[arg-type]
        assert Buffer.num_sms == 24 == Buffer._most_sms
        Buffer.set_num_sms(4096)
    finally:
        Buffer.num_sms, Buffer._most_sms = before


def negative_hints(ctx: Context) -> None:
    """Refused by every call that takes one, and nothing sent: the calls after it are as if it had not been."""
    buffer, elastic = ctx.new_buffer(), ElasticBuffer(ctx.group, 1 << 20, num_max_tokens_per_rank=4)
    x, ids = torch.ones(2, 8, dtype=torch.bfloat16), torch.tensor([[0, 1], [1, -1]])
    received, _, _, handle, _ = elastic.dispatch(x, topk_idx=ids, num_experts=2)
    calls = {
        "dispatch": lambda **hint: elastic.dispatch(x, topk_idx=ids, num_experts=2, **hint),
        "cached dispatch": lambda **hint: elastic.dispatch(x, handle=handle, **hint),
        "combine": lambda **hint: elastic.combine(received, handle, **hint),
    }
    for call in calls.values():
        for hint in ("num_sms", "num_qps"):
            with pytest.raises(ArgumentError, match=f"{hint} = -1: must not be negative, use 0 or more"):
                call(**{hint: -1})
        call(num_sms=4096, num_qps=1)
    with pytest.raises(ArgumentError, match="num_sms = -1"):
        elastic.get_theoretical_num_qps(-1)
    _, _, ll_handle, _, _ = buffer.low_latency_dispatch(x, ids, 4, 2, use_fp8=False)
    y, weights = torch.zeros(2, 4, 8, dtype=torch.bfloat16), torch.ones(2, 2)
    with pytest.raises(ArgumentError, match="num_sms = -1: must not be negative, use 0 or more"):
        buffer.low_latency_combine(y, ids, weights, ll_handle, num_sms=-1)
    buffer.low_latency_combine(y, ids, weights, ll_handle, num_sms=3)
    buffer.destroy()
    elastic.destroy()


def test_hints_below_zero_are_refused(pool: RankPool) -> None:
    pool.run(negative_hints, ranks=1)
    for name in ("num_sms", "num_max_nvl_chunked_send_tokens", "num_max_rdma_chunked_recv_tokens"):
        with pytest.raises(ArgumentError, match=f"{name} = -1"):
            Config(**{name: -1})


def construction(ctx: Context) -> None:
    # Hints, and arguments of other versions that ask for nothing, change nothing.
    buffer = ctx.new_buffer(
        num_nvl_bytes=4096, num_qps_per_rank=1, allow_mnnvl=True, explicitly_destroy=True, enable_shrink=False,
        use_fabric=True, is_intranode=ctx.num_ranks <= 8, a_later_argument=False, another=None,
    )  # fmt: skip
    check_equal("group", buffer.group == ctx.group, True)
    facts = (buffer.rank, buffer.group_size, buffer.num_nvl_bytes, buffer.low_latency_mode, buffer.explicitly_destroy)
    check_equal("facts", facts, (ctx.rank, ctx.num_ranks, 4096, True, True))
    check_equal("stream of communication", buffer.get_comm_stream(), None)
    scratch = buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True)
    check_equal("bytes of scratch", scratch.numel(), buffer.num_rdma_bytes)
    scratch[:64].zero_()
    buffer.clean_low_latency_buffer(8, 64, 4)
    cases.high_throughput(ctx, tokens=[3] * ctx.num_ranks, topk=2, experts=4, buffer=buffer)  # in any mode after it
    dropped = weakref.ref(buffer)
    del buffer, scratch
    gc.collect()
    check_equal("a buffer that nobody holds", dropped(), None)
    for name, value in (("a_later_argument", True), ("num_rdma_byte", 1 << 20)):
        with pytest.raises(ArgumentError, match=f"no argument {name}"):
            ctx.new_buffer(**{name: value})


@pytest.mark.parametrize("domain", [0, 1])
def test_construction(pool: RankPool, domain: int) -> None:
    pool.run(construction, ranks=2, domain=domain)


def training(ctx: Context, dtype: str) -> None:
    """As Megatron's flex dispatcher: forward and backward over one handle, whose gradients have another dtype, and
    other dispatches in between."""
    buffer, rank, n, experts, hidden = ctx.buffer(), ctx.rank, ctx.num_ranks, 8, 64
    inputs = cases.make_inputs(n, [6 + r for r in range(n)], hidden=hidden, experts=experts, topk=3, routing="holes")
    assert inputs.weights is not None
    ids, w = inputs.ids[rank], inputs.weights[rank]
    x = inputs.xs[rank]
    layout = buffer.get_dispatch_layout(
        ids, experts, previous_event=EventOverlap(EventHandle()), async_finish=True, allocate_on_comm_stream=True
    )
    recv, recv_idx, recv_w, counts, handle, event = buffer.dispatch(
        x, topk_idx=ids, topk_weights=w, num_tokens_per_rank=layout[0], num_tokens_per_rdma_rank=layout[1],
        is_token_in_rank=layout[3], num_tokens_per_expert=layout[2], previous_event=layout[4], async_finish=True,
        allocate_on_comm_stream=True,
    )  # fmt: skip
    assert event.event is not None and isinstance(counts, list) and all(type(count) is int for count in counts)
    event.current_stream_wait()
    want = reference.dispatch(rank, inputs.xs, inputs.ids, experts, topk_weights=inputs.weights)
    check_equal("recv_x", recv, want.x)
    cases.high_throughput(ctx, tokens=[2] * n, topk=2, experts=4, buffer=buffer)  # another layer
    # Backward of dispatch: gradients of rows and of weights come home.
    weight_grad = torch.where(recv_idx >= 0, recv_w * 0.5, 0.0)
    _, grads, none = buffer.combine(recv.contiguous(), handle, topk_weights=weight_grad.float())
    assert none.event is None
    check_equal("gradient of the weights", grads, torch.where(ids >= 0, w * 0.5, 0.0))
    # Backward of combine: a gradient of another dtype and width along the same routes.
    kind = cases.DTYPES[dtype]
    gradient = [closed_form.rows(6 + r, 96, rank=r, seed=5, dtype=kind) for r in range(n)]
    back = buffer.dispatch(gradient[rank], handle=handle, previous_event=EventHandle(), async_finish=True,
                           allocate_on_comm_stream=True)  # fmt: skip
    check_equal("gradient rows", back[0], reference.dispatch(rank, gradient, inputs.ids, experts).x)
    check_equal("the rest", back[1:4], (None, None, None))
    with pytest.raises(ArgumentError, match="num_worst_tokens"):
        buffer.dispatch(gradient[rank], handle=handle, num_worst_tokens=len(want.x) + 1)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_training(pool: RankPool, dtype: str) -> None:
    pool.run(training, ranks=4, domain=2, arguments={"dtype": dtype})


def refused_when_set(ctx: Context) -> None:
    buffer = ctx.buffer(low_latency_mode=True)
    x, ids, w = torch.ones(2, 128).bfloat16(), torch.tensor([[0], [1]]), torch.ones(2, 1)

    def dispatch(**arguments: Any) -> Any:
        return buffer.low_latency_dispatch(x, ids, 2, 2, **{"use_fp8": False, **arguments})

    for name, arguments in (
        ("use_nvfp4", {"use_nvfp4": True}),
        ("x_global_scale", {"x_global_scale": torch.ones(1)}),
        ("round_scale", {"use_fp8": True, "use_ue8m0": True}),
    ):
        with pytest.raises(ArgumentError, match=name):
            dispatch(**arguments)
    # Without a cast there are no scales to round; SGLang's bf16 dispatch on Blackwell asks for it all the same.
    recv, count, handle, _, _ = dispatch(
        round_scale=True, use_ue8m0=True, use_nvfp4=False, x_global_scale=None, async_finish=False
    )
    y = recv.clone()
    for name, value in (
        ("use_logfmt", True), ("overlap", True), ("packed_recv_count", count), ("comp_signal", count),
        ("src_signals", count), ("block_m", 64), ("threshold", 1), ("src_signal_expect_value", 1),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=name):
            buffer.low_latency_combine(y, ids, w, handle, **{name: value})
    out, _, _ = buffer.low_latency_combine(
        x=y, topk_idx=ids, topk_weights=w, handle=handle, overlap=False, packed_recv_count=None, comp_signal=None,
        block_m=0, threshold=0, num_sms=4, src_signals=None, src_signal_expect_value=0,
    )  # fmt: skip
    check_equal("combined_x", out, x)


def test_refused_when_set(pool: RankPool) -> None:
    pool.run(refused_when_set, ranks=2)


def refused_dispatch(ctx: Context) -> None:
    """A dispatch that is refused leaves earlier results, and their handles, as they are."""
    buffer, w = ctx.new_buffer(), torch.ones(2, 1)
    x, ids = closed_form.rows(2, 128, rank=ctx.rank, seed=3, dtype=torch.bfloat16), torch.tensor([[0], [1]])
    recv, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, 2, 2, use_fp8=False)
    backend = buffer._communicator.backend
    limits = backend.limits
    backend._limits = dataclasses.replace(limits, max_shared_bytes=8)  # refused last of all, by the grid
    for _ in range(2):
        with pytest.raises(ArgumentError, match="shared memory"):
            buffer.low_latency_dispatch(-x, ids, 2, 2, use_fp8=False)
    backend._limits = limits
    out, _, _ = buffer.low_latency_combine(recv, ids, w, handle)
    check_equal("combined_x", out, x)
    buffer.destroy()


def test_refused_dispatch(pool: RankPool) -> None:
    pool.run(refused_dispatch, ranks=2)
