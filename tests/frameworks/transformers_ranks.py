"""Cases over transformers: a small Qwen3-MoE with its experts divided among ranks, against its eager forward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ranks import Context, check_equal
from uccl_ep.integrations import transformers as integration

NUM_EXPERTS = 8


def model_of(experts: str, dtype: torch.dtype, num_topk: int) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=num_topk,
        norm_topk_prob=True,
        max_position_embeddings=64,
        decoder_sparse_step=1,
    )
    torch.manual_seed(7)
    model = Qwen3MoeForCausalLM(config)
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    model = model.to(dtype).eval()
    model.set_experts_implementation(experts)
    return model


def gathered(group: Any) -> integration.ExpertsFunction:
    """The truth: every rank runs the eager experts over the tokens of all ranks, and keeps its own."""

    def together(tensor: Tensor) -> Tensor:
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, tensor, group=group)
        return torch.cat(parts)

    def forward(self: torch.nn.Module, x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
        counts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(counts, x.shape[0], group=group)
        first = sum(counts[: dist.get_rank(group)])
        out = type(self).forward.__wrapped__(self, together(x), together(idx), together(weights))
        return out[first : first + x.shape[0]]

    return forward


def logits(
    ctx: Context,
    dtype: str = "float32",
    num_topk: int = 2,
    local: str = "eager",
    shard: bool = False,
    exact: bool = True,
) -> None:
    """Logits of each rank's own batch, of another length on each rank.

    With at most two experts a token and eager experts here, every sum has the terms and rounding of the eager forward
    over all ranks' tokens, so logits are equal bit for bit; and they are close to the eager forward of one rank, whose
    matrix products have other shapes.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    kind = getattr(torch, dtype)
    buffer = ctx.buffer()
    name = integration.register(buffer, f"uccl_ep_{local}", local)
    ALL_EXPERTS_FUNCTIONS.register("gathered", gathered(ctx.group))
    length = 5 + 3 * ctx.rank
    ids = torch.randint(97, (2, length), generator=torch.Generator().manual_seed(ctx.rank))
    with torch.no_grad():
        got_model = model_of(name, kind, num_topk)
        if shard:
            assert integration.shard_experts(got_model, buffer) == 2
            size = sum(p.numel() for n, p in got_model.named_parameters() if "experts" in n)
            whole = sum(p.numel() for n, p in model_of("eager", kind, num_topk).named_parameters() if "experts" in n)
            assert size * ctx.num_ranks == whole
        got = got_model(ids).logits
        eager = model_of("eager", kind, num_topk)(ids).logits
        if exact:
            check_equal("logits", got, model_of("gathered", kind, num_topk)(ids).logits)
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 3e-2}[kind]
    torch.testing.assert_close(got.float(), eager.float(), rtol=tolerance, atol=tolerance)
    assert eager.abs().max() > 0.1


def training_step(ctx: Context, local: str) -> None:
    """Gradients of all parameters, against those of the eager model."""
    buffer = ctx.buffer()
    name = integration.register(buffer, f"uccl_ep_{local}", local)
    gradients = {}
    for kind in (name, "eager"):
        model = model_of(kind, torch.float32, 2).train()
        ids = torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(ctx.rank))
        model(ids, labels=ids).loss.backward()
        for parameter_name, parameter in model.named_parameters():
            gradient = parameter.grad
            if "experts" in parameter_name and kind == "eager":
                dist.all_reduce(gradient, group=ctx.group)  # under expert parallelism tokens come to the experts
            assert gradient is not None and gradient.abs().sum() > 0, parameter_name
            if "experts" in parameter_name:
                mine = NUM_EXPERTS // ctx.num_ranks
                gradient = gradient[ctx.rank * mine : (ctx.rank + 1) * mine]
            gradients[kind, parameter_name] = gradient
    for kind, parameter_name in [key for key in gradients if key[0] == name]:
        want = gradients["eager", parameter_name]
        torch.testing.assert_close(gradients[kind, parameter_name], want, rtol=1e-4, atol=1e-6)


def refusals(ctx: Context) -> None:
    import pytest

    buffer = ctx.buffer()
    with pytest.raises(ValueError, match=r"use one of .*eager.*grouped_mm"):
        integration.register(buffer, local="nothing")
    with pytest.raises(ValueError, match="no experts module"):
        integration.shard_experts(torch.nn.Linear(2, 2), buffer)
    model = model_of("eager", torch.float32, 2)
    if ctx.num_ranks == 3:
        with pytest.raises(ValueError, match="8 experts cannot be divided among 3 ranks"):
            integration.shard_experts(model, buffer)
        model.set_experts_implementation(integration.register(buffer))
        with pytest.raises(ValueError, match="8 experts cannot be divided among 3 ranks"):
            model(torch.zeros(1, 2, dtype=torch.int64))
        return
    integration.shard_experts(model, buffer)
    with pytest.raises(ValueError, match="divided among ranks already"):
        integration.shard_experts(model, buffer)
