"""Rails that fail in every way and at every moment, over a network whose every step is chosen by a seed.

Two or three ranks have two to four rails, of which one is never touched: every write then completes once, without an
error and after its bytes are there, no copy lands on newer bytes, and every immediate arrives. Where no rail is left,
and where a rank is gone, every write ends all the same.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator

import pytest
from scripted_ranks import OUTBOX, WINDOW, Network, Traffic

from uccl_ep_core.conformance import abi
from uccl_ep_core.conformance.driver import PromiseBroken

SEEDS = range(1, 41)
STEPS = 500


class Run:
    """One seed: a network, its traffic, and what goes wrong, which is listed in ``events``."""

    def __init__(self, seed: int, fault: str) -> None:
        self.chance = chance = random.Random(seed * 7 + 1)
        self.ranks, self.rails = chance.choice([2, 2, 3]), chance.choice([2, 3, 3, 4])
        self.fault, self.events = fault, [f"seed {seed}, {self.ranks} ranks, {self.rails} rails"]
        self.manual = fault not in ("refused", "no rail", "death") and chance.random() < 0.4
        self.kept = -1 if fault == "no rail" else chance.randrange(self.rails)
        self.living = set(range(self.ranks))
        self.dies_at = chance.randrange(60, STEPS - 50) if fault == "death" else -1
        self.victim = chance.randrange(self.ranks)
        self.network = Network(
            self.ranks,
            self.rails,
            seed=seed,
            manual=self.manual,
            refusal=chance.choice([errno.EINVAL, errno.EACCES, errno.EREMOTEIO, errno.ENOMEM])
            if fault == "refused"
            else errno.ECONNRESET,
            window=chance.choice([1 << 20, 8, 3]),
            again=chance.choice([0, 100]),
            send_depth=chance.choice([4, 16, 64]),
            revoke_s=0.05 if fault in ("no rail", "death") else 100.0,
        )
        if fault == "receives":
            self.network.wire.scripted_refuse_receives(900)
        self.traffic = Traffic(self.network)

    def go_wrong(self) -> None:
        chance, network = self.chance, self.network
        rail = chance.choice([rail for rail in range(self.rails) if rail != self.kept])
        one = chance.choice(sorted(self.living))
        other = chance.choice([rank for rank in range(self.ranks) if rank != one])
        what = chance.choice(["give up"] if self.manual or self.fault == "refused" else ["give up", "cut"])
        if self.fault == "completion queues":
            what = "queue"
        self.events.append(f"{what} {rail} {one} {other}")
        if what == "give up":
            network.give_up(one, rail)
        elif what == "cut":
            network.cut(one, other, rail)
        else:
            network.wire.scripted_break_queue(network.endpoint(one, rail), 0, errno.EIO)

    def also(self, step: int) -> None:
        """What a fault does beside taking rails away."""
        network, chance = self.network, self.chance
        if self.fault == "messages" and chance.random() < 0.2:
            one, other = chance.sample(range(self.ranks), 2)
            for rail in range(self.rails):
                network.wire.scripted_lose_messages(network.endpoint(one, rail), network.endpoint(other, rail))
        if step == self.dies_at:
            self.events.append(f"rank {self.victim} dies")
            self.living.discard(self.victim)
            for rail in range(self.rails):
                network.wire.scripted_kill(network.endpoint(self.victim, rail))
        elif 0 <= self.dies_at < step and step % 20 == 0:
            for one in self.living:
                network.cut(one, self.victim, chance.randrange(self.rails))

    def go(self) -> list[str]:
        for step in range(STEPS):
            self.traffic.step(self.living)
            if step > 50 and self.chance.random() < 0.02:
                self.go_wrong()
            self.also(step)
        return self.traffic.finish(self.living)


@pytest.mark.parametrize("fault", ["cut", "refused", "messages", "completion queues", "receives", "no rail", "death"])
def test_losses_at_every_moment(fault: str) -> None:
    moved = 0
    for seed in SEEDS:
        run = Run(seed, fault)
        try:
            left = run.go()
        except (AssertionError, PromiseBroken) as error:
            raise AssertionError(f"{error}: {run.events}") from error
        assert not left, f"{left[:3]}: {run.events}"
        if fault not in ("no rail", "death"):
            words = [driver.last_error(0) for driver in run.network.drivers]
            assert run.traffic.failed == 0, f"{run.events}, {words}"
        moved += sum(run.network.statistics(rank).moved for rank in range(run.ranks))
        run.network.close()
    assert moved > 30, "hardly a write was under way when its rail was lost: this test shows nothing"


@pytest.fixture
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    found = Network(**request.param)
    yield found
    found.close()


def write(peer: int, nbytes: int, immediate: int) -> abi.Write:
    return abi.Write(peer, abi.IMMEDIATE, 0, 0, OUTBOX, 0, nbytes, immediate, 0)


def progress(network: Network, ranks: tuple[int, ...], limit_s: float = 5.0) -> bool:
    """Until all writes of these ranks have ended."""
    drivers = [network.drivers[rank] for rank in ranks]
    try:
        for driver in drivers:
            driver.settle(limit_s, between=lambda: (network.wire.scripted_step(20), [it.progress() for it in drivers]))
    except PromiseBroken:
        return False
    return True


@pytest.mark.parametrize("network", [{"ranks": 2, "rails": 2, "revoke_s": 0.1, "manual": True}], indirect=True)
def test_two_ranks_with_no_rail_in_common(network: Network) -> None:
    """Each has given up the rail that the other still uses: no message gets through, and both say so in time."""
    for rank in range(2):
        network.give_up(rank, rank)
        network.drivers[rank].poll(0)
        network.drivers[rank].post(0, [write(1 - rank, 64, number) for number in range(4)])
    assert progress(network, (0, 1))
    for rank in range(2):
        assert len(network.drivers[rank].errors) == 4
        assert network.drivers[rank].peer_state(1 - rank) == 1
        assert f"rank {1 - rank} did not say within 0.1 s" in network.drivers[rank].last_error(0)


@pytest.mark.parametrize("network", [{"ranks": 3, "rails": 3, "revoke_s": 0.1}], indirect=True)
def test_a_rank_that_is_gone_when_it_is_asked(network: Network) -> None:
    """Its machine has no power: no connection breaks. Writes to it end, those to others arrive."""
    for rail in range(3):
        for rank in (0, 1):
            network.wire.scripted_hold(network.endpoint(rank, rail), network.endpoint(2, rail), 1)
    network.drivers[0].post(0, [write(2, 64, 1), write(2, 12288, 2), write(1, 12288, 3)])
    network.give_up(0, 1)
    assert progress(network, (0, 1))
    assert {posted.peer for posted in network.drivers[0].errors} == {2}
    assert network.drivers[0].peer_state(2) == 1
    for _ in range(50):  # an entry may show later than its write is complete
        network.drivers[1].progress()
    assert {number for number, _ in network.drivers[1].arrived} == {3}


@pytest.mark.parametrize("network", [{"ranks": 3, "rails": 2, "window": 2}], indirect=True)
def test_a_rank_that_takes_nothing_holds_up_no_other(network: Network) -> None:
    """Parts of large writes wait for room: those to a rank without any must not stand before those to another."""
    for rail in range(2):
        network.wire.scripted_hold(network.endpoint(0, rail), network.endpoint(2, rail), 1)
    driver = network.drivers[0]
    driver.post(0, [write(2, 12288, number) for number in range(6)])
    driver.post(0, [write(1, 12288, number) for number in range(6)])
    for _ in range(300):
        network.wire.scripted_step(20)
        driver.progress()
        network.drivers[1].progress()
    assert {number for number, _ in network.drivers[1].arrived} == {*range(6)}
    assert driver.outstanding == 6


@pytest.mark.parametrize("network", [{"ranks": 2, "rails": 2}], indirect=True)
def test_an_arrival_queue_that_breaks_is_an_error(network: Network) -> None:
    """What lies in it was acknowledged, and nobody will read it: with the rail given up it would be lost unheard."""
    network.wire.scripted_break_queue(network.endpoint(1, 0), 1, errno.EIO)
    with pytest.raises(PromiseBroken, match=r"rail 0: its arrival queue broke"):
        network.drivers[1].poll_arrivals(0)


@pytest.mark.parametrize("network", [{"ranks": 2, "rails": 2, "manual": True}], indirect=True)
def test_a_receive_that_was_refused_is_posted_later(network: Network) -> None:
    """There are 64 of them, and each message takes one: here writes of nothing in one machine, sent as messages."""
    network.wire.scripted_refuse_receives(500)
    for number in range(400):
        network.drivers[0].post(0, [write(1, 0, number)])
        assert progress(network, (0, 1)), f"message {number} found no receive"


@pytest.mark.parametrize("network", [{"ranks": 2, "rails": 3, "stripe_bytes": 1}], indirect=True)
@pytest.mark.parametrize("nbytes", [1, 2, 3, 4095, 4096, 12288, 12290, WINDOW // 4])
def test_any_length_is_cut(network: Network, nbytes: int) -> None:
    driver = network.drivers[0]
    driver.post(0, [write(1, nbytes, nbytes & 0xFFFF)])
    assert progress(network, (0, 1))
    for _ in range(50):  # an entry may show later than its write is complete
        network.drivers[1].progress()
    assert [number for number, _ in network.drivers[1].arrived] == [nbytes & 0xFFFF]
    assert network.statistics(0).failed == 0
