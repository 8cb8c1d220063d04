"""Cases over vLLM's adapters, high throughput, low latency and v2, with uccl_ep as deep_ep, on a CPU.

vLLM itself needs a GPU build of torch to be imported. Its adapters, micro-batching and weighting are the files of
its wheel, loaded one by one; what they take from the rest of vLLM stands here, as small as they need it.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib.util
import os
import sys
import weakref
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import uccl_ep
from ranks import Context, buffer_environment, check_equal, environment

FUSED = "vllm.model_executor.layers.fused_moe"


def stand_in(name: str, **content: Any) -> ModuleType:
    """A module of this name in sys.modules, and its parents as empty packages."""
    parts = name.split(".")
    for count in range(1, len(parts)):
        parent = ".".join(parts[:count])
        if parent not in sys.modules:
            sys.modules[parent] = ModuleType(parent)
            sys.modules[parent].__path__ = []
    module = sys.modules[name] = ModuleType(name)
    module.__path__ = []
    vars(module).update(content)
    if len(parts) > 1:
        setattr(sys.modules[".".join(parts[:-1])], parts[-1], module)
    return module


def real(name: str) -> Any:
    """The module of this name from vLLM's wheel."""
    file = Path(os.environ["UCCL_EP_TEST_VLLM"], *name.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    stand_in(name)  # makes the packages around it
    sys.modules[name] = module
    setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], module)
    spec.loader.exec_module(module)
    return module


@dataclasses.dataclass
class ExpertTokensMetadata:
    """As in vLLM: rows per expert, on the device and on the host."""

    expert_num_tokens: Tensor | None
    expert_num_tokens_cpu: Tensor | None
    psum_recv_per_rank: Tensor | None = None
    rank_expert_offset: int | None = None

    @staticmethod
    def make_from_list(counts: list[int], device: Any) -> ExpertTokensMetadata:
        host = torch.tensor(counts, dtype=torch.int32)
        return ExpertTokensMetadata(host.to(device), host)


class Format(enum.Enum):
    Standard = 1
    BatchedExperts = 2


def quantize(x: Tensor, *_: Any, quant_dtype: Any = None, block_shape: Any = None, **__: Any) -> tuple[Tensor, Any]:
    """e4m3 with a scale for each block of a row; nothing where no type is asked for."""
    if quant_dtype is None:
        return x, None
    blocks = x.float().unflatten(1, (x.shape[1] // block_shape[1], block_shape[1]))
    scales = blocks.abs().amax(-1).clamp_min(1e-4) / 448
    return (blocks / scales.unsqueeze(-1)).view(x.shape).to(torch.float8_e4m3fn), scales


@functools.cache
def adapters() -> Any:
    """The two adapters, with all that they import."""
    uccl_ep.install_as_deep_ep()
    logger = SimpleNamespace(**dict.fromkeys(("debug", "debug_once", "info_once", "warning_once"), print))
    stand_in("vllm.logger", init_logger=lambda _: logger)
    sys.modules["vllm"].envs = SimpleNamespace(VLLM_DEEPEPLL_NVFP4_DISPATCH=False)  # type: ignore[attr-defined]
    context = SimpleNamespace(dp_metadata=None)
    stand_in("vllm.forward_context", ForwardContext=object, get_forward_context=lambda: context)
    stand_in("vllm.platforms", current_platform=SimpleNamespace(is_rocm=lambda: False))
    stand_in(
        "vllm.utils.math_utils",
        round_up=lambda n, multiple: -(-n // multiple) * multiple,
        cdiv=lambda a, b: -(-a // b),
    )
    # A GPU kernel of v2, which renumbers experts unless the experts do so themselves, as they do here.
    stand_in("vllm.triton_utils", tl=SimpleNamespace(constexpr=int), triton=SimpleNamespace(jit=lambda function: None))
    mx = {"MXFP8_BLOCK_SIZE": 32, "swizzle_mxfp8_scale": None}
    stand_in("vllm.model_executor.layers.quantization.utils.mxfp8_utils", **mx)
    stand_in("vllm.utils.torch_utils", current_stream=lambda: None)
    ops = stand_in("vllm._custom_ops", moe_sum=lambda rows, out: out.copy_(rows.float().sum(1)))
    sys.modules["vllm"]._custom_ops = ops  # type: ignore[attr-defined]
    stand_in(f"{FUSED}.config", FusedMoEQuantConfig=object)
    stand_in(
        f"{FUSED}.modular_kernel",
        FusedMoEPrepareAndFinalizeModular=object,
        FusedMoEActivationFormat=Format,
        FusedMoEExperts=object,
        ExpertTokensMetadata=ExpertTokensMetadata,
        TopKWeightAndReduce=object,
        PrepareResultType=tuple,
        ReceiverType=object,
    )
    stand_in(
        f"{FUSED}.utils",
        moe_kernel_quantize_input=quantize,
        normalize_batched_scales_shape=lambda scales, _: scales,
    )
    real("vllm.v1.worker.ubatching")
    reduce = real(f"{FUSED}.topk_weight_and_reduce")
    return SimpleNamespace(
        high_throughput=real(f"{FUSED}.prepare_finalize.deepep_ht"),
        low_latency=real(f"{FUSED}.prepare_finalize.deepep_ll"),
        v2=real(f"{FUSED}.prepare_finalize.deepep_v2"),
        reduce=reduce,
    )


def quantization(block: bool) -> Any:
    """What the adapters read of a FusedMoEQuantConfig."""
    return SimpleNamespace(
        is_block_quantized=block,
        block_shape=[128, 128] if block else None,
        quant_dtype=torch.float8_e4m3fn if block else None,
        per_act_token_quant=False,
        is_scale_swizzled=False,
        mx_alignment=0,
        a1_scale=None,
        a2_scale=None,
        a1_gscale=None,
    )


def values(count: int, hidden: int, num_topk: int, num_experts: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Integers that bf16 and e4m3 hold, an expert index and a power of two as weight."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-3, 4, (count, hidden), generator=generator).bfloat16()
    x[:, ::128] = 7  # so that a block's greatest is the same everywhere, and its scale a power of two: 7 / 448
    idx = torch.rand(count, num_experts, generator=generator).argsort(1)[:, :num_topk]
    weights = 2.0 ** -torch.randint(0, 3, (count, num_topk), generator=generator)
    return x, idx, weights


def truth(x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
    """Expert e multiplies by 1 or 2, so that every sum is exact."""
    return (x.float() * ((idx % 2 + 1) * weights).sum(1, keepdim=True)).bfloat16()


def finalized(
    adapter: Any, rows: torch.Tensor, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, asynchronous: bool
) -> torch.Tensor:
    """What a finalize writes that has rows with their weights applied, into memory that would show a row left out."""
    out = torch.full(x.shape, torch.nan, dtype=torch.bfloat16)
    final = (out, rows, weights, idx, False, adapters().reduce.TopKWeightAndReduceNoOP())
    if asynchronous:
        adapter.finalize_async(*final)()
    else:
        adapter.finalize(*final)
    return out


def high_throughput(ctx: Context, block: bool, asynchronous: bool) -> None:
    """Prepare, experts, finalize, twice, with the buffer made as vLLM's manager makes it."""
    vllm = adapters()
    num_experts, num_topk, hidden = 4 * ctx.num_ranks, 2, 512
    local = num_experts // ctx.num_ranks
    arguments: dict[str, Any] = {
        "group": ctx.group,
        "num_nvl_bytes": 1024 << 20,
        "num_rdma_bytes": 0,
        "low_latency_mode": False,
        "num_qps_per_rank": 1,
        "explicitly_destroy": True,
    }
    with environment(buffer_environment(ctx.domain, ctx.options)):
        buffer = sys.modules["deep_ep"].Buffer(**arguments)
    assert weakref.WeakValueDictionary({0: buffer})[0] is buffer
    cls = vllm.high_throughput.DeepEPHTPrepareAndFinalize
    adapter = cls(buffer, ctx.num_ranks, ctx.num_ranks, ctx.rank * local)
    assert (
        adapter.topk_indices_dtype() == torch.int64
        and cls.maybe_roundup_layer_hidden_size(2880, torch.bfloat16) == 3072
    )
    for step in range(2):
        count = 0 if ctx.rank == step else 5 + 2 * ctx.rank  # an idle rank is ordinary there
        x, idx, weights = values(count, hidden, num_topk, num_experts, 10 * step + ctx.rank)
        common = (x, weights, idx, num_experts, None, False, quantization(block))
        rows, scales, meta, ids, row_weights = (
            adapter.prepare_async(*common)() if asynchronous else adapter.prepare(*common)
        )
        if block:
            assert rows.dtype == torch.float8_e4m3fn and scales.shape == (rows.shape[0], hidden // 128)
            rows = (rows.float().unflatten(1, (hidden // 128, 128)) * scales.unsqueeze(-1)).flatten(1)
        mine = (ids >= ctx.rank * local) & (ids < (ctx.rank + 1) * local)
        counts = [int((ids[mine] == ctx.rank * local + e).sum()) for e in range(local)]
        check_equal("rows per expert", meta.expert_num_tokens.tolist(), counts)
        assert mine.any(1).all() and (ids >= 0).all()
        factors = ((ids % 2 + 1) * row_weights).masked_fill(~mine, 0).sum(1, keepdim=True)
        out = finalized(adapter, (rows.float() * factors).bfloat16(), x, idx, weights, asynchronous)
        check_equal(f"step {step}, output", out, truth(x, idx, weights))
    buffer.destroy()


def low_latency(ctx: Context, fp8: bool, asynchronous: bool) -> None:
    """Prepare with its hook, experts, finalize into the caller's output, with -1 and idle ranks."""
    vllm = adapters()
    num_experts, num_topk, hidden, most = 2 * ctx.num_ranks, 2, 2048, 16
    local = num_experts // ctx.num_ranks
    deep_ep = sys.modules["deep_ep"]
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=most, hidden=hidden, num_ranks=ctx.num_ranks, num_experts=num_experts
    )
    with environment(buffer_environment(ctx.domain, ctx.options)):
        buffer = deep_ep.Buffer(
            group=ctx.group,
            num_nvl_bytes=1024 << 20,
            num_rdma_bytes=hint,
            low_latency_mode=True,
            num_qps_per_rank=local,
            allow_nvlink_for_low_latency_mode=True,
            allow_mnnvl=False,
            explicitly_destroy=True,
            enable_shrink=False,
        )
    adapter = vllm.low_latency.DeepEPLLPrepareAndFinalize(buffer, most, ctx.num_ranks, use_fp8_dispatch=fp8)
    for step in range(3):
        count = 0 if ctx.rank == step else 3 + 2 * ctx.rank
        x, idx, weights = values(count, hidden, num_topk, num_experts, 20 * step + ctx.rank)
        common = (x, weights, idx, num_experts, None, False, quantization(block=fp8))
        if asynchronous:
            hook, receiver = adapter.prepare_async(*common)
            hook()
            rows, scales, meta, _, _ = receiver()
        else:
            rows, scales, meta, _, _ = adapter.prepare(*common)
        assert rows.shape == (local, ctx.num_ranks * most, hidden) and meta.expert_num_tokens.shape == (local,)
        if fp8:
            rows = (rows.float().view(*rows.shape[:2], -1, 128) * scales.unsqueeze(-1)).view(rows.shape)
        factors = torch.tensor([(ctx.rank * local + e) % 2 + 1 for e in range(local)]).view(local, 1, 1)
        y = torch.zeros(rows.shape, dtype=torch.bfloat16)
        for e, arrived in enumerate(meta.expert_num_tokens.tolist()):
            y[e, :arrived] = (rows[e, :arrived].float() * factors[e]).bfloat16()
        out = torch.full((count, hidden), torch.nan, dtype=torch.bfloat16)
        final = (out, y, weights, idx, False, vllm.reduce.TopKWeightAndReduceDelegate())
        if asynchronous:
            hook, receiver = adapter.finalize_async(*final)
            hook()
            receiver()
        else:
            adapter.finalize(*final)
        check_equal(f"step {step}, output", out, truth(x, idx, weights))
    buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_()  # vLLM's recovery after a fault
    buffer.destroy()


def v2(ctx: Context, decode: bool, block: bool, asynchronous: bool) -> None:
    """The two modes of vLLM's v2 adapter: expanded rows and counts, or worst-case rows without a look at the counts."""
    vllm = adapters()
    num_experts, num_topk, hidden, most = 4 * ctx.num_ranks, 2, 512, 64
    local = num_experts // ctx.num_ranks
    arguments: dict[str, Any] = {
        "group": ctx.group,
        "num_max_tokens_per_rank": most,
        "hidden": hidden,
        "num_topk": num_topk,
        "use_fp8_dispatch": block,
        "allow_hybrid_mode": True,
        "prefer_overlap_with_compute": True,
        "allow_multiple_reduction": True,
        "explicitly_destroy": True,
    }
    with environment(buffer_environment(ctx.domain, ctx.options)):
        buffer = sys.modules["deep_ep"].ElasticBuffer(**arguments)
    assert buffer.get_theoretical_num_sms(num_experts=num_experts, num_topk=num_topk) > 0
    first = ctx.rank * local
    adapter = vllm.v2.DeepEPV2PrepareAndFinalize(
        buffer, ctx.num_ranks, ctx.num_ranks, first, num_experts, num_topk, block, use_cudagraph=decode
    )
    adapter.defer_globalize = decode
    for step in range(2):
        # Decode pads batches to the same size everywhere; a prefill may find a rank idle.
        count = 6 + step if decode else (0 if ctx.rank == step else 5 + 2 * ctx.rank)
        x, idx, weights = values(count, hidden, num_topk, num_experts, 30 * step + ctx.rank)
        common = (x, weights, idx, num_experts, None, False, quantization(block))
        rows, scales, meta, ids, row_weights = (
            adapter.prepare_async(*common)() if asynchronous else adapter.prepare(*common)
        )
        if block:
            rows = (rows.float().unflatten(1, (hidden // 128, 128)) * scales.unsqueeze(-1)).flatten(1)
        if decode:
            arrived = int(meta.psum_recv_per_rank[-1])
            assert rows.shape[0] == 8 * ctx.num_ranks >= arrived and meta.expert_num_tokens is None
            ids = torch.where(ids < 0, -1, ids + meta.rank_expert_offset)
            ids[arrived:] = -1
            rows = rows.float()
            rows[arrived:] = 0
        else:
            check_equal("rows", rows.shape[0], int(meta.expert_num_tokens.sum()))
            assert ids.shape == row_weights.shape == (rows.shape[0], 1)
        factors = ((ids % 2 + 1) * row_weights).masked_fill(ids < 0, 0).sum(1, keepdim=True)
        out = finalized(adapter, (rows.float() * factors).bfloat16(), x, idx, weights, asynchronous)
        check_equal(f"step {step}, output", out, truth(x, idx, weights))
    buffer.destroy()
