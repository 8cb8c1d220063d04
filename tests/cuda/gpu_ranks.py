"""Dispatch and combine on real GPUs: the cases of the CPU suite bit for bit, then times.

    python tests/cuda/gpu_ranks.py check --ranks 2 [--domain 1]
    python tests/cuda/gpu_ranks.py bench --ranks 2 --json FILE

Ranks share GPUs where there are fewer of them. Times are CUDA events around whole operations, the slowest rank of
each iteration, the median over iterations, with NCCL's all_to_all of as many bytes in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing


def _to(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(_to(item, device) for item in value)
    return value


class OnGpu:
    """A buffer that takes and gives CPU tensors, and works on the GPU."""

    def __init__(self, buffer: Any, device: str) -> None:
        self._buffer, self._device = buffer, device

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._buffer, name)
        if not callable(attribute) or name == "get_next_low_latency_combine_buffer":
            return attribute

        def call(*arguments: Any, **keywords: Any) -> Any:
            on_device = {key: _to(value, self._device) for key, value in keywords.items()}
            result = attribute(*[_to(argument, self._device) for argument in arguments], **on_device)
            torch.cuda.synchronize()
            for key, value in keywords.items():
                if isinstance(value, torch.Tensor) and key.endswith("stats"):
                    value.copy_(on_device[key])
            return tuple(_to(item, "cpu") for item in result) if type(result) is tuple else _to(result, "cpu")

        return call


def check(rank: int, num_ranks: int, device: str, options: dict[str, Any]) -> None:
    import cases
    import closed_form
    from uccl_ep import Buffer

    group = dist.group.WORLD
    hint = Buffer.get_low_latency_rdma_size_hint(128, 7168, num_ranks, 288)
    buffer = Buffer(group, low_latency_mode=True, num_rdma_bytes=hint, device=device, options=options)
    if rank == 0:
        print(json.dumps(buffer.describe(), indent=1), flush=True)
    gpu = OnGpu(buffer, device)
    ctx = SimpleNamespace(rank=rank, num_ranks=num_ranks, group=group)
    done = 0
    started = time.monotonic()
    experts = 24 * num_ranks
    for seed, (hidden, topk, kind, routing, dtype, bias, cached) in enumerate(
        [
            (64, 2, "even", "random", "bf16", 0, False),
            (100, 4, "rotate", "holes", "fp32", 1, True),
            (2880, 4, "first", "random", "fp16", 2, False),
            (7168, 8, "rotate", "holes", "bf16", 2, True),
            (7168, 8, "idle", "skewed", "fp8", 0, True),
            (2048, 10, "zero", "random", "bf16", 0, False),
            (1536, 6, "even", "one_rank", "fp64", 1, False),
            (2048, 8, "even", "one_expert", "bf16", 0, False),
            (2048, 12, "even", "nothing", "bf16", 1, True),
            (4096, 8, "rotate", "starved", "bf16", 0, True),
        ]
    ):
        for index in ("int64", "int32"):
            cases.high_throughput(
                ctx, hidden=hidden, topk=topk, experts=experts, tokens=closed_form.token_counts(kind, num_ranks, seed),
                routing=routing, dtype=dtype, index=index, bias=bias, cached=cached, seed=seed, buffer=gpu,
                contiguous=index == "int64",
            )  # fmt: skip
            done += 1
    tokens = [4096 - 7 * r for r in range(num_ranks)]
    cases.high_throughput(
        ctx, hidden=7168, topk=8, experts=256 // num_ranks * num_ranks, tokens=tokens, seed=77, buffer=gpu
    )
    done += 1
    for seed, (hidden, topk, kind, routing, cast) in enumerate(
        [
            (64, 2, "even", "random", "none"),
            (2880, 4, "rotate", "holes", "none"),
            (7168, 8, "even", "random", "fp8"),
            (7168, 8, "first", "holes", "round"),
            (7168, 8, "idle", "skewed", "ue8m0"),
            (2048, 10, "zero", "random", "none"),
            (1536, 6, "even", "one_rank", "none"),
            (2048, 12, "even", "nothing", "fp8"),
        ]
    ):
        for zero_copy in (False, True):
            cases.low_latency(
                ctx, hidden=hidden, topk=topk, experts=experts, most=128, routing=routing, cast=cast, hook=False,
                tokens=closed_form.token_counts(kind, num_ranks, seed, most=128), zero_copy=zero_copy, seed=seed,
                buffer=gpu,
            )  # fmt: skip
            done += 1
    print(
        f"rank {rank}: {done} cases equal to the reference bit for bit in {time.monotonic() - started:.1f} s",
        flush=True,
    )
    dist.barrier(group)
    buffer.destroy()


REPLAYS = 10  # of a graph between two events


def measure(call: Callable[[], Any], iterations: int, group: Any, warmup: int = 5, repeats: int = 1) -> float:
    """Median over iterations of the slowest rank, microseconds.

    Args:
        repeats: calls between two events, which share the time; more than one hides how far apart ranks start.
    """
    for _ in range(warmup):
        call()
    times = []
    for _ in range(iterations):
        torch.cuda.synchronize()
        dist.barrier(group)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / repeats)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, times, group=group)
    return statistics.median(max(sample) for sample in zip(*everyone, strict=True))


def replayed(call: Callable[[], Any], group: Any) -> Callable[[], Any]:
    """The call as a captured graph: what it costs without the CPU's part."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    dist.barrier(group)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    dist.barrier(group)
    return graph.replay


class Table:
    """Records of one run, each with what it is compared with."""

    def __init__(self, group: Any, iterations: int, num_ranks: int) -> None:
        self.group, self.iterations = group, iterations
        self.records: list[dict[str, Any]] = []
        self._machine = f"{num_ranks} x {torch.cuda.get_device_name()}"

    def add(self, case: str, metric: str, value: float, baseline: str = "", base: float = 0.0) -> None:
        entry = {"bench": "ep", "case": case, "metric": metric, "value": value, "unit": "us", "baseline": baseline}
        ratio = base / value if base else None
        self.records.append({**entry, "ratio": ratio, "machine": self._machine, "date": time.strftime("%Y-%m-%d")})

    def time(
        self, case: str, call: Callable[[], Any], baseline: str = "", base: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        """Both boundaries: events around the call, and around replays of its graph."""
        self.add(case, "call", measure(call, self.iterations, self.group), baseline, base[0])
        replay = replayed(call, self.group)
        value = measure(replay, self.iterations, self.group, repeats=REPLAYS)
        self.add(case, "graph replay", value, baseline, base[1])


def bench(
    rank: int, num_ranks: int, device: str, options: dict[str, Any], iterations: int, only: str = ""
) -> list[dict[str, Any]]:
    from uccl_ep import Buffer

    group = dist.group.WORLD
    nccl = dist.new_group(backend="nccl") if num_ranks <= torch.cuda.device_count() else None
    hint = Buffer.get_low_latency_rdma_size_hint(128, 7168, num_ranks, 288)
    buffer = Buffer(group, low_latency_mode=True, num_rdma_bytes=hint, device=device, options=options)
    if rank == 0:
        print(json.dumps(buffer.describe()), flush=True)
    torch.manual_seed(rank)
    table = Table(group, iterations, num_ranks)

    def all_to_all(rows: int, row_bytes: int) -> tuple[float, float]:
        if nccl is None:
            return 0.0, 0.0
        source = torch.randint(0, 255, (num_ranks * rows * row_bytes,), dtype=torch.uint8, device=device)
        target = torch.empty_like(source)

        def call() -> None:
            dist.all_to_all_single(target, source, group=nccl)

        return measure(call, iterations, group), measure(replayed(call, group), iterations, group, repeats=REPLAYS)

    tokens, hidden, topk, experts = 4096, 7168, 8, 256
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    idx = torch.stack([torch.randperm(experts)[:topk] for _ in range(tokens)]).to(device)
    weights = torch.rand(tokens, topk, device=device)
    per_rank, per_domain, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, experts)
    received, _, _, _, handle, _ = buffer.dispatch(
        x, topk_idx=idx, topk_weights=weights, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_domain,
        is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
    )  # fmt: skip
    base = all_to_all(4096, hidden * 2)
    name = "NCCL all_to_all of 4096 rows a peer"
    table.time("HT dispatch bf16, cached", lambda: buffer.dispatch(x, handle=handle), name, base)
    table.time("HT combine bf16", lambda: buffer.combine(received, handle), name, base)
    x8 = torch.randint(0, 100, (tokens, hidden), device=device, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.rand(tokens, hidden // 128, device=device)
    table.time("HT dispatch fp8, cached", lambda: buffer.dispatch((x8, scales), handle=handle))

    for tokens in () if only == "HT" else (1, 16, 128):
        experts = 288
        x = torch.randn(tokens, hidden, device=device).bfloat16()
        idx = torch.stack([torch.randperm(experts)[:topk] for _ in range(tokens)]).to(device)
        weights = torch.rand(tokens, topk, device=device)
        base = all_to_all(tokens, hidden * 2)
        name = f"NCCL all_to_all of {tokens} rows a peer"
        state: list[Any] = [None]

        def dispatch(fp8: bool, x: Any = x, idx: Any = idx, state: list[Any] = state) -> None:
            state[0] = buffer.low_latency_dispatch(x, idx, 128, 288, use_fp8=fp8)

        table.time(f"LL dispatch fp8, {tokens} tokens", lambda: dispatch(True), name, base)
        table.time(f"LL dispatch bf16, {tokens} tokens", lambda: dispatch(False), name, base)
        received, _, handle, _, _ = state[0]
        table.time(
            f"LL combine bf16, {tokens} tokens",
            lambda: buffer.low_latency_combine(received, idx, weights, handle),  # noqa: B023
            name,
            base,
        )
    dist.barrier(group)
    torch.cuda.synchronize()
    buffer.destroy()
    return table.records


def bench_deepep(rank: int, num_ranks: int, device: str, iterations: int) -> list[dict[str, Any]]:
    """The same shapes through DeepEP, where its package can be imported, by the same two boundaries."""
    import deep_ep

    group = dist.new_group(backend="nccl")
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(128, 7168, num_ranks, 288)
    buffer = deep_ep.Buffer(group, 1 << 30, hint, low_latency_mode=True, num_qps_per_rank=288 // num_ranks)
    deep_ep.Buffer.set_num_sms(24)
    torch.manual_seed(rank)
    table = Table(dist.group.WORLD, iterations, num_ranks)
    tokens, hidden, topk = 4096, 7168, 8
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    idx = torch.stack([torch.randperm(256)[:topk] for _ in range(tokens)]).to(device)
    per_rank, per_domain, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 256)
    received, _, _, _, handle, _ = buffer.dispatch(
        x, topk_idx=idx, topk_weights=torch.rand(tokens, topk, device=device), num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_domain, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
    )  # fmt: skip
    table.time("DeepEP HT dispatch bf16, cached", lambda: buffer.dispatch(x, handle=handle))
    table.time("DeepEP HT combine bf16", lambda: buffer.combine(received, handle))
    x8 = torch.randint(0, 100, (tokens, hidden), device=device, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.rand(tokens, hidden // 128, device=device)
    table.time("DeepEP HT dispatch fp8, cached", lambda: buffer.dispatch((x8, scales), handle=handle))
    for tokens in (1, 128):
        y = torch.randn(tokens, hidden, device=device).bfloat16()
        ids = torch.stack([torch.randperm(288)[:topk] for _ in range(tokens)]).to(device)
        weights = torch.rand(tokens, topk, device=device)
        _, _, low, _, _ = buffer.low_latency_dispatch(y, ids, 128, 288, use_fp8=True)
        outputs = torch.randn(288 // num_ranks, num_ranks * 128, hidden, device=device).bfloat16()
        table.time(
            f"DeepEP LL dispatch fp8, {tokens} tokens",
            lambda: buffer.low_latency_dispatch(y, ids, 128, 288, use_fp8=True),  # noqa: B023
        )
        table.time(
            f"DeepEP LL combine bf16, {tokens} tokens",
            lambda: buffer.low_latency_combine(outputs, ids, weights, low),  # noqa: B023
        )
    torch.cuda.synchronize()
    dist.barrier()
    return table.records


def main_of_rank(rank: int, arguments: argparse.Namespace, store: str, results: Any) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", NVSHMEM_REMOTE_TRANSPORT="none")  # the latter for DeepEP
    torch.set_num_threads(2)
    index = rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=arguments.ranks, timeout=timedelta(seconds=120)
    )
    options: dict[str, Any] = {"domain_size": arguments.domain, "timeout_s": 20.0}
    for option in arguments.option:
        name, _, value = option.partition("=")
        options[name] = value
    device = f"cuda:{index}"
    if arguments.what == "check":
        check(rank, arguments.ranks, device, options)
    else:
        records = bench(rank, arguments.ranks, device, options, arguments.iterations, arguments.only)
        if arguments.deepep:
            records += bench_deepep(rank, arguments.ranks, device, arguments.iterations)
        if rank == 0:
            for entry in records:
                ratio = f"{entry['ratio']:.2f}x" if entry["ratio"] else ""
                print(
                    f"{entry['case']:28} {entry['metric']:13} {entry['value']:9.1f} us  {ratio:7} {entry['baseline']}",
                    flush=True,
                )
            if arguments.json:
                Path(arguments.json).write_text(json.dumps(records, indent=1))
    results.put(rank)
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("check", "bench"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--domain", type=int, default=0, help="most ranks of a scale-up domain")
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--option", action="append", default=[], help="name=value, an option of the buffer")
    parser.add_argument("--json")
    parser.add_argument("--only", choices=("", "HT"), default="", help="the high-throughput cases alone")
    parser.add_argument("--deepep", action="store_true", help="time DeepEP too, in the same run")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: this check needs an NVIDIA GPU, and torch sees none")
        return 0
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    store = tempfile.mktemp()
    processes = [
        context.Process(target=main_of_rank, args=(rank, arguments, store, results)) for rank in range(arguments.ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(200)
        if process.is_alive():
            process.kill()
    codes = [process.exitcode for process in processes]
    print("exit codes", codes)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
