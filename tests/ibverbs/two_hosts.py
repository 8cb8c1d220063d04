"""One rank of two, each alone in its guest; test_two_hosts.py starts both. Not a test by itself.

two_hosts.py steps NUMBER      dispatch and combine, every step checked bit for bit
two_hosts.py cut STEP SECONDS  the same, but at that step both ends of the link fall silent
two_hosts.py flap STEP SECONDS the same; at that step the link falls silent, and comes back after so many seconds
two_hosts.py latency           a ping-pong of the bare transport, and ib_write_lat's
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist

import cases
from ranks import Context
from uccl_ep import Buffer, reference
from uccl_ep_core.errors import PeerFailure

NODE = int(os.environ["NODE"])
HIDDEN, TOPK, EXPERTS, MOST = 64, 2, 8, 8


def join() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "vec0"
    torch.set_num_threads(1)
    # Packets get lost: the group gets far more time than the library is given.
    dist.init_process_group(
        "gloo", init_method="tcp://10.7.0.1:29500", rank=NODE, world_size=2, timeout=timedelta(seconds=300)
    )


def make_buffer() -> Any:
    nbytes = Buffer.get_low_latency_rdma_size_hint(MOST, HIDDEN, 2, EXPERTS)
    return Buffer(dist.group.WORLD, num_rdma_bytes=nbytes, low_latency_mode=True)


class Steps:
    """A low-latency dispatch and combine on inputs that repeat, with the right result computed once."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        ctx = Context(NODE, 2, dist.group.WORLD, 1, {}, {})
        self.ctx = ctx
        self.expected: dict[int, Any] = {}
        self.inputs = [
            cases.make_inputs(2, [5 + seed % 4, 8 - seed % 3], hidden=HIDDEN, experts=EXPERTS, topk=TOPK, seed=seed)
            for seed in range(4)
        ]

    def step(self, number: int) -> None:
        """Runs and checks one step; the first of each kind against the reference, later ones against that."""
        if number % 50 == 0:
            cases.high_throughput(
                self.ctx, hidden=HIDDEN, topk=TOPK, experts=EXPERTS, tokens=[40, 23], seed=number, buffer=self.buffer
            )
        kind = number % len(self.inputs)
        if kind not in self.expected:
            tokens = [x.shape[0] for x in self.inputs[kind].xs]
            cases.low_latency(
                self.ctx, hidden=HIDDEN, topk=TOPK, experts=EXPERTS, most=MOST, tokens=tokens, seed=kind,
                buffer=self.buffer,
            )  # fmt: skip
        found = self._low_latency(kind)
        if kind not in self.expected:
            self.expected[kind] = (*found[:2], self._combined(kind))
        expected = self.expected[kind]
        for what, got, want in zip(("recv_count", "recv_x", "combined_x"), found, expected, strict=True):
            if not torch.equal(got, want):
                raise AssertionError(f"step {number}: {what} differs from that of earlier steps of this kind")

    def _combined(self, kind: int) -> torch.Tensor:
        """What must come back to this rank, by the reference."""
        inputs = self.inputs[kind]
        assert inputs.weights is not None
        terms = (inputs.xs[NODE] * 2)[:, None, :].expand(-1, TOPK, -1)
        return reference.ll_combine_terms(terms, inputs.ids[NODE], inputs.weights[NODE])

    def _low_latency(self, kind: int) -> tuple[torch.Tensor, ...]:
        inputs = self.inputs[kind]
        assert inputs.weights is not None
        recv, count, handle, _, hook = self.buffer.low_latency_dispatch(
            inputs.xs[NODE], inputs.ids[NODE], MOST, EXPERTS, use_fp8=False, return_recv_hook=True
        )
        hook()
        used = torch.arange(recv.shape[1])[None, :] < count[:, None]
        y = torch.zeros_like(recv)
        y[used] = recv[used] * 2
        combined, _, hook = self.buffer.low_latency_combine(
            y, inputs.ids[NODE], inputs.weights[NODE], handle, return_recv_hook=True
        )
        hook()
        # Rows of a block come in any order of arrival of their ranks, but each rank's own block is fixed.
        return count.clone(), y[used].sort(0).values, combined.clone()


def steps(number: int) -> None:
    join()
    buffer = make_buffer()
    described = buffer.describe()
    work = Steps(buffer)
    start = time.monotonic()
    for index in range(number):
        work.step(index)
    dist.barrier()
    buffer.destroy()
    print(f"exact for {number} steps over {described['plan']['name']} in {time.monotonic() - start:.1f} s", flush=True)
    used = "vec1" if "siw" in os.environ["UCCL_EP_IBVERBS_DEVICE"] else "vec0"
    subprocess.run(["tc", "-s", "qdisc", "show", "dev", used], check=True)


def until_failure(work: Steps, at: int) -> tuple[PeerFailure, float]:
    """Steps until the peer is called failed; what was said, and how long after the link was cut."""
    silent_since = 0.0
    index = 0
    while True:
        if index == at:
            dist.barrier()
            for link in ("vec0", "vec1"):
                subprocess.run(["tc", "qdisc", "replace", "dev", link, "root", "netem", "loss", "100%"], check=True)
            silent_since = time.monotonic()
        try:
            work.step(index)
        except PeerFailure as failure:
            if not silent_since:
                raise
            return failure, time.monotonic() - silent_since
        index += 1


def cut(at: int, limit_s: float) -> None:
    join()
    buffer = make_buffer()
    work = Steps(buffer)
    failure, took = until_failure(work, at)
    print(f"after {took:.1f} s: {failure}", flush=True)
    assert failure.rank == 1 - NODE, failure
    assert took < limit_s, f"{took:.1f} s after the cut, {limit_s} s were given"
    start = time.monotonic()
    buffer.destroy()
    print(f"destroyed in {time.monotonic() - start:.1f} s", flush=True)


def flap(at: int, seconds: float) -> None:
    """The link is cut for longer than the queue pairs try, but not for longer than they may be replaced."""
    join()
    buffer = make_buffer()
    work = Steps(buffer)
    for index in range(at):
        work.step(index)
    dist.barrier()
    used = "vec1" if "siw" in os.environ["UCCL_EP_IBVERBS_DEVICE"] else "vec0"
    link = ["tc", "qdisc", "replace", "dev", used, "root", "netem", "loss"]
    subprocess.run([*link, "100%"], check=True)
    back = threading.Timer(seconds, lambda: subprocess.run([*link, "0%"], check=True))
    back.start()
    for index in range(at, 3 * at):
        work.step(index)
    back.join()
    dist.barrier()
    transport, engine = buffer._communicator.transport, buffer.stats()["engine"]
    replaced = sum(transport.statistics(lane)["renewals"] for lane in range(transport._lanes))
    buffer.destroy()
    print(f"exact for {3 * at} steps; {replaced} queue pairs replaced, {engine['retried']} writes repeated", flush=True)


def latency() -> None:
    """Medians of half an exchange, alternating with ib_write_lat, the best of eight rounds."""
    import perftest
    from wire import Endpoint

    join()
    device = os.environ["UCCL_EP_IBVERBS_DEVICE"]
    for nbytes, count in ((8, 2000), (65536, 300), (1 << 20, 50)):
        endpoint = Endpoint(device, {}, 2 * nbytes)
        addresses: list[Any] = [None, None]
        dist.all_gather_object(addresses, endpoint.transport.address())
        endpoint.connect(NODE, addresses, 1)
        gid = endpoint.transport._rails[0].gid.index  # type: ignore[attr-defined]
        words = ["stdbuf", "-oL", *perftest.command("ib_write_lat", device, gid, nbytes, count)]
        ours, theirs = [], []
        for _ in range(8):
            dist.barrier()
            halves = endpoint.ping_pong(1 - NODE, nbytes, count, first=NODE == 0, yields=False)
            dist.barrier()
            ours += [statistics.median(halves) * 1e6] if halves else []
            theirs += _ib_write_lat(words, nbytes, count)
        endpoint.close()
        if NODE == 0 and not theirs:
            print(f"latency of {nbytes} bytes: {min(ours):.1f} us, ib_write_lat could not measure", flush=True)
        elif NODE == 0:
            ratio = min(ours) / min(theirs)
            print(
                f"latency of {nbytes} bytes: {min(ours):.1f} us, ib_write_lat {min(theirs):.1f} us, ratio {ratio:.2f}",
                flush=True,
            )
    dist.barrier()


def _ib_write_lat(words: list[str], nbytes: int, count: int) -> list[float]:
    import perftest

    if NODE == 1:
        server = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert server.stdout is not None
        for line in server.stdout:
            if "Waiting for client" in line:
                break
        dist.barrier()
        server.communicate(timeout=120)
        return []
    dist.barrier()
    client = subprocess.run([*words, "10.7.0.2"], capture_output=True, text=True, timeout=120)
    return perftest.typical_latency_us(client.stdout + client.stderr, nbytes, count)


def main() -> None:
    if sys.argv[1] == "steps":
        steps(int(sys.argv[2]))
    elif sys.argv[1] == "cut":
        cut(int(sys.argv[2]), float(sys.argv[3]))
    elif sys.argv[1] == "flap":
        flap(int(sys.argv[2]), float(sys.argv[3]))
    elif sys.argv[1] == "latency":
        latency()
    else:
        raise SystemExit(f"{sys.argv[1]} is none of steps, cut, flap and latency")
    # The process group is left as it is: after a cut its destructor would wait for the other rank.
    sys.stdout.flush()


if __name__ == "__main__":
    main()
