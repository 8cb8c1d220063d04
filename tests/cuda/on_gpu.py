"""Cases of the common suite on GPUs: the same functions, with tensors moved to the device and back around calls.

Where torch sees no GPU the "device" is the CPU, with copies that stand apart, so that this harness is tested itself.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ranks import Context


def use_device(rank: int) -> str:
    """The device of a rank; ranks share GPUs where there are fewer."""
    if not torch.cuda.is_available():
        return "cpu"
    ordinal = rank % torch.cuda.device_count()
    torch.cuda.set_device(ordinal)
    return f"cuda:{ordinal}"


class _Transfer:
    """Moves the tensors of one call's arguments, and brings back what the call wrote into them, and its results."""

    def __init__(self, buffer: Any, device: str, in_place: int = 0) -> None:
        self._buffer, self._device, self._in_place = buffer, device, in_place
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []  # on the CPU, on the device

    def there(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.data_ptr() == self._in_place != 0:
                return value
            moved = value.to(self._device, copy=True)
            self._pairs.append((value, moved))
            return moved
        if type(value) in (tuple, list):
            return type(value)(self.there(item) for item in value)
        return value  # what holds tensors inside, such as a handle, stays as it is

    def back(self) -> None:
        if self._device != "cpu":
            torch.cuda.synchronize()
        for here, moved in self._pairs:
            here.copy_(moved)

    def result(self, value: Any) -> Any:
        """A copy on the CPU; a receive hook brings what it filled into the copies that were returned before."""
        if isinstance(value, torch.Tensor):
            given = next((here for here, moved in self._pairs if moved.data_ptr() == value.data_ptr() != 0), None)
            if given is not None and given.shape == value.shape:
                return given  # ``out``
            here = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value)
            self._pairs.append((here, value))
            return here
        if type(value) in (tuple, list):
            return type(value)(map(self.result, value))
        if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            return self._hook(value)
        return value

    def _hook(self, hook: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            hook()
            self.back()
            self._buffer.check()

        return call


class OnGpu:
    """A Buffer that takes and gives CPU tensors."""

    def __init__(self, buffer: Any, device: str) -> None:
        self._buffer, self._device = buffer, device
        self._in_place = 0  # what zero-copy combines are written into, on the device

    def get_next_low_latency_combine_buffer(self, handle: Any) -> torch.Tensor:
        outputs: torch.Tensor = self._buffer.get_next_low_latency_combine_buffer(handle)
        self._in_place = outputs.data_ptr()
        return outputs

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._buffer, name)
        if not callable(attribute):
            return attribute

        def call(*arguments: Any, **named: Any) -> Any:
            transfer = _Transfer(self._buffer, self._device, self._in_place)
            result = attribute(
                *(transfer.there(argument) for argument in arguments),
                **{key: transfer.there(argument) for key, argument in named.items()},
            )
            transfer.back()
            if name not in ("check", "destroy"):
                self._buffer.check()  # what a kernel has found, now that it has ended
            return transfer.result(result)

        return call


@dataclass
class GpuContext(Context):
    """A rank whose buffers work on its GPU."""

    def new_buffer(self, group: Any = None, **arguments: Any) -> OnGpu:
        device = use_device(self.rank)
        return OnGpu(super().new_buffer(group, **{"device": device, **arguments}), device)

    def barrier(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        super().barrier()


def case(ctx: Context, *, function: str, arguments: Mapping[str, Any]) -> Any:
    """Runs ``function``, "module:name" of the common suite, with buffers on the GPU of this rank."""
    module, name = function.split(":")
    gpu = GpuContext(ctx.rank, ctx.num_ranks, ctx.group, ctx.domain, ctx.options, ctx.groups, ctx.buffers)
    return getattr(importlib.import_module(module), name)(gpu, **arguments)


def several(ctx: Context, *, function: str, rows: list[dict[str, Any]]) -> int:
    """`case` for each of ``rows``; one message to the ranks instead of many."""
    for arguments in rows:
        case(ctx, function=function, arguments=arguments)
    return len(rows)


def elastic(ctx: Context, *, hybrid: bool = True, multiple: bool = True, **arguments: Any) -> None:
    import elastic_cases

    device = use_device(ctx.rank)
    buffer = elastic_cases.elastic_buffer(ctx, allow_hybrid_mode=hybrid, allow_multiple_reduction=multiple)
    elastic_cases.elastic(ctx, buffer=OnGpu(buffer, device), hybrid=hybrid, multiple=multiple, **arguments)


def graphs(ctx: Context, *, rounds: int) -> None:
    """Two captured graphs of different token counts on one buffer, replayed in turn with eager calls between."""
    buffer = Context.new_buffer(ctx, num_rdma_bytes=256 << 20, device=use_device(ctx.rank))
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
