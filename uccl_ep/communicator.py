"""One communicator a buffer: the launch of kernels on a group that is connected, and what went wrong in them.

Both public faces (`Buffer` and `ElasticBuffer`) are adapters over it; the operations themselves are in
`uccl_ep.high_throughput` and `uccl_ep.low_latency`.
"""

from __future__ import annotations

import ctypes
import functools
import os
from contextlib import suppress
from typing import Any

from uccl_ep_core import _native
from uccl_ep_core.errors import ArgumentError, BufferClosedError, EPError
from uccl_ep_core.kernel_parameters import BarrierParameters, Group, LayoutStruct

from .connection import Connection
from .failures import peer_failure
from .grids import LOCAL_WARPS, full_grid, low_latency_grid
from .tracing import Profile


class Communicator(Connection):
    """The ranks of one group, connected, and in use."""

    def group_struct(self, count: bool = True) -> Group:
        """The `Group` that kernels are given, for the next operation.

        Args:
            count: number a new operation; False for a kernel that goes on with the last one.
        """
        if count:
            self._operation += 1
        group = Group.from_buffer_copy(self._group_of_all_operations)
        group.operation = self._operation
        return group

    @functools.cached_property
    def _group_of_all_operations(self) -> Group:
        """What the set-up settled; only the number of the operation is missing."""
        group = Group(
            layout=LayoutStruct.from_buffer_copy(self.layout.to_bytes()),
            rank=self.rank,
            timeout_ns=int(self.general.timeout_s * 1e9),
        )
        self.windows.fill(group)
        return group

    def launch(
        self, kernel: str, parameters: ctypes.Structure, *, num_blocks: int = 1, warps: int = 1, shared_bytes: int = 0
    ) -> None:
        """Run a kernel and raise what went wrong in it.

        A signal handler that raises (Ctrl-C) while it runs closes the buffer: the operation is cut off.
        """
        self._calls[kernel] = self._calls.get(kernel, 0) + 1
        with self._resources.used():
            self.verdicts.enter(self._operation)
            try:
                self.backend.launch(
                    kernel, bytes(parameters), num_blocks=num_blocks, warps_per_block=warps, shared_bytes=shared_bytes
                )
            except EPError:
                raise
            except BaseException:  # whatever a signal handler raised
                self._cut_off()
                raise
            self.check()

    def _cut_off(self) -> None:
        """Tell the group that this rank left an operation, and close the buffer."""
        if not self.windows.kernel_status.failed:  # else `check` tells what the kernel saw
            self.verdicts.report(self.rank, int(_native.Reason.INTERRUPTED), 0)
        with suppress(EPError):
            self.check()

    def local_grid(self) -> dict[str, int]:
        """The grid of a kernel whose warps do not wait for each other: all that run at once."""
        return full_grid(self.backend.limits, LOCAL_WARPS)

    def low_latency_grid(self) -> dict[str, int]:
        """The grid of a low-latency kernel, whose blocks all wait for all ranks."""
        return low_latency_grid(self.backend.limits, self.staged)

    def ensure_usable(self) -> None:
        """Raise when the buffer was destroyed, or an earlier failure closed it."""
        if self._failure is not None:
            raise BufferClosedError(f"this buffer was closed by an earlier failure: {self._failure}") from self._failure
        self.ensure_open()
        if os.getpid() != self._resources.process:
            raise BufferClosedError(
                f"this buffer belongs to process {self._resources.process}, and this is a fork of it: create a Buffer "
                "in the process that uses it"
            )
        with self._resources.used():
            self.check()

    def check(self) -> None:
        """Raise the failure of this group, if there is one; it is the same on all surviving ranks.

        Raises:
            PeerFailure: naming the rank at fault; the buffer is closed to further use.
        """
        if not self.verdicts.aborted:
            return
        status = self.windows.kernel_status
        detail: tuple[int, ...] = ()
        if status.failed:
            mine = status.verdict
            self.verdicts.report(
                mine.culprit,
                mine.reason,
                mine.phase,
                signal=mine.signal,
                expected=mine.expected,
                seen=mine.seen,
                operation=mine.operation,
                elapsed_ns=mine.elapsed_ns,
            )
            detail = tuple(status.detail)
        verdict = self.verdicts.agree(min(1.0, self.general.timeout_s / 10))
        words = self.engine.error() if self._resources.engine is not None else ""
        if verdict is None:
            self._failure = EPError("the group was aborted without a verdict" + (f": {words}" if words else ""))
        else:
            own = detail if verdict.reporter == self.rank else ()
            self._failure = peer_failure(verdict, self.rank, own, words)
        raise self._failure

    def barrier(self) -> None:
        """Wait until every rank is here; raises like any operation."""
        self.ensure_usable()
        self.launch("uccl_ep_barrier", BarrierParameters(group=self.group_struct()))

    def stats(self) -> dict[str, Any]:
        """Counts since the start: kernels launched by name, and what the proxies did."""
        self.ensure_open()
        result: dict[str, Any] = {"operations": self._operation, "launches": dict(self._calls)}
        if self._resources.engine is not None:
            result["engine"] = self.engine.stats()
        return result

    def profile(self) -> Profile:
        """See `GroupBuffer.profile`."""
        self.ensure_usable()
        if self.windows.tracing is None:
            raise ArgumentError(
                "kernels of this buffer record nothing: create it with the option trace_kernels = true "
                "(UCCL_EP_TRACE_KERNELS=1)"
            )
        with self._resources.used():
            return self.windows.tracing.profile(self.general.timeout_s)

    def close(self) -> None:
        """Release everything; not collective, may be called twice."""
        self._closed = True
        self._finalizer()
