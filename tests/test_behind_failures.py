"""What runs behind a kernel that failed, on a device that the host is ahead of: it must stay within its bounds.

A launch on a GPU returns before its kernel has ended, so that calls enqueue more until they hear of a failure. The host
backend runs a kernel inside the launch and raises there; so these cases keep the news from the library, and give it
memory that holds large numbers, as memory of a GPU may.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ranks import Context, RankPool
from uccl_ep import ElasticBuffer, high_throughput
from uccl_ep_core.errors import PeerFailure

HIDDEN, TOPK, TOKENS, MARGIN, BYTE = 64, 2, 12, 1 << 16, 0x7F
WHO = 1
LIMIT_S = 1.5  # short, as each case waits for it; but ranks of a loaded machine must meet within it


class Away(Exception):
    """The rank under test leaves its group here."""


class Guarded:
    """Gives memory like `GpuBackend.empty`, full of `BYTE`, with as much on both sides, which nobody may write."""

    def __init__(self) -> None:
        self.given: list[tuple[torch.Tensor, int]] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        storage = torch.full((nbytes + 2 * MARGIN,), BYTE, dtype=torch.uint8)
        self.given.append((storage, nbytes))
        return storage[MARGIN : MARGIN + nbytes].view(dtype).view(shape)

    def check(self, *, unwritten: bool = False) -> None:
        assert self.given
        for storage, nbytes in self.given:
            sides = [storage] if unwritten else [storage[:MARGIN], storage[MARGIN + nbytes :]]
            assert all(bool((side == BYTE).all()) for side in sides), f"{nbytes} bytes: others were written"


@contextmanager
def ahead(communicator: Any) -> Iterator[Guarded]:
    """The host hears of no failure meanwhile, as when it is ahead of its GPU."""
    memory = Guarded()
    communicator.check = lambda: None
    communicator.backend.empty = memory.empty
    try:
        yield memory
    finally:
        del communicator.check, communicator.backend.empty


def failure_of(communicator: Any) -> str:
    """What the next check says, without which rank it was raised on: WHO failed."""
    with pytest.raises(PeerFailure) as failure:
        communicator.check()
    assert failure.value.rank == WHO, failure.value
    return str(failure.value).partition(" (raised on")[0]


@contextmanager
def launching_as_on_a_gpu(communicator: Any) -> Iterator[None]:
    """What a launch finds is told to the next check, not by the launch itself."""
    launch = communicator.launch

    def without_check(*arguments: Any, **grid: Any) -> None:
        communicator.check = lambda: None
        try:
            launch(*arguments, **grid)
        finally:
            del communicator.check

    communicator.launch = without_check
    try:
        yield
    finally:
        del communicator.launch


@contextmanager
def leaving_at(communicator: Any, kernel: str) -> Iterator[None]:
    launch = communicator.launch

    def until_then(name: str, *arguments: Any, **grid: Any) -> None:
        if name == kernel:
            raise Away
        launch(name, *arguments, **grid)

    communicator.launch = until_then
    try:
        with pytest.raises(Away):
            yield
    finally:
        del communicator.launch


def inputs(ranks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A row to every rank, this one included."""
    ids = torch.arange(TOPK * TOKENS).view(TOKENS, TOPK) % (TOPK * ranks)
    return torch.ones(TOKENS, HIDDEN), ids, torch.ones(TOKENS, TOPK)


def everything_behind(ctx: Context, kernel: str, expand: bool, multiple: bool) -> str:
    """Rank `WHO` leaves before ``kernel`` of a dispatch; the others finish all calls of it and of its combine."""
    buffer = ElasticBuffer(
        ctx.group, num_max_tokens_per_rank=TOKENS, allow_multiple_reduction=multiple, options={"timeout_s": LIMIT_S}
    )
    communicator = buffer._communicator
    x, ids, weights = inputs(ctx.num_ranks)

    def pair() -> None:
        received, _, its_weights, handle, _ = buffer.dispatch(
            x, topk_idx=ids, topk_weights=weights, num_experts=TOPK * ctx.num_ranks, do_expand=expand, do_cpu_sync=False
        )
        again = buffer.dispatch(x, topk_weights=weights, handle=handle, do_expand=expand)[0]
        assert again.shape == received.shape and handle.recv_src_metadata.shape[1] == TOPK + 2
        buffer.combine(received, handle, topk_weights=None if expand and not multiple else its_weights)

    pair()
    message = ""
    if ctx.rank == WHO:
        with leaving_at(communicator, kernel):
            pair()
    else:
        with ahead(communicator) as memory:
            pair()
            memory.check()
        message = failure_of(communicator)
    ctx.barrier()  # whoever left is waited for in vain until then
    buffer.destroy()
    return message


def one_error(messages: list[str]) -> None:
    survivors = [message for rank, message in enumerate(messages) if rank != WHO]
    assert len(set(survivors)) == 1 and f"rank {WHO} is at fault" in survivors[0], messages


@pytest.mark.parametrize("kernel", ["uccl_ep_notify", "uccl_ep_dispatch"])
@pytest.mark.parametrize(("expand", "multiple"), [(False, True), (True, True), (True, False)])
def test_nothing_behind_a_failure_leaves_its_bounds(pool: RankPool, kernel: str, expand: bool, multiple: bool) -> None:
    one_error(
        pool.run(everything_behind, ranks=3, arguments={"kernel": kernel, "expand": expand, "multiple": multiple})
    )


def counts_that_never_came(ctx: Context) -> str:
    """The host waits for the counts of a dispatch, and looks then, before it sizes anything by them."""
    buffer = ctx.new_buffer(options={"timeout_s": LIMIT_S})
    communicator = buffer._communicator
    x, ids, weights = inputs(ctx.num_ranks)
    layout = buffer.get_dispatch_layout(ids, TOPK * ctx.num_ranks)

    def dispatch() -> None:
        buffer.dispatch(
            x, topk_idx=ids, topk_weights=weights, is_token_in_rank=layout[3], num_tokens_per_expert=layout[2]
        )

    dispatch()
    message = ""
    if ctx.rank == WHO:
        with leaving_at(communicator, "uccl_ep_notify"):
            dispatch()
    else:
        before = buffer.stats()["launches"]
        with launching_as_on_a_gpu(communicator), pytest.raises(PeerFailure) as failure:
            dispatch()
        after = buffer.stats()["launches"]
        assert {name for name in after if after[name] != before[name]} == {"uccl_ep_notify"}
        message = str(failure.value).partition(" (raised on")[0]
    ctx.barrier()
    buffer.destroy()
    return message


def test_counts_that_never_came(pool: RankPool) -> None:
    one_error(pool.run(counts_that_never_came, ranks=3))


def wild_counts(ctx: Context) -> None:
    """Kernels that go by counts first ask whether anything failed: what a failed one left may be anything."""
    buffer = ctx.new_buffer(options={"timeout_s": LIMIT_S})
    communicator = buffer._communicator
    x, ids, _ = inputs(ctx.num_ranks)
    layout = buffer.get_dispatch_layout(ids, TOPK * ctx.num_ranks)
    handle = buffer.dispatch(x, is_token_in_rank=layout[3], num_tokens_per_expert=layout[2])[4]
    if ctx.rank != WHO:
        with ahead(communicator):
            communicator.barrier()  # fails
    ctx.barrier()  # nobody's signals are under way any more
    if ctx.rank != WHO:
        wild = {
            name: torch.full_like(getattr(handle, name), 1 << 24)
            for name in ("send_rows", "rail_send_rows", "receive_rows", "receive_offset", "rail_rows")
        }
        torn = dataclasses.replace(handle, num_received=0, num_rows=0, **wild)

        def windows() -> list[bytes]:
            memory = (communicator.windows.data.memory, communicator.windows.counters.memory)
            return [ctypes.string_at(m.pointer, min(m.nbytes, 16 << 20)) for m in memory]

        before = windows()
        with ahead(communicator) as memory:
            high_throughput.dispatch_cached(communicator, torn, x, None)
            high_throughput.combine(communicator, torn, x[:0])
            memory.check(unwritten=True)
        assert windows() == before
    ctx.barrier()
    buffer.destroy()


@pytest.mark.parametrize(("ranks", "domain"), [(3, 0), (4, 2)])
def test_wild_counts_move_no_byte(pool: RankPool, ranks: int, domain: int) -> None:
    pool.run(wild_counts, ranks=ranks, domain=domain)


def low_latency_behind(ctx: Context, hook: bool, pairs_before: int) -> str:
    """The same of low latency, whose combines go by what dispatches find out on the device."""
    buffer = ctx.new_buffer(options={"timeout_s": LIMIT_S})
    communicator = buffer._communicator
    _, ids, weights = inputs(ctx.num_ranks)
    x = torch.ones(TOKENS, 2048, dtype=torch.bfloat16)  # long enough for rows to be loaded ahead of what is waited for

    def pair() -> None:
        arguments = {"use_fp8": False, "return_recv_hook": hook}
        received, _, handle, _, receive = buffer.low_latency_dispatch(
            x, ids, TOKENS, TOPK * ctx.num_ranks, **arguments
        )  # fmt: skip
        if hook:
            receive()
        receive = buffer.low_latency_combine(received, ids, weights, handle, return_recv_hook=hook)[2]
        if hook:
            receive()

    for _ in range(pairs_before):
        pair()
    message = ""
    if ctx.rank != WHO:
        with ahead(communicator) as memory:
            pair()
            pair()
            memory.check()
        message = failure_of(communicator)
    ctx.barrier()
    buffer.destroy()
    return message


@pytest.mark.parametrize("path", ["direct", "packed"])
@pytest.mark.parametrize("lanes", ["1", "32"])
@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("pairs_before", [0, 3])
def test_low_latency_behind_a_failure(pool: RankPool, path: str, lanes: str, hook: bool, pairs_before: int) -> None:
    options = {"UCCL_EP_LOW_LATENCY_PATH": path, "UCCL_EP_HOST_LANES": lanes}
    one_error(pool.run(low_latency_behind, ranks=3, options=options,
                       arguments={"hook": hook, "pairs_before": pairs_before}))  # fmt: skip
