"""Trains a small mixture-of-experts language model, expert-parallel, and shows that nothing changes but the place.

    torchrun --nproc-per-node 4 examples/train_moe.py

trains on 4 processes that hold 2 of the 8 experts each; then rank 0 trains the same model alone, without any
communication, and compares: every loss must be the same float32 number, bit for bit. It plots both curves.
``python examples/train_moe.py`` is the single-process run alone.

Why the bits are equal. The batch is cut into shards, and everything that is replicated (embedding, attention,
router) runs shard by shard, with one copy of its parameters per shard, so its matrices have the same shapes on any
number of processes, and its gradients are summed in shard order. ``Buffer.dispatch`` delivers rows in the order
(source rank, source index), which is the order of the tokens in the whole batch, so each expert sees the same matrix
wherever it lives. A token picks two experts, and a sum of two terms does not depend on their order; with more picks
the sum would follow the ranks.
"""

from __future__ import annotations

import argparse
import codecs
import importlib.util
import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class Model:
    """Sizes. Bytes are the vocabulary."""

    width: int = 64
    layers: int = 2
    heads: int = 4
    length: int = 64
    experts: int = 8
    topk: int = 2
    expert_width: int = 128


def text() -> Tensor:
    """Bytes that every Python carries: the Zen, and the topics of its help."""
    spec = importlib.util.find_spec("this")
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text()
    zen = codecs.decode(source.split('"""')[1], "rot13")
    from pydoc_data.topics import topics

    whole = "\n\n".join([zen, *(topics[name] for name in sorted(topics))])
    return torch.tensor(list(whole.encode()), dtype=torch.uint8)


def batch(data: Tensor, step: int, sequences: int, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets [sequences, length] of a step; the same on every process."""
    g = torch.Generator().manual_seed(step)
    starts = torch.randint(0, data.numel() - length - 1, (sequences, 1), generator=g)
    rows = data[starts + torch.arange(length + 1)].long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def initial(model: Model) -> tuple[Parameters, Parameters]:
    """Replicated parameters, and those of every expert (each its own tensor, so that it can live anywhere)."""
    g = torch.Generator().manual_seed(1234)
    w, shared, experts = model.width, {}, {}

    def random(*shape: int, scale: float) -> Tensor:
        return torch.randn(*shape, generator=g) * scale

    shared["embed"] = random(256, w, scale=0.1)
    shared["position"] = random(model.length, w, scale=0.1)
    for i in range(model.layers):
        shared[f"norm_a{i}"] = torch.ones(w)
        shared[f"qkv{i}"] = random(w, 3 * w, scale=w**-0.5)
        shared[f"proj{i}"] = random(w, w, scale=w**-0.5 / model.layers)
        shared[f"norm_m{i}"] = torch.ones(w)
        shared[f"router{i}"] = random(w, model.experts, scale=w**-0.5)
        for e in range(model.experts):
            experts[f"up{i}.{e}"] = random(w, model.expert_width, scale=w**-0.5)
            experts[f"down{i}.{e}"] = random(model.expert_width, w, scale=model.expert_width**-0.5 / model.layers)
    shared["norm_out"] = torch.ones(w)
    shared["head"] = random(w, 256, scale=w**-0.5)
    return shared, experts


def norm(x: Tensor, gain: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * gain


def attention(x: Tensor, qkv: Tensor, proj: Tensor, heads: int) -> Tensor:
    b, t, w = x.shape
    q, k, v = (x @ qkv).view(b, t, 3, heads, w // heads).permute(2, 0, 3, 1, 4)
    scores = (q @ k.transpose(-1, -2)) * (w // heads) ** -0.5
    mask = torch.ones(t, t, dtype=torch.bool).tril()
    scores = scores.masked_fill(~mask, -math.inf).softmax(-1)
    return (scores @ v).transpose(1, 2).reshape(b, t, w) @ proj


# ---- where tokens meet experts ----


class Exchange(Protocol):
    """Brings tokens to the experts of this process, and their outputs back."""

    experts: range

    def dispatch(self, x: Tensor, idx: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Any]: ...

    def combine(self, y: Tensor, handle: Any) -> Tensor: ...


class Alone:
    """All experts are here: nothing moves."""

    def __init__(self, model: Model) -> None:
        self.experts = range(model.experts)

    def dispatch(self, x: Tensor, idx: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Any]:
        return x, idx, weights, None

    def combine(self, y: Tensor, handle: Any) -> Tensor:
        return y


class Dispatch(torch.autograd.Function):
    """Forward: dispatch. Backward: combine of the gradients, of the tokens and of the router's weights."""

    @staticmethod
    def forward(ctx: Any, buffer: Any, num_experts: int, x: Tensor, idx: Tensor, weights: Tensor) -> Any:
        layout = buffer.get_dispatch_layout(idx, num_experts)
        recv_x, recv_idx, recv_weights, _, handle, _ = buffer.dispatch(
            x, topk_idx=idx, topk_weights=weights, num_tokens_per_rank=layout[0], num_tokens_per_rdma_rank=layout[1],
            num_tokens_per_expert=layout[2], is_token_in_rank=layout[3],
        )  # fmt: skip
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(recv_idx)
        return recv_x, recv_idx, recv_weights, handle

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor, _idx: Any, grad_weights: Tensor, _handle: Any) -> Any:
        x, weights, _ = ctx.buffer.combine(grad_x.contiguous(), ctx.handle, topk_weights=grad_weights.contiguous())
        return None, None, x, None, weights


class Combine(torch.autograd.Function):
    """Forward: combine. Backward: dispatch of the gradient along the same routes."""

    @staticmethod
    def forward(ctx: Any, buffer: Any, handle: Any, y: Tensor) -> Tensor:
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.combine(y, handle)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, ctx.buffer.dispatch(grad.contiguous(), handle=ctx.handle)[0]


class Parallel:
    """Each process of the group holds its share of the experts."""

    def __init__(self, model: Model, group: Any) -> None:
        import uccl_ep

        self.buffer = uccl_ep.Buffer(group)
        self.num_experts = model.experts
        share = model.experts // self.buffer.group_size
        self.experts = range(self.buffer.rank * share, (self.buffer.rank + 1) * share)

    def dispatch(self, x: Tensor, idx: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Any]:
        return Dispatch.apply(self.buffer, self.num_experts, x, idx, weights)

    def combine(self, y: Tensor, handle: Any) -> Tensor:
        return Combine.apply(self.buffer, handle, y)


def run_experts(x: Tensor, idx: Tensor, weights: Tensor, layer: int, first: int, params: Parameters) -> Tensor:
    """Rows under their local experts: sum over picks of weight * expert(row). Expert e's rows keep their order."""
    out = torch.zeros_like(x)
    for name in (n for n in params if n.startswith(f"up{layer}.")):
        expert = int(name.rpartition(".")[2])
        row, k = (idx == expert - first).nonzero(as_tuple=True)
        hidden = F.gelu(x[row] @ params[name])
        out = out.index_add(0, row, hidden @ params[f"down{layer}.{expert}"] * weights[row, k, None])
    return out


def losses(
    model: Model, shards: Sequence[tuple[Tensor, Tensor]], copies: Sequence[Parameters], experts: Parameters,
    exchange: Exchange, num_tokens: int,
) -> list[Tensor]:  # fmt: skip
    """Each shard's share of the mean cross-entropy over ``num_tokens``; ``copies[i]`` are shard i's parameters."""
    hs = [p["embed"][x] + p["position"] for (x, _), p in zip(shards, copies, strict=True)]
    for i in range(model.layers):
        hs = [
            h + attention(norm(h, p[f"norm_a{i}"]), p[f"qkv{i}"], p[f"proj{i}"], model.heads)
            for h, p in zip(hs, copies, strict=True)
        ]
        xs = [norm(h, p[f"norm_m{i}"]).view(-1, model.width) for h, p in zip(hs, copies, strict=True)]
        picks = [(x @ p[f"router{i}"]).softmax(-1).topk(model.topk) for x, p in zip(xs, copies, strict=True)]
        weights = [w / w.sum(-1, keepdim=True) for w, _ in picks]
        recv, idx, w, handle = exchange.dispatch(torch.cat(xs), torch.cat([e for _, e in picks]), torch.cat(weights))
        y = exchange.combine(run_experts(recv, idx, w, i, exchange.experts.start, experts), handle)
        hs = [h + part.view_as(h) for h, part in zip(hs, y.split([x.shape[0] for x in xs]), strict=True)]
    return [
        F.cross_entropy(
            (norm(h, p["norm_out"]) @ p["head"]).view(-1, 256), y.reshape(-1), reduction="sum"
        ) / num_tokens
        for h, p, (_, y) in zip(hs, copies, shards, strict=True)
    ]  # fmt: skip


def train(model: Model, steps: int, shards: int, per_shard: int, group: Any = None, quiet: bool = False) -> list[float]:
    """The loss of every step; with ``group``, expert-parallel over it."""
    rank, size = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
    if shards % size or model.experts % size:
        raise SystemExit(f"{size} processes: {shards} shards and {model.experts} experts must be divisible by that")
    exchange: Exchange = Alone(model) if group is None else Parallel(model, group)
    mine = range(rank * shards // size, (rank + 1) * shards // size)
    shared, everybodys = initial(model)
    experts = {n: t.requires_grad_() for n, t in everybodys.items() if int(n.rpartition(".")[2]) in exchange.experts}
    optimizer = torch.optim.AdamW([*shared.values(), *experts.values()], lr=3e-3, weight_decay=0.0, foreach=False)
    data, curve = text(), []
    for step in range(steps):
        inputs, targets = batch(data, step, shards * per_shard, model.length)
        cuts = [
            (inputs[s * per_shard : (s + 1) * per_shard], targets[s * per_shard : (s + 1) * per_shard]) for s in mine
        ]
        copies = [{n: t.detach().clone().requires_grad_() for n, t in shared.items()} for _ in mine]
        parts = losses(model, cuts, copies, experts, exchange, inputs.numel())
        optimizer.zero_grad()
        torch.autograd.backward(parts)
        # Of each shard: the loss, then the gradients of the replicated parameters.
        rows = [torch.cat([loss.detach().view(1), *(as_row(c[n]) for n in shared)])
                for loss, c in zip(parts, copies, strict=True)]  # fmt: skip
        total = sum_of_shards(torch.stack(rows), group)
        for (name, t), grad in zip(shared.items(), total[1:].split([t.numel() for t in shared.values()]), strict=True):
            shared[name].grad = grad.view_as(t).clone()
        optimizer.step()
        curve.append(total[0].item())
        if not quiet and rank == 0 and (step % 20 == 0 or step == steps - 1):
            print(f"step {step:4d}  loss {curve[-1]:.4f}", flush=True)
    if isinstance(exchange, Parallel):
        exchange.buffer.destroy()
    return curve


def as_row(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.reshape(-1)


def sum_of_shards(rows: Tensor, group: Any) -> Tensor:
    """The sum over all shards of all processes, always in the order of the shards."""
    if group is not None:
        everyone = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, rows, group=group)
        rows = torch.cat(everyone)
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def plot(path: Path, parallel: list[float], single: list[float], size: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(8, 4.4), layout="constrained")
    ax.plot(single, color="#f0a35e", linewidth=5, alpha=0.8, label="one process, no communication")
    ax.plot(parallel, color="#1f6f8b", linewidth=1.4, label=f"expert-parallel on {size} processes (uccl_ep)")
    different = sum(a != b for a, b in zip(parallel, single, strict=True))
    verdict = "all equal, bit for bit" if not different else f"{different} differ"
    ax.set_title(f"MoE language model, float32, top-2 of 8 experts: {len(single)} losses, {verdict}", loc="left",
                 fontsize=11)  # fmt: skip
    ax.set_xlabel("step")
    ax.set_ylabel("cross-entropy per byte (nats)")
    ax.legend(frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--shards", type=int, default=4, help="parts of the batch; processes share them (default 4)")
    parser.add_argument("--per-shard", type=int, default=2, help="sequences in a shard (default 2)")
    parser.add_argument("--plot", default="out/train_moe.png", metavar="FILE", help="both curves (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the losses to FILE")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    model = Model()
    work = (model, given.steps, given.shards, given.per_shard)
    if "WORLD_SIZE" not in os.environ:
        curve = train(*work)
        if given.json:
            Path(given.json).write_text(json.dumps({"single": curve}) + "\n")
        return 0
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    started = time.perf_counter()
    curve = train(*work, group=dist.group.WORLD)
    status = 0
    if dist.get_rank() == 0:
        print(f"{given.steps} steps on {size} processes: {time.perf_counter() - started:.1f} s; now alone", flush=True)
        single = train(*work, quiet=True)
        first = next((i for i, (a, b) in enumerate(zip(curve, single, strict=True)) if a != b), None)
        if given.json:
            Path(given.json).write_text(json.dumps({"parallel": curve, "single": single}) + "\n")
        if first is None:
            print(
                f"all {len(curve)} losses equal those of a single process, bit for bit "
                f"({curve[0]:.4f} to {curve[-1]:.4f})"
            )
        else:
            print(f"step {first}: {curve[first]!r} on {size} processes, {single[first]!r} alone")
            status = 1
        try:
            plot(Path(given.plot), curve, single, size)
            print(f"plot: {Path(given.plot).resolve()}")
        except ModuleNotFoundError:
            print("no plot: matplotlib is not installed (pip install 'uccl_ep[plot]')")
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    raise SystemExit(main())
