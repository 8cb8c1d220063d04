"""torchtitan's deepep primitives, forward and backward."""

from __future__ import annotations

import pytest

from ranks import RankPool
from versions import needs

pytestmark = [needs("torchtitan"), needs("triton")]


@pytest.mark.parametrize(("ranks", "domain"), [(2, 0), (4, 2)])
@pytest.mark.parametrize("score_before_experts", [True, False])
def test_dispatch_and_combine_tokens(four: RankPool, ranks: int, domain: int, score_before_experts: bool) -> None:
    arguments = {"score_before_experts": score_before_experts}
    four.run("torchtitan_ranks:block", ranks=ranks, domain=domain, arguments=arguments, timeout_s=120)
