"""How the rows of a low-latency operation travel: packed into one message a rank, or each directly to its place."""

from __future__ import annotations

from uccl_ep_core._native import kernels
from uccl_ep_core.kernel_parameters import LowLatencyShape, PayloadType

from ..communicator import Communicator

PACKED, DIRECT = "packed", "direct"

DIRECT_PICKS = int(kernels.DIRECT_PICKS)
"""Most picks of all ranks on the direct path: each block reads them all, and looks through them for each of its own."""
MOST_DIRECT_EXPERTS = 32767
"""A block keeps picks as int16."""


class DirectPath:
    """Sizes of direct kernels of one shape, and whether that path can be taken.

    Attributes:
        placing_bytes: shared memory of a dispatch.
        terms_bytes: shared memory of a combine.
    """

    def __init__(self, communicator: Communicator, shape: LowLatencyShape) -> None:
        self._communicator, self._shape = communicator, shape
        self.grid = {**communicator.low_latency_grid(), "num_blocks": communicator.direct_blocks}
        ranks, warps = communicator.num_ranks, self.grid["warps"]
        self.placing_bytes = int(kernels.direct_placing_bytes(ranks, warps, shape.num_topk, shape.max_tokens))
        self.terms_bytes = int(kernels.low_latency_terms_bytes(warps, shape.num_topk))

    def hindrance(self, masked: bool) -> str | None:
        """Why rows of this shape cannot go directly; None where they can. Equal on all ranks.

        Args:
            masked: the group goes on without ranks that are gone: all blocks must then agree on what has come.
        """
        communicator, shape = self._communicator, self._shape
        ranks, backend = communicator.num_ranks, communicator.backend
        picks = ranks * shape.max_tokens * shape.num_topk
        accumulator_bytes = 8 if shape.payload_type == PayloadType.FLOAT64 else 4
        sums = kernels.direct_combine_bytes(ranks, shape.max_tokens, shape.hidden, accumulator_bytes, shape.num_topk)
        shared = max(self.placing_bytes, self.terms_bytes)
        # The inboxes of a dispatch need no look: rows take no more than the full packed message that
        # `LowLatencyCapacity.require` has let in.
        if communicator.layout.has_remote:
            return "a rank is reached through a transport"
        if masked:
            return "the group goes on without ranks that are gone (enable_shrink)"
        if picks > DIRECT_PICKS:
            return f"all ranks together have {picks} picks, more than {DIRECT_PICKS}"
        if shape.num_experts > MOST_DIRECT_EXPERTS:
            return f"there are {shape.num_experts} experts, more than {MOST_DIRECT_EXPERTS}"
        if sums > communicator.capacity.combine_bytes:
            return f"the sums that come home need {sums} bytes, and have {communicator.capacity.combine_bytes}"
        if shared > backend.limits.max_shared_bytes:
            return f"a block needs {shared} bytes of shared memory, and has {backend.limits.max_shared_bytes}"
        return None


_MOST_KNOWN = 64  # shapes; a program has a few


class Paths:
    """The paths of the shapes that were dispatched, each chosen once: a buffer never changes its answer."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._known: dict[tuple[bytes, bool], DirectPath | None] = {}

    def of(self, shape: LowLatencyShape, masked: bool) -> DirectPath | None:
        """As `choose`."""
        key = bytes(shape), masked
        try:
            return self._known[key]
        except KeyError:
            path = choose(self._communicator, shape, masked)
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()  # by any thread, at any time
        self._known[key] = path
        return path


def choose(communicator: Communicator, shape: LowLatencyShape, masked: bool) -> DirectPath | None:
    """The direct path, where a dispatch of this shape and its combine take it; None: they are packed."""
    wanted = communicator.general.low_latency_path
    if wanted == "auto":  # a lone lane moves fewer bytes and looks through fewer picks when it packs
        wanted = DIRECT if communicator.backend.limits.warp_size > 1 else PACKED
    if wanted == PACKED:
        return None
    direct = DirectPath(communicator, shape)
    return direct if direct.hindrance(masked) is None else None
