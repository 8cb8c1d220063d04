"""Cases over megatron-core: its MoELayer with uccl_ep as deep_ep, against its own allgather dispatcher, bit for bit."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import uccl_ep
from ranks import Context, buffer_environment, check_equal, environment

HIDDEN = 48


@functools.cache
def megatron() -> Any:
    """megatron.core, made to run on a CPU, with uccl_ep as its deep_ep."""
    uccl_ep.install_as_deep_ep()
    import megatron.core
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import fused_a2a, moe_utils

    assert fused_a2a.HAVE_DEEP_EP and fused_a2a.Buffer is uccl_ep.Buffer
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    moe_utils.te_general_gemm = None
    megatron_random.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    return megatron.core


def start(ctx: Context, expert_parallel_size: int) -> None:
    """Expert-parallel groups of this size among all ranks, and a buffer of Megatron for them; else data parallelism."""
    megatron()
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import fused_a2a

    current = parallel_state.is_initialized() and parallel_state.get_expert_model_parallel_world_size()
    if current not in (False, expert_parallel_size):
        parallel_state.destroy_model_parallel()
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=expert_parallel_size)
    fused_a2a._buffer = None  # that of an earlier case
    with environment(buffer_environment(ctx.domain, ctx.options)):
        fused_a2a.get_buffer(parallel_state.get_expert_tensor_and_model_parallel_group(), HIDDEN * 4)


def config_of(dispatcher: str, dtype: torch.dtype, **changes: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    flex = dispatcher == "flex"
    values: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "ffn_hidden_size": 64,
        "moe_ffn_hidden_size": 64,
        "num_moe_experts": 8,
        "moe_router_topk": 2,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": dispatcher,
        "moe_flex_dispatcher_backend": "deepep",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    from megatron.core.parallel_state import get_expert_model_parallel_world_size

    values["expert_model_parallel_size"] = get_expert_model_parallel_world_size()
    late = {}
    if not flex and "moe_expert_capacity_factor" in changes:
        # Configurations refuse it for allgather, but the router drops tokens whatever moves them.
        late = {name: changes.pop(name) for name in ("moe_expert_capacity_factor", "moe_token_drop_policy")}
    config = TransformerConfig(**{**values, **changes})
    for name, value in late.items():
        setattr(config, name, value)
    return config


def layer_of(config: Any) -> torch.nn.Module:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer

    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    torch.manual_seed(0)
    return MoELayer(config, spec.submodules.mlp.submodules, layer_number=1)


def fill(module: torch.nn.Module, rank: int) -> None:
    """Weights that depend on their name alone, and for experts on the rank."""
    for number, (name, parameter) in enumerate(sorted(module.named_parameters())):
        generator = torch.Generator().manual_seed(1000 * number + (rank if "experts" in name else 0))
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)


def moe_layer(
    ctx: Context,
    expert_parallel_size: int,
    dtype: str,
    num_topk: int = 2,
    drop: bool = False,
    idle_rank: int | None = None,
    steps: int = 2,
) -> None:
    """Output, gradient of the input and of every weight, with both dispatchers, on different tokens each step."""
    start(ctx, expert_parallel_size)
    from megatron.core import parallel_state

    kind = getattr(torch, dtype)
    changes: dict[str, Any] = {"moe_router_topk": num_topk}
    if drop:
        changes |= {"moe_expert_capacity_factor": 0.5, "moe_token_drop_policy": "probs"}
    layers = {}
    for dispatcher in ("flex", "allgather"):
        layer = layer_of(config_of(dispatcher, kind, **dict(changes))).to(kind)
        fill(layer, parallel_state.get_expert_model_parallel_rank())
        if idle_rank is not None:
            local = layer.num_local_experts
            with torch.no_grad():  # inputs are positive, so these experts come last for every token
                layer.router.weight[idle_rank * local : (idle_rank + 1) * local] = -1
        layers[dispatcher] = layer
    seen: list[tuple[Tensor, list[int]]] = []
    manager = layers["flex"].token_dispatcher._comm_manager
    original = manager.dispatch

    def observed(*arguments: Any, **named: Any) -> Tensor:
        result = original(*arguments, **named)
        seen.append((manager.token_indices, manager.tokens_per_expert.tolist()))
        return result

    manager.dispatch = observed
    from megatron.core.transformer.moe import fused_a2a

    buffer = fused_a2a._buffer
    for step in range(steps):
        results = {}
        for dispatcher, layer in layers.items():
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            x = torch.randn(12 + step, 2, HIDDEN, generator=generator)
            grad = torch.randn(x.shape, generator=generator).to(kind)
            x = (x.abs() if idle_rank is not None else x).to(kind).requires_grad_()
            layer.zero_grad()
            out, _ = layer(x)
            out.backward(grad)
            results[dispatcher] = {
                "output": out,
                "input gradient": x.grad,
                **{f"gradient of {name}": p.grad for name, p in layer.named_parameters()},
            }
        got, want = results["flex"], results["allgather"]
        assert set(got) == set(want) and len(got) > 6
        for what in want:
            check_equal(f"step {step}, {what}", got[what], want[what])
        indices, rows = seen[-1]
        assert want["output"].abs().sum() > 0 and want["gradient of router.weight"].abs().sum() > 0
        assert drop == bool((indices < 0).any()), "the case did not exercise what it is for"
        assert fused_a2a._buffer is buffer and buffer.describe()["domains"]["ranks_per_domain"] == (
            ctx.domain or expert_parallel_size
        )
        if idle_rank is not None:
            idle = parallel_state.get_expert_model_parallel_rank() == idle_rank
            assert idle == (sum(rows) == 0), rows


VOCABULARY, SEQUENCE, BATCH = 61, 16, 4


def gpt(dispatcher: str, dtype: torch.dtype) -> torch.nn.Module:
    """A GPT of two layers, each with attention and 8 experts, in megatron-core's own modules."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    config = config_of(
        dispatcher, dtype, num_layers=2, moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.01
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
    ).to(dtype)
    fill(model, parallel_state.get_expert_model_parallel_rank())
    return model


def sentences(step: int) -> Tensor:
    """int64 [BATCH, SEQUENCE + 1]: each token follows from the one before it, so there is something to learn."""
    first = torch.randint(VOCABULARY, (BATCH,), generator=torch.Generator().manual_seed(step * 64 + dist.get_rank()))
    tokens = [first]
    for _ in range(SEQUENCE):
        tokens.append((tokens[-1] * 3 + 7) % VOCABULARY)
    return torch.stack(tokens, dim=1)


def train_gpt(ctx: Context, expert_parallel_size: int, dtype: str, steps: int = 50) -> list[float]:
    """Losses of this rank, the same with both dispatchers at every step."""
    start(ctx, expert_parallel_size)
    from megatron.core import parallel_state

    losses: dict[str, list[float]] = {}
    experts_group = parallel_state.get_expert_data_parallel_group()
    for dispatcher in ("allgather", "flex"):
        model = gpt(dispatcher, getattr(torch, dtype))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        positions = torch.arange(SEQUENCE).expand(BATCH, -1)
        mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).tril() < 0.5
        losses[dispatcher] = []
        for step in range(steps):
            tokens = sentences(step)
            loss = model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous()).mean()
            optimizer.zero_grad()
            loss.backward()
            for name, parameter in model.named_parameters():
                if parameter.grad is None:
                    continue
                dist.all_reduce(parameter.grad, group=experts_group if ".experts." in name else None)
                parameter.grad /= dist.get_world_size()
            optimizer.step()
            losses[dispatcher].append(loss.item())
    check_equal("losses", losses["flex"], losses["allgather"])
    return losses["flex"]
