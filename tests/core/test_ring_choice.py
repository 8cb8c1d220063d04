"""The ring of a signal: every phase spreads over all rings and all proxies, whatever the shape of the group."""

from __future__ import annotations

from collections import Counter

import pytest

from uccl_ep_core import _native

RINGS_PER_PROXY = 4
KIND = _native.SignalKind


def layout(ranks: int, domain: int, channels: int, parts: int = 1) -> _native.Layout:
    return _native.Layout(
        num_ranks=ranks,
        ranks_per_domain=domain,
        num_channels=channels,
        num_slots=8,
        slot_bytes=1024,
        has_remote=True,
        ll_parts=parts,
    )


def most_and_fair(rings: list[int], num_rings: int) -> tuple[int, int]:
    """How often the busiest ring is used, and how often it must be at least."""
    return max(Counter(rings).values()), -(-len(rings) // num_rings)


@pytest.mark.parametrize("proxies", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("channels", [1, 3, 8, 24, 128])
@pytest.mark.parametrize(("ranks", "domain"), [(2, 1), (3, 1), (7, 1), (16, 1), (4, 2), (24, 8), (64, 8), (160, 8)])
def test_no_ring_and_no_proxy_has_much_more_than_its_share(
    ranks: int, domain: int, channels: int, proxies: int
) -> None:
    parts = min(channels, proxies)
    shape, num_rings = layout(ranks, domain, channels, parts), proxies * RINGS_PER_PROXY
    for rank in (0, ranks - 1):
        others = [peer for peer in range(ranks) if peer // domain != rank // domain]
        rail = [peer for peer in others if peer % domain == rank % domain]
        phases = [
            (others, KIND.LOW_LATENCY_DISPATCH, parts),
            (others, KIND.LOW_LATENCY_COMBINE, parts),
            (others, KIND.LOW_LATENCY_COMBINE_CREDIT, 1),
            (others, KIND.DIRECT_DATA, channels),
            (rail, KIND.RAIL_DATA, channels),
            (rail, KIND.RAIL_CREDIT, channels),
        ]
        for peers, kind, used in phases:
            rings = [
                shape.ring_index(peer, shape.signal_index(kind, rank, channel), num_rings)
                for peer in peers
                for channel in range(used)
            ]
            assert set(rings) <= set(range(num_rings))
            # Two runs of neighbours, before the own domain and behind it: each may bring one more than its share.
            most, fair = most_and_fair(rings, num_rings)
            assert most <= fair + 1, f"{kind} of rank {rank}: {Counter(rings)}"
            most, fair = most_and_fair([ring % proxies for ring in rings], proxies)
            assert most <= fair + 1, f"{kind} of rank {rank} by proxy"


def test_each_part_of_a_message_has_a_proxy_of_its_own() -> None:
    shape = layout(8, 2, 6, parts=4)
    for peer in range(8):
        rings = [shape.ring_index(peer, shape.signal_index(KIND.LOW_LATENCY_COMBINE, 3, part), 16) for part in range(4)]
        assert {ring % 4 for ring in rings} == set(range(4))


def test_a_signal_always_has_the_same_ring() -> None:
    shape = layout(8, 2, 4)
    for kind in (KIND.DIRECT_DATA, KIND.RAIL_DATA, KIND.LOW_LATENCY_DISPATCH, KIND.BARRIER):
        signal = shape.signal_index(kind, 3, 2)
        assert len({shape.ring_index(5, signal, 12) for _ in range(3)}) == 1
