"""Queue pairs that fail at every moment, also while they are being replaced, over a device that needs no hardware.

Every write completes once without an error in the end, after its bytes are there; no copy lands on newer bytes; every
immediate arrives.
"""

from __future__ import annotations

import pytest
from scripted_ends import Group, replace_pyverbs

SEEDS = range(1, 81)
STEPS = 1000
MOST_STEPS = 30000


def finish(group: Group) -> None:
    for _ in range(MOST_STEPS):
        group.step(0.0, False)
        living = [group.ends[rank] for rank in group.living]
        if not group.unfinished() and not any(end.tokens or end.down or end.again for end in living):
            return


@pytest.mark.parametrize("refused", [0, 10], ids=["failures", "refused posts"])
def test_queue_pairs_that_fail_at_every_moment(refused: int, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_pyverbs(monkeypatch)
    renewals = errors = 0
    for seed in SEEDS:
        group = Group(seed, refused=refused)
        try:
            for _ in range(STEPS):
                group.step(0.01, True)
            finish(group)
            left = group.unfinished()
        except AssertionError as error:
            raise AssertionError(f"{error}: seed {seed}") from error
        assert not left, f"{left[:3]}: seed {seed}, {group.faults} faults"
        renewals += sum(end.plane.statistics(0)["renewals"] for end in group.ends)
        errors += sum(end.errors for end in group.ends)
        group.close()
    assert renewals > 300 and errors > 300, "hardly a queue pair was replaced: this test shows nothing"


def test_a_rank_that_dies_among_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes to it end with an error in time, those to others are not lost."""
    replace_pyverbs(monkeypatch)
    dead = 0
    for seed in SEEDS:
        group = Group(seed, limit_s=20.0)
        victim = group.chance.randrange(group.ranks)
        at = group.chance.randrange(STEPS // 2)
        for step in range(STEPS):
            group.step(0.01, True)
            if step == at:
                group.kill(victim)
        finish(group)
        assert not group.unfinished(), f"seed {seed}: {group.unfinished()[:3]}"
        for rank in group.living:
            assert not group.ends[rank].tokens, f"seed {seed}: rank {rank} waits for a completion"
            dead += group.ends[rank].driver.peer_state(victim) == 1
            assert all(group.ends[rank].driver.peer_state(other) == 0 for other in group.living - {rank})
        group.close()
    assert dead > len(SEEDS) // 2
