"""Where a group comes from: torch.distributed or mpi4py; and several groups in one job."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import cases
import elastic_cases
from ranks import Context, RankPool, buffer_environment, environment

GROUPS = ((0, 1, 2, 3), (0, 1), (2, 3), (1, 2, 3), (0, 1, 2))
KINDS = ("high_throughput", "low_latency", "elastic")


def of_group(ctx: Context, group: Any) -> Context:
    """This rank's context within another group."""
    return dataclasses.replace(ctx, rank=dist.get_rank(group), num_ranks=dist.get_world_size(group), group=group)


def interleaved(ctx: Context, steps: int) -> None:
    """Buffers of overlapping groups, made one after another, used in turn: each call is one of its group alone."""
    from uccl_ep import ElasticBuffer

    mine = []
    for members in GROUPS:
        if ctx.rank in members:
            group = ctx.groups[members]
            with environment(buffer_environment(ctx.domain, ctx.options)):
                elastic = ElasticBuffer(group)
            mine.append((members, of_group(ctx, group), ctx.new_buffer(group, num_rdma_bytes=8 << 20), elastic))
    for step in range(steps):
        # Every rank takes the groups in the same order, which changes from step to step.
        turn = step % len(GROUPS)
        for members in GROUPS[turn:] + GROUPS[:turn]:
            for theirs, own, buffer, elastic in mine:
                if theirs != members:
                    continue
                kind = KINDS[(step + len(members)) % len(KINDS)]
                tokens = [(step * 7 + r * 3) % 9 for r in range(own.num_ranks)]
                arguments: dict[str, Any] = {"hidden": 64, "topk": 2, "experts": 12, "tokens": tokens, "seed": step}
                if kind == "low_latency":
                    cases.low_latency(own, most=16, buffer=buffer, **arguments)
                elif kind == "high_throughput":
                    cases.high_throughput(own, buffer=buffer, **arguments)
                else:
                    elastic_cases.elastic(own, expand=bool(step % 2), buffer=elastic, cached=False, **arguments)
    for _, _, buffer, elastic in mine:
        elastic.destroy()
        buffer.destroy()


@pytest.mark.parametrize("domain", [0, 1])
def test_interleaved_groups(pool: RankPool, domain: int) -> None:
    pool.run(interleaved, ranks=4, domain=domain, arguments={"steps": 8}, timeout_s=120)


@pytest.mark.full
def test_interleaved_groups_for_long(pool: RankPool) -> None:
    pool.run(interleaved, ranks=4, domain=1, arguments={"steps": 1000}, timeout_s=1200)


def _mpi() -> tuple[str, Path]:
    """mpiexec and the folder of its libmpi, of the mpich package; skips where either package is not there."""
    pytest.importorskip("mpi4py", reason="needs mpi4py (pip install mpi4py mpich)")
    try:
        files = [Path(str(file.locate())).resolve() for file in metadata.distribution("mpich").files or []]
    except metadata.PackageNotFoundError:
        pytest.skip("needs an MPI to run under (pip install mpich)")
    programs = [file for file in files if file.name == "mpiexec" and os.access(file, os.X_OK)]
    libraries = [file for file in files if file.name == "libmpi.so.12"]
    if not programs or not libraries:
        pytest.skip("the mpich package has no mpiexec or no libmpi.so.12")
    return str(programs[0]), libraries[0].parent


def test_mpi_communicator() -> None:
    program, folder = _mpi()
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
    variables = {**os.environ, "LD_LIBRARY_PATH": paths, "OMP_NUM_THREADS": "1", "UCCL_EP_TIMEOUT_S": "60"}
    command = [program, "-n", "4", sys.executable, str(Path(__file__).parent / "mpi_ranks.py")]
    assert shutil.which(program)
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.split("\n")) == ["", *(f"rank {rank} of 4 is right" for rank in range(4))]
