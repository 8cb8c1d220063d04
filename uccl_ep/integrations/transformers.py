"""Hugging Face transformers: expert parallelism as an experts function, for any model whose experts are pluggable.

    uccl_ep.integrations.transformers.register(buffer)
    model = AutoModelForCausalLM.from_pretrained(..., experts_implementation="uccl_ep")
    shard_experts(model, buffer)      # or keep all experts on all ranks and use one part of them
    model(...)                        # on all ranks of the group, each with its own batch

Every rank runs the model at once and equally often: a forward pass is collective. For generation pass
``synced_gpus=True``, so that a rank whose sequences have ended goes on with the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from uccl_ep_core.errors import ArgumentError

from .. import functional
from ..buffer import Buffer

ExpertsFunction = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
SHARDED = "_uccl_ep_ranks"  # on a module whose parameters are those of this rank's experts: the number of ranks


def register(buffer: Buffer, name: str = "uccl_ep", local: str = "grouped_mm") -> str:
    """Register `experts_function` with transformers, for ``experts_implementation=name``.

    Args:
        buffer: of the group among whose ranks the experts are divided, in order.
        name: to register it under; a buffer registered later under the same name takes its place.
        local: the implementation that computes this rank's experts: ``"grouped_mm"``, ``"batched_mm"``, ``"eager"``, or
            another that is registered.

    Returns:
        The name.

    Raises:
        ImportError: transformers is missing, or has no experts functions (before 5.0).
        ArgumentError: ``local`` is no implementation.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    known = sorted({"eager", *ALL_EXPERTS_FUNCTIONS.keys()} - {name})
    if local not in known:
        raise ArgumentError(f"local = {local!r} is no experts implementation: use one of {', '.join(known)}")
    ALL_EXPERTS_FUNCTIONS.register(name, experts_function(buffer, local))
    return name


def experts_function(buffer: Buffer, local: str = "grouped_mm") -> ExpertsFunction:
    """A function ``(experts, hidden_states, top_k_index, top_k_weights) -> hidden_states`` for transformers' registry.

    It dispatches tokens to the ranks of their experts, lets the implementation ``local`` compute those there, and
    combines. Differentiable.
    """
    name = functional.register(buffer)
    ranks, rank = buffer.group_size, buffer.rank

    def forward(
        self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        held = int(self.num_experts)  # type: ignore[arg-type]
        sharded = getattr(self, SHARDED, 0)
        if sharded not in (0, ranks):
            raise ArgumentError(f"these experts are divided among {sharded} ranks, but the buffer has {ranks}")
        num_experts = held * ranks if sharded else held
        if num_experts % ranks:
            raise ArgumentError(f"{num_experts} experts cannot be divided among {ranks} ranks: use a divisor of them")
        # All experts or those of this rank: the index of this rank's first one among those held.
        first = 0 if sharded else num_experts // ranks * rank
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        tokens = functional.dispatch(x, top_k_index, top_k_weights, name, num_experts)
        elsewhere = tokens.topk_idx < 0
        # Transformers' implementations skip the index behind the last expert; eager ones know no such index, and
        # get an expert with weight 0.
        none = first if local == "eager" else held
        idx = torch.where(elsewhere, none, tokens.topk_idx + first)
        y = _implementation(self, local)(self, tokens.x, idx, tokens.topk_weights)
        return functional.combine(y, tokens.routes, name).view(hidden_states.shape)

    return forward


def _implementation(experts: torch.nn.Module, local: str) -> ExpertsFunction:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    eager = type(experts).forward
    return ALL_EXPERTS_FUNCTIONS.get_interface(local, getattr(eager, "__wrapped__", eager))


def shard_experts(model: torch.nn.Module, buffer: Buffer) -> int:
    """Keep this rank's experts only: cut the parameters of every experts module to them, in place.

    Args:
        model: a transformers model whose experts are pluggable, with all experts.
        buffer: of the group; rank r keeps the r-th run of consecutive experts.

    Returns:
        The number of modules cut.

    Raises:
        ArgumentError: no such module, experts that cannot be divided, or a module that is cut already.
    """
    ranks, rank = buffer.group_size, buffer.rank
    found = [module for module in model.modules() if _is_pluggable(module)]
    if not found:
        raise ArgumentError("this model has no experts module that takes an experts function")
    for module in found:
        held = int(module.num_experts)  # type: ignore[arg-type]
        if getattr(module, SHARDED, 0):
            raise ArgumentError("the experts of this model are divided among ranks already")
        if held % ranks:
            raise ArgumentError(f"{held} experts cannot be divided among {ranks} ranks: use a divisor of them")
    for module in found:
        _cut(module, ranks, rank)
    return len(found)


def _is_pluggable(module: torch.nn.Module) -> bool:
    return all(hasattr(module, name) for name in ("num_experts", "has_gate", "is_transposed", "config"))


def _cut(module: Any, ranks: int, rank: int) -> None:
    held = module.num_experts
    local = held // ranks
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter.shape[:1] != (held,):
            raise ArgumentError(
                f"parameter {name} is {list(parameter.shape)}: its first dimension must be {held} experts"
            )
        mine = parameter.detach()[rank * local : (rank + 1) * local].clone()  # a view would keep all of it
        setattr(module, name, torch.nn.Parameter(mine, requires_grad=parameter.requires_grad))
    module.num_experts = local
    setattr(module, SHARDED, ranks)
