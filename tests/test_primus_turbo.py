"""The Primus-Turbo backend. Primus-Turbo itself needs an AMD GPU, so its calls are repeated here."""

from __future__ import annotations

import pytest

import primus_turbo_cases
from ranks import RankPool


@pytest.mark.parametrize(("generation", "ranks", "domain"), [(1, 2, 0), (2, 3, 1)])
def test_backend(pool: RankPool, generation: int, ranks: int, domain: int) -> None:
    pool.run(primus_turbo_cases.backend, ranks=ranks, domain=domain, arguments={"generation": generation})
