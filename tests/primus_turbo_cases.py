"""Cases over the Primus-Turbo backend, called as each generation of its protocol calls it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ranks import Context, buffer_environment, check_equal, environment
from uccl_ep import Buffer
from uccl_ep.integrations import primus_turbo

NAME = "primus_turbo.pytorch.kernels.moe.moe_dispatch_combine_impl"


def registered(name: str) -> Any:
    """The class that ends up in a registry of that module, as Primus-Turbo keeps one."""
    registry: dict[str, Any] = {}
    module = ModuleType(NAME)
    module.register_ep_backend = registry.__setitem__  # type: ignore[attr-defined]
    parents = [NAME.rsplit(".", n)[0] for n in range(1, 5)]
    saved = {parent: sys.modules.get(parent) for parent in [NAME, *parents]}
    try:
        sys.modules.update({NAME: module, **{parent: ModuleType(parent) for parent in parents}})
        assert primus_turbo.register(name) == name
    finally:
        for parent, before in saved.items():
            if before is None:
                del sys.modules[parent]
            else:
                sys.modules[parent] = before
    return registry[name]


def backend(ctx: Context, generation: int) -> None:
    """Dispatch, cached dispatch and combine give what the Buffer gives, called as Primus-Turbo calls them."""
    cls = registered("DEEP_EP" if generation == 1 else "UCCL_EP")
    assert cls.is_available()
    turbo = cls()
    assert not turbo.is_initialized()
    with pytest.raises(RuntimeError, match="call init_buffer first"):
        turbo.combine(torch.ones(1, 1), None)
    config = SimpleNamespace(num_sms=64, dispatch_config=None, combine_config=None)
    num_experts, hidden = 2 * ctx.num_ranks, 64
    x = torch.randn(5 + ctx.rank, hidden, generator=torch.Generator().manual_seed(ctx.rank)).bfloat16()
    with environment(buffer_environment(ctx.domain, ctx.options)):
        for _ in range(2):  # before every dispatch
            if generation == 1:
                turbo.init_buffer(ctx.group, hidden * 2, config)
            else:
                turbo.init_buffer(
                    ctx.group,
                    hidden_size=hidden,
                    num_experts=num_experts,
                    num_topk=2,
                    seqlen=x.shape[0],
                    fp8_dispatch=False,
                    config=config,
                )
    assert turbo.is_initialized() and Buffer.num_sms == 64
    idx = torch.rand(x.shape[0], num_experts, generator=torch.Generator().manual_seed(9)).topk(2).indices
    weights = torch.rand(idx.shape)
    extra: dict[str, Any] = {} if generation == 1 else {"config": None}
    buffer = ctx.buffer()
    _, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, num_experts)
    for worst in (0, 40):
        want = buffer.dispatch(
            x,
            topk_idx=idx,
            topk_weights=weights,
            num_tokens_per_expert=per_expert,
            is_token_in_rank=in_rank,
            num_worst_tokens=worst,
        )
        got = turbo.dispatch(
            x,
            handle=None,
            topk_idx=idx,
            token_weights=weights,
            num_experts=num_experts,
            async_finish=True,
            allocate_on_comm_stream=True,
            num_worst_tokens=worst,
            **extra,
        )
        arrived = want[4].num_received
        check_equal("received", got[0][:arrived], want[0][:arrived])
        check_equal("indices", got[1], want[1])
        check_equal("weights", got[2], want[2])
        check_equal("counts", got[3], want[3])
        rows = got[0].clone()
        rows[arrived:] = 0
        again = turbo.dispatch(x * 2, handle=got[4], async_finish=True, allocate_on_comm_stream=True, **extra)
        check_equal("cached", again[0][:arrived], rows[:arrived] * 2)
        out, summed = turbo.combine(rows, handle=got[4], topk_weights=got[2], async_finish=True, **extra)
        expected = buffer.combine(rows, want[4], topk_weights=want[2])
        check_equal("combined", out, expected[0])
        check_equal("summed weights", summed, expected[1])
    d_config, c_config, d_time, c_time = turbo.tune_configs(
        group=ctx.group, x=x, num_experts=num_experts, num_sms=32, num_tests=2, num_topk=2, uniform_dispatch=True
    )
    assert d_config is None and c_config is None and d_time > 0 and c_time > 0
    with pytest.raises(ValueError, match="needs topk_idx= and num_experts="):
        turbo.dispatch(x)
    turbo.release_buffer()
    assert not turbo.is_initialized()
