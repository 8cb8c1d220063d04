"""A rank under mpiexec: dispatch and combine in both interfaces, over an mpi4py communicator and no torch group."""

from __future__ import annotations

import sys

from mpi4py import MPI

import cases
import elastic_cases
from ranks import Context
from uccl_ep import Buffer, ElasticBuffer


def main() -> None:
    world = MPI.COMM_WORLD
    everyone = world.Dup()
    for communicator in (everyone, world.Split(world.Get_rank() % 2, world.Get_rank())):
        rank, num_ranks = communicator.Get_rank(), communicator.Get_size()
        tokens = [4 + 3 * r for r in range(num_ranks)]
        ctx = Context(rank, num_ranks, None, 0, {}, {})
        buffer = Buffer(comm=communicator, num_rdma_bytes=16 << 20, low_latency_mode=True)
        cases.high_throughput(ctx, tokens=tokens, buffer=buffer)
        cases.low_latency(ctx, most=32, tokens=tokens, buffer=buffer)
        elastic = ElasticBuffer(comm=communicator)
        elastic_cases.elastic(ctx, tokens=tokens, expand=True, buffer=elastic)
        elastic.destroy()
        buffer.destroy()
    sys.stdout.write(f"rank {world.Get_rank()} of {world.Get_size()} is right\n")


main()
