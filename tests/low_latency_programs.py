"""Random programs of low-latency calls: shapes drawn anew for each dispatch, halves in any order that is allowed.

All ranks draw the same program from its seed; each is late by itself. Everything is compared with the reference.
"""

from __future__ import annotations

import random
import time
from typing import Any

import torch

import cases
import closed_form
from ranks import Context, check_equal
from uccl_ep import reference

HIDDEN = (1, 2, 3, 5, 8, 9, 16, 31, 64, 65, 100, 127, 128, 129, 257, 384, 640, 1000, 2880, 4097, 7168)
IN_FLIGHT = 2  # results that live, and sends whose receive halves may wait


def draw(rng: random.Random, ranks: int) -> dict[str, Any]:
    topk, most = rng.choice((1, 2, 3, 4, 8, 9, 16, 31, 33, 40)), rng.choice((1, 1, 2, 7, 17, 64, 130))
    few = most * topk > 500 or most > 17  # fits the buffer
    dtype = rng.choice(("bf16", "fp16", "fp32", "fp64"))
    tokens = {"random": [rng.randint(0, most) for _ in range(ranks)], "full": [most] * ranks, "none": [0] * ranks}
    return {
        "topk": topk,
        "most": most,
        "experts": rng.choice((1, 2, 3, 8, 33)) * ranks,
        "hidden": rng.choice(HIDDEN[:12] if few else HIDDEN),
        "dtype": dtype,
        "cast": "none" if dtype == "fp64" else rng.choice(("none", "fp8", "round", "ue8m0")),
        "tokens": tokens[rng.choice(("random", "random", "full", "none"))],
        "picks": rng.choice(("any", "one expert", "few", "none")),
        "index": rng.choice((torch.int32, torch.int64)),
        "seed": rng.randint(0, 999),
    }


def picks(shape: dict[str, Any], rank: int) -> torch.Tensor:
    """[tokens, topk], experts named more than once, but none more often than there are rows for."""
    g = torch.Generator().manual_seed(shape["seed"] * 37 + rank)
    size, most = (shape["tokens"][rank], shape["topk"]), shape["most"]
    ids = torch.randint(-1, shape["experts"], size, generator=g)
    if shape["picks"] == "one expert":
        ids = torch.randint(0, shape["experts"], (size[0], 1), generator=g).expand(size).clone()
    if shape["picks"] == "none":
        ids.fill_(-1)
    if shape["picks"] == "few":
        ids[torch.rand(size, generator=g) < 0.6] = -1
    flat = ids.flatten()
    order = torch.argsort(flat, stable=True)
    added = torch.bincount(flat + 1)
    times = torch.empty_like(flat)
    times[order] = torch.arange(len(flat)) - (added.cumsum(0) - added)[flat[order] + 1]
    return torch.where(times < most, flat, -1).view(size).to(shape["index"])


class Flight:
    """A dispatch and its combine; what the caller passed is overwritten as soon as that is allowed."""

    number = 0  # of its dispatch

    def __init__(self, ctx: Context, buffer: Any, shape: dict[str, Any], rng: random.Random) -> None:
        self.rank, self.buffer, self.shape, self.rng = ctx.rank, buffer, shape, rng
        dtype, hidden, cast = cases.DTYPES[shape["dtype"]], shape["hidden"], shape["cast"]
        self.xs = [
            closed_form.rows(count, hidden, rank=rank, seed=shape["seed"], dtype=dtype)
            for rank, count in enumerate(shape["tokens"])
        ]
        self.ids = [picks(shape, rank) for rank in range(ctx.num_ranks)]
        self.local = shape["experts"] // ctx.num_ranks
        self.casts = {"use_fp8": cast != "none", "round_scale": cast in ("round", "ue8m0"),
                      "use_ue8m0": cast == "ue8m0"}  # fmt: skip
        self.weights = closed_form.weights(shape["tokens"][ctx.rank], shape["topk"], rank=ctx.rank, seed=1)
        self.weights[self.ids[ctx.rank] < 0] = float("nan")  # of no expert: they say nothing
        x, hook = self.xs[ctx.rank].clone(), rng.random() < 0.6
        self.received, self.count, self.handle, _, self.hook = buffer.low_latency_dispatch(
            x, self.ids[ctx.rank], shape["most"], shape["experts"], return_recv_hook=hook, **self.casts
        )
        x.fill_(9)
        self.state = "sent"
        if not hook:
            self.hook = lambda: None
            self.receive()

    def receive(self) -> None:
        self.hook()
        self.state = "received"
        want = reference.ll_dispatch(
            self.rank, self.xs, self.ids, self.shape["most"], self.shape["experts"], **self.casts
        )
        got, scales = self.received if isinstance(self.received, tuple) else (self.received, None)
        self.used = want.source_rank >= 0
        check_equal("recv_count", self.count, want.count)
        check_equal("recv_x", got[self.used], want.x[self.used])
        check_equal("source_index", self.handle[0][self.used].long(), want.source_index[self.used])
        if want.scales is not None:
            assert scales is not None
            check_equal("recv_scales", scales[self.used], want.scales[self.used])
            scales = scales[self.used]
        dtype = self.xs[self.rank].dtype
        expert = torch.arange(self.local)[:, None].expand_as(self.used)[self.used] + self.rank * self.local
        self.y = torch.full(want.x.shape, float("nan"), dtype=dtype)
        self.y[self.used] = cases.ll_expert(cases.as_payload(got[self.used], scales, dtype), expert)

    def combine(self) -> None:
        y, zero_copy, hook = self.y, self.rng.random() < 0.3, self.rng.random() < 0.6
        if zero_copy:
            y = self.buffer.get_next_low_latency_combine_buffer(self.handle)
            y.copy_(self.y)
        out = torch.empty_like(self.xs[self.rank]) if self.rng.random() < 0.3 else None
        self.combined, _, receive = self.buffer.low_latency_combine(
            y, self.ids[self.rank], self.weights, self.handle, zero_copy=zero_copy, return_recv_hook=hook, out=out
        )
        y.fill_(5)
        assert out is None or self.combined.data_ptr() == out.data_ptr()
        self.hook, self.state = receive or (lambda: None), "on its way home"
        if not hook:
            self.finish()

    def finish(self) -> None:
        self.hook()
        self.state = "done"
        x, ids = self.xs[self.rank], self.ids[self.rank].long()
        if self.casts["use_fp8"]:
            cast = {name: value for name, value in self.casts.items() if name != "use_fp8"}
            x = cases.as_payload(*reference.quantize_fp8(x, **cast), x.dtype)
        terms = torch.zeros(*ids.shape, x.shape[1], dtype=x.dtype)
        for k in range(ids.shape[1]):
            terms[:, k] = cases.ll_expert(x, ids[:, k])
        want = reference.ll_combine_terms(terms, ids, self.weights, self.handle.rounding, self.local)
        check_equal("combined_x", self.combined, want)


def run(ctx: Context, seed: int, steps: int) -> None:
    rng, of_rank = random.Random(seed), random.Random(seed * 131 + ctx.rank)
    buffer = ctx.new_buffer(num_rdma_bytes=192 << 20)
    flights: list[Flight] = []  # in the order of their dispatches
    dispatches = 0
    for _ in range(steps):
        sent, home = ([f for f in flights if f.state == state] for state in ("sent", "on its way home"))
        ready = [
            f for f in flights if f.state == "received" and not (sent and flights.index(sent[0]) < flights.index(f))
        ]
        choices: list[Any] = [(f, f.receive) for f in sent] + [(f, f.finish) for f in home]
        if len(home) < IN_FLIGHT:
            choices += [(f, f.combine) for f in ready] * 2
        alive = [f for f in flights if f.state in ("sent", "received")]
        if len(alive) < IN_FLIGHT and (not alive or dispatches - alive[0].number < 1):
            choices += [None, None]
        if of_rank.random() < 0.1:
            time.sleep(of_rank.random() * 0.003)  # the random lateness under test
        choice = rng.choice(choices)
        if choice is None:
            dispatches += 1
            flights.append(Flight(ctx, buffer, draw(rng, ctx.num_ranks), rng))
            flights[-1].number = dispatches
        else:
            choice[1]()
        flights = [f for f in flights if f.state != "done"]
    ctx.barrier()
    buffer.destroy()
