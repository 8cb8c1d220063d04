"""A deterministic pairwise generator: few rows in which every legal pair of values occurs; and samples of them."""

from __future__ import annotations

import itertools
import random
from collections import Counter
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
    # open_pairs[i][v][j][w]: value v of parameter i still wants to meet value w of parameter j. Both ways round.
    sizes = [len(values[n]) for n in names]
    open_pairs = [[[[i != j] * m for j, m in enumerate(sizes)] for _ in range(n)] for i, n in enumerate(sizes)]
    rows: list[Row] = []
    every_value = [(i, v) for i, n in enumerate(sizes) for v in range(n)]
    for a, v in every_value:
        for b, w in every_value[sum(sizes[: a + 1]) :]:
            while open_pairs[a][v][b][w]:
                best: tuple[int, ...] | None = None
                best_gain = 0
                tries = 0
                while tries < attempts or (best is None and tries < 400):
                    tries += 1
                    choice = _fill(rng, sizes, {a: v, b: w}, open_pairs)
                    if not legal({n: values[n][c] for n, c in zip(names, choice, strict=True)}):
                        continue
                    gain = _gain(choice, open_pairs)
                    if gain > best_gain:
                        best, best_gain = choice, gain
                if best is None:
                    open_pairs[a][v][b][w] = open_pairs[b][w][a][v] = False  # no legal row found that has this pair
                    continue
                for i, j in itertools.permutations(range(len(names)), 2):
                    open_pairs[i][best[i]][j][best[j]] = False
                rows.append({n: values[n][c] for n, c in zip(names, best, strict=True)})
    return rows


def sample(rows: Sequence[Row], times: int) -> list[int]:
    """Indices of few of the ``rows``, in order: each value of each parameter occurs in at least ``times`` of them, or
    in as many as there are."""
    of = [list(row.items()) for row in rows]
    missing = {value: min(times, n) for value, n in Counter(value for row in of for value in row).items()}
    left = set(range(len(rows)))
    while any(missing.values()):
        best = max(sorted(left), key=lambda i: sum(missing[value] > 0 for value in of[i]))
        left.remove(best)
        for value in of[best]:
            missing[value] = max(0, missing[value] - 1)
    return sorted(set(range(len(rows))) - left)


OpenPairs = list[list[list[list[bool]]]]


def _gain(choice: tuple[int, ...], open_pairs: OpenPairs) -> int:
    gain = 0
    for i, v in enumerate(choice):
        mine = open_pairs[i][v]
        for j in range(i):
            gain += mine[j][choice[j]]
    return gain


def _fill(rng: random.Random, sizes: list[int], target: dict[int, int], open_pairs: OpenPairs) -> tuple[int, ...]:
    """A row with ``target`` in it; each other value is the best of three draws by the pairs it would cover."""
    fixed = dict(target)
    order = [i for i in range(len(sizes)) if i not in fixed]
    rng.shuffle(order)
    for i in order:
        draws = [rng.randrange(sizes[i]) for _ in range(3)]
        fixed[i] = max(draws, key=lambda v: sum(open_pairs[i][v][j][w] for j, w in fixed.items()))
    return tuple(fixed[i] for i in range(len(sizes)))
