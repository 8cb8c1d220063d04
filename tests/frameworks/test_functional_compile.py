"""An MoE block of uccl_ep.functional through torch.compile(fullgraph=True) with its default code generator."""

from __future__ import annotations

import shutil

import pytest

from ranks import RankPool


@pytest.mark.full  # a minute of compiling
@pytest.mark.skipif(shutil.which("g++") is None, reason="the code generator needs g++")
@pytest.mark.parametrize("worst", [False, True])
def test_generated_code(four: RankPool, worst: bool) -> None:
    arguments = {"backend": "inductor", "worst": worst}
    four.run("functional_cases:compiled", ranks=2, arguments=arguments, timeout_s=240)
