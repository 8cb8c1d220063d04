"""How the rows of a low-latency operation travel: packed into one message a rank, or each directly to its place."""

from __future__ import annotations

import dataclasses

from uccl_ep_core._native import kernels
from uccl_ep_core.kernel_parameters import LowLatencyShape, PayloadType

from ..communicator import Communicator

PACKED, DIRECT = "packed", "direct"

DIRECT_PICKS = int(kernels.DIRECT_PICKS)
"""Most picks of all ranks on the direct path: each block reads them all, and looks through them for each of its own."""
MOST_DIRECT_EXPERTS = 32767
"""A block keeps picks as int16."""


@dataclasses.dataclass(frozen=True)
class DirectPath:
    """Sizes of the direct kernels of one shape.

    Attributes:
        grid: of a launch.
        placing_bytes: shared memory of a block of a dispatch.
        terms_bytes: shared memory of a block of a combine.
    """

    grid: dict[str, int]
    placing_bytes: int
    terms_bytes: int

    @classmethod
    def of(cls, communicator: Communicator, shape: LowLatencyShape) -> DirectPath:
        grid = {**communicator.low_latency_grid(), "num_blocks": communicator.direct_blocks}
        ranks, warps = communicator.num_ranks, grid["warps"]
        return cls(
            grid,
            int(kernels.direct_placing_bytes(ranks, warps, shape.num_topk, shape.max_tokens)),
            int(kernels.low_latency_terms_bytes(warps, shape.num_topk)),
        )

    def is_possible(self, communicator: Communicator, shape: LowLatencyShape, masked: bool) -> bool:
        """Whether rows of this shape can go directly. Equal on all ranks.

        Args:
            masked: the group goes on without ranks that are gone (enable_shrink): all blocks of a rank must then agree
                on what has come, and only the packed kernels do.
        """
        ranks = communicator.num_ranks
        accumulator_bytes = 8 if shape.payload_type == PayloadType.FLOAT64 else 4
        sums = kernels.direct_combine_bytes(ranks, shape.max_tokens, shape.hidden, accumulator_bytes, shape.num_topk)
        # The inboxes of a dispatch need no look: rows take no more than the full packed message that
        # `LowLatencyCapacity.require` has let in.
        return (
            not communicator.layout.has_remote
            and not masked
            and ranks * shape.max_tokens * shape.num_topk <= DIRECT_PICKS
            and shape.num_experts <= MOST_DIRECT_EXPERTS
            and sums <= communicator.capacity.combine_bytes
            and max(self.placing_bytes, self.terms_bytes) <= communicator.backend.limits.max_shared_bytes
        )


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
    direct = DirectPath.of(communicator, shape)
    return direct if direct.is_possible(communicator, shape, masked) else None
