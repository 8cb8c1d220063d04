"""What the ranks do in the tests of reported faults."""

from __future__ import annotations

import gc
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import cases
import closed_form
from ranks import Context, check_equal, environment
from uccl_ep import reference
from uccl_ep_core.errors import ArgumentError, PeerFailure

# ---- inputs ----


def both_modes(ctx: Context, *, most: int = 0, **arguments: Any) -> None:
    """The same arguments in high-throughput and in low-latency mode."""
    cases.high_throughput(ctx, **arguments)
    cases.low_latency(ctx, most=most or max(1, *arguments["tokens"]), **arguments)


def all_streams(ctx: Context) -> None:
    for seed, stream in enumerate(("sync", "async", "event", "full")):
        for cached in (False, True):
            tokens = closed_form.token_counts("rotate", ctx.num_ranks, seed, most=40)
            cases.high_throughput(ctx, tokens=tokens, stream=stream, cached=cached, bias=2, seed=seed)


def backward_of_a_starved_rank(ctx: Context) -> None:
    """Backward of dispatch is combine, backward of combine is dispatch with the handle; also with 0 rows."""
    buffer, rank, n = ctx.buffer(), ctx.rank, ctx.num_ranks
    experts = closed_form.few_experts(ctx.num_ranks)
    tokens = [9 + r for r in range(n)]
    inputs = cases.make_inputs(n, tokens, hidden=64, experts=experts, topk=4, routing="starved", dtype="fp32", seed=8)
    assert inputs.weights is not None
    layout = buffer.get_dispatch_layout(inputs.ids[rank], experts)
    recv_x, recv_idx, recv_w, counts, handle, _ = buffer.dispatch(
        inputs.xs[rank], topk_idx=inputs.ids[rank], topk_weights=inputs.weights[rank], num_tokens_per_rank=layout[0],
        is_token_in_rank=layout[3], num_tokens_per_expert=layout[2],
    )  # fmt: skip
    if rank == n - 1:
        check_equal("shapes on the starved rank", (list(recv_x.shape), counts), ([0, 64], [0] * (experts // n)))
    buffer.combine(closed_form.apply_experts(recv_x, recv_idx, recv_w, rank * experts // n), handle)
    # Backward: a gradient for each rank's tokens goes out with the handle, and comes home.
    grads = [closed_form.rows(t, 64, rank=r, seed=8, dtype=torch.float32, salt=4) for r, t in enumerate(tokens)]
    grad_recv = buffer.dispatch(grads[rank], handle=handle)[0]
    want = reference.dispatch(rank, grads, inputs.ids, experts)
    check_equal("gradient of the expert outputs", grad_recv, want.x)
    grad_x, grad_w, _ = buffer.combine(grad_recv, handle, topk_weights=recv_w)
    in_rank = reference.layout(inputs.ids[rank], experts, n).is_token_in_rank
    segments = [grads[rank][in_rank[:, d]] for d in range(n)]
    check_equal("gradient of x", grad_x, reference.combine_segments(segments, in_rank))
    check_equal("gradient of the weights", grad_w,
                torch.where(inputs.ids[rank] >= 0, inputs.weights[rank], 0.0))  # fmt: skip


def deterministic_mode(ctx: Context) -> None:
    """torch fills fresh memory with NaN in this mode; nothing of it may reach a result."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        for seed, routing in enumerate(("random", "holes", "starved")):
            both_modes(ctx, tokens=[17 + r for r in range(ctx.num_ranks)], routing=routing, seed=seed)
    finally:
        torch.use_deterministic_algorithms(False)


def huge(ctx: Context, rows: int) -> None:
    """More than 2^31 bytes and elements arrive on one rank; bytes, so that the machine can hold it."""
    buffer, rank, n, hidden = ctx.buffer(), ctx.rank, ctx.num_ranks, 8192
    pattern = closed_form.rows(64, hidden, rank=0, seed=3, dtype=torch.uint8)
    x = pattern.repeat(-(-rows // 64), 1)[:rows]
    x[:, 0] = rank
    x[:, 1:9] = torch.arange(rows)[:, None].contiguous().view(torch.uint8)
    ids = torch.zeros(rows, 1, dtype=torch.int64)
    layout = buffer.get_dispatch_layout(ids, n)
    recv, *_ = buffer.dispatch(x, topk_idx=ids, num_tokens_per_rank=layout[0], is_token_in_rank=layout[3],
                               num_tokens_per_expert=layout[2])  # fmt: skip
    check_equal("rows", recv.shape[0], rows * n if rank == 0 else 0)
    if rank == 0:
        assert recv.numel() > 2**31
        for source in range(n):
            x[:, 0] = source
            check_equal(f"rows of rank {source}", recv[source * rows : (source + 1) * rows], x)


def worst_case_too_small(ctx: Context, who: int) -> None:
    """Known only when the counts are in: that rank raises with the number that would do, and the others go on."""
    experts = closed_form.few_experts(ctx.num_ranks)
    made = cases.make_inputs(ctx.num_ranks, [6] * ctx.num_ranks, hidden=64, experts=experts, topk=4)
    enough = reference.dispatch(ctx.rank, made.xs, made.ids, experts).x.shape[0]
    buffer, ids = ctx.buffer(), made.ids[ctx.rank]
    layout = buffer.get_dispatch_layout(ids, experts)
    arguments = {"topk_idx": ids, "num_tokens_per_rank": layout[0], "is_token_in_rank": layout[3],
                 "num_tokens_per_expert": layout[2]}  # fmt: skip
    if ctx.rank == who:
        try:
            buffer.dispatch(made.xs[ctx.rank], num_worst_tokens=enough - 1, **arguments)
        except ArgumentError as error:
            check_equal("the value that would do is named", str(enough) in str(error), True)
        else:
            raise AssertionError("fewer rows than arrive were accepted")
    else:
        buffer.dispatch(made.xs[ctx.rank], num_worst_tokens=enough, **arguments)
    both_modes(ctx, tokens=[5 + r for r in range(ctx.num_ranks)], seed=22)


def split_batch(ctx: Context) -> None:
    """A batch in two halves, of which some are empty, both in flight at once."""
    buffer, n = ctx.buffer(), ctx.num_ranks
    tokens = [[0 if r % 2 else 11 for r in range(n)], [5 if r % 2 else 0 for r in range(n)]]
    flights = [start(buffer, ctx, t, seed=s) for s, t in enumerate(tokens)]
    for s, t in enumerate(tokens):
        finish(buffer, ctx, t, flights[s], seed=s)


def start(buffer: Any, ctx: Context, tokens: list[int], seed: int) -> Any:
    """Dispatch of a standard case; its result goes to ``finish``."""
    experts = closed_form.few_experts(ctx.num_ranks)
    inputs = cases.make_inputs(ctx.num_ranks, tokens, hidden=64, experts=experts, topk=4, seed=seed)
    ids, w = inputs.ids[ctx.rank], inputs.weights[ctx.rank]  # type: ignore[index]
    layout = buffer.get_dispatch_layout(ids, experts)
    result = buffer.dispatch(
        inputs.xs[ctx.rank], topk_idx=ids, topk_weights=w, num_tokens_per_rank=layout[0], is_token_in_rank=layout[3],
        num_tokens_per_expert=layout[2], async_finish=True,
    )  # fmt: skip
    return inputs, result


def finish(buffer: Any, ctx: Context, tokens: list[int], flight: Any, seed: int) -> None:
    inputs, result = flight
    experts = closed_form.few_experts(ctx.num_ranks)
    cases.wait(result[5])
    want = reference.dispatch(ctx.rank, inputs.xs, inputs.ids, experts, topk_weights=inputs.weights)
    cases.check_dispatch(ctx, want, result)
    y = closed_form.apply_experts(result[0], result[1], result[2], ctx.rank * experts // ctx.num_ranks)
    combined, _, event = buffer.combine(y, result[4], async_finish=True)
    cases.wait(event)
    check_equal(f"combined_x, seed {seed}", combined, cases.expected_combine(ctx, inputs, experts, [])[0])


# ---- life of buffers ----


def lasting_names() -> set[str]:
    """This library's names in shared memory that stay; those of other processes of the machine come and go."""
    names, looks = {name for name in os.listdir("/dev/shm") if name.startswith("uccl_ep")}, 0
    while names and looks < 5:
        time.sleep(0.2)  # until they are gone, if they are another's
        names, looks = names & set(os.listdir("/dev/shm")), looks + 1
    return names


def resources() -> dict[str, int]:
    gc.collect()
    status = Path("/proc/self/status").read_text()
    words = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return {
        "threads": int(words["Threads"]),
        "fds": len(os.listdir("/proc/self/fd")),
        "maps": len(Path("/proc/self/maps").read_text().splitlines()),
        "memory_kib": int(words["VmRSS"].split()[0]),
        "shm_names": len(lasting_names()),
    }


def create_and_destroy(ctx: Context, times: int, how: str) -> dict[str, list[int]]:
    """Resources after 5 rounds and after all: ``destroy``, ``drop`` (no destroy), ``twice``."""
    before: dict[str, int] = {}
    for i in range(times):
        buffer = ctx.new_buffer()
        if i % 10 == 0:
            cases.high_throughput(ctx, tokens=[3] * ctx.num_ranks, buffer=buffer, seed=i)
        if how != "drop":
            buffer.destroy()
        if how == "twice":
            buffer.destroy()
        del buffer
        if i == 4:
            ctx.barrier()
            before = resources()
    ctx.barrier()
    after = resources()
    return {name: [before[name], after[name]] for name in before}


def many_shapes(ctx: Context, rounds: int) -> dict[str, list[int]]:
    """Resources of one buffer after a third of the rounds and after all; every round has sizes of its own."""
    buffer, before = ctx.new_buffer(), {}
    for i in range(rounds):
        tokens = [(i + rank) % (rounds + 1) for rank in range(ctx.num_ranks)]
        sizes = {"hidden": 64, "experts": ctx.num_ranks * (1 + i % 7), "topk": 1 + i % 2, "seed": i, "buffer": buffer}
        cases.low_latency(ctx, most=rounds + 1, tokens=tokens, **sizes)
        cases.high_throughput(ctx, tokens=tokens, **sizes)
        if i == rounds // 3:
            ctx.barrier()
            before = resources()
    ctx.barrier()
    after = resources()
    buffer.destroy()
    return {name: [before[name], after[name]] for name in before}


def exit_without_destroy(ctx: Context) -> None:
    buffer = ctx.new_buffer()
    cases.high_throughput(ctx, tokens=[3] * ctx.num_ranks, buffer=buffer)
    globals()["kept_until_exit"] = buffer


def same_as_before(ctx: Context, options: dict[str, Any]) -> None:
    buffer = ctx.new_buffer(**options)
    cases.high_throughput(ctx, tokens=[4 + r for r in range(ctx.num_ranks)], buffer=buffer, seed=3)
    buffer.destroy()


def failing_start(ctx: Context, who: int) -> str:
    """Rank ``who`` may create no file of any size, so its windows fail; every rank must raise, then all succeed."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if ctx.rank == who:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        buffer = ctx.new_buffer()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    else:
        buffer.destroy()
        raise AssertionError("a buffer was made although one rank had no memory for it")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    ctx.barrier()
    same_as_before(ctx, {})
    return text


def construction_error(ctx: Context, values: dict[str, str]) -> str:
    with environment(values):
        try:
            ctx.new_buffer()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        else:
            raise AssertionError(f"{values} was accepted")
    ctx.barrier()
    same_as_before(ctx, {})
    return text


# ---- ranks that die or are late ----


def failure_of(call: Callable[[], Any]) -> dict[str, Any]:
    started = time.monotonic()
    try:
        call()
    except PeerFailure as error:
        return {**{k: getattr(error, k) for k in ("rank", "reason", "phase", "reporter", "expected", "seen",
                                                  "operation", "elapsed_s")},
                "message": str(error), "after_s": time.monotonic() - started}  # fmt: skip
    raise AssertionError("a rank is gone and nothing was raised")


def one_rank_dies(ctx: Context, who: int, when: str, mode: str) -> dict[str, Any] | None:
    """``when``: "before", "inside" or "after" a dispatch. The survivors' errors are returned."""
    buffer = ctx.new_buffer()
    tokens = [40 + r for r in range(ctx.num_ranks)]

    def pair(seed: int, count: list[int] = tokens) -> None:
        if mode == "low_latency":
            cases.low_latency(ctx, tokens=count, most=64, seed=seed, buffer=buffer)
        else:
            cases.high_throughput(ctx, tokens=count, seed=seed, buffer=buffer)

    def until_it_fails() -> None:
        for seed in range(100_000):
            pair(seed % 50)

    pair(1)
    ctx.barrier()
    if ctx.rank == who:
        if when == "before":
            os.kill(os.getpid(), 9)
        if when == "inside":  # somewhere in a stream of pairs
            subprocess.Popen(["/bin/sh", "-c", f"sleep 0.3; kill -9 {os.getpid()}"])
            until_it_fails()
        if when == "after":
            start(buffer, ctx, tokens, seed=2)
            os.kill(os.getpid(), 9)
    if when == "after":
        report = failure_of(
            lambda: (finish(buffer, ctx, tokens, start(buffer, ctx, tokens, seed=2), seed=2), until_it_fails())
        )
    else:
        report = failure_of(until_it_fails)
    buffer.destroy()
    return report


def killed_inside_a_long_dispatch(ctx: Context, who: int, rows: int) -> dict[str, Any] | None:
    """One dispatch of so many rows that the kill lands in the middle of it."""
    buffer = ctx.new_buffer()
    experts = closed_form.few_experts(ctx.num_ranks)
    x = closed_form.rows(rows, 4096, rank=ctx.rank, seed=1, dtype=torch.bfloat16)
    ids = closed_form.topk_idx("random", rows, 4, experts, ctx.num_ranks, rank=ctx.rank, seed=1)
    layout = buffer.get_dispatch_layout(ids, experts)
    cases.high_throughput(ctx, tokens=[3] * ctx.num_ranks, buffer=buffer)
    ctx.barrier()
    if ctx.rank == who:
        subprocess.Popen(["/bin/sh", "-c", f"sleep 0.03; kill -9 {os.getpid()}"])

    def forever() -> None:
        while True:
            buffer.dispatch(x, topk_idx=ids, num_tokens_per_rank=layout[0], is_token_in_rank=layout[3],
                            num_tokens_per_expert=layout[2])  # fmt: skip

    report = failure_of(forever)
    buffer.destroy()
    return report


def late_rank(ctx: Context, who: int, delay_s: float) -> None:
    buffer = ctx.new_buffer()
    for seed in range(2):
        if ctx.rank == who:
            time.sleep(delay_s)  # this is the lateness under test
        cases.high_throughput(ctx, tokens=[6] * ctx.num_ranks, seed=seed, buffer=buffer)
        if ctx.rank == who:
            time.sleep(delay_s)
        cases.low_latency(ctx, tokens=[6] * ctx.num_ranks, most=8, seed=seed, buffer=buffer)
    buffer.destroy()


def too_late_rank(ctx: Context, who: int, mode: str) -> dict[str, Any]:
    """Rank ``who`` does not call at all; the others' wait ends, and so does its own next call."""
    buffer = ctx.new_buffer()
    cases.high_throughput(ctx, tokens=[6] * ctx.num_ranks, buffer=buffer)
    cases.low_latency(ctx, tokens=[6] * ctx.num_ranks, most=8, buffer=buffer)
    x, ids = torch.ones(ctx.num_ranks, 64), torch.arange(2 * ctx.num_ranks).view(-1, 2)  # a row to every rank
    layout = buffer.get_dispatch_layout(ids, 2 * ctx.num_ranks)
    handle = buffer.dispatch(x, topk_idx=ids, is_token_in_rank=layout[3], num_tokens_per_expert=layout[2])[4]

    def call() -> None:
        if mode == "cached_dispatch":
            buffer.dispatch(x, handle=handle)
        elif mode == "low_latency":
            cases.low_latency(ctx, tokens=[7] * ctx.num_ranks, most=8, buffer=buffer)
        else:
            cases.high_throughput(ctx, tokens=[7] * ctx.num_ranks, buffer=buffer)

    if ctx.rank != who:
        report = failure_of(call)
        ctx.barrier()
    else:
        ctx.barrier()  # the others have given up
        report = failure_of(call)
    started = time.monotonic()
    buffer.destroy()
    report["destroy_s"] = time.monotonic() - started
    ctx.barrier()
    same_as_before(ctx, {})  # the processes and the group are still good
    return report


# ---- several buffers and groups ----


def interleaved_groups(ctx: Context, rounds: int) -> None:
    """Two groups that share ranks, and two buffers of one group, all used in turn."""
    views, ready = [], []
    for seed, members in enumerate(((0, 1, 2, 3), (1, 2, 3), (0, 1, 2, 3))):
        if ctx.rank in members:
            view = Context(members.index(ctx.rank), len(members), ctx.groups[members], 0, ctx.options, ctx.groups)
            views.append((view, view.new_buffer()))
            ready.append(prepared_pairs(view, seed))
    for i in range(rounds):
        for (view, buffer), pairs in zip(views, ready, strict=True):
            run_pair(view, buffer, pairs[i % len(pairs)])
    for _, buffer in views:
        buffer.destroy()


class Pair:
    """One dispatch and combine with everything computed beforehand, so that a loop only moves and compares."""

    def __init__(self, ctx: Context, tokens: list[int], seed: int, hidden: int, routing: str) -> None:
        n = ctx.num_ranks
        experts = self.experts = closed_form.few_experts(n)
        self.inputs = cases.make_inputs(n, tokens, hidden=hidden, experts=experts, topk=4, routing=routing, seed=seed)
        self.want = reference.dispatch(
            ctx.rank, self.inputs.xs, self.inputs.ids, experts, topk_weights=self.inputs.weights
        )
        self.y = closed_form.apply_experts(
            self.want.x, self.want.topk_idx, self.want.topk_weights, ctx.rank * (experts // n)
        )
        self.combined = cases.expected_combine(ctx, self.inputs, experts, [])[0]


def prepared_pairs(ctx: Context, seed: int, count: int = 12, hidden: int = 64) -> list[Pair]:
    kinds = ("rotate", "even", "idle", "first", "zero")
    return [
        Pair(
            ctx,
            closed_form.token_counts(kinds[i % 5], ctx.num_ranks, seed + i, most=50),
            seed + i,
            hidden,
            closed_form.ROUTINGS[i % len(closed_form.ROUTINGS)],
        )
        for i in range(count)
    ]


def run_pair(ctx: Context, buffer: Any, pair: Pair) -> None:
    rank, inputs = ctx.rank, pair.inputs
    assert inputs.weights is not None
    layout = buffer.get_dispatch_layout(inputs.ids[rank], pair.experts)
    result = buffer.dispatch(
        inputs.xs[rank], topk_idx=inputs.ids[rank], topk_weights=inputs.weights[rank], num_tokens_per_rank=layout[0],
        is_token_in_rank=layout[3], num_tokens_per_expert=layout[2],
    )  # fmt: skip
    cases.check_dispatch(ctx, pair.want, result)
    combined, _, _ = buffer.combine(pair.y, result[4])
    check_equal("combined_x", combined, pair.combined)


class LowLatencyPair:
    """The same in low-latency mode."""

    def __init__(self, ctx: Context, tokens: list[int], seed: int, most: int, routing: str) -> None:
        n, self.most = ctx.num_ranks, most
        experts = self.experts = closed_form.few_experts(n)
        self.inputs = cases.make_inputs(n, tokens, hidden=64, experts=experts, topk=4, routing=routing, seed=seed)
        self.want = reference.ll_dispatch(ctx.rank, self.inputs.xs, self.inputs.ids, most, experts)
        self.used = self.want.source_rank >= 0
        self.y = closed_form.apply_ll_experts(self.want.x, ctx.rank * (experts // n))
        ids = self.inputs.ids[ctx.rank]
        terms = torch.stack([cases.ll_expert(self.inputs.xs[ctx.rank], ids[:, k]) for k in range(4)], 1)
        assert self.inputs.weights is not None
        self.combined = reference.ll_combine_terms(terms, ids, self.inputs.weights[ctx.rank])


def start_low_latency(ctx: Context, buffer: Any, pair: LowLatencyPair) -> Any:
    recv, count, handle, _, hook = buffer.low_latency_dispatch(
        pair.inputs.xs[ctx.rank],
        pair.inputs.ids[ctx.rank],
        pair.most,
        pair.experts,
        use_fp8=False,
        return_recv_hook=True,
    )
    return recv, count, handle, hook


def finish_low_latency(ctx: Context, buffer: Any, pair: LowLatencyPair, flight: Any) -> None:
    recv, count, handle, hook = flight
    hook()
    check_equal("recv_count", count, pair.want.count)
    check_equal("recv_x", recv[pair.used], pair.want.x[pair.used])
    combined, _, hook = buffer.low_latency_combine(
        pair.y, pair.inputs.ids[ctx.rank], pair.inputs.weights[ctx.rank], handle,  # type: ignore[index]
        return_recv_hook=True,
    )  # fmt: skip
    hook()
    check_equal("combined_x", combined, pair.combined)


def stress(ctx: Context, pairs: int, mode: str, seed: int, longest_ms: float = 2.0) -> None:
    """``pairs`` dispatches and combines with random delays of each rank's own and no barrier between them."""
    import random

    delays = random.Random(seed * 100 + ctx.rank)
    buffer = ctx.new_buffer()
    if mode == "low_latency":
        ready: list[Any] = [
            LowLatencyPair(ctx, closed_form.token_counts(kind, ctx.num_ranks, seed + i, most=50), seed + i, 50, routing)
            for i, (kind, routing) in enumerate(
                (k, r) for k in ("rotate", "even", "idle", "first") for r in ("random", "holes", "one_rank")
            )
        ]
    else:
        ready = prepared_pairs(ctx, seed)
    order = random.Random(seed)  # the same on all ranks
    for _ in range(pairs):
        pair = ready[order.randrange(len(ready))]
        if delays.random() < 0.1:
            time.sleep(delays.random() * longest_ms / 1000)  # the random lateness under test
        if mode == "low_latency":
            finish_low_latency(ctx, buffer, pair, start_low_latency(ctx, buffer, pair))
        else:
            run_pair(ctx, buffer, pair)
    dist.barrier(ctx.group)
    buffer.destroy()


def two_in_flight(ctx: Context, rounds: int) -> None:
    """Two dispatches before the first combine, combined in both orders, in both modes."""
    buffer = ctx.new_buffer()
    n = ctx.num_ranks
    tokens = [[9 + r for r in range(n)], [30 - 3 * r for r in range(n)]]
    pairs = [LowLatencyPair(ctx, t, s, 40, "random") for s, t in enumerate(tokens)]
    for i in range(rounds):
        flights = [start(buffer, ctx, t, seed=s) for s, t in enumerate(tokens)]
        ll_flights = [start_low_latency(ctx, buffer, p) for p in pairs]
        for s in (0, 1) if i % 2 else (1, 0):
            finish(buffer, ctx, tokens[s], flights[s], seed=s)
            finish_low_latency(ctx, buffer, pairs[s], ll_flights[s])
    buffer.destroy()


def two_threads(ctx: Context, rounds: int) -> None:
    """Two micro-batches of one buffer, each in a thread of its own that takes its turn."""
    buffer = ctx.new_buffer()
    tokens = [[9 + r for r in range(ctx.num_ranks)], [0 if r else 13 for r in range(ctx.num_ranks)]]
    turn = threading.Condition()
    whose = [0]
    errors: list[BaseException] = []

    def take_turn(me: int, work: Callable[[], Any]) -> Any:
        with turn:
            if not turn.wait_for(lambda: whose[0] == me or errors, timeout=30) or errors:
                raise AssertionError("the other thread failed or is late")
            result = work()
            whose[0] = 1 - me
            turn.notify_all()
            return result

    def micro_batch(me: int) -> None:
        try:
            for _ in range(rounds):
                flight = take_turn(me, lambda: start(buffer, ctx, tokens[me], seed=me))
                take_turn(me, lambda flight=flight: finish(buffer, ctx, tokens[me], flight, seed=me))
        except BaseException as error:
            with turn:
                errors.append(error)
                turn.notify_all()

    threads = [threading.Thread(target=micro_batch, args=(me,)) for me in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    buffer.destroy()


def only_rank_0_picks(ctx: Context, most: int, rounds: int) -> None:
    """All ranks have tokens, but the picks of all but rank 0 are -1."""
    buffer, n, rank = ctx.buffer(), ctx.num_ranks, ctx.rank
    experts = closed_form.few_experts(ctx.num_ranks)
    for seed in range(rounds):
        made = cases.make_inputs(n, [most] * n, hidden=64, experts=experts, topk=4, seed=seed)
        assert made.weights is not None
        ids = [made.ids[0]] + [torch.full_like(i, -1) for i in made.ids[1:]]
        recv, count, handle, _, hook = buffer.low_latency_dispatch(
            made.xs[rank], ids[rank], most, experts, use_fp8=False, return_recv_hook=True
        )
        hook()
        want = reference.ll_dispatch(rank, made.xs, ids, most, experts)
        check_equal("recv_count", count, want.count)
        used = want.source_rank >= 0
        check_equal("recv_x", recv[used], want.x[used])
        combined, _, hook = buffer.low_latency_combine(
            closed_form.apply_ll_experts(want.x, rank * (experts // n)), ids[rank], made.weights[rank], handle,
            return_recv_hook=True,
        )  # fmt: skip
        hook()
        terms = torch.stack([cases.ll_expert(made.xs[rank], ids[rank][:, k]) for k in range(4)], 1)
        check_equal("combined_x", combined, reference.ll_combine_terms(terms, ids[rank], made.weights[rank]))


def fingerprint(ctx: Context) -> str:
    """Digest of what one step returns."""
    import hashlib

    buffer, rank = ctx.buffer(), ctx.rank
    made = cases.make_inputs(ctx.num_ranks, [31 + r for r in range(ctx.num_ranks)], hidden=100, experts=24, topk=6)
    layout = buffer.get_dispatch_layout(made.ids[rank], 24)
    recv_x, recv_idx, _, _, handle, _ = buffer.dispatch(
        made.xs[rank], topk_idx=made.ids[rank], num_tokens_per_rank=layout[0], is_token_in_rank=layout[3],
        num_tokens_per_expert=layout[2],
    )  # fmt: skip
    y = closed_form.apply_experts(recv_x, recv_idx, None, rank * 24 // ctx.num_ranks)
    combined, _, _ = buffer.combine(y, handle)
    digest = hashlib.sha256()
    for t in (recv_x, recv_idx, combined):
        digest.update(t.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def describe(ctx: Context) -> dict[str, Any]:
    same_as_before(ctx, {})
    return dict(ctx.buffer().describe())


def warp_size(ctx: Context) -> int:
    return int(ctx.buffer()._communicator.backend.limits.warp_size)
