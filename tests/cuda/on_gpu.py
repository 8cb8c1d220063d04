"""Cases of the common matrix on GPUs: the same functions, with tensors moved to the device and back around calls."""

from __future__ import annotations

from typing import Any

import torch

import cases
import elastic_cases
from ranks import Context


class _Transfer:
    """Moves the tensors of one call's arguments, and brings back what the call wrote into them."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def there(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            moved = value.to(self._device)
            self._pairs.append((value, moved))
            return moved
        if type(value) in (tuple, list):
            return type(value)(self.there(item) for item in value)
        return value  # what holds tensors inside, such as a handle, stays as it is

    def back(self) -> None:
        torch.cuda.synchronize()
        for original, moved in self._pairs:
            original.copy_(moved)


def _to_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    return type(value)(map(_to_cpu, value)) if type(value) in (tuple, list) else value


class OnGpu:
    """A Buffer that takes and gives CPU tensors."""

    def __init__(self, buffer: Any, ordinal: int) -> None:
        self._buffer = buffer
        self._device = f"cuda:{ordinal}"

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._buffer, name)
        if not callable(attribute):
            return attribute

        def call(*arguments: Any, **named: Any) -> Any:
            transfer = _Transfer(self._device)
            result = attribute(
                *(transfer.there(argument) for argument in arguments),
                **{key: transfer.there(argument) for key, argument in named.items()},
            )
            transfer.back()
            return _to_cpu(result)

        return call


def _buffer(ctx: Context, **arguments: Any) -> OnGpu:
    ordinal = ctx.rank % torch.cuda.device_count()
    torch.cuda.set_device(ordinal)
    return OnGpu(ctx.buffer(**arguments), ordinal)


def high_throughput(ctx: Context, **arguments: Any) -> str:
    buffer = _buffer(ctx, num_rdma_bytes=64 << 20)
    cases.high_throughput(ctx, buffer=buffer, **arguments)
    return torch.cuda.get_device_name()


def low_latency(ctx: Context, *, hidden: int, most: int, experts: int, **arguments: Any) -> str:
    """Without a hook: with one, outputs would be brought back before the receive half has filled them."""
    buffer = _buffer(ctx, num_rdma_bytes=1 << 30)
    cases.low_latency(ctx, buffer=buffer, hidden=hidden, most=most, experts=experts, hook=False, **arguments)
    return torch.cuda.get_device_name()


def elastic(ctx: Context, *, hybrid: bool = True, multiple: bool = True, **arguments: Any) -> str:
    ordinal = ctx.rank % torch.cuda.device_count()
    torch.cuda.set_device(ordinal)
    buffer = elastic_cases.elastic_buffer(ctx, allow_hybrid_mode=hybrid, allow_multiple_reduction=multiple)
    on_gpu = OnGpu(buffer, ordinal)
    elastic_cases.elastic(ctx, buffer=on_gpu, hybrid=hybrid, multiple=multiple, **arguments)
    return torch.cuda.get_device_name()


def graphs(ctx: Context, *, rounds: int) -> None:
    """Two captured graphs of different token counts on one buffer, replayed in turn with eager calls between."""
    device = ctx.rank % torch.cuda.device_count()
    torch.cuda.set_device(device)
    buffer = ctx.new_buffer(num_rdma_bytes=256 << 20)
    experts, topk, hidden, most = 8 * ctx.num_ranks, 4, 1024, 64
    generator = torch.Generator().manual_seed(17 + ctx.rank)

    def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = torch.randn(tokens, hidden, generator=generator).to(torch.bfloat16).cuda()
        ids = torch.rand(tokens, experts, generator=generator).topk(topk, 1).indices.cuda()
        return x, ids, torch.rand(tokens, topk, generator=generator).cuda()

    def step(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        received, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, most, experts, use_fp8=False)
        combined, _, _ = buffer.low_latency_combine(received * 2, ids, weights, handle)
        return combined

    def expected(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for k in range(topk):
            total = total + (x * 2).float() * weights[:, k : k + 1]
        return total.to(torch.bfloat16)

    shapes = [inputs(13), inputs(most)]
    captured = []
    for arguments in shapes:
        step(*arguments)
    torch.cuda.synchronize()
    for arguments in shapes:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step(*arguments)
        captured.append((graph, arguments, out))
    for round_ in range(rounds):
        graph, (x, ids, weights), out = captured[round_ % 2]
        fresh_x, fresh_ids, fresh_weights = inputs(x.shape[0])
        x.copy_(fresh_x)
        ids.copy_(fresh_ids)
        weights.copy_(fresh_weights)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected(x, weights)), f"replay {round_}"
        eager = inputs(5)
        assert torch.equal(step(*eager), expected(eager[0], eager[2])), f"eager call {round_}"
    buffer.destroy()
