from collections.abc import Mapping

class Faults:
    seed: int
    microseconds: bool
    early_immediate: bool
    max_segments: int
    imm_bits: int
    max_message: int
    alignment: int

class Simulator:
    def __init__(
        self,
        inner: int,
        faults: Faults,
        rank: int,
        num_ranks: int,
        num_lanes: int,
        regions: list[tuple[int, int]],
        with_signals: bool,
        with_immediates: bool,
        with_peer_state: bool,
    ) -> None: ...
    @property
    def ops(self) -> int: ...
    @property
    def statistics(self) -> Mapping[str, int]: ...
    def drain(self, limit_us: int) -> bool: ...
