"""Where the time of an operation goes on real GPUs: kernel times by name, and the host's time per call.

python tests/cuda/profile_ranks.py [--ranks 2] [--option name=value]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing


def profile_rank(rank: int, arguments: argparse.Namespace, store: str) -> None:
    from uccl_ep import Buffer

    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    index = rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=arguments.ranks)
    device = f"cuda:{index}"
    options = dict(option.split("=", 1) for option in arguments.option)
    hint = Buffer.get_low_latency_rdma_size_hint(128, 7168, arguments.ranks, 288)
    buffer = Buffer(dist.group.WORLD, low_latency_mode=True, num_rdma_bytes=hint, device=device, options=options)
    torch.manual_seed(rank)

    def routes(tokens: int, experts: int) -> torch.Tensor:
        return torch.stack([torch.randperm(experts)[:8] for _ in range(tokens)]).to(device)

    x, idx = torch.randn(4096, 7168, device=device).bfloat16(), routes(4096, 256)
    layout = buffer.get_dispatch_layout(idx, 256)
    received, _, _, _, handle, _ = buffer.dispatch(
        x, topk_idx=idx, is_token_in_rank=layout[3], num_tokens_per_expert=layout[2]
    )
    y, ids, weights = (
        torch.randn(128, 7168, device=device).bfloat16(),
        routes(128, 288),
        torch.rand(128, 8, device=device),
    )
    state: list[Any] = [None]

    def ll_dispatch() -> None:
        state[0] = buffer.low_latency_dispatch(y, ids, 128, 288, use_fp8=True)

    ll_dispatch()
    low = torch.randn(288 // arguments.ranks, arguments.ranks * 128, 7168, device=device).bfloat16()
    calls = {
        "HT dispatch": lambda: buffer.dispatch(x, handle=handle),
        "HT combine": lambda: buffer.combine(received, handle),
        "LL dispatch": ll_dispatch,
        "LL combine": lambda: buffer.low_latency_combine(low, ids, weights, state[0][2]),
    }
    for name, call in calls.items():
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        dist.barrier()
        host = []
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(10):
                started = time.perf_counter()
                call()
                host.append(time.perf_counter() - started)
                torch.cuda.synchronize()
                dist.barrier()
        if rank == 0:
            print(f"== {name}: host {sorted(host)[5] * 1e6:.0f} us a call")
            for event in sorted(profiler.key_averages(), key=lambda e: -e.device_time_total)[:6]:
                print(f"   {event.key[:70]:70} {event.device_time_total / 10:10.1f} us a call", flush=True)
    dist.barrier()
    buffer.destroy()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--option", action="append", default=[])
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: this profile needs an NVIDIA GPU, and torch sees none")
        return 0
    context = multiprocessing.get_context("spawn")
    store = tempfile.mktemp()
    processes = [context.Process(target=profile_rank, args=(rank, arguments, store)) for rank in range(arguments.ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        if process.is_alive():
            process.kill()
    return int(any(process.exitcode for process in processes))


if __name__ == "__main__":
    sys.exit(main())
