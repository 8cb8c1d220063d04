"""The low-latency mode of a communicator."""

from __future__ import annotations

from collections.abc import Callable

import torch

from uccl_ep_core._native import kernels
from uccl_ep_core.errors import ArgumentError, HandleError
from uccl_ep_core.kernel_parameters import Quantization

from ..communicator import Communicator
from .combining import Returning, combine_parameters
from .dispatching import Incoming, Outgoing, dispatch_parameters, new_state
from .grid import dispatch_grid
from .path import PACKED, Paths
from .receive_halves import ReceiveHalves
from .results import LIVE_RESULTS, HandleState, LowLatencyHandle, Results


class LowLatency:
    """Dispatch and combine, each in two halves. All calls but `check_handle` and `combine_buffer` are collective.

    Attributes:
        mask: int32 [num_ranks] on the device, 1: left out; kernels set it for a rank that is gone or late. None where
            the group does not go on without a rank.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._generation = 0  # of the last dispatch that was sent
        self._results = (Results(), Results())
        self._combine_buffers = (Results(), Results())
        self._receive_halves = ReceiveHalves(communicator)
        self._choices = Paths(communicator)
        self._paths: dict[str, str] = {}  # last taken, by kind of operation
        self._captured: str | None = None  # the path of the graphs that were captured: all calls keep to it
        self.mask: torch.Tensor | None = None

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        max_tokens: int,
        num_experts: int,
        quantization: Quantization,
        statistics: torch.Tensor | None = None,
        wait_cost: torch.Tensor | None = None,
        at_once: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, LowLatencyHandle, Callable[[], None]]:
        """Send half of a dispatch.

        Args:
            x: [num_tokens, hidden], num_tokens at most ``max_tokens``.
            topk_idx: int32 or int64 [num_tokens, topk] global expert indices, -1 for none.
            max_tokens: most tokens of any rank; equal on all ranks.
            quantization: how rows are cast before they travel.
            statistics: int32 [local experts], raised by the received counts.
            wait_cost: int64 [num_ranks], raised by the time waited for each rank (ns on the host).
            at_once: the hook is called before the caller can change x: own rows are then not copied twice.

        Returns:
            (received x [L, num_ranks * max_tokens, hidden], scales or None, count int32 [L], handle, hook);
            the first three hold data after ``hook()``, until the second dispatch after this one.

        Raises:
            ArgumentError: before any communication; says what would do. Earlier results stay as they are.
        """
        communicator = self._communicator
        communicator.ensure_usable()
        backend, num_ranks = communicator.backend, communicator.num_ranks
        outgoing = Outgoing.check(
            communicator, x, topk_idx, max_tokens, num_experts, quantization, statistics, wait_cost
        )
        self._receive_halves.check_room("dispatch")
        num_tokens, num_topk = outgoing.topk_idx.shape
        direct = None
        if self._captured != PACKED:
            direct = self._choices.of(outgoing.shape, masked=self.mask is not None)
        if direct is not None:
            kernel, num_chunks = "uccl_ep_ll_direct_dispatch", 0
            grid, send_bytes = direct.grid, direct.placing_bytes
            receive_bytes = send_bytes
        else:
            self._refuse_beside_graphs(PACKED)
            kernel = "uccl_ep_ll_dispatch"
            grid, num_chunks, send_bytes = dispatch_grid(communicator, num_tokens, num_topk, num_experts)
            receive_bytes = kernels.low_latency_arrivals_bytes(num_experts, num_ranks, grid["warps"], num_topk)
        generation = self._generation + 1
        kept = self._results[generation % LIVE_RESULTS]
        incoming = Incoming.allocate(outgoing.shape, outgoing.x.dtype, num_ranks, kept, backend)
        state = new_state(self, generation, outgoing, incoming, num_ranks, backend, direct)
        self._change_path("dispatch", state.path)
        parameters = dispatch_parameters(
            communicator.group_struct(), outgoing, incoming, state, self.mask, num_chunks, own_in_place=at_once
        )
        self._generation = generation  # not before nothing can be refused any more: it makes an earlier result expire
        hook = self._receive_halves.start(
            "dispatch", kernel, generation, parameters, grid,
            send_bytes=send_bytes, receive_bytes=receive_bytes, at_once=at_once, keep=(outgoing, incoming, state),
        )  # fmt: skip
        scales = None if incoming.scales is None else incoming.scales.transpose(1, 2)
        return incoming.x, scales, incoming.count, LowLatencyHandle.of(state), hook

    def check_handle(self, handle: object) -> HandleState:
        """The state behind a handle of this mode that has not expired.

        Raises:
            HandleError: it is another thing, another buffer's, or expired.
        """
        if not isinstance(handle, LowLatencyHandle):
            raise HandleError(f"a handle from low_latency_dispatch() is needed, not {type(handle).__name__}")
        state = handle.state
        if state.owner() is not self:
            raise HandleError("this handle came from another buffer: use the buffer that made it")
        if self._generation - state.generation >= LIVE_RESULTS:
            raise HandleError(
                f"this handle expired: {self._generation - state.generation} dispatches came after its own, and a "
                f"result lives until the second; combine before that"
            )
        return state

    def combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: object,
        out: torch.Tensor | None = None,
        wait_cost: torch.Tensor | None = None,
        at_once: bool = False,
    ) -> tuple[torch.Tensor, Callable[[], None]]:
        """Send half of a combine.

        out[t] = sum over k of topk_weights[t, k] * (row of expert topk_idx[t, k] for t), in the order that
        ``handle.rounding`` says; product and sum in float32 (float64 for float64), rounded once.

        Args:
            x: [local experts, num_ranks * max_tokens, hidden] expert outputs, rows as they were received, of the
                dtype of dispatch's x (then all ranks agree on it without a word more on the wire).
            topk_idx: this rank's own indices, as given to dispatch.
            topk_weights: float32 [num_tokens, topk].
            out: [num_tokens, hidden] of x's dtype to write into, or None.
            at_once: the hook is called before the caller can change x: own rows are then summed from it.

        Returns:
            (out, hook); out holds the sums after ``hook()``.
        """
        communicator = self._communicator
        communicator.ensure_usable()
        state = self.check_handle(handle)
        returning = Returning.check(communicator, state, x, topk_idx, topk_weights, out, wait_cost)
        self._receive_halves.check_room("combine")
        self._receive_halves.check_received(state.generation)
        self._refuse_beside_graphs(state.path)
        self._change_path("combine", state.path)
        parameters = combine_parameters(communicator.group_struct(), returning, state, self.mask, own_in_place=at_once)
        if (direct := state.direct) is not None:
            grid, receive_bytes = direct.grid, direct.terms_bytes
            send_bytes, kernel = receive_bytes, "uccl_ep_ll_direct_combine"
        else:
            grid, send_bytes, kernel = communicator.low_latency_grid(), 0, "uccl_ep_ll_combine"
            receive_bytes = kernels.low_latency_terms_bytes(grid["warps"], state.shape.num_topk)
        hook = self._receive_halves.start(
            "combine", kernel, state.generation, parameters, grid,
            send_bytes=send_bytes, receive_bytes=receive_bytes, at_once=at_once, keep=(returning, state),
        )  # fmt: skip
        return returning.out, hook

    def _change_path(self, kind: str, path: str) -> None:
        """Take in all that was sent, on every rank, before the other path is taken: both use the same inboxes, and
        count apart."""
        if self._paths.get(kind, path) != path:
            self._receive_halves.run_all()
            self._communicator.barrier()
        self._paths[kind] = path
        if self._captured is None and self._communicator.backend.is_capturing():
            self._captured = path

    def _refuse_beside_graphs(self, path: str) -> None:
        """The barrier of a change of path would not be part of a graph that is replayed after it.

        Raises:
            ArgumentError: graphs captured on this buffer take the other path.
        """
        if self._captured not in (None, path):
            raise ArgumentError(
                f"this call's rows go {path}, and those of a graph captured on this buffer {self._captured}: a replay "
                'would not wait for what was sent the other way. Set low_latency_path = "packed" '
                "(UCCL_EP_LOW_LATENCY_PATH=packed), which all shapes can take, or use another buffer"
            )

    def combine_buffer(self, handle: object) -> torch.Tensor:
        """Memory [L, num_ranks * max_tokens, hidden] for expert outputs, which the send half reads as it is."""
        state, communicator = self.check_handle(handle), self._communicator
        kept = self._combine_buffers[state.generation % LIVE_RESULTS]
        return kept.get("x", state.rows_shape(communicator.num_ranks), state.dtype, communicator.backend)
