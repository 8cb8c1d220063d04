"""How a group's ranks find each other before any of our own memory exists: the caller's own group."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from uccl_ep_core.errors import ArgumentError, ConfigurationError, EPError, TransportError

from .roll_call import ProcessName, RollCall, store_of

T = TypeVar("T")

_inherited_groups: list[dist.ProcessGroup] = []
"""Of the parent, in a fork: the threads that moved their messages are not there, so a collective would never end."""


def _note_inherited_groups() -> None:
    _inherited_groups[:] = list(dist.distributed_c10d._world.pg_map) if dist.is_available() else []


os.register_at_fork(after_in_child=_note_inherited_groups)


class Bootstrap(Protocol):
    """Small exchanges among the ranks of a group; slow, and used at set-up only."""

    rank: int
    num_ranks: int

    def all_gather(self, value: Any, stage: str) -> list[Any]:
        """Every rank's picklable value, by rank.

        Args:
            stage: what this exchange is for, in the words of an error.

        Raises:
            PeerFailure: a rank ended or did not come in time; names it and the stage.
        """

    def start(self, timeout_s: float) -> None:
        """Begin a set-up, in which each exchange waits so long for each rank."""

    def finish(self) -> None:
        """End it, done or failed."""


class TorchBootstrap:
    """Through a torch.distributed group of any backend (gloo and NCCL both carry objects)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        if any(group is inherited for inherited in _inherited_groups):
            raise ArgumentError(
                f"process {os.getpid()} is a fork of the one that made this group, whose threads a fork lacks: start "
                "it by spawn or forkserver, or before init_process_group, and make the group in it"
            )
        self._group = group
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        if self.rank < 0:
            raise ArgumentError("this process is not a member of the group: create the Buffer on members only")
        self._roll_call: RollCall | None = None

    def start(self, timeout_s: float) -> None:
        self._roll_call = RollCall(store_of(self._group), self.rank, self.num_ranks, timeout_s)
        names = self.all_gather(tuple(ProcessName.own()), "meeting")
        self._roll_call.watch([ProcessName(*name) for name in names])

    def finish(self) -> None:
        if self._roll_call is not None:
            self._roll_call.close()
            self._roll_call = None

    def all_gather(self, value: Any, stage: str) -> list[Any]:
        roll_call = self._roll_call
        if roll_call is None:
            raise RuntimeError("all_gather outside of start() and finish()")
        roll_call.answer(stage)
        result: list[Any] = [None] * self.num_ranks
        try:
            dist.all_gather_object(result, value, group=self._group)
        except RuntimeError as error:
            roll_call.explain(stage, error)
        return result


class MpiBootstrap:
    """Through an mpi4py communicator."""

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator
        self.rank = communicator.Get_rank()
        self.num_ranks = communicator.Get_size()

    def all_gather(self, value: Any, stage: str) -> list[Any]:
        return list(self._communicator.allgather(value))

    def start(self, timeout_s: float) -> None:
        """MPI itself ends the job when a rank dies."""

    def finish(self) -> None:
        """Nothing was begun."""


def make_bootstrap(group: Any, communicator: Any = None) -> Bootstrap:
    """The bootstrap for what a `Buffer` was given.

    Raises:
        ArgumentError: neither a torch.distributed group nor an mpi4py communicator.
    """
    if group is not None:
        if isinstance(group, dist.ProcessGroup):
            return TorchBootstrap(group)
        raise ArgumentError(f"group must be a torch.distributed process group, not {type(group).__name__}")
    if communicator is not None:
        if all(hasattr(communicator, name) for name in ("Get_rank", "Get_size", "allgather")):
            return MpiBootstrap(communicator)
        raise ArgumentError(f"comm must be an mpi4py communicator, not {type(communicator).__name__}")
    if dist.is_available() and dist.is_initialized():
        return TorchBootstrap(dist.group.WORLD)  # type: ignore[arg-type]
    raise ArgumentError("no group: call torch.distributed.init_process_group first, or pass group= or comm=")


def together(bootstrap: Bootstrap, stage: str, step: Callable[[], T]) -> T:
    """Run a step of the set-up on every rank; when it fails on any, every rank raises.

    The ranks on which it succeeded raise `TransportError` naming the rank that failed and its error, so
    that none is left waiting for a peer that has given up.
    """
    result: T | None = None
    error: Exception | None = None
    try:
        result = step()
    except Exception as caught:
        error = caught
    reports = bootstrap.all_gather(None if error is None else f"{type(error).__name__}: {error}", stage)
    if error is not None:
        if isinstance(error, EPError):
            raise error
        raise TransportError(f"{stage} failed on rank {bootstrap.rank}: {type(error).__name__}: {error}") from error
    for rank, report in enumerate(reports):
        if report is not None:
            raise TransportError(f"{stage} failed on rank {rank}: {report}")
    return result  # type: ignore[return-value]


def agree(bootstrap: Bootstrap, stage: str, mine: Mapping[str, object]) -> None:
    """Raise `ConfigurationError` on every rank where a value differs between ranks; all give the same names."""
    everyone = bootstrap.all_gather(mine, stage)
    for name in mine:
        values = [other[name] for other in everyone]
        if any(value != values[0] for value in values):
            odd = next(rank for rank, value in enumerate(values) if value != values[0])
            raise ConfigurationError(
                f"{name} differs between ranks: {values[0]!r} on rank 0, {values[odd]!r} on rank {odd}; "
                "give every rank the same value"
            )
