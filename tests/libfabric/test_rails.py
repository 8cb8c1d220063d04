"""Several endpoints as rails of one lane: striping, and the loss of one in the middle of a write."""

from __future__ import annotations

import random

import pytest
from rig import Rank, Ranks
from variants import VARIANTS, Variant

LARGE = 1 << 20
OUTBOX = 4 << 20


def content(seed: int, nbytes: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def send_large(rank: Rank, rounds: int) -> dict[str, int]:
    for seed in range(rounds):
        rank.data[OUTBOX : OUTBOX + LARGE] = content(seed, LARGE)
        rank.driver.post(0, [rank.write(1, OUTBOX, 4096 * (seed % 3), LARGE - seed, seed)])
        rank.driver.wait_all()
        rank.meet()
    return rank.transport.statistics()


def receive_large(rank: Rank, rounds: int) -> int:
    for seed in range(rounds):
        assert rank.until(lambda seed=seed: (seed, 0xFFFFFFFF) in rank.driver.arrived)  # type: ignore[misc]
        begin = 4096 * (seed % 3)
        # At the moment of the immediate, all parts are there.
        assert bytes(rank.data[begin : begin + LARGE - seed]) == content(seed, LARGE)[: LARGE - seed]
        rank.meet()
    return len(rank.driver.arrived)


@pytest.mark.parametrize("rails", [2, 3])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_large_writes_are_striped_and_arrive_once(variant: Variant, rails: int) -> None:
    options = {**variant.options, "rails": rails, "stripe_bytes": 65536}
    with Ranks(options) as ranks:
        results = ranks.run({0: (send_large, 5), 1: (receive_large, 5)})
        assert results[0]["split"] == 5
        assert results[1] == 5


SLOT = 16384
SLOTS = 128


def send_and_break(rank: Rank, breaker: int) -> dict[str, int]:
    """Many writes under way, small and striped; one rail goes away among them."""
    from uccl_ep_libfabric.library import native

    rank.data[OUTBOX : OUTBOX + SLOT * SLOTS] = content(1, SLOT * SLOTS)
    rank.meet()
    for half in range(2):
        writes = [rank.write(1, OUTBOX, 3 << 20, 1 << 19, 1000 + half)]
        for index in range(half * SLOTS // 2, (half + 1) * SLOTS // 2):
            writes.append(rank.write(1, OUTBOX + index * SLOT, index * SLOT, SLOT, index))
        rank.driver.post(0, writes)
        if half == 0:
            if breaker == rank.rank:
                native().lib.fab_break_rail(rank.transport.native_context, 0, 1)
            rank.meet()
    rank.driver.wait_all(30.0)
    rank.meet()
    return rank.transport.statistics()


def receive_and_break(rank: Rank, breaker: int) -> tuple[list[int], bool]:
    from uccl_ep_libfabric.library import native

    rank.meet()
    if breaker == rank.rank:
        native().lib.fab_break_rail(rank.transport.native_context, 0, 1)
    rank.meet()
    wanted = {*range(SLOTS), 1000, 1001}
    assert rank.until(lambda: {number for number, _ in rank.driver.arrived} == wanted, 30.0), (
        f"missing {sorted(wanted - {number for number, _ in rank.driver.arrived})[:5]}"
    )
    same = bytes(rank.data[: SLOT * SLOTS]) == content(1, SLOT * SLOTS)
    rank.meet()
    return sorted({number for number, _ in rank.driver.arrived}), same


@pytest.mark.parametrize("breaker", [0, 1])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_rail_lost_in_the_middle_costs_nothing_but_speed(variant: Variant, breaker: int) -> None:
    options = {**variant.options, "rails": 2, "stripe_bytes": 65536}
    with Ranks(options) as ranks:
        results = ranks.run({0: (send_and_break, breaker), 1: (receive_and_break, breaker)})
        arrived, same = results[1]
        assert same
        assert arrived == [*range(SLOTS), 1000, 1001]
        assert results[0]["rails_lost"] == 1
        assert results[0]["failed"] == 0


def write_into_a_rail_given_up(rank: Rank, nbytes: int) -> dict[str, int]:
    """Writes after the other has given up its side of the rail, and before this rank has heard of it."""
    rank.meet()
    rank.meet(polling=False)
    rank.driver.post(0, [rank.write(1, OUTBOX, 8 * number, nbytes, number) for number in range(SIGNALS)])
    rank.driver.wait_all(20.0)
    rank.meet()
    return rank.transport.statistics()


def give_up_a_rail(rank: Rank) -> set[int]:
    from uccl_ep_libfabric.library import native

    rank.meet()
    native().lib.fab_break_rail(rank.transport.native_context, 0, 0)  # of idle rails the first is written to
    rank.driver.progress()
    rank.meet(polling=False)
    rank.until(lambda: {number for number, _ in rank.driver.arrived} == {*range(SIGNALS)}, 5.0)
    rank.meet()
    return {number for number, _ in rank.driver.arrived}


SIGNALS = 12


@pytest.mark.parametrize("nbytes", [0, 8])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_what_goes_into_a_rail_that_the_other_has_given_up_arrives(variant: Variant, nbytes: int) -> None:
    """Writes of nothing, which carry signals, as well: no completion may be given for what nobody will take in."""
    with Ranks({**variant.options, "rails": 2}) as ranks:
        results = ranks.run({0: (write_into_a_rail_given_up, nbytes), 1: (give_up_a_rail,)})
        assert results[1] == {*range(SIGNALS)}
        assert results[0]["failed"] == 0


def break_own_rail(rank: Rank, rail: int) -> dict[str, int]:
    """Both at once, each another rail, with writes in both directions that fill the queues."""
    from uccl_ep_libfabric.library import native

    other = 1 - rank.rank
    rank.data[OUTBOX : OUTBOX + LARGE] = content(rank.rank, LARGE)
    rank.meet()
    writes = [
        rank.write(other, OUTBOX + 4096 * i, 4096 * i, STRIPED, i) for i in range(LARGE // 4096 - STRIPED // 4096)
    ]
    half = len(writes) // 2
    rank.driver.post(0, writes[:half])
    native().lib.fab_break_rail(rank.transport.native_context, 0, rail)
    rank.driver.post(0, writes[half:])
    rank.driver.wait_all(20.0)
    wanted = {*range(len(writes))}
    assert rank.until(lambda: {number for number, _ in rank.driver.arrived} == wanted, 30.0), (
        f"missing {sorted(wanted - {number for number, _ in rank.driver.arrived})[:5]}, "
        f"{rank.transport.statistics()}, {rank.driver.errors[:2]}, {rank.driver.last_error(0)}"
    )
    rank.meet()
    end = 4096 * (len(writes) - 1) + STRIPED
    assert bytes(rank.data[:end]) == content(other, LARGE)[:end]
    return rank.transport.statistics()


STRIPED = 32768


@pytest.mark.parametrize("send_depth", [16, 1024])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_both_ranks_lose_a_rail_at_once_with_full_queues(variant: Variant, send_depth: int) -> None:
    """Two of three rails go; what says so finds room however many parts of writes there are."""
    options = {**variant.options, "rails": 3, "stripe_bytes": 8192, "send_depth": send_depth}
    with Ranks(options) as ranks:
        results = ranks.run({0: (break_own_rail, 0), 1: (break_own_rail, 2)})
        for rank in range(2):
            assert results[rank]["failed"] == 0
            assert results[rank]["rails_lost"] == 2


def count_losses(rank: Rank) -> int:
    from uccl_ep_libfabric.library import native

    rank.driver.post(0, [rank.write(1, OUTBOX, 0, 8, 1)])
    rank.driver.wait_all()
    for rail in range(2):
        native().lib.fab_break_rail(rank.transport.native_context, 0, rail)
    rank.driver.progress()
    rank.driver.post(0, [rank.write(1, OUTBOX, 0, 8, 2)] * 3)
    assert rank.until(lambda: rank.driver.outstanding == 0)
    assert rank.driver.peer_state(1) == 1
    assert "rail" in rank.driver.last_error(0)
    return len(rank.driver.errors)


def wait_for_nothing(rank: Rank) -> None:
    rank.until(lambda: False, 0.5)


@pytest.mark.parametrize("variant", VARIANTS[:1], ids=str)
def test_the_loss_of_all_rails_is_a_clear_error(variant: Variant) -> None:
    with Ranks({**variant.options, "rails": 2}) as ranks:
        assert ranks.run({0: (count_losses,), 1: (wait_for_nothing,)})[0] == 3
