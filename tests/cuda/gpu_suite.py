"""Everything that real GPUs have to show, in one command within ten minutes.

    python tests/cuda/gpu_suite.py --ranks 8 [--out FOLDER] [--only exact killed] [--limit-s 570]

Exactness at real shapes with one domain, also on few multiprocessors, with domains of 1, 2 and 4 ranks whose bytes go
through proxies, and with twice the ranks, so that every domain forwards; graphs among eager calls; 2,000 steps of each
mode with random delays; a rank killed and a rank that stays away; times, balanced and skewed, against NCCL and DeepEP
where they can be had, and through proxies against the transport alone; then small cases under compute-sanitizer. Ranks
share GPUs where there are fewer. A stage for which something is not installed is skipped, with the reason; one that
fails, or for which no time is left, is named at the end, and the exit status is 1. ``--small`` takes small
shapes and runs without a GPU too, on the host backend: that is how this file itself is tested.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import sanitizer

import closed_form
from ranks import RankPool
from uccl_ep.bench import gpu, proxied, records
from uccl_ep.bench.records import Record
from uccl_ep.bench.workload import Case
from uccl_ep_core.config import Configuration
from uccl_ep_core.errors import EPError

HERE = Path(__file__).resolve().parent
TRANSPORTS = ("shm", "libfabric")
TIMEOUT_S = 4.0
SANITIZER_LIMIT_S = 150.0  # of one tool

HIGH_THROUGHPUT = [  # hidden, top-k, tokens, routing, dtype, biases, cached, index
    (64, 2, "even", "random", "bf16", 0, False, "int64"),
    (100, 4, "rotate", "holes", "fp32", 1, True, "int32"),
    (2880, 4, "first", "random", "fp16", 2, False, "int64"),
    (7168, 8, "rotate", "holes", "bf16", 2, True, "int32"),
    (7168, 8, "idle", "skewed", "fp8", 0, True, "int64"),
    (2048, 10, "zero", "random", "bf16", 0, False, "int32"),
    (1536, 6, "even", "one_rank", "fp64", 1, False, "int64"),
    (2048, 8, "even", "one_expert", "bf16", 0, False, "int32"),
    (2048, 12, "even", "nothing", "bf16", 1, True, "int64"),
    (4096, 8, "rotate", "starved", "bf16", 0, True, "int32"),
]
LOW_LATENCY = [  # hidden, top-k, tokens, routing, cast, zero-copy, hook
    (64, 2, "even", "random", "none", False, True),
    (2880, 4, "rotate", "holes", "none", True, False),
    (7168, 8, "even", "random", "fp8", False, False),
    (7168, 8, "first", "holes", "round", True, True),
    (7168, 8, "idle", "skewed", "ue8m0", False, True),
    (2048, 10, "zero", "random", "none", True, False),
    (1536, 6, "even", "one_rank", "none", False, False),
    (2048, 12, "even", "nothing", "fp8", True, True),
]


@dataclass(frozen=True)
class Sizes:
    """What ``--small`` makes smaller."""

    widest: int
    tokens: int
    steps: int
    iterations: int


FULL = Sizes(widest=7168, tokens=4096, steps=2000, iterations=10)
SMALL = Sizes(widest=128, tokens=64, steps=60, iterations=2)


class Failed(Exception):
    """A stage did not show what it has to."""


class Skipped(Exception):
    """A stage needs what is not here."""


def over(domain: int, transport: str = "shm") -> dict[str, str]:
    """Options for domains of ``domain`` ranks; 0: all are one, and need no transport."""
    return {"UCCL_EP_TRANSPORT": transport} if domain else {}


def need(transport: str) -> None:
    """Raises `Skipped` where the transport cannot be used here."""
    try:
        Configuration.resolve({"transport": transport}).select_transport()
    except EPError as error:
        raise Skipped(str(error)) from None


class Suite:
    """The stages; each returns a line that says what it showed, or raises."""

    def __init__(self, ranks: int, sizes: Sizes, out: Path | None) -> None:
        self.ranks, self.sizes, self.out = ranks, sizes, out
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    @contextmanager
    def pool(self, ranks: int = 0) -> Iterator[RankPool]:
        pool = RankPool(ranks or self.ranks, {"PYTHONPATH": str(HERE)})
        try:
            yield pool
        finally:
            pool.stop()

    def domains(self) -> list[int]:
        return [size for size in (1, 2, 4) if size < self.ranks and self.ranks % size == 0]

    def stages(self) -> dict[str, Callable[[], str]]:
        n, domains = self.ranks, self.domains()
        found: dict[str, Callable[[], str]] = {"exact, one domain": lambda: self.exact(0)}
        found["exact, 24 SMs"] = lambda: self.exact(0, {"UCCL_EP_NUM_SMS": "24"})
        for size in domains:
            found[f"exact, domains of {size}"] = partial(self.exact, size)
        found["exact, domains of 1, libfabric"] = lambda: self.exact(1, transport="libfabric")
        found[f"exact, {2 * n} ranks, domains of {n}"] = lambda: self.exact(n, ranks=2 * n)
        found["graphs"] = self.graphs
        for mode in ("high_throughput", "low_latency"):
            for size in (0, domains[-1]):
                found[f"steps, {mode}, domains of {size or n}"] = partial(self.steps, mode, size)
        for mode in ("high_throughput", "low_latency"):
            found[f"killed, {mode}"] = partial(self.killed, mode)
        for mode in ("high_throughput", "cached_dispatch", "low_latency"):
            found[f"late, {mode}"] = partial(self.late, mode)
        found["bench, one domain"] = lambda: self.bench(0)
        found["bench, 24 SMs"] = lambda: self.bench(0, num_sms=24)
        for size in domains:
            found[f"bench, domains of {size}"] = partial(self.bench, size)
        for transport in TRANSPORTS:
            found[f"proxied, {transport}"] = partial(self.proxied, transport)
        for tool in sanitizer.TOOLS:
            found[f"sanitizer, {tool}"] = partial(self.sanitized, tool)
        return found

    def exact(self, domain: int, options: dict[str, str] | None = None, transport: str = "shm", ranks: int = 0) -> str:
        n, widest, most = ranks or self.ranks, self.sizes.widest, min(128, 2 * self.sizes.tokens)
        need(transport)
        experts = 24 * n

        def tokens(kind: str, seed: int, limit: int = 1000) -> list[int]:
            return closed_form.token_counts(kind, n, seed, most=min(limit, self.sizes.tokens))

        high: list[dict[str, Any]] = [
            {"hidden": min(hidden, widest), "topk": topk, "experts": experts, "tokens": tokens(kind, seed),
             "routing": routing, "dtype": dtype, "index": index, "bias": bias, "cached": cached, "seed": seed,
             "contiguous": index == "int64"}
            for seed, (hidden, topk, kind, routing, dtype, bias, cached, index) in enumerate(HIGH_THROUGHPUT)
        ]  # fmt: skip
        full = [self.sizes.tokens - 7 * r for r in range(n)] if domain == 0 else [self.sizes.tokens // 4] * n
        high.append({"hidden": widest, "topk": 8, "experts": 256 // n * n, "tokens": full, "seed": 77})
        low: list[dict[str, Any]] = [
            {"hidden": min(hidden, widest), "topk": topk, "experts": experts, "tokens": tokens(kind, seed, most),
             "most": most, "routing": routing, "cast": cast, "zero_copy": zero_copy, "hook": hook, "seed": seed}
            for seed, (hidden, topk, kind, routing, cast, zero_copy, hook) in enumerate(LOW_LATENCY)
        ]  # fmt: skip
        low.append({"hidden": widest, "topk": 8, "experts": 288 // n * n, "tokens": [most] * n, "most": most,
                    "cast": "fp8", "seed": 78})  # fmt: skip
        with self.pool(n) as pool:
            for function, rows in (("cases:high_throughput", high), ("cases:low_latency", low)):
                pool.run(
                    "on_gpu:several", ranks=n, domain=domain, timeout_s=240,
                    options={**over(domain, transport), **(options or {})},
                    arguments={"function": function, "rows": rows},
                )  # fmt: skip
        return f"{len(high)} + {len(low)} cases equal to the reference bit for bit"

    def graphs(self) -> str:
        if self.device == "cpu":
            raise Skipped("graphs are captured on GPUs")
        rounds = self.sizes.iterations * 4
        with self.pool() as pool:
            pool.run(
                "on_gpu:case", ranks=self.ranks, timeout_s=120,
                arguments={"function": "on_gpu:graphs", "arguments": {"rounds": rounds}},
            )  # fmt: skip
        return f"{rounds} replays of two graphs of different token counts, eager calls between, every one equal"

    def steps(self, mode: str, domain: int) -> str:
        inner = {"pairs": self.sizes.steps, "mode": mode, "seed": 11}
        with self.pool() as pool:
            pool.run(
                "on_gpu:case", ranks=self.ranks, domain=domain, options=over(domain), timeout_s=200,
                arguments={"function": "stream_cases:stress", "arguments": inner},
            )  # fmt: skip
        return f"{self.sizes.steps} dispatches and combines with random delays, every one equal"

    def killed(self, mode: str) -> str:
        who = self.ranks - 1
        inner = {"who": who, "when": "inside", "mode": mode}
        with self.pool() as pool:
            reports = pool.run(
                "on_gpu:case", ranks=self.ranks, options={"UCCL_EP_TIMEOUT_S": str(TIMEOUT_S)}, may_die=(who,),
                timeout_s=60, arguments={"function": "death_cases:one_rank_dies", "arguments": inner},
            )  # fmt: skip
        survivors = [report for report in reports if report is not None]
        if len(survivors) != self.ranks - 1 or any(report["rank"] != who for report in survivors):
            raise Failed(f"rank {who} was killed, and the others report {survivors}")
        with self.pool() as pool:  # the GPUs are usable, by new processes
            row = {"tokens": [9] * self.ranks, "experts": 12 * self.ranks, "most": 16}
            pool.run(
                "on_gpu:case", ranks=self.ranks, timeout_s=60,
                arguments={"function": "fault_cases:both_modes", "arguments": row},
            )  # fmt: skip
        after = max(report["after_s"] for report in survivors)
        return f"every survivor named rank {who} within {after:.1f} s (time-out {TIMEOUT_S:g} s), and exited"

    def late(self, mode: str) -> str:
        inner = {"who": 1, "mode": mode}
        with self.pool() as pool:
            reports = pool.run(
                "on_gpu:case", ranks=self.ranks, options={"UCCL_EP_TIMEOUT_S": "1.5"}, timeout_s=60,
                arguments={"function": "death_cases:too_late_rank", "arguments": inner},
            )  # fmt: skip
        if any(report["rank"] != 1 for report in reports):
            raise Failed(f"rank 1 stayed away, and the others report {reports}")
        return "every rank named rank 1; a new buffer of the same processes is exact"

    def bench(self, domain: int, num_sms: int = 0) -> str:
        n, sizes = self.ranks, self.sizes
        few = min(128, sizes.tokens)
        cases = [
            case
            for experts in ((256 // n * n, 288 // n * n) if domain == 0 else (288 // n * n,))
            for skewed in ((False, True) if domain == 0 else (False,))
            for case in (
                Case("high throughput", sizes.tokens, sizes.widest, 8, experts, skewed),
                Case("low latency", few, sizes.widest, 8, experts, skewed),
            )
        ]
        cases.append(Case("low latency", 1, sizes.widest, 8, 288 // n * n, most=few))
        if num_sms:  # what the limit is for
            cases = [Case("high throughput", sizes.tokens, sizes.widest, 8, 256 // n * n)]
        options = {"transport": "shm", "num_proxies": 4} if domain else {}
        begun = time.monotonic()

        def on_event(rank: int, event: Any) -> None:
            if rank == 0:
                print(f"       {time.monotonic() - begun:6.1f} s  {event[0]}, {event[1]}", flush=True)

        # No kernel times here: the profiler would take more of the ten minutes than all that it looks at.
        found = gpu.run(
            cases, ranks=n, domain_size=domain, iterations=sizes.iterations, options=options, device=self.device,
            num_sms=num_sms, profiled=0, rivals=gpu.RIVALS if domain == 0 else {"all_to_all": gpu.RIVALS["all_to_all"]},
            on_event=on_event,
        )  # fmt: skip
        limit = f"_{num_sms}_sms" if num_sms else ""
        self.keep(f"ep{n}_domains_of_{domain or n}{limit}", found)
        refused = Counter(f"{r.metric} of {{}} cases: {r.note}" for r in found if r.note)
        left_out = [words.replace("{}", str(count), 1) for words, count in refused.items()]
        return "; ".join([f"{len(cases)} cases timed, every byte equal before and after", *left_out])

    def proxied(self, transport: str) -> str:
        need(transport)
        n, sizes = self.ranks, self.sizes
        few = min(128, sizes.tokens)
        cases = [
            Case("high throughput", sizes.tokens, sizes.widest, 8, 256 // n * n),
            Case("low latency", few, sizes.widest, 8, 288 // n * n),
            Case("low latency", 1, sizes.widest, 8, 288 // n * n, most=few),
        ]
        options = {"transport": transport, "num_proxies": 4 if transport == "shm" else 1}
        found = proxied.run(cases, ranks=n, iterations=sizes.iterations, options=options, device=self.device)
        self.keep(f"proxied{n}_{transport}", found)
        return f"{len(cases)} cases beside the steps of their bytes, every byte equal before and after"

    def sanitized(self, tool: str) -> str:
        program = sanitizer.find()
        if program is None:
            raise Skipped("compute-sanitizer is not here: it comes with the CUDA toolkit")
        return sanitizer.run(program, tool, self.ranks, ("exact, one domain", "exact, domains of 1"), SANITIZER_LIMIT_S)

    def keep(self, name: str, found: list[Record]) -> None:
        records.show(found)
        if self.out is not None:
            self.out.mkdir(parents=True, exist_ok=True)
            records.write_json(self.out / f"{name}.json", found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=max(2, torch.cuda.device_count()))
    parser.add_argument("--out", type=Path, help="folder for JSON files")
    parser.add_argument("--only", nargs="*", default=[], help="stages whose name starts so")
    parser.add_argument("--limit-s", type=float, default=570, help="no stage starts after so many seconds")
    parser.add_argument("--small", action="store_true", help="small shapes, and the host backend where there is no GPU")
    given = parser.parse_args()
    if not torch.cuda.is_available() and not given.small:
        print("skipped: this needs GPUs, and torch sees none (--small runs on CPUs)")
        return 0
    if given.ranks < 2:
        parser.error("--ranks must be at least 2")
    suite = Suite(given.ranks, SMALL if given.small else FULL, given.out)
    started = time.monotonic()
    results: dict[str, dict[str, Any]] = {}
    for name, stage in suite.stages().items():
        if given.only and not name.startswith(tuple(given.only)):
            continue
        begun = time.monotonic()
        if begun - started > given.limit_s:
            results[name] = {"ok": False, "words": "not run: no time was left"}
        else:
            try:
                results[name] = {"ok": True, "words": stage()}
            except Skipped as reason:
                results[name] = {"ok": True, "words": f"skipped: {reason}"}
            except Exception as error:  # the other stages are worth their time all the same
                results[name] = {"ok": False, "words": f"{type(error).__name__}: {error}"}
        results[name]["seconds"] = round(time.monotonic() - begun, 1)
        mark = "ok    " if results[name]["ok"] else "FAILED"
        print(f"{mark} {name:44} {results[name]['seconds']:6.1f} s  {results[name]['words']}", flush=True)
    failed = [name for name, result in results.items() if not result["ok"]]
    print(f"{len(results) - len(failed)} of {len(results)} stages ok in {time.monotonic() - started:.0f} s")
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "stages.json").write_text(json.dumps(results, indent=1) + "\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
