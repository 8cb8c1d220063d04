"""A deterministic pairwise generator: few rows in which every legal pair of values occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def pairwise(
    parameters: Mapping[str, Sequence[Any]], legal: Callable[[Row], bool], *, seed: int = 0, attempts: int = 30
) -> list[Row]:
    """Rows over ``parameters`` for which ``legal`` holds, so that each pair of values that occurs in some legal
    row (as far as a random search finds one) occurs in a row of the result."""
    rng = random.Random(seed)
    names = list(parameters)
    values = {n: list(parameters[n]) for n in names}
    uncovered = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(len(values[names[a]]))
        for j in range(len(values[names[b]]))
    }
    rows: list[Row] = []
    while uncovered:
        target = min(uncovered)
        best: tuple[int, ...] | None = None
        best_gain = 0
        tries = 0
        while tries < attempts or (best is None and tries < 400):
            tries += 1
            choice = _fill(rng, names, values, target, uncovered)
            if not legal({n: values[n][c] for n, c in zip(names, choice, strict=True)}):
                continue
            gain = len(_pairs(choice) & uncovered)
            if gain > best_gain:
                best, best_gain = choice, gain
        if best is None:
            uncovered.discard(target)  # no legal row found that has this pair
            continue
        uncovered -= _pairs(best)
        rows.append({n: values[n][c] for n, c in zip(names, best, strict=True)})
    return rows


Pair = tuple[tuple[int, int], tuple[int, int]]


def _pairs(choice: tuple[int, ...]) -> set[Pair]:
    return set(itertools.combinations(enumerate(choice), 2))


def _fill(
    rng: random.Random, names: list[str], values: Mapping[str, list[Any]], target: Pair, uncovered: set[Pair]
) -> tuple[int, ...]:
    """A row with ``target`` in it; each other value is the best of three draws by the pairs it would cover."""
    fixed = dict(target)
    order = [i for i in range(len(names)) if i not in fixed]
    rng.shuffle(order)
    for i in order:
        draws = [rng.randrange(len(values[names[i]])) for _ in range(3)]
        fixed[i] = max(draws, key=lambda v: sum(tuple(sorted(((i, v), other))) in uncovered for other in fixed.items()))
    return tuple(fixed[i] for i in range(len(names)))
