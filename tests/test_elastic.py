"""`ElasticBuffer` over a pairwise matrix, bit for bit equal to the reference; and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import elastic_cases
from ranks import Context, RankPool, buffer_environment, check_equal, environment
from test_matrix import matrix, run
from uccl_ep import (
    ArgumentError,
    BufferClosedError,
    ConfigurationError,
    ElasticBuffer,
    EventOverlap,
    HandleError,
    PeerFailure,
    reference_v2,
)

ELASTIC: dict[str, list[Any]] = {
    "topology": [(1, 0), (2, 0), (3, 0), (4, 0), (4, 2), (6, 3)],
    "hidden": [64, 100, 2048],
    "topk": [1, 2, 6, 8],
    "experts": [12, 36, 60],
    "tokens": ["rotate0", "rotate2", "even", "first", "idle", "zero"],
    "routing": ["random", "holes", "one_rank", "nothing", "starved"],
    "dtype": ["bf16", "fp8"],
    "index": ["int64", "int32"],
    "weights": [True, False],
    "bias": [0, 1, 2],
    "alignment": [1, 128],
    "expand": [False, True],
    "padding": [False, True],
    "cpu_sync": [True, False],
    "hybrid": [True, False],
    "multiple": [True, False],
    "deterministic": [False, True],
    "tma": [False, True],
    "copy": [True, False],
    "stream": ["sync", "async", "event", "full"],
}


def legal(row: dict[str, Any]) -> bool:
    return row["experts"] % row["topology"][0] == 0 and row["topk"] <= row["experts"]


@pytest.mark.parametrize(("row", "seed"), matrix(ELASTIC, legal, seed=5))
def test_elastic(pool: RankPool, row: dict[str, Any], seed: int) -> None:
    run(pool, elastic_cases.elastic, row, seed)


@pytest.mark.parametrize("dtype", ["fp16", "fp32", "fp64"])
def test_other_types(pool: RankPool, dtype: str) -> None:
    for expand in (False, True):
        arguments = {"tokens": [9, 0, 30, 1], "dtype": dtype, "expand": expand, "bias": 1, "multiple": not expand}
        pool.run(elastic_cases.elastic, ranks=4, domain=2, arguments=arguments)


def test_rounding_worked_example() -> None:
    """Experts 0 to 3 on rank 0, 4 to 7 on rank 1; bf16 keeps 8 bits, so 256 + 1 is a tie that rounds to even."""
    ids = torch.tensor([[0, 4, 1]])
    terms = torch.tensor([[[1.0], [256.0], [0.75]]]).bfloat16()
    # Rank 0: 1 + 0.75 = 1.75 stands at k = 2, behind rank 1's at k = 1: 256 + 1.75 = 257.75 -> 258.
    assert reference_v2.combine(terms, ids, 8, 2).item() == 258
    # One domain of both: 257.75 is rounded to 258 before the bias of 1 comes in: 259 -> 260 (ties to even).
    bias = [torch.tensor([[1.0]]).bfloat16()]
    assert reference_v2.combine(terms, ids, 8, 2, bias=bias, ranks_per_domain=2).item() == 260
    # Without, the sum in float32 is 1 + 256 + 1.75 = 258.75 -> 258.
    assert reference_v2.combine(terms, ids, 8, 2, bias=bias).item() == 258
    # -1 is no term, and the order is that of each rank's largest k: 2^24 + 1 is 2^24 in float32.
    ids = torch.tensor([[4, 0, -1, 5]])
    terms = torch.tensor([[[1.0], [2.0**24], [9.0], [1.0]]])
    assert reference_v2.combine(terms, ids, 8, 2).item() == 2.0**24 + 2
    assert reference_v2.combine(terms, ids, 8, 2, reduce_in_rank=False).item() == 2.0**24


def refusals(ctx: Context, who: int) -> None:
    """Rank ``who`` alone passes what cannot be served: it raises before anybody communicates, and all go on."""
    buffer = elastic_cases.elastic_buffer(ctx)
    x, ids = torch.zeros(5, 8).bfloat16(), torch.tensor([[0, 3]]).expand(5, 2).contiguous()
    good = {"topk_idx": ids, "num_experts": 4, "num_max_tokens_per_rank": 5}
    expanded = buffer.dispatch(x, **good, do_expand=True)[3]
    handle = buffer.dispatch(x, **good)[3]
    if ctx.rank == who:
        for words, arguments in (
            ("topk_idx= and num_experts=", {"num_experts": 4}),
            ("use at least 5", good | {"num_max_tokens_per_rank": 4}),
            ("most tokens of any rank", good | {"num_max_tokens_per_rank": None}),
            ("32 bits, use up to 1073741823", good | {"num_max_tokens_per_rank": 1 << 30}),
            ("must be divisible", good | {"num_experts": 5}),
            ("indices are 0 to 1", good | {"num_experts": 2}),
            ("must be at least 1", good | {"expert_alignment": 0}),
            ("needs do_expand=True", good | {"do_zero_padding": True}),
            ("leave out topk_idx or handle", {"handle": handle, "topk_idx": ids}),
            ("no counts to wait for", {"handle": handle, "do_cpu_sync": True}),
            ("num_experts = 8, but the handle has 4", {"handle": handle, "num_experts": 8}),
            ("was not expanded", {"handle": handle, "do_expand": True}),
            ("recv_stats", good | {"cumulative_local_expert_recv_stats": torch.zeros(3, dtype=torch.int32)}),
            ("more than once", good | {
                "topk_idx": torch.tensor([[0, 1, 2, 0]] * 5), "do_expand": True, "do_cpu_sync": False
            }),
        ):  # fmt: skip
            with pytest.raises(ArgumentError, match=words):
                buffer.dispatch(x, **arguments)
        rows = expanded.num_expanded_tokens
        for words, call in (
            ("rows", lambda: buffer.combine(torch.zeros(rows + 1, 8).bfloat16(), expanded)),
            ("topk_weights", lambda: buffer.combine(torch.zeros(rows, 8).bfloat16(), expanded, torch.zeros(rows, 2))),
            ("bias", lambda: buffer.combine(torch.zeros(rows, 8).bfloat16(), expanded, bias=torch.zeros(4, 8))),
        ):
            with pytest.raises(ArgumentError, match=words):
                call()
        with pytest.raises(HandleError, match=r"ElasticBuffer\.dispatch"):
            buffer.combine(x, object())
    # An expanded handle serves un-expanded output as well, and a handle's attributes are not what it goes by.
    again = buffer.dispatch(x, handle=expanded)[0]
    check_equal("un-expanded rows of an expanded handle", again.shape[0], expanded.num_recv_tokens)
    expanded.recv_src_metadata = expanded.recv_src_metadata[:0]
    out, _, _ = buffer.combine(torch.ones(expanded.num_expanded_tokens, 8).bfloat16(), expanded)
    check_equal("combined_x", out, torch.full((5, 8), 2.0).bfloat16())


def test_refused_before_anybody_communicates(pool: RankPool) -> None:
    pool.run(refusals, ranks=2, arguments={"who": 1})
    with pytest.raises(ArgumentError, match="Engram"):
        ElasticBuffer(None, num_cpu_bytes=1 << 20)


def snapshots(ctx: Context) -> None:
    """Handles of several dispatches, used out of turn and more than once, after the caller's tensors have changed."""
    buffer, n, hidden, experts = elastic_cases.elastic_buffer(ctx), ctx.num_ranks, 32, 2 * ctx.num_ranks
    kept = []
    for turn, expand in enumerate((False, True, False)):
        g = torch.Generator().manual_seed(turn * n + ctx.rank)
        ids = torch.rand(6 + turn, experts, generator=g).topk(3).indices
        x = (torch.arange(len(ids) * hidden).view(-1, hidden) % 97).bfloat16() + turn
        sums = torch.stack([(ids // 2 == rank).any(1) for rank in range(n)], 1).sum(1)
        terms = torch.full((len(ids),), 3) if expand else sums
        recv, _, _, handle, _ = buffer.dispatch(
            x, ids, num_experts=experts, num_max_tokens_per_rank=8, do_expand=expand, do_zero_padding=expand
        )
        kept.append((recv, handle, x.clone(), terms))
        ids.fill_(0)
        x.zero_()
    for recv, handle, x, terms in kept[::-1] + kept:
        out, _, _ = buffer.combine(recv, handle)
        check_equal("combined_x", out, (x.float() * terms[:, None]).bfloat16())
        again = buffer.dispatch(x, handle=handle, do_expand=handle.do_expand)[0]
        check_equal("rows of the same route", again, recv)


def test_handles_are_snapshots(pool: RankPool) -> None:
    pool.run(snapshots, ranks=4, domain=2)


def differing(ctx: Context, where: str) -> None:
    with environment(buffer_environment(ctx.domain, ctx.options)):
        if where == "constructor":
            with pytest.raises(ConfigurationError, match="allow_hybrid_mode differs between ranks: True"):
                ElasticBuffer(ctx.group, allow_hybrid_mode=ctx.rank == 0)
            return
        buffer = ElasticBuffer(ctx.group, num_gpu_timeout_secs=50, num_cpu_timeout_secs=40)
    check_equal("timeout_s", buffer._communicator.general.timeout_s, 40.0)
    ids = torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(PeerFailure, match=r"num_max_tokens_per_rank.* is (8|9), that of rank [01] (8|9)"):
        buffer.dispatch(torch.zeros(2, 8), ids, num_experts=2, num_max_tokens_per_rank=8 + ctx.rank)
    buffer.destroy()


@pytest.mark.parametrize("where", ["constructor", "dispatch"])
def test_ranks_that_differ(pool: RankPool, where: str) -> None:
    pool.run(differing, ranks=2, arguments={"where": where})


def facts(ctx: Context) -> None:
    with environment(buffer_environment(ctx.domain, ctx.options)):
        buffer = ElasticBuffer(ctx.group, num_max_tokens_per_rank=32, hidden=512, num_topk=2, explicitly_destroy=True)
    hint = ElasticBuffer.get_buffer_size_hint(ctx.group, 32, 512, num_topk=2)
    check_equal("num_bytes", buffer.num_bytes, hint)
    assert hint % (2 << 20) == 0 and hint >= 4 * 32 * 512 * 2
    assert ElasticBuffer.get_buffer_size_hint(ctx.group, 32768, 512) > hint
    check_equal("group", buffer.group, ctx.group)
    check_equal("places", (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx), (ctx.rank // 2, ctx.rank % 2))
    check_equal("rank_idx", (buffer.rank_idx, buffer.num_ranks), (ctx.rank, 4))
    num_sms = buffer.get_theoretical_num_sms(num_experts=8, num_topk=2)
    assert num_sms > 0 and num_sms % 2 == 0 and buffer.get_theoretical_num_qps(num_sms) >= 1
    buffer.barrier()
    buffer.barrier(use_comm_stream=False, with_cpu_sync=True, sequential=False)
    with EventOverlap(buffer.capture())(release_handle=True) as event:
        ran = []
        event.register_hook_after_wait(lambda: ran.append(1))
    check_equal("hooks that ran", ran, [1])
    assert event.event is None
    others = ("engram_write", "pp_send", "all_gather", "create_agrs_session")
    check_equal("names outside expert parallelism", [name for name in others if hasattr(buffer, name)], [])
    buffer.destroy()
    with pytest.raises(BufferClosedError):
        buffer.barrier()


def test_facts(pool: RankPool) -> None:
    pool.run(facts, ranks=4, domain=2)
