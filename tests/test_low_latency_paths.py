"""The two ways of low-latency rows: which one a call takes, and a buffer that goes from one to the other."""

from __future__ import annotations

import ctypes
import itertools
import struct
import threading
import time
from typing import Any

import pytest
import torch

import cases
import closed_form
from ranks import Context, RankPool, check_equal
from stream_cases import LowLatencyPair, finish_low_latency, start_low_latency
from uccl_ep import Buffer
from uccl_ep.low_latency.path import DIRECT_PICKS
from uccl_ep_core.errors import ArgumentError, PeerFailure

FEW, TOPK = 40, 4
DIRECTLY = {"UCCL_EP_LOW_LATENCY_PATH": "direct"}


def many(num_ranks: int) -> int:
    """Tokens a rank whose picks are too many for the direct path."""
    return DIRECT_PICKS // (num_ranks * TOPK) + 1


def new_buffer(ctx: Context) -> Any:
    n, experts = ctx.num_ranks, closed_form.few_experts(ctx.num_ranks)
    hint = Buffer.get_low_latency_rdma_size_hint(many(n), 64, n, experts)
    return ctx.new_buffer(low_latency_mode=True, num_rdma_bytes=hint)


def back_and_forth(ctx: Context, sequence: str, together: bool) -> list[str]:
    """``sequence``: f for few tokens, m for many; ``together``: sent two at a time before they are taken in."""
    n, buffer = ctx.num_ranks, new_buffer(ctx)
    pairs = {}
    for kind, most in (("f", FEW), ("m", many(n))):
        tokens = [most - 3 * rank for rank in range(n)]
        pairs[kind] = LowLatencyPair(ctx, tokens, seed=len(pairs), most=most, routing="holes")
    roundings = []
    for first, second in zip(sequence[::2], sequence[1::2], strict=True):
        flights = []
        for kind in (first, second):
            flights.append((pairs[kind], start_low_latency(ctx, buffer, pairs[kind])))
            if not together:
                finish_low_latency(ctx, buffer, *flights.pop())
        for pair, flight in flights:
            finish_low_latency(ctx, buffer, pair, flight)
            roundings.append(flight[2].rounding)
    buffer.destroy()
    return roundings


@pytest.mark.parametrize("together", [False, True])
def test_back_and_forth(pool: RankPool, together: bool) -> None:
    sequence = "ffmmfmmffmmf"
    for roundings in pool.run(
        back_and_forth, ranks=3, options=DIRECTLY, arguments={"sequence": sequence, "together": together}, timeout_s=120
    ):
        names = {"f": "by rank", "m": "increasing k"}
        assert roundings == ([names[kind] for kind in sequence] if together else [])


def overlapping(ctx: Context, late: int, rounds: int) -> None:
    """Sends that come before the receive halves of those before them, as two micro-batches make them, with a rank that
    is late each time: what the others have read and been sent must reach it, and them, whoever waits first."""
    n, buffer = ctx.num_ranks, ctx.new_buffer()
    pairs = [LowLatencyPair(ctx, [9 + seed + rank for rank in range(n)], seed, 16, "holes") for seed in range(4)]
    handles: dict[int, Any] = {}
    sent: dict[int, Any] = {}

    def step(what: str, i: int) -> None:
        pair = pairs[i]
        if ctx.rank == late:
            time.sleep(0.01)  # the lateness under test
        if what == "d":
            _, _, handles[i], hook = start_low_latency(ctx, buffer, pair)
            hook()
        elif what == "c":
            x, _, hook = buffer.low_latency_combine(pair.y, pair.ids, pair.weights, handles[i], return_recv_hook=True)
            sent[i] = x, hook
        else:
            x, hook = sent.pop(i)
            hook()
            check_equal("combined_x", x, pair.combined(handles[i].rounding))

    for _ in range(rounds):
        # Dispatch, send half of a combine, receive half of it: two combines under way, then a third before the second
        # is received, then one more.
        for what, i in ("d0", "d1", "c0", "c1", "r0", "d2", "c2", "r1", "r2", "d3", "c3", "r3"):
            step(what, int(i))
    buffer.destroy()


@pytest.mark.parametrize("path", ["direct", "packed"])
@pytest.mark.parametrize("late", [0, 1, 2])
def test_sends_before_receives_with_a_late_rank(pool: RankPool, path: str, late: int) -> None:
    options = {"UCCL_EP_LOW_LATENCY_PATH": path, "UCCL_EP_TIMEOUT_S": "5"}
    pool.run(overlapping, ranks=3, options=options, arguments={"late": late, "rounds": 3})


CASES = [  # hidden, top-k, experts, tokens, routing, index, cast, hook, zero-copy, dtype
    (64, 2, 12, "even", "random", "int64", "none", True, False, "bf16"),
    (100, 4, 36, "rotate", "holes", "int32", "none", False, True, "fp16"),
    (2880, 4, 36, "first", "random", "int64", "fp8", False, False, "bf16"),
    (65, 1, 6, "zero", "one_expert", "int64", "none", True, False, "fp32"),
    (7168, 8, 36, "idle", "skewed", "int32", "ue8m0", True, True, "bf16"),
    (1000, 10, 36, "even", "starved", "int64", "round", False, False, "fp32"),
    (130, 12, 36, "rotate", "one_rank", "int64", "none", True, False, "fp64"),
    (128, 8, 36, "even", "nothing", "int64", "fp8", False, True, "bf16"),
]


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("path", ["direct", "packed"])
def test_both_are_exact(pool: RankPool, path: str, case: int, ranks: int) -> None:
    hidden, topk, experts, tokens, routing, index, cast, hook, zero_copy, dtype = CASES[case]
    pool.run(
        "cases:low_latency", ranks=ranks, options={"UCCL_EP_LOW_LATENCY_PATH": path},
        arguments={"hidden": hidden, "topk": topk, "experts": experts * ranks,
                   "tokens": closed_form.token_counts(tokens, ranks, case, most=48), "most": 48, "routing": routing,
                   "index": index, "cast": cast, "hook": hook, "zero_copy": zero_copy, "dtype": dtype, "seed": case},
    )  # fmt: skip


@pytest.mark.parametrize(("domain", "lanes"), [(1, "32"), (1, "1"), (2, "32")])
def test_messages_in_parts_are_exact(pool: RankPool, domain: int, lanes: str) -> None:
    """Three proxies bring a third of each message; lanes of a warp wait for a part each."""
    options = {"UCCL_EP_NUM_PROXIES": "3", "UCCL_EP_NUM_CHANNELS": "4", "UCCL_EP_HOST_LANES": lanes}
    pool.run("low_latency_programs:run", ranks=4, domain=domain, options=options, timeout_s=100,
             arguments={"seed": 7, "steps": 20})  # fmt: skip


@pytest.mark.parametrize("seed", [5, 6])
def test_many_pairs_without_a_barrier(pool: RankPool, seed: int) -> None:
    pool.run(
        "stream_cases:stress", ranks=3, options=DIRECTLY,
        arguments={"pairs": 150, "mode": "low_latency", "seed": seed, "longest_ms": 1.0}, timeout_s=120,
    )  # fmt: skip


@pytest.mark.parametrize("when", ["before", "inside", "after"])
def test_a_killed_rank_is_named(pool: RankPool, when: str) -> None:
    reports = pool.run(
        "death_cases:one_rank_dies", ranks=3, options={**DIRECTLY, "UCCL_EP_TIMEOUT_S": "4"}, may_die=(1,),
        arguments={"who": 1, "when": when, "mode": "low_latency"},
    )  # fmt: skip
    assert {report["rank"] for report in reports if report is not None} == {1}


def test_a_rank_that_does_not_come_is_named(pool: RankPool) -> None:
    reports = pool.run(
        "death_cases:too_late_rank", ranks=3, options={**DIRECTLY, "UCCL_EP_TIMEOUT_S": "1.5"},
        arguments={"who": 1, "mode": "low_latency"},
    )  # fmt: skip
    assert {report["rank"] for report in reports} == {1}


def no_word_is_old(ctx: Context) -> None:
    """What tells a word from an older one has few bits: all words, also those of no token, are renewed in time."""
    buffer, n = new_buffer(ctx), ctx.num_ranks
    layout, window = buffer._communicator.layout, buffer._communicator.windows.data.memory.pointer
    words = layout.direct_words()
    many_tokens = LowLatencyPair(ctx, [FEW] * n, 0, FEW, "random")
    one_token = LowLatencyPair(ctx, [1] * n, 1, 1, "random")
    operations = 2 * words + 2
    for i in range(operations):
        flight = start_low_latency(ctx, buffer, many_tokens if i < 2 else one_token)
        if i < 4 or i > operations - 4:
            finish_low_latency(ctx, buffer, many_tokens if i < 2 else one_token, flight)
        else:
            pair = one_token
            flight[-1]()
            buffer.low_latency_combine(pair.y, pair.inputs.ids[ctx.rank], pair.inputs.weights[ctx.rank], flight[2])
    ctx.barrier()
    for kind, (shift, mask) in enumerate(((0, 0xFFFF), (32, 0xFFFFFFFF))):
        for parity, source in itertools.product(range(2), range(n)):
            if source == ctx.rank:
                continue
            offset = layout.direct_word_offset(kind, parity, source, 0)
            raw = ctypes.string_at(window + offset, 8 * words)
            numbers = [word >> shift & mask for word in struct.unpack(f"<{words}Q", raw)]
            assert min(numbers) > operations - 2 * words - 2, (kind, parity, source, min(numbers))
            assert max(numbers) == operations - (operations - parity) % 2, (kind, parity, source, max(numbers))
    buffer.destroy()


def test_no_word_is_old(pool: RankPool, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--lanes") not in (None, 1):
        pytest.skip("16,386 operations, which take blocks of many lanes minutes; lone lanes send the same words")
    pool.run(no_word_is_old, ranks=2, options=DIRECTLY, timeout_s=120)


SINGLES, ABORTED = 15, 13  # of core/kernels/counters.hpp


def failures_between_lanes(ctx: Context, combines: int) -> None:
    """The word that says that a kernel failed changes all the time: lanes that see different ones still meet."""
    buffer = ctx.new_buffer()
    communicator, most, hidden = buffer._communicator, 8, 256
    stride = max(16, communicator.layout.num_ranks * communicator.layout.num_channels)
    counters = communicator.windows.counters.device_pointer
    failed = ctypes.c_uint64.from_address(counters + 8 * (SINGLES * stride + ABORTED))
    x, y = torch.ones(most, hidden, dtype=torch.bfloat16), torch.ones(4, most, hidden, dtype=torch.bfloat16)
    ids, weights = torch.arange(2 * most).view(most, 2) % 4, torch.ones(most, 2)
    out = torch.full_like(x, 7)

    def change(over: threading.Event) -> None:
        while not over.is_set():
            failed.value = 1
            failed.value = 0

    for i in range(combines + 2):
        handle = buffer.low_latency_dispatch(x, ids, most, 4)[2]
        over = threading.Event()
        changes = threading.Thread(target=change, args=(over,))
        if i < combines:
            changes.start()
        failed.value = int(i == combines)
        buffer.low_latency_combine(y, ids, weights, handle, out=out.fill_(7))
        over.set()
        if i < combines:
            changes.join()
        else:  # it is that word
            check_equal("out", out, torch.full_like(out, 7 if failed.value else 2))
        failed.value = 0
    buffer.destroy()


def test_lanes_go_the_same_way_when_a_kernel_fails(pool: RankPool) -> None:
    options = {**DIRECTLY, "UCCL_EP_HOST_LANES": "32", "UCCL_EP_TIMEOUT_S": "3"}
    pool.run(failures_between_lanes, ranks=1, options=options, arguments={"combines": 5}, timeout_s=40)


def launch_counts(ctx: Context) -> dict[str, int]:
    buffer = ctx.new_buffer()
    cases.low_latency(ctx, tokens=[5] * ctx.num_ranks, most=8, buffer=buffer)
    launches: dict[str, int] = buffer._communicator.stats()["launches"]
    buffer.destroy()
    return launches


@pytest.mark.parametrize(("domain", "options", "direct"), [
    (0, DIRECTLY, True), (0, {"UCCL_EP_LOW_LATENCY_PATH": "packed"}, False), (1, DIRECTLY, False),
])  # fmt: skip
def test_which_one(pool: RankPool, domain: int, options: dict[str, str], direct: bool) -> None:
    for launches in pool.run(launch_counts, ranks=2, domain=domain, options=options):
        assert any("direct" in name for name in launches) == direct, launches
        assert any(name.startswith("uccl_ep_ll_dispatch") for name in launches) != direct, launches


def different_ways(ctx: Context, before: int) -> tuple[int, str]:
    """After ``before`` equal calls rank 1 provides for more tokens than go directly: nobody finds the other's rows."""
    n, buffer = ctx.num_ranks, new_buffer(ctx)
    experts = closed_form.few_experts(n)
    ids = torch.arange(TOPK * 3).view(3, TOPK) % experts
    x = torch.ones(3, 64, dtype=torch.bfloat16)
    try:
        for _ in range(before):  # a rank that is slow may hear in the last of these what others find in the next
            buffer.low_latency_dispatch(x, ids, FEW, experts)
        buffer.low_latency_dispatch(x, ids, many(n) if ctx.rank == 1 else FEW, experts)
    except PeerFailure as error:
        return error.rank, str(error)
    finally:
        buffer.destroy()
        ctx.barrier()
    raise AssertionError("ranks that went different ways delivered something")


@pytest.mark.parametrize("before", [0, 1, 4])
def test_ranks_that_go_different_ways_raise_at_once(pool: RankPool, before: int) -> None:
    reports = pool.run(different_ways, ranks=3, options={**DIRECTLY, "UCCL_EP_TIMEOUT_S": "100"}, timeout_s=60,
                       arguments={"before": before})  # fmt: skip
    assert len({culprit for culprit, _ in reports}) == 1, reports
    for _, words in reports:
        if before:  # rank 1 has not sent yet what it asks for: it waits until all have come to the change
            assert "rank 1 is at fault (mismatch)" in words
            assert "its low-latency path (0: packed, 1: direct) is 0, that of rank" in words
        else:
            assert "num_max_dispatch_tokens_per_rank is " in words
            assert all(str(value) in words for value in (FEW, many(3)))


def beside_a_graph(ctx: Context, captured: str) -> str:
    """A call while the backend says that it captures, then one that wants the other path; what is said then."""
    n, buffer = ctx.num_ranks, new_buffer(ctx)
    backend = buffer._communicator.backend
    few = LowLatencyPair(ctx, [FEW] * n, 0, FEW, "random")
    too_many = LowLatencyPair(ctx, [many(n)] * n, 1, many(n), "random")
    first, second = (few, too_many) if captured == "direct" else (too_many, few)
    backend.is_capturing = lambda: True
    finish_low_latency(ctx, buffer, first, start_low_latency(ctx, buffer, first))
    del backend.is_capturing
    said = ""
    try:
        finish_low_latency(ctx, buffer, second, start_low_latency(ctx, buffer, second))
    except ArgumentError as error:
        said = str(error)
    finish_low_latency(ctx, buffer, first, start_low_latency(ctx, buffer, first))
    launches = buffer._communicator.stats()["launches"]
    assert any("direct" in name for name in launches) == (captured == "direct"), launches
    buffer.destroy()
    return said


@pytest.mark.parametrize("captured", ["direct", "packed"])
def test_calls_keep_to_the_path_of_a_captured_graph(pool: RankPool, captured: str) -> None:
    for said in pool.run(beside_a_graph, ranks=2, options=DIRECTLY, arguments={"captured": captured}):
        assert ("UCCL_EP_LOW_LATENCY_PATH=packed" in said) == (captured == "direct"), said
