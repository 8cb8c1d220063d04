"""Blocks of several warps, as a GPU runs them: teams of all or some of them, and low-latency halves of whole blocks.

The host backend takes one warp a block unless it has a thread for every role; here it has. With 64 lanes these are
the wavefronts of a GPU that has such, executed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import cases
from ranks import Context, RankPool
from uccl_ep_core import kernel_parameters
from uccl_ep_core.errors import CapabilityError

STRUCTS = {
    "uccl_ep_dispatch": kernel_parameters.DispatchParameters,
    "uccl_ep_combine": kernel_parameters.CombineParameters,
}


def _recorded(buffer: Any) -> list[tuple[str, bytes, int]]:
    """The kernel, parameters and warps of a block of every launch from now on."""
    backend = buffer._communicator.backend
    seen: list[tuple[str, bytes, int]] = []
    launch = type(backend).launch

    def record(kernel: str, parameters: bytes, **shape: Any) -> None:
        seen.append((kernel, parameters, shape["warps_per_block"]))
        launch(backend, kernel, parameters, **shape)

    backend.launch = record
    return seen


def _team_warps(team_ends: int) -> tuple[int, ...]:
    """Of each team of a block, as the kernels read it."""
    ends = [end for end in team_ends.to_bytes(8, "little") if end]
    return tuple(end - begin for begin, end in zip([0, *ends], ends, strict=False))


def high_throughput(ctx: Context, **arguments: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Exact results, and the warps of the teams of a block in each dispatch and combine."""
    buffer = ctx.buffer()
    seen = _recorded(buffer)
    cases.high_throughput(ctx, buffer=buffer, **arguments)
    return [(k, _team_warps(STRUCTS[k].from_buffer_copy(p).team_ends)) for k, p, _ in seen if k in STRUCTS]


def low_latency(ctx: Context, **arguments: Any) -> list[tuple[str, int]]:
    """Exact results, and the warps of a block in each kernel of the mode."""
    buffer = ctx.buffer()
    seen = _recorded(buffer)
    cases.low_latency(ctx, buffer=buffer, **arguments)
    return [(kernel, warps) for kernel, _, warps in seen if "_ll_" in kernel]


def options(lanes: int, threads: int) -> dict[str, str]:
    return {"UCCL_EP_HOST_LANES": str(lanes), "UCCL_EP_HOST_THREADS": str(threads)}


# As many threads as a dispatch has roles: direct sends and receives, forwards and the own tokens.
@pytest.mark.parametrize("lanes", [1, 64])
@pytest.mark.parametrize(("ranks", "domain", "threads"), [(2, 0, 3), (4, 2, 7)])
def test_teams_work_a_role_together(pool: RankPool, ranks: int, domain: int, threads: int, lanes: int) -> None:
    launches = pool.run(
        high_throughput, ranks=ranks, domain=domain, options=options(lanes, threads), timeout_s=120,
        arguments={"tokens": [33, 0, 50, 7][:ranks], "hidden": 200, "experts": 8, "topk": 3, "bias": 1, "cached": True,
                   "seed": ranks},
    )  # fmt: skip
    for seen in launches:
        assert {kernel for kernel, _ in seen} == set(STRUCTS)
        assert all(teams == (12,) for _, teams in seen), seen


# One block for all: unequal teams of a part of it. Four ranks in two domains send, receive, forward and keep.
@pytest.mark.parametrize(
    ("ranks", "domain", "threads", "lanes", "teams", "arguments"),
    [
        (2, 0, 1, 1, [(3, 5, 4), (7, 5)], {"tokens": [70, 0], "dtype": "fp8", "hidden": 256}),
        (2, 0, 1, 32, [(3, 5, 4), (7, 5)], {"tokens": [33, 9], "bias": 2, "routing": "holes"}),
        (4, 2, 2, 1, [(3, 5, 4), (9, 3)], {"tokens": [33, 0, 50, 7], "hidden": 2048}),
    ],
)
def test_teams_share_a_block(
    pool: RankPool,
    ranks: int,
    domain: int,
    threads: int,
    lanes: int,
    teams: list[tuple[int, ...]],
    arguments: dict[str, Any],
) -> None:
    launches = pool.run(
        high_throughput, ranks=ranks, domain=domain, timeout_s=120,
        options={**options(lanes, threads), "UCCL_EP_BLOCK_TEAMS": "3", "UCCL_EP_NUM_SMS": str(threads),
                 "UCCL_EP_SLOT_BYTES": "16384"},
        arguments={"hidden": 200, "experts": 8, "topk": 3, "cached": True, "seed": ranks, **arguments},
    )  # fmt: skip
    dispatch, combine = teams
    kernels = [("uccl_ep_dispatch", dispatch)] * 2 + [("uccl_ep_combine", combine)]
    assert launches == [kernels] * ranks


# Two slots of one row or two: a round of sums may not wait for rows of the next that its own slots have no room for.
@pytest.mark.parametrize(("block_teams", "hidden"), [(1, 1800), (3, 1800), (3, 900)])
def test_rounds_of_few_rows(pool: RankPool, block_teams: int, hidden: int) -> None:
    pool.run(
        high_throughput, ranks=2, domain=0, timeout_s=120,
        options={**options(1, 1), "UCCL_EP_BLOCK_TEAMS": str(block_teams), "UCCL_EP_NUM_SMS": "1",
                 "UCCL_EP_SLOT_BYTES": "4096", "UCCL_EP_NUM_SLOTS": "2"},
        arguments={"tokens": [13, 6], "hidden": hidden, "experts": 8, "topk": 3, "cached": True, "seed": 3},
    )  # fmt: skip


def refused(ctx: Context) -> str:
    """What is said of more teams than a device has barriers for, such as one whose blocks have one."""
    backend = type(ctx.buffer()._communicator.backend)
    limits = backend.limits
    backend.limits = property(lambda self: dataclasses.replace(limits.fget(self), block_teams=1))
    try:
        with pytest.raises(CapabilityError) as error:
            ctx.new_buffer(options={"block_teams": 3})
    finally:
        backend.limits = limits
    return str(error.value)


def test_more_teams_than_a_block_can_have(pool: RankPool) -> None:
    for said in pool.run(refused, ranks=2, timeout_s=120):
        assert "block_teams = 3" in said and "use 1" in said


def limited(ctx: Context, num_sms: int, by_call: bool, **arguments: Any) -> tuple[int, dict[str, int]]:
    """Exact results under a limit, the channels, and the blocks of dispatch and combine."""
    from uccl_ep import Buffer

    before = Buffer.num_sms, Buffer._most_sms
    try:
        if by_call:
            Buffer.set_num_sms(num_sms)
        buffer = ctx.new_buffer(options={} if by_call else {"num_sms": num_sms})
    finally:
        Buffer.num_sms, Buffer._most_sms = before
    communicator = buffer._communicator
    seen: dict[str, int] = {}
    launch = type(communicator.backend).launch

    def record(kernel: str, parameters: bytes, **shape: Any) -> None:
        seen[kernel] = max(seen.get(kernel, 0), shape["num_blocks"])
        launch(communicator.backend, kernel, parameters, **shape)

    communicator.backend.launch = record
    cases.high_throughput(ctx, buffer=buffer, **arguments)
    buffer.destroy()
    return communicator.num_channels, {kernel: seen[kernel] for kernel in STRUCTS}


# The rows that stay share the block of a receiver, so that all that cross have as many as the limit allows.
@pytest.mark.parametrize(
    ("ranks", "domain", "num_sms", "by_call", "channels", "blocks"),
    [(2, 0, 4, True, 2, [4, 4]), (2, 0, 4, False, 2, [4, 4]), (4, 2, 6, False, 1, [6, 4]), (2, 0, 1, False, 1, [1, 1])],
)
def test_a_limit_of_multiprocessors(
    pool: RankPool, ranks: int, domain: int, num_sms: int, by_call: bool, channels: int, blocks: list[int]
) -> None:
    found = pool.run(
        limited, ranks=ranks, domain=domain, options=options(1, 7), timeout_s=120,
        arguments={"num_sms": num_sms, "by_call": by_call, "tokens": [33, 9, 50, 7][:ranks], "hidden": 200,
                   "experts": 8, "topk": 3, "bias": 1, "cached": True, "seed": 5},
    )  # fmt: skip
    assert found == [(channels, dict(zip(STRUCTS, blocks, strict=True)))] * ranks


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize(("ranks", "domain"), [(2, 0), (2, 1)])
def test_low_latency_blocks_have_several_warps(pool: RankPool, ranks: int, domain: int, hook: bool) -> None:
    launches = pool.run(
        low_latency, ranks=ranks, domain=domain, options=options(64, 2), timeout_s=120,
        arguments={"tokens": [8, 3], "most": 8, "hidden": 256, "experts": 8, "topk": 3, "cast": "fp8", "hook": hook,
                   "seed": 1},
    )  # fmt: skip
    halves = ("_send", "_receive") if hook else ("",)
    path = "" if domain else "direct_"  # with so many lanes as on a GPU
    wanted = {f"uccl_ep_ll_{path}{operation}{half}" for operation in ("dispatch", "combine") for half in halves}
    for seen in launches:
        assert {kernel for kernel, _ in seen} == wanted
        assert all(warps > 1 for _, warps in seen), seen
