"""Whether a low-latency message has room, over a transport: known by the heads of dispatches, or looked for."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

import closed_form
from ranks import Context, RankPool, check_equal
from uccl_ep import Buffer

SINGLES, DISPATCH_ROOM, COMBINE_ROOM = 15, 0, 1  # of core/kernels/counters.hpp
HIDDEN, TOPK, TOKENS = 256, 4, 3


def counter(buffer: Any, index: int) -> int:
    communicator = buffer._communicator
    stride = max(16, communicator.layout.num_ranks * communicator.layout.num_channels)
    address = communicator.windows.counters.device_pointer + 8 * (SINGLES * stride + index)
    return ctypes.c_uint64.from_address(address).value


def new_buffer(ctx: Context) -> Any:
    n = ctx.num_ranks
    hint = Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, n, closed_form.few_experts(n))
    return ctx.new_buffer(low_latency_mode=True, num_rdma_bytes=hint)


class Exchange:
    """A dispatch whose rows say who sent them when, and its combines, each of which must bring them back."""

    def __init__(self, ctx: Context, buffer: Any, number: int) -> None:
        self.ctx, self.buffer = ctx, buffer
        experts = closed_form.few_experts(ctx.num_ranks)
        self.x = torch.full((TOKENS, HIDDEN), float(number % 97 + 100 * ctx.rank), dtype=torch.float32)
        self.ids = (torch.arange(TOKENS * TOPK).view(TOKENS, TOPK) * 5 + number) % experts
        self.received, _, self.handle, _, self.hook = buffer.low_latency_dispatch(
            self.x.clone(), self.ids, TOKENS, experts, use_fp8=False, return_recv_hook=True
        )

    def receive(self) -> None:
        self.hook()

    def combine(self, factor: float) -> None:
        weights = torch.full((TOKENS, TOPK), 0.25)
        out = self.buffer.low_latency_combine(self.received * factor, self.ids, weights, self.handle)[0]
        check_equal("out", out, self.x * factor)


def one_after_another(ctx: Context, rounds: int) -> tuple[int, int]:
    buffer = new_buffer(ctx)
    dispatches = combines = 0
    for number in range(1, rounds + 1):
        exchange = Exchange(ctx, buffer, number)
        exchange.receive()
        assert counter(buffer, DISPATCH_ROOM) <= number + 1, (
            "room for a message of which nobody has read the last but one"
        )
        assert counter(buffer, COMBINE_ROOM) <= number
        dispatches += counter(buffer, DISPATCH_ROOM) == number + 1
        combines += counter(buffer, COMBINE_ROOM) == number
        exchange.combine(1.0)
    buffer.destroy()
    return dispatches, combines


@pytest.mark.parametrize(("ranks", "domain"), [(2, 1), (4, 2)])
def test_heads_say_that_there_is_room(pool: RankPool, ranks: int, domain: int) -> None:
    """Not each time, as completions or a credit's signal may be late; but they are not late forty times."""
    rounds = 40
    for dispatches, combines in pool.run(one_after_another, ranks=ranks, domain=domain, arguments={"rounds": rounds}):
        assert 0 < dispatches <= rounds
        assert 0 < combines <= rounds


def two_ahead(ctx: Context, rounds: int, combines: int) -> None:
    """Two sends before the first receive: the head of the second tells nothing new, so all look, and tell before that.
    And several combines of one dispatch, of which heads tell nothing either."""
    buffer = new_buffer(ctx)
    for number in range(0, 2 * rounds, 2):
        pair = [Exchange(ctx, buffer, number + i) for i in range(2)]
        for exchange in pair:
            exchange.receive()
        for i in range(combines):
            for exchange in pair:
                exchange.combine(1.0 + i)
    buffer.destroy()


@pytest.mark.parametrize("lanes", [1, 32])
@pytest.mark.parametrize("transport", [
    {"UCCL_EP_TRANSPORT": "shm"}, {"UCCL_EP_TRANSPORT": "sim", "UCCL_EP_SIM_PROFILE": "srd"},
])  # fmt: skip
def test_ranks_that_look_tell_first(pool: RankPool, transport: dict[str, str], lanes: int) -> None:
    options = {**transport, "UCCL_EP_HOST_LANES": str(lanes), "UCCL_EP_TIMEOUT_S": "20"}
    pool.run(two_ahead, ranks=3, domain=1, options=options, arguments={"rounds": 8, "combines": 3})


def many_dispatches(ctx: Context, rounds: int) -> None:
    """No combine for a long time, then one: its credit was never told before."""
    buffer = new_buffer(ctx)
    for number in range(rounds):
        exchange = Exchange(ctx, buffer, number)
        exchange.receive()
        if number % 40 == 0:
            exchange.combine(2.0)
    buffer.destroy()


def test_one_kind_alone_for_long(pool: RankPool) -> None:
    options = {"UCCL_EP_TRANSPORT": "sim", "UCCL_EP_SIM_PROFILE": "srd", "UCCL_EP_TIMEOUT_S": "20"}
    pool.run(many_dispatches, ranks=2, domain=1, options=options, arguments={"rounds": 121})
