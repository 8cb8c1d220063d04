"""AMD Primus-Turbo: uccl_ep as one of its expert-parallel backends.

    uccl_ep.integrations.primus_turbo.register()             # a backend called UCCL_EP
    uccl_ep.integrations.primus_turbo.register("DEEP_EP")    # in place of the one that calls deep_ep

Its protocol has grown: earlier releases call ``init_buffer(group, hidden_bytes, config)``, later ones give the shape by
keywords. `UcclEpBackend` takes both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from uccl_ep_core.errors import ArgumentError, BufferClosedError

from ..buffer import Buffer, Payload
from ..events import EventHandle, EventOverlap

Dispatched = tuple[Payload, torch.Tensor | None, torch.Tensor | None, list[int] | None, Any]


def register(name: str = "UCCL_EP") -> str:
    """Register `UcclEpBackend` with Primus-Turbo; select it as its documentation says for ``name``.

    Returns:
        The name.

    Raises:
        ImportError: Primus-Turbo is missing, or has no registry of backends.
    """
    from primus_turbo.pytorch.kernels.moe.moe_dispatch_combine_impl import register_ep_backend

    register_ep_backend(name, UcclEpBackend)
    return name


class UcclEpBackend:
    """Primus-Turbo's ``EPBackend`` over a `Buffer`, which it creates when first needed."""

    def __init__(self) -> None:
        self._buffer: Buffer | None = None

    @staticmethod
    def is_available() -> bool:
        """Whether the backend can be used: always, where this module could be imported."""
        return True

    @staticmethod
    def supports_cuda_graph() -> bool:
        """False: the number of received rows is read on the host."""
        return False

    def is_initialized(self) -> bool:
        """Whether there is a buffer."""
        return self._buffer is not None

    def init_buffer(
        self,
        group: dist.ProcessGroup,
        hidden_bytes: int | None = None,
        config: Any = None,
        *,
        hidden_size: int | None = None,
        num_experts: int | None = None,
        num_topk: int | None = None,
        seqlen: int | None = None,
        fp8_dispatch: bool = False,
    ) -> None:
        """Create the buffer, unless there is one of this group. Collective in that case.

        Tokens stream through slots whose size is an option of uccl_ep, so one buffer serves all shapes.

        Args:
            group: the expert-parallel group.
            config: its ``num_sms`` is passed on as a hint.
            hidden_bytes, hidden_size, num_experts, num_topk, seqlen, fp8_dispatch: the shape, as either generation
                of the protocol gives it.
        """
        sms = getattr(config, "num_sms", None)
        if sms:
            Buffer.set_num_sms(sms)
        if self._buffer is None or self._buffer.group != group:
            self.release_buffer()
            self._buffer = Buffer(group)

    def dispatch(
        self,
        x: Payload,
        handle: Any = None,
        topk_idx: torch.Tensor | None = None,
        token_weights: torch.Tensor | None = None,
        num_experts: int | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        num_worst_tokens: int = 0,
        config: Any = None,
    ) -> Dispatched:
        """Send tokens to their experts, or other payload along the routes of ``handle``.

        Args:
            x: [num_tokens, hidden], or (fp8, scales).
            topk_idx, token_weights, num_experts: given without a handle.
            num_worst_tokens: as for `Buffer.dispatch`.

        Returns:
            (x, local expert indices, weights, rows per expert, handle); the second to fourth are None with a handle.
        """
        buffer = self._usable()
        previous = EventOverlap(EventHandle()) if async_finish else None
        common: dict[str, Any] = {"async_finish": async_finish, "allocate_on_comm_stream": allocate_on_comm_stream}
        if handle is not None:
            out, _, _, _, handle, event = buffer.dispatch(x, handle=handle, previous_event=previous, **common)
            event.current_stream_wait()
            return out, None, None, None, handle
        if topk_idx is None or num_experts is None:
            raise ArgumentError("dispatch without a handle needs topk_idx= and num_experts=")
        per_rank, per_domain, per_expert, in_rank, event = buffer.get_dispatch_layout(
            topk_idx, num_experts, previous_event=previous, **common
        )
        out, idx, weights, counts, handle, event = buffer.dispatch(
            x,
            topk_idx=topk_idx,
            topk_weights=None if token_weights is None else token_weights.float(),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_domain,
            num_tokens_per_expert=per_expert,
            is_token_in_rank=in_rank,
            num_worst_tokens=num_worst_tokens,
            previous_event=event if async_finish else None,
            **common,
        )
        event.current_stream_wait()
        return out, idx, weights, counts, handle

    def combine(
        self,
        x: torch.Tensor,
        handle: Any,
        topk_weights: torch.Tensor | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        config: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Bring rows home and sum them by token, without weights.

        Returns:
            ([num_tokens, hidden], summed weights or None).
        """
        out, weights, event = self._usable().combine(
            x,
            handle=handle,
            topk_weights=None if topk_weights is None else topk_weights.float(),
            previous_event=EventOverlap(EventHandle()) if async_finish else None,
            async_finish=async_finish,
            allocate_on_comm_stream=allocate_on_comm_stream,
        )
        event.current_stream_wait()
        return out, weights

    def release_buffer(self) -> None:
        """Destroy the buffer, if there is one."""
        if self._buffer is not None:
            self._buffer.destroy()
            self._buffer = None

    def tune_configs(
        self,
        group: dist.ProcessGroup,
        x: Payload,
        num_experts: int,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        num_sms: int = 32,
        num_tests: int = 20,
        num_topk: int | None = None,
        uniform_dispatch: bool = True,
    ) -> tuple[None, None, float, float]:
        """Time dispatch and combine, for Primus-Turbo's choice between backends; there are no configs to choose from.

        Returns:
            (None, None, seconds of a dispatch, seconds of a combine), the same on all ranks: those of the slowest.

        Raises:
            ArgumentError: neither ``topk_idx`` nor ``num_topk``.
        """
        payload = x[0] if isinstance(x, tuple) else x
        if topk_idx is None or uniform_dispatch:
            if topk_idx is None and num_topk is None:
                raise ArgumentError("tune_configs needs topk_idx= or num_topk=")
            columns = num_topk if topk_idx is None else topk_idx.shape[1]
            random = torch.rand(payload.shape[0], num_experts, device=payload.device)
            topk_idx = random.topk(columns or 1, dim=1).indices
            topk_weights = None
        if topk_weights is None:
            topk_weights = torch.ones(topk_idx.shape, dtype=torch.float32, device=payload.device)
        self.init_buffer(group)
        chosen, weights = topk_idx, topk_weights

        def dispatch() -> Dispatched:
            return self.dispatch(x, topk_idx=chosen, token_weights=weights, num_experts=num_experts)

        received, _, _, _, handle = dispatch()
        rows = received[0] if isinstance(received, tuple) else received
        rows = rows if rows.element_size() > 1 else rows.to(torch.bfloat16)
        seconds = [self._time(dispatch, num_tests), self._time(lambda: self.combine(rows, handle), num_tests)]
        slowest: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(slowest, seconds, group=group)
        dispatch_s, combine_s = (max(times) for times in zip(*slowest, strict=True))
        return None, None, dispatch_s, combine_s

    @staticmethod
    def _time(call: Callable[[], Any], times: int) -> float:
        synchronize = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
        call()
        synchronize()
        start = time.perf_counter()
        for _ in range(times):
            call()
        synchronize()
        return (time.perf_counter() - start) / times

    def _usable(self) -> Buffer:
        if self._buffer is None:
            raise BufferClosedError("this backend has no buffer: call init_buffer first")
        return self._buffer
