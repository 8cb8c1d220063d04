"""Frameworks on several GPUs, with uccl_ep as deep_ep: results against the framework's own way, then times.

    python tests/frameworks/gpu_frameworks.py megatron --ranks 2 [--json FILE]
    python tests/frameworks/gpu_frameworks.py transformers --ranks 2 [--json FILE]

`megatron`: a MoELayer of 256 experts with hidden size 7168 over 4096 tokens a rank, with the flex dispatcher and its
deepep backend, against the alltoall dispatcher of the same layer. `transformers`: a Qwen3-MoE of 8 layers whose experts
are divided among the ranks, against the whole model on one GPU. ``--small`` makes both fit a CPU, where allgather is
the reference, since Megatron's alltoall needs a GPU.

megatron-core 0.19 needs Python 3.12, triton and einops beside torch; install it with --no-deps.

Times are medians over iterations of the slowest rank, the ways in alternation, CUDA events around the whole.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

import uccl_ep


def on_gpu() -> bool:
    return torch.cuda.is_available()


def milliseconds(calls: dict[str, Callable[[], Any]], iterations: int) -> dict[str, float]:
    """Median time of each call, all in turn, of the slowest rank of each iteration."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for iteration in range(iterations + 3):
        for name, call in calls.items():
            dist.barrier()
            if on_gpu():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                call()
                end.record()
                end.synchronize()
                taken = begin.elapsed_time(end)
            else:
                started = time.perf_counter()
                call()
                taken = (time.perf_counter() - started) * 1e3
            if iteration >= 3:
                samples[name].append(taken)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, samples)
    return {name: statistics.median(map(max, *(rank[name] for rank in everyone))) for name in calls}


def relative(got: Tensor, want: Tensor) -> float:
    """Norm of the difference, relative to that of ``want``; row by row, since the gradients of experts are large."""
    difference = sum(((a.float() - b.float()).square().sum() for a, b in zip(got, want, strict=True)), torch.zeros(()))
    whole = sum((b.float().square().sum() for b in want), torch.zeros(()))
    return float((difference.cpu() / whole.cpu().clamp_min(1e-30)).sqrt())


# ---- megatron-core ----


class GroupedExperts(torch.nn.Module):
    """Gated experts over sorted rows by torch's grouped matrix product; megatron-core's own need Transformer Engine."""

    def __init__(self, num_local_experts: int, config: Any, pg_collection: Any = None, name: str | None = None) -> None:
        super().__init__()
        hidden, inner, kind = config.hidden_size, config.moe_ffn_hidden_size, config.params_dtype
        device = torch.cuda.current_device()
        self.up = torch.nn.Parameter(torch.empty(num_local_experts, hidden, 2 * inner, dtype=kind, device=device))
        self.down = torch.nn.Parameter(torch.empty(num_local_experts, inner, hidden, dtype=kind, device=device))

    def forward(self, x: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        counts = tokens_per_expert.to(x.device)
        gate, value = grouped(x, self.up, counts).chunk(2, dim=-1)
        inner = (torch.nn.functional.silu(gate) * value * probs.unsqueeze(-1)).to(x.dtype)
        return grouped(inner, self.down, counts), None


def grouped(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    if on_gpu():
        product = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
        return product(x, weights, offs=counts.cumsum(0).to(torch.int32))
    parts = x.split(counts.tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])


def megatron_layer(small: bool, iterations: int) -> dict[str, Any]:
    uccl_ep.install_as_deep_ep()
    if on_gpu():
        import megatron.core
    else:
        from megatron_ranks import megatron as megatron_on_cpu

        megatron_on_cpu()
        import megatron.core
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import fused_a2a
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    ranks = dist.get_world_size()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)
    hidden, inner, experts, topk, tokens = (64, 32, 8, 2, 64) if small else (7168, 2048, 256, 8, 4096)
    reference = "alltoall" if on_gpu() else "allgather"

    def layer_with(dispatcher: str) -> Any:
        config = TransformerConfig(
            num_layers=1,
            hidden_size=hidden,
            num_attention_heads=8,
            moe_ffn_hidden_size=inner,
            num_moe_experts=experts,
            moe_router_topk=topk,
            moe_router_dtype="fp32",
            moe_router_load_balancing_type="none",
            moe_token_dispatcher_type=dispatcher,
            moe_flex_dispatcher_backend="deepep",
            expert_model_parallel_size=ranks,
            add_bias_linear=False,
            gated_linear_unit=True,
            params_dtype=torch.bfloat16,
            bf16=True,
            perform_initialization=False,
        )
        return MoELayer(config, MoESubmodules(experts=GroupedExperts), layer_number=1)

    layers = {"flex": layer_with("flex"), reference: layer_with(reference)}
    layers["flex"].experts = layers[reference].experts  # 11 GB at full size: both use the same
    layers["flex"].router = layers[reference].router
    device = layers["flex"].experts.up.device
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    with torch.no_grad():
        for parameter in layers["flex"].experts.parameters():
            for matrix in parameter:
                matrix.copy_(torch.randn(matrix.shape, generator=generator, device=device) / matrix.shape[0] ** 0.5)
        same = torch.Generator(device).manual_seed(99)
        router = layers["flex"].router
        router.weight.copy_(torch.randn(router.weight.shape, generator=same, device=device) / hidden**0.5)
    x = torch.randn(tokens, 1, hidden, generator=generator, device=device).bfloat16()
    upstream = torch.randn(x.shape, generator=generator, device=device).bfloat16()

    def step(name: str) -> dict[str, Tensor]:
        for parameter in layers[name].parameters():
            parameter.grad = None
        own = x.clone().requires_grad_()
        out, _ = layers[name](own)
        out.backward(upstream)
        assert own.grad is not None
        gradients = {what: parameter.grad for what, parameter in layers[name].named_parameters()}
        return {"output": out.detach(), "input gradient": own.grad, **gradients}

    def moved(name: str) -> Callable[[], Any]:
        """What a dispatcher does without experts, forward and backward: to the experts, sorted, and back."""
        dispatcher = layers[name].token_dispatcher
        with torch.no_grad():
            probs, routing = layers[name].router(x)

        def call() -> None:
            own, weights = x.clone().requires_grad_(), probs.clone().requires_grad_()
            rows, rows_probs = dispatcher.dispatch_preprocess(own, routing, weights)
            rows, rows_probs = dispatcher.token_dispatch(rows, rows_probs)
            rows, _, rows_probs = dispatcher.dispatch_postprocess(rows, rows_probs)
            rows = (rows * rows_probs.unsqueeze(-1)).to(rows.dtype)
            out = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(rows)))
            out.backward(upstream.view(out.shape))

        return call

    got = step("flex")
    got = {what: value.clone() for what, value in got.items()}
    want = step(reference)
    again = step(reference)
    errors = {what: relative(got[what], want[what]) for what in want}
    noise = {what: relative(again[what], want[what]) for what in want}
    del again
    if dist.get_rank() == 0:  # before anything is asserted
        print(json.dumps({"difference": errors, "noise": noise}), file=sys.stderr, flush=True)
    for what in want:
        # bf16 keeps 8 bits, and the alltoall dispatcher adds the experts of a token in bf16, one after another.
        assert errors[what] < 1e-2, f"{what}: flex and {reference} differ by {errors[what]:.2e} of their norm"
        assert want[what].float().norm() > 0, what
    del got, want
    if on_gpu():
        torch.cuda.empty_cache()
    assert isinstance(fused_a2a._buffer, uccl_ep.Buffer)
    return {
        "megatron-core": megatron.core.__version__,
        "shape": {"hidden": hidden, "inner": inner, "experts": experts, "topk": topk, "tokens per rank": tokens},
        "difference from " + reference: errors,
        f"difference of {reference} from itself": noise,
        "layer forward and backward, ms": milliseconds({n: (lambda n=n: step(n)) for n in layers}, iterations),
        "dispatch and combine forward and backward, ms": milliseconds({n: moved(n) for n in layers}, iterations),
        "buffer": fused_a2a._buffer.describe(),
    }


# ---- transformers ----


def transformers_model(small: bool, iterations: int) -> dict[str, Any]:
    import transformers
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from uccl_ep.integrations.transformers import register, shard_experts

    device = f"cuda:{torch.cuda.current_device()}" if on_gpu() else "cpu"
    size = {"hidden_size": 64, "num_hidden_layers": 2, "num_experts": 8, "moe_intermediate_size": 32, "head_dim": 16}
    if not small:
        size = {"hidden_size": 2048, "num_hidden_layers": 8, "num_experts": 128, "moe_intermediate_size": 768}
        size["head_dim"] = 128
    topk, batch, length, new = (2, 2, 8, 6) if small else (8, 4, 512, 32)
    config = Qwen3MoeConfig(
        vocab_size=1024,
        intermediate_size=256,
        num_attention_heads=4 if small else 16,
        num_key_value_heads=2 if small else 4,
        num_experts_per_tok=topk,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        **size,
    )
    buffer = uccl_ep.Buffer(dist.group.WORLD)

    def model_of(dtype: torch.dtype) -> Any:
        torch.manual_seed(5)
        with torch.device(device):
            model = Qwen3MoeForCausalLM(config).to(dtype).eval()
            generator = torch.Generator(device).manual_seed(6)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "norm" not in name:
                        scale = parameter.shape[-1] ** -0.5
                        parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        return model

    result: dict[str, Any] = {"transformers": transformers.__version__, "model": size, "prompt": [batch, length]}
    prompts = torch.randint(1024, (batch, length), generator=torch.Generator().manual_seed(dist.get_rank())).to(device)
    # In float64 no two experts are so close that a rounding decides which is chosen; bf16 is what is used.
    ways = [(torch.float64, "eager")] + ([(torch.bfloat16, "grouped_mm")] if on_gpu() else [])
    for dtype, local in ways:
        whole, divided = model_of(dtype), model_of(dtype)
        whole.set_experts_implementation(local)
        divided.set_experts_implementation(register(buffer, "uccl_ep", local))
        shard_experts(divided, buffer)
        with torch.no_grad():
            want, got = whole(prompts).logits, divided(prompts).logits
            per_token = ((got - want).double().norm(dim=-1) / want.double().norm(dim=-1)).flatten()
            facts: dict[str, Any] = {
                "logits, difference of the middle token": float(per_token.median()),
                "logits, difference of the worst token": float(per_token.max()),
            }
            if dist.get_rank() == 0:  # before anything is asserted
                print(json.dumps({str(dtype): facts}), file=sys.stderr, flush=True)
            if dtype == torch.float64:
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
                options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
                expected = whole.generate(prompts, **options)
                facts["tokens generated, equal"] = bool(torch.equal(divided.generate(prompts, **options), expected))
                assert facts["tokens generated, equal"], "greedy generation differs from that of one GPU"
            else:  # where two experts tie in bf16 the choice may differ for a token
                assert facts["logits, difference of the middle token"] < 2e-2, facts
            calls = {"one GPU, whole model": lambda m=whole: m(prompts), "divided": lambda m=divided: m(prompts)}
            facts["prefill of each rank's own batch, ms"] = milliseconds(calls, iterations)
        result[f"{str(dtype).removeprefix('torch.')}, {local}"] = facts
        del whole, divided
    buffer.destroy()
    return result


def main_of_rank(rank: int, store: str, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # Megatron makes gloo groups too
    if on_gpu():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "nccl" if on_gpu() else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=arguments.ranks,
        timeout=timedelta(seconds=300),
    )
    case = {"megatron": megatron_layer, "transformers": transformers_model}[arguments.framework]
    result = {"ranks": arguments.ranks, "torch": torch.__version__, **case(arguments.small, arguments.iterations)}
    if rank == 0:
        print(json.dumps(result, indent=1), flush=True)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(result, indent=1))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=["megatron", "transformers"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="a size for CPUs")
    parser.add_argument("--json", help="file for the result")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(main_of_rank, (f"{folder}/store", arguments), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
