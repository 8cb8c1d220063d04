"""The simulator itself, over shm, with both ranks in this process: what it does and that it does it again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from uccl_ep_core.capabilities import Capabilities
from uccl_ep_core.conformance import abi
from uccl_ep_core.conformance.context import Windows
from uccl_ep_core.conformance.driver import Driver, PromiseBroken
from uccl_ep_core.errors import ConfigurationError, TransportError
from uccl_ep_core.transport import Memory
from uccl_ep_sim import PROFILES, SimTransport

OUTBOX = 1 << 19
NBYTES = 256
FAULTS = ("delay", "completion_delay", "arrival_delay", "early_completion", "duplicate", "drop", "stall", "refuse")
NO_FAULTS: dict[str, Any] = dict.fromkeys(FAULTS, 0) | {"max_segments": 1}


class Pair:
    """Rank 0 writes to rank 1."""

    def __init__(self, options: dict[str, Any]) -> None:
        defaults = {name: option.default for name, option in SimTransport.OPTIONS.items()}
        self.windows = [Windows(1 << 20) for _ in range(2)]
        self.transports = [SimTransport.open(None, defaults | options) for _ in range(2)]
        for transport, windows in zip(self.transports, self.windows, strict=True):
            for memory in windows.memories():
                transport.register(memory)
        addresses = [transport.address() for transport in self.transports]
        for rank, transport in enumerate(self.transports):
            transport.connect(rank, addresses, [1 - rank], 2, 5.0)
        self.drivers = [Driver(transport.native_ops, 2) for transport in self.transports]
        self.inbox = self.windows[1].views[abi.DATA]
        self.order: list[int] = []

    def statistics(self) -> dict[str, int]:
        return dict(self.transports[0].statistics)

    def send(self, count: int, *, flags: int = 0, polls: int = 0) -> None:
        """``count`` writes of `NBYTES` bytes, message i filled with i + 1, to place i."""
        source = self.windows[0].views[abi.DATA]
        for index in range(count):
            at = OUTBOX + index * NBYTES
            source[at : at + NBYTES] = bytes([index % 255 + 1]) * NBYTES
            write = abi.Write(1, flags, 0, 0, at, index * NBYTES, NBYTES, index, 0)
            self.drivers[0].post(0, [write])
            for _ in range(polls):
                self.poll()

    def poll(self) -> None:
        self.order += [token for token, _ in self.drivers[0].poll(0)]

    def placed(self, index: int) -> bool:
        at = index * NBYTES
        return self.inbox[at : at + NBYTES] == bytes([index % 255 + 1]) * NBYTES

    def finish(self) -> None:
        for _ in range(100_000):
            if not self.drivers[0].outstanding:
                return
            self.poll()
        raise AssertionError(f"{self.drivers[0].outstanding} writes did not complete in 100000 polls")

    def close(self) -> None:
        for transport in self.transports:
            transport.close()
        for windows in self.windows:
            windows.close()


@contextmanager
def pair(**options: Any) -> Iterator[Pair]:
    made = Pair(options)
    try:
        yield made
    finally:
        made.close()


def _fate(seed: int, polls: int) -> tuple[list[int], int]:
    with pair(profile="srd", seed=seed, duplicate=0.1) as run:
        run.send(60, polls=polls)
        run.finish()
        return run.order, run.statistics()["decisions"]


def test_equal_seeds_and_posts_meet_equal_fates() -> None:
    assert _fate(1, 0) == _fate(1, 0)
    assert _fate(1, 0) != _fate(2, 0)
    assert _fate(1, 0)[1] == _fate(1, 5)[1], "how often one polls must not change what is drawn"


@pytest.mark.parametrize("profile", ["srd", "iwarp"])
def test_unordered_profiles_reorder(profile: str) -> None:
    with pair(profile=profile) as run:
        run.send(60)
        run.finish()
        assert run.statistics()["overtakes"] > 5
        assert run.order != sorted(run.order)


def test_rc_places_in_order() -> None:
    with pair(profile="rc", delay=10.0) as run:
        run.send(60)
        while run.drivers[0].outstanding:
            run.poll()
            placed = [run.placed(index) for index in range(60)]
            assert placed == sorted(placed, reverse=True), "a later write was visible before an earlier one"
        assert run.statistics()["overtakes"] == 0


def test_early_completions_keep_their_own_bytes() -> None:
    with pair(profile="iwarp", early_completion=1.0, completion_delay=0, delay=200.0) as run:
        run.send(40)
        run.finish()
        assert not all(run.placed(index) for index in range(40)), "nothing completed before it was placed"
        source = run.windows[0].views[abi.DATA]
        source[OUTBOX : OUTBOX + 40 * NBYTES] = b"\xff" * (40 * NBYTES)  # allowed after the completions
        for _ in range(20_000):
            run.poll()
        assert all(run.placed(index) for index in range(40))
        assert run.statistics()["source_changed"] == 0


def test_a_source_changed_too_early_is_noticed() -> None:
    with pair(profile="srd", early_completion=0, delay=50.0) as run:
        run.send(10)
        source = run.windows[0].views[abi.DATA]
        source[OUTBOX : OUTBOX + 10 * NBYTES] = b"\xff" * (10 * NBYTES)
        run.finish()
        assert run.statistics()["source_changed"] > 0


def test_fenced_writes_wait_for_placement() -> None:
    with pair(profile="iwarp", early_completion=1.0, delay=30.0, refuse=0) as run:  # so that token i is write i
        run.send(40, flags=abi.FENCED)
        seen = 0
        while run.drivers[0].outstanding:
            run.poll()
            assert all(run.placed(token) for token in run.order[seen:])
            seen = len(run.order)


def test_pieces_land_apart_and_the_immediate_last() -> None:
    with pair(profile="srd", max_segments=8, delay=40.0, early_completion=0, arrival_delay=0) as run:
        run.send(30, flags=abi.IMMEDIATE)
        torn = 0
        while run.drivers[0].outstanding:
            run.poll()
            for index in range(30):
                at = index * NBYTES
                torn += 0 < bytes(run.inbox[at : at + NBYTES]).count(0) < NBYTES
            arrived = len(run.drivers[1].arrived)
            run.drivers[1].poll_arrivals(0)
            assert all(run.placed(immediate) for immediate, _ in run.drivers[1].arrived[arrived:])
        assert torn > 0
        assert run.statistics()["segments"] > 30


def test_duplicates_land_twice_before_the_completion() -> None:
    with pair(profile="srd", duplicate=1.0, early_completion=0) as run:
        assert not run.transports[0].capabilities.exactly_once
        run.send(20, flags=abi.IMMEDIATE)
        run.finish()
        for _ in range(100):
            run.drivers[1].poll_arrivals(0)
        assert sorted(immediate for immediate, _ in run.drivers[1].arrived) == sorted(2 * list(range(20)))


def test_losses_cost_time_or_are_reported() -> None:
    with pair(profile="srd", **NO_FAULTS | {"drop": 0.5}) as run:
        run.send(60)
        run.finish()
        assert run.statistics()["losses"] > 10
        assert all(run.placed(index) for index in range(60))
    with pair(profile="srd", **NO_FAULTS | {"drop": 0.5}, report_drops=1) as run:
        run.send(60)
        run.finish()
        lost = {token for token, entry in run.drivers[0].ledger.items() if entry.status}
        assert 10 < len(lost) < 50
        assert all(run.placed(index) != (index in lost) for index in range(60))
        assert "was lost" in run.drivers[0].last_error()


def test_a_stall_stops_the_lane_and_no_other() -> None:
    with pair(profile="srd", **NO_FAULTS | {"stall": 1.0}, stall_time=500) as run:
        run.send(1)
        for _ in range(400):
            run.poll()
        assert run.order == []
        run.finish()
        assert run.statistics()["stalls"] == 1


def test_the_queue_fills_and_refuses() -> None:
    with pair(profile="srd", **NO_FAULTS, send_queue_depth=8) as run:
        writes = [abi.Write(1, 0, 0, 0, OUTBOX, 0, 8, 0, 0)] * 20
        assert run.drivers[0].post_once(0, writes) == 8
        assert run.drivers[0].post_once(0, writes) == 0
    with pair(profile="srd", **NO_FAULTS | {"refuse": 1.0}) as run:
        run.send(20)
        run.finish()
        assert run.statistics()["refusals"] >= 20


def test_collapse_above_the_limit() -> None:
    def polls(**options: Any) -> int:
        with pair(profile="bnxt", **NO_FAULTS | {"delay": 20.0}, distribution="constant", **options) as run:
            run.send(32)
            count = 0
            while run.drivers[0].outstanding:
                run.poll()
                count += 1
            assert (run.statistics()["collapsed"] > 0) == ("inflight_limit" in options)
            return count

    assert polls(inflight_limit=16 * NBYTES) > 5 * polls()


def test_a_killed_peer_shows_in_completions_and_state() -> None:
    with pair(profile="rc", **NO_FAULTS, kill_peer=1, kill_after=10) as run:
        assert run.drivers[0].peer_state(1) == abi.PEER_ALIVE
        run.send(20, polls=3)
        run.finish()
        statuses = [entry.status for entry in run.drivers[0].ledger.values()]
        assert statuses == [0] * 10 + [-107] * 10  # ENOTCONN
        assert run.drivers[0].peer_state(1) == abi.PEER_DEAD


def test_a_failure_after_the_completion_breaks_the_lane() -> None:
    with pair(profile="iwarp", early_completion=1.0, completion_delay=0, delay=50.0) as run:
        run.drivers[0].post(0, [abi.Write(1, 0, 0, 0, OUTBOX, (1 << 20) - 4, NBYTES, 0, 0)])
        with pytest.raises(PromiseBroken, match="failed after it had completed"):
            _poll_often(run)


def _poll_often(run: Pair) -> None:
    for _ in range(1000):
        run.poll()


@pytest.mark.parametrize("lacking", ["write_order", "signal_order", "imm_bits", "exactly_once", "native_signal"])
def test_no_profile_claims_what_the_inner_transport_lacks(lacking: str) -> None:
    everything: dict[str, Any] = {
        "write_order": True,
        "signal_order": True,
        "imm_bits": 64,
        "imm_after_payload": True,
        "delivery_complete": True,
        "exactly_once": True,
        "native_signal": "device",
    }
    nothing = getattr(Capabilities(), lacking)
    for profile in PROFILES.values():
        assert getattr(profile.claims(Capabilities(**everything | {lacking: nothing})), lacking) == nothing


def test_options_are_checked() -> None:
    with pytest.raises(ConfigurationError, match="cannot wrap itself"):
        SimTransport.open(None, {"inner": "sim"})
    with pytest.raises(ConfigurationError, match="did you mean 'srd'"):
        SimTransport.open(None, {"profile": "sdr"})
    with pytest.raises(ConfigurationError, match="did you mean 'lanes'"):
        SimTransport.open(None, {"inner_options": "lane=3"})
    opened = SimTransport.open(None, {"inner_options": "lanes=3"})
    assert opened.capabilities.lanes == 3
    with pytest.raises(TransportError, match="register host memory"):
        opened.register(Memory(4096, 4096, device=0))
    opened.close()
