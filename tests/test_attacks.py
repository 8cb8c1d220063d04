"""Uses that a careless or hostile caller may make: each is served, or refused before anybody communicates, and none
crashes, hangs or gives wrong bits."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fault_cases
from ranks import Context, RankPool, check_equal
from uccl_ep_core.errors import ArgumentError, BufferClosedError, PeerFailure

EXPERTS, TOPK, HIDDEN, TOKENS = 8, 2, 64, 20
DOMAINS = [0, 1]
SHORT = {"UCCL_EP_TIMEOUT_S": "4"}


def routes(tokens: int = TOKENS, experts: int = EXPERTS) -> torch.Tensor:
    """Token t goes to experts 2t and 2t + 1."""
    return torch.arange(TOPK * tokens).view(tokens, TOPK) % experts


def dispatch(buffer: Any, ids: torch.Tensor, experts: int = EXPERTS, x: Any = None, **changes: Any) -> Any:
    layout = buffer.get_dispatch_layout(ids, experts)
    arguments = {"topk_idx": ids, "topk_weights": torch.ones(ids.shape), "is_token_in_rank": layout[3],
                 "num_tokens_per_expert": layout[2], **changes}  # fmt: skip
    return buffer.dispatch(torch.ones(len(ids), HIDDEN) if x is None else x, **arguments)


def ll_dispatch(buffer: Any, x: torch.Tensor, ids: torch.Tensor, **changes: Any) -> Any:
    return buffer.low_latency_dispatch(x, ids, len(ids), EXPERTS, use_fp8=False, **changes)


def refused(kind: type[Exception], call: Callable[[], Any], *words: str) -> str:
    try:
        call()
    except kind as error:
        text = str(error)
    else:
        text = ""
    if text:
        missing = [word for word in words if word not in text]
        if missing:
            raise AssertionError(f"the error does not say {missing}: {text}")
        return text
    raise AssertionError(f"accepted; {kind.__name__} with {words} was expected")


def still_good(ctx: Context) -> None:
    fault_cases.both_modes(ctx, tokens=[5 + r for r in range(ctx.num_ranks)], seed=21)


# ---- tensors that are views ----


def views(ctx: Context) -> None:
    buffer, ids = ctx.buffer(), routes()
    x = torch.arange(TOKENS * HIDDEN, dtype=torch.float32).view(TOKENS, HIDDEN) + 1
    want = dispatch(buffer, ids, x=x)
    kinds = {
        "strided": torch.stack([x, -x], 2)[:, :, 0],
        "transposed": x.t().contiguous().t(),
        "requires grad": x.clone().requires_grad_(),
        "a view that stands for a negation": torch._neg_view(-x),
    }
    home = buffer.combine(want[0], want[4])[0]
    received, _, handle, *_ = ll_dispatch(buffer, x, ids)
    ll_home = buffer.low_latency_combine(received, ids, torch.ones(ids.shape), handle)[0]
    for name, view in kinds.items():
        check_equal(f"dispatch, {name}", dispatch(buffer, ids, x=view)[0].detach(), want[0])
        received, _, handle, *_ = ll_dispatch(buffer, view, ids)
        ll_sum = buffer.low_latency_combine(received, ids, torch.ones(ids.shape), handle)[0]
        check_equal(f"low latency, {name}", ll_sum.detach(), ll_home)
    check_equal("combine", buffer.combine(torch._neg_view(-want[0]), want[4])[0], home)
    counts = buffer.get_dispatch_layout(ids, EXPERTS)[2]
    strided = torch.stack([counts, torch.full_like(counts, -7)], 1)[:, 0]
    for _ in range(5):
        check_equal("strided counts", dispatch(buffer, ids, num_tokens_per_expert=strided)[3], want[3])


@pytest.mark.parametrize("domain", DOMAINS)
def test_views(pool: RankPool, domain: int) -> None:
    pool.run(views, ranks=2, domain=domain)


# ---- refused before anybody communicates ----


def refusals(ctx: Context, who: int) -> None:
    """Rank ``who`` alone makes wrong calls; that all make right ones afterwards shows that nothing was sent."""
    buffer, ids, x = ctx.buffer(), routes(), torch.ones(TOKENS, HIDDEN)
    received, *_, handle, _ = dispatch(buffer, ids)
    if ctx.rank == who:
        for rows in (1 << 50, -5):
            refused(ArgumentError, lambda: dispatch(buffer, ids, num_worst_tokens=rows), str(rows))  # noqa: B023
        for wrong in ([5] * EXPERTS, torch.ones(2, 4, dtype=torch.int32), torch.ones(EXPERTS)):
            call = lambda: dispatch(buffer, ids, num_tokens_per_expert=wrong)  # noqa: B023, E731
            refused(ArgumentError, call, "num_tokens_per_expert")
        for wrong in (torch.tensor(1.0), [1.0]):
            refused(ArgumentError, lambda: buffer.combine(received, handle, topk_weights=wrong), "topk_weights")  # noqa: B023
        refused(ArgumentError, lambda: dispatch(buffer, ids, x=(x, x, x)), "(x, scales)")
        refused(ArgumentError, lambda: buffer.get_dispatch_layout(ids, 8.0), "int")
        often = torch.full_like(ids, 6)
        refused(ArgumentError, lambda: ll_dispatch(buffer, x, often), f"expert 6 {TOPK * TOKENS} times", "-1")
        most = 1 << 16
        refused(
            ArgumentError,
            lambda: buffer.low_latency_dispatch(x, ids, most, EXPERTS, use_fp8=False),
            str(most), str(most - 1),
        )  # fmt: skip
        refused(
            ArgumentError, lambda: ll_dispatch(buffer, x, ids, cumulative_local_expert_recv_stats=[1]), "recv_stats"
        )
    still_good(ctx)


@pytest.mark.parametrize("domain", DOMAINS)
def test_refused_before_anybody_communicates(pool: RankPool, domain: int) -> None:
    pool.run(refusals, ranks=2, domain=domain, arguments={"who": 1})


def counts_beyond_a_slot(ctx: Context) -> None:
    """The counts of all experts are one message: as many as fit are right, one more is refused."""
    buffer = ctx.new_buffer(options={"slot_bytes": 4096, "num_channels": 1})
    most = (4096 - 64 - 24 - 8) // 4  # of a rank
    ids = routes(200, most * ctx.num_ranks)
    want = torch.bincount(ids.flatten(), minlength=most * ctx.num_ranks) * ctx.num_ranks
    got = dispatch(buffer, ids, most * ctx.num_ranks)[3]
    check_equal("counts", torch.tensor(got), want[ctx.rank * most : (ctx.rank + 1) * most])
    refused(ArgumentError, lambda: dispatch(buffer, ids, (most + 1) * ctx.num_ranks), "slot_bytes", "4160")
    buffer.destroy()


@pytest.mark.parametrize("domain", DOMAINS)
def test_counts_beyond_a_slot(pool: RankPool, domain: int) -> None:
    pool.run(counts_beyond_a_slot, ranks=2, domain=domain)


# ---- ranks that disagree ----


def rail_disagreement(ctx: Context, mine: int) -> str:
    """By rank 0's handle its one token goes to rank 2, by the others' to rank 3; or the other way round.

    Either way rank 2, its rail peer, gets one row: only what it does with the row differs.
    """
    buffer = ctx.new_buffer()
    num = 1 if ctx.rank == 0 else 0
    handles = [dispatch(buffer, torch.full((num, 1), expert), 2 * ctx.num_ranks)[4] for expert in (4, 6)]
    handle = handles[mine if ctx.rank == 0 else 1 - mine]

    ctx.barrier()  # or a rank hears of it in the dispatch that makes its handle

    def until_told() -> None:
        end = time.monotonic() + 10  # a rank that waits for nobody hears of it some calls later
        while time.monotonic() < end:
            buffer.dispatch(torch.ones(num, HIDDEN), handle=handle)

    text = refused(PeerFailure, until_told)
    buffer.destroy()
    ctx.barrier()
    return text


@pytest.mark.parametrize("mine", [0, 1])
def test_ranks_disagree_where_a_rail_peers_row_goes(pool: RankPool, mine: int) -> None:
    texts = pool.run(rail_disagreement, ranks=4, domain=2, options=SHORT, arguments={"mine": mine})
    assert all("mismatch" in text for text in texts), texts


def disagreement(ctx: Context, about: str) -> str:
    """Messages whose rows are as long but mean something else: never taken for what this rank expects."""
    buffer, mine = ctx.new_buffer(), ctx.rank == 0
    few, many = (torch.zeros(tokens, 1, dtype=torch.int64) for tokens in (20, 300))
    received, _, weights, _, handle, _ = dispatch(buffer, routes(), x=torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16))
    handles = [dispatch(buffer, ids)[4] for ids in (few, many)]
    x = torch.ones(TOKENS, HIDDEN)
    calls = {
        "dtype of combine": lambda: buffer.combine(received.half() if mine else received, handle),
        "weights of combine": lambda: buffer.combine(received, handle, topk_weights=weights if mine else None),
        "scales of a cached dispatch": lambda: buffer.dispatch((x, x[:, :3]) if mine else x, handle=handle),
        "handle": lambda: buffer.dispatch(torch.ones(20 if mine else 300, HIDDEN), handle=handles[not mine]),
    }

    def until_told() -> None:
        calls[about]()
        for _ in range(3):  # a rank that only sends learns of it with its next call
            buffer.dispatch(x, handle=handle)

    text = refused(PeerFailure, until_told)
    buffer.destroy()
    ctx.barrier()
    return text


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("about", ["dtype of combine", "weights of combine", "scales of a cached dispatch", "handle"])
def test_ranks_disagree(pool: RankPool, about: str, domain: int) -> None:
    texts = pool.run(disagreement, ranks=2, domain=domain, options=SHORT, arguments={"about": about})
    assert all("mismatch" in text for text in texts), texts


# ---- handles and hooks out of place ----


def failed_hook(ctx: Context) -> None:
    """A receive that failed has brought nothing: its hook says so however often it is called."""
    buffer, ids, x = ctx.new_buffer(), routes(), torch.ones(TOKENS, HIDDEN)
    ll_dispatch(buffer, x, ids)
    if ctx.rank == 0:
        hooks = [ll_dispatch(buffer, x, ids, return_recv_hook=True)[4] for _ in range(2)]
        refused(PeerFailure, hooks[1])
        for hook in hooks * 2:
            refused(BufferClosedError, hook)
    ctx.barrier()
    buffer.destroy()


def test_hook_after_a_failure(pool: RankPool) -> None:
    pool.run(failed_hook, ranks=2, options=SHORT)


def results_dropped(ctx: Context) -> None:
    """What a receive half writes lives until it has run, also where the caller keeps the hook alone, or nothing."""
    buffer, ids, x = ctx.buffer(), routes(), torch.ones(TOKENS, HIDDEN)
    _, count, handle, _, hook = ll_dispatch(buffer, x, ids, return_recv_hook=True)
    written = [weakref.ref(count), weakref.ref(handle.state)]
    del count, handle, _
    assert all(ref() is not None for ref in written)
    hook()
    ll_dispatch(buffer, x, ids, return_recv_hook=True)
    still_good(ctx)


def test_results_dropped_before_the_hook(pool: RankPool) -> None:
    pool.run(results_dropped, ranks=2)


def destroyed_by_another_thread(ctx: Context) -> None:
    """A dispatch that waits ends with an error; its memory is not taken from under it."""
    buffer, ids, errors = ctx.new_buffer(), routes(), []
    dispatch(buffer, ids)
    ctx.barrier()
    if ctx.rank == 0:

        def wait() -> None:
            try:
                dispatch(buffer, ids)
            except (PeerFailure, BufferClosedError) as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        limit = time.monotonic() + 5
        while buffer.stats()["launches"]["uccl_ep_notify"] < 2 and time.monotonic() < limit:
            os.sched_yield()
        time.sleep(0.2)  # into the wait itself
        buffer.destroy()
        thread.join(5)
        assert errors and not thread.is_alive()
    else:
        ctx.barrier()
        refused(PeerFailure, lambda: dispatch(buffer, ids), "rank 0", "closed")
    if ctx.rank == 0:
        ctx.barrier()
    buffer.destroy()


@pytest.mark.parametrize("domain", DOMAINS)
def test_destroyed_by_another_thread(pool: RankPool, domain: int) -> None:
    pool.run(destroyed_by_another_thread, ranks=2, domain=domain, options={"UCCL_EP_TIMEOUT_S": "20"})


def forked(ctx: Context) -> str:
    """A fork may neither use nor close what is its parent's, nor wait for ever in its parent's group."""
    buffer, ids = ctx.new_buffer(), routes()
    dispatch(buffer, ids)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = refused(BufferClosedError, lambda: dispatch(buffer, ids), "fork")
            buffer.destroy()
            refused(ArgumentError, lambda: ctx.new_buffer(), "forkserver")
        except BaseException as error:
            text = f"wrong: {error!r}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    text = os.read(read, 4096).decode()
    os.close(read)
    os.waitpid(child, 0)
    ctx.barrier()
    dispatch(buffer, ids)
    buffer.destroy()
    return text


@pytest.mark.parametrize("domain", DOMAINS)
def test_fork_after_creation(pool: RankPool, domain: int) -> None:
    for text in pool.run(forked, ranks=2, domain=domain):
        assert "belongs to process" in text, text


# ---- after destroy ----


# What each public method is called with after destroy(); a method that is missing here fails the test.
AFTER_DESTROY: dict[str, Callable[[Any, Any], Any]] = {
    "check": lambda b, h: b.check(),
    "describe": lambda b, h: b.describe(),
    "stats": lambda b, h: b.stats(),
    "profile": lambda b, h: b.profile(),
    "get_comm_stream": lambda b, h: b.get_comm_stream(),
    "get_local_buffer_tensor": lambda b, h: b.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True),
    "get_dispatch_layout": lambda b, h: b.get_dispatch_layout(routes(), EXPERTS),
    "dispatch": lambda b, h: b.dispatch(torch.ones(TOKENS, HIDDEN), handle=h[0]),
    "internode_dispatch": lambda b, h: b.internode_dispatch(torch.ones(TOKENS, HIDDEN), handle=h[0]),
    "combine": lambda b, h: b.combine(torch.ones(h[0].num_rows, HIDDEN), h[0]),
    "internode_combine": lambda b, h: b.internode_combine(torch.ones(h[0].num_rows, HIDDEN), h[0]),
    "clean_low_latency_buffer": lambda b, h: b.clean_low_latency_buffer(TOKENS, HIDDEN, EXPERTS),
    "low_latency_dispatch": lambda b, h: ll_dispatch(b, torch.ones(TOKENS, HIDDEN), routes()),
    "low_latency_combine": lambda b, h: b.low_latency_combine(h[2], routes(), torch.ones(TOKENS, TOPK), h[1]),
    "get_next_low_latency_combine_buffer": lambda b, h: b.get_next_low_latency_combine_buffer(h[1]),
    "low_latency_update_mask_buffer": lambda b, h: b.low_latency_update_mask_buffer(1 - b.rank, True),
    "low_latency_query_mask_buffer": lambda b, h: b.low_latency_query_mask_buffer(torch.zeros(2, dtype=torch.int32)),
    "low_latency_clean_mask_buffer": lambda b, h: b.low_latency_clean_mask_buffer(),
}
# Facts of the class, and the call itself, which may be made twice.
ALWAYS = {"destroy", "is_sm90_compiled", "set_num_sms", "capture", "get_dispatch_config", "get_combine_config",
          "get_low_latency_rdma_size_hint"}  # fmt: skip


def used_after_destroy(ctx: Context) -> None:
    buffer, ids = ctx.new_buffer(enable_shrink=True), routes()
    handle = dispatch(buffer, ids)[4]
    received, _, ll_handle, *_ = ll_dispatch(buffer, torch.ones(TOKENS, HIDDEN), ids)
    hook = ll_dispatch(buffer, torch.ones(TOKENS, HIDDEN), ids, return_recv_hook=True)[4]
    ctx.barrier()
    buffer.destroy()
    public = {name for name in dir(type(buffer)) if name[0] != "_" and callable(getattr(type(buffer), name))}
    check_equal("public methods", sorted(public - ALWAYS), sorted(AFTER_DESTROY))
    for call in AFTER_DESTROY.values():
        refused(BufferClosedError, lambda: call(buffer, (handle, ll_handle, received)), "destroyed")  # noqa: B023
    refused(BufferClosedError, hook, "destroyed")
    ctx.barrier()


@pytest.mark.parametrize("domain", DOMAINS)
def test_used_after_destroy(pool: RankPool, domain: int) -> None:
    pool.run(used_after_destroy, ranks=2, domain=domain)
