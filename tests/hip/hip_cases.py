"""Cases for the pool of rank processes: a whole Buffer on the fake runtime, kernels run by the host backend."""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import fakes

import cases
from ranks import Context
from uccl_ep.tracing import clocks
from uccl_ep_core import kernel_parameters

INVALID_VALUE = 1  # hipErrorInvalidValue, CUDA_ERROR_INVALID_VALUE
_installed: dict[str, fakes.Fake] = {}


def widest_host_lanes() -> int:
    """The lanes nearest to those of a wavefront that the host backend was built with."""
    for lanes in (64, 32, 1):
        try:
            importlib.import_module(f"uccl_ep_host._host_lanes{lanes}")
        except ModuleNotFoundError:
            continue
        return lanes
    raise AssertionError("the host backend has no kernels")


def windows_of(parameters: ctypes.Structure) -> Iterator[tuple[str, int, int]]:
    """Name, address and least size of what the kernels take from windows, which a device must have mapped.

    Tensors are left out: the ones of the fake are in host memory.
    """
    group = getattr(parameters, "group", None)
    if not isinstance(group, kernel_parameters.Group):
        return
    for name in ("data", "control", "peer_data", "peer_control", "counters", "status"):
        yield name, getattr(group, name) or 0, 8
    if group.spans.counts:
        yield "spans.counts", group.spans.counts, 4 * group.spans.tracks
        yield "spans.records", group.spans.records, 32 * group.spans.tracks * group.spans.capacity
    if group.num_rings != 0:
        yield "rings", group.rings or 0, 8
    for name in ("peer_data", "peer_control"):
        table = (ctypes.c_uint64 * group.layout.num_ranks).from_address(getattr(group, name))
        yield from ((f"{name}[{rank}]", base, 8) for rank, base in enumerate(table) if base != 0)


def _install(files: fakes.FakeFiles) -> fakes.Fake:
    """Once a process: CPU tensors for the vendor's backend, and launches that the host kernels execute."""
    if files.vendor in _installed:
        return _installed[files.vendor]
    fake = fakes.Fake(files)
    backend = fakes.backend_class(fake).__mro__[1]
    backend.torch_device_of = classmethod(lambda cls, ordinal: fakes.CpuTorchDevice(ordinal))
    launcher = importlib.import_module(f"uccl_ep_host._host_lanes{widest_host_lanes()}").Launcher()
    lanes = 64 if files.vendor == "hip" else 32

    def run(kernel: str, at: int, blocks: int, threads: int, shared: int) -> int:
        parameters = ctypes.string_at(at, ctypes.sizeof(fakes.KERNELS[kernel]))
        for name, pointer, nbytes in windows_of(fakes.KERNELS[kernel].from_buffer_copy(parameters)):
            if not fake.library.fake_reaches(pointer, nbytes):
                print(f"{kernel} was given {name} = {pointer:#x}, which the device cannot reach", file=sys.stderr)
                return INVALID_VALUE
        launcher.launch(kernel, parameters, blocks, threads // lanes, shared)
        return 0

    fake.set_launcher(run)
    _installed[files.vendor] = fake
    return fake


def high_throughput(ctx: Context, *, files: fakes.FakeFiles, **arguments: Any) -> list[str]:
    """Dispatch and combine, exact; returns the calls that the fake has seen."""
    fake = _install(files)
    buffer = ctx.buffer(num_rdma_bytes=16 << 20, num_nvl_bytes=16 << 20)
    fake.journal()
    cases.high_throughput(ctx, buffer=buffer, **arguments)
    return fake.journal()


def low_latency(ctx: Context, *, files: fakes.FakeFiles, **arguments: Any) -> list[str]:
    fake = _install(files)
    buffer = ctx.buffer(num_rdma_bytes=64 << 20)
    fake.journal()
    cases.low_latency(ctx, buffer=buffer, **arguments)
    return fake.journal()


def created_and_destroyed(ctx: Context, *, files: fakes.FakeFiles, times: int) -> list[tuple[int, int]]:
    """Memory that is live on the fake after each life of a buffer."""
    fake = _install(files)
    live = []
    for _ in range(times):
        buffer = ctx.new_buffer(num_rdma_bytes=8 << 20)
        buffer.destroy()
        ctx.barrier()
        live.append((fake.count("allocations"), fake.count("registrations")))
    return live


def fails_to_open(ctx: Context, *, files: fakes.FakeFiles, call: str) -> str:
    """The error of a Buffer when a call of the driver fails on rank 1."""
    fake = _install(files)
    if ctx.rank == 1:
        fake.fail_next(call, 2)
    try:
        ctx.new_buffer(num_rdma_bytes=8 << 20)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        fake.fail_next("", 0)
    return "no error"


def another_build(ctx: Context, *, files: fakes.FakeFiles, tokens: list[int]) -> str:
    """The error of a dispatch whose kernel takes another struct than these bindings give."""
    _install(files)
    buffer = ctx.new_buffer(num_rdma_bytes=16 << 20)
    try:
        cases.high_throughput(ctx, buffer=buffer, tokens=tokens)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        buffer.destroy()
    return "no error"


def traced(ctx: Context, *, files: fakes.FakeFiles, **arguments: Any) -> tuple[list[Any], int, int]:
    """Rows of the profile of a dispatch and combine, and what a comparison of clocks is off by, and may be."""
    _install(files)
    buffer = ctx.new_buffer(num_rdma_bytes=64 << 20)
    cases.low_latency(ctx, buffer=buffer, **arguments)
    rows = [dict(row) for row in buffer.profile().as_dict()["rows"]]
    backend = buffer._communicator.backend
    window = backend.allocate_host_window(clocks.WINDOW_BYTES)
    anchor = clocks.compare(backend, window)  # the fake device runs on the host's clock
    window.close()
    buffer.destroy()
    return rows, abs(anchor.device_ns - anchor.host_ns), anchor.error_ns
