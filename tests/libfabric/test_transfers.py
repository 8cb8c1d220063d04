"""Writes between processes: exact bytes, immediates after their payload, full queues, several lanes."""

from __future__ import annotations

import random

import pytest
from rig import Rank, Ranks
from variants import VARIANTS, Variant

SLOT = 64 << 10
SLOTS = 64
OUTBOX = SLOT * SLOTS  # the lower half of the window receives, the upper half sends


def slot_bytes(index: int, seed: int) -> tuple[int, bytes]:
    """Offset inside the slot, and content, of write number `index`; equal on all ranks."""
    chooser = random.Random(f"{seed}/{index}")
    size = chooser.choice([0, 1, 7, 8, 63, 64, 65, 4095, 4096, 4097, 7168, 14336, SLOT - 128])
    return chooser.randrange(0, 128), chooser.randbytes(size)


def exchange(rank: Rank, seed: int, lane: int) -> int:
    """Every rank fills all slots of its neighbour and checks each of its own when its immediate arrives."""
    neighbour = (rank.rank + 1) % rank.size
    checked: list[int] = []

    def check(immediate: int, _peer: int) -> None:
        offset, content = slot_bytes(immediate & 0xFFFF, seed)
        begin = (immediate & 0xFFFF) * SLOT + offset
        assert bytes(rank.data[begin : begin + len(content)]) == content, f"slot {immediate & 0xFFFF}"
        assert immediate >> 16 == 0xBEEF, "the upper half of the immediate was lost"
        checked.append(immediate & 0xFFFF)

    rank.driver.on_arrival = check
    rank.data[:OUTBOX] = bytes(OUTBOX)
    rank.meet()
    writes = []
    for index in range(SLOTS):
        offset, content = slot_bytes(index, seed)
        begin = OUTBOX + index * SLOT
        rank.data[begin : begin + len(content)] = content
        writes.append(rank.write(neighbour, begin, index * SLOT + offset, len(content), 0xBEEF0000 | index))
    order = random.Random(seed)
    order.shuffle(writes)
    rank.driver.post(lane, writes)
    rank.driver.wait_all()
    assert rank.until(lambda: len(checked) == SLOTS), f"only {len(checked)} of {SLOTS} arrived"
    assert sorted(checked) == list(range(SLOTS))
    for index in range(SLOTS):  # nothing was written beside the slots' contents
        offset, content = slot_bytes(index, seed)
        slot = bytes(rank.data[index * SLOT : (index + 1) * SLOT])
        assert not any(slot[:offset]) and not any(slot[offset + len(content) :])
    rank.driver.on_arrival = None
    return len(checked)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_exact_bytes_and_immediates_after_payload(variant: Variant) -> None:
    with Ranks(variant.options, size=3, lanes=2) as ranks:
        for seed in range(3):
            results = ranks.run(dict.fromkeys(range(3), (exchange, seed, seed % 2)))
            assert results == {0: SLOTS, 1: SLOTS, 2: SLOTS}


def flood(rank: Rank, count: int) -> dict[str, int]:
    """Post as fast as possible, polling only when nothing more is accepted."""
    refused = 0
    posted = 0
    writes = [rank.write(1, OUTBOX, 0, 7168, index & 0xFFFF) for index in range(256)]
    while posted < count:
        accepted = rank.driver.post_once(0, writes[: min(256, count - posted)])
        assert accepted >= 0, rank.driver.last_error()
        posted += accepted
        if accepted < 256:
            refused += 1
            rank.driver.poll(0)
    rank.driver.wait_all(30.0)
    return {"refused": refused, **rank.transport.statistics()}


def drain(rank: Rank, count: int) -> int:
    assert rank.until(lambda: len(rank.driver.arrived) >= count, 30.0), f"{len(rank.driver.arrived)} of {count}"
    rank.until(lambda: False, 0.05)
    return len(rank.driver.arrived)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_full_queue_accepts_fewer_and_loses_nothing(variant: Variant) -> None:
    count = 8000
    with Ranks(variant.options) as ranks:
        results = ranks.run({0: (flood, count), 1: (drain, count)})
        assert results[1] == count
        assert results[0]["refused"] > 0, "the test did not fill the queue"
        assert results[0]["posted"] == results[0]["completed"] == count
        assert results[0]["failed"] == 0


def talk_on_lane(rank: Rank, lanes: int) -> list[int]:
    other = 1 - rank.rank
    for lane in range(lanes):
        rank.driver.post(lane, [rank.write(other, OUTBOX, 0, 8, lane)])
    rank.driver.wait_all()
    assert rank.until(lambda: len(rank.driver.arrived) == lanes)
    return sorted(immediate for immediate, _ in rank.driver.arrived)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_lanes_below_the_most(variant: Variant) -> None:
    """Endpoints of lanes that connect does not ask for are closed, the others work."""
    with Ranks({**variant.options, "lanes": 4}, lanes=3) as ranks:
        assert ranks.run({0: (talk_on_lane, 3), 1: (talk_on_lane, 3)}) == {0: [0, 1, 2], 1: [0, 1, 2]}
