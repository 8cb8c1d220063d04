"""vLLM's high-throughput, low-latency and v2 adapters; `.ci/frameworks vllm` fetches its wheel and runs this."""

from __future__ import annotations

import os

import pytest

from ranks import RankPool

pytestmark = pytest.mark.skipif(
    "UCCL_EP_TEST_VLLM" not in os.environ, reason="needs the files of vLLM 0.33.0's wheel: run .ci/frameworks vllm"
)


@pytest.mark.parametrize(("ranks", "domain"), [(2, 0), (4, 2)])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("block", [False, True], ids=["bf16", "fp8"])
def test_high_throughput(four: RankPool, ranks: int, domain: int, asynchronous: bool, block: bool) -> None:
    arguments = {"block": block, "asynchronous": asynchronous}
    four.run("vllm_ranks:high_throughput", ranks=ranks, domain=domain, arguments=arguments, timeout_s=120)


@pytest.mark.parametrize(("ranks", "domain"), [(2, 0), (4, 2)])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_low_latency(four: RankPool, ranks: int, domain: int, asynchronous: bool, fp8: bool) -> None:
    arguments = {"fp8": fp8, "asynchronous": asynchronous}
    four.run("vllm_ranks:low_latency", ranks=ranks, domain=domain, arguments=arguments, timeout_s=120)


@pytest.mark.parametrize(("ranks", "domain"), [(2, 0), (4, 2)])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
@pytest.mark.parametrize("block", [False, True], ids=["bf16", "fp8"])
def test_v2(four: RankPool, ranks: int, domain: int, asynchronous: bool, decode: bool, block: bool) -> None:
    arguments = {"decode": decode, "block": block, "asynchronous": asynchronous}
    four.run("vllm_ranks:v2", ranks=ranks, domain=domain, arguments=arguments, timeout_s=120)
