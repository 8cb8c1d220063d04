"""The host backend: CPU threads run the same kernels as a GPU would."""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from uccl_ep_core import shared_memory
from uccl_ep_core.errors import BackendUnavailableError
from uccl_ep_core.gpu_backend import Event, GpuBackend, KernelLimits, Window
from uccl_ep_core.transport import Device, Memory, Option

from .pool import OutputPool

_POOL = OutputPool()  # shared by all buffers of the process


def _has_avx2() -> bool:
    try:
        with open("/proc/cpuinfo") as file:
            flags = next((line for line in file if line.startswith("flags")), "").split()
    except OSError:
        return False
    return {"avx2", "fma", "bmi2", "f16c", "movbe"} <= set(flags)  # x86-64-v3


def _native_module(lanes: int) -> Any:
    names = [f"_host_lanes{lanes}"]
    if lanes == 1 and _has_avx2():
        names.insert(0, "_host_lanes1_v3")
    for name in names:
        try:
            return importlib.import_module(f"uccl_ep_host.{name}")
        except ModuleNotFoundError:
            continue
    raise BackendUnavailableError(
        f"the host backend was not built with {lanes} lanes: install with "
        f"-C cmake.define.UCCL_EP_HOST_LANES='1;{lanes}'"
    )


class HostWindow(Window):
    """Shared memory of this host."""

    def __init__(self, shared: Any, exported: bool) -> None:
        self._shared = shared
        self.memory = Memory(shared.pointer, shared.nbytes, share_handle=shared.handle() if exported else None)
        self.device_pointer = shared.pointer

    def close(self) -> None:
        self._shared.close()


class HostMemory(Window):
    """Private memory of this process."""

    def __init__(self, nbytes: int) -> None:
        self._storage = torch.zeros((max(nbytes, 8) + 63) // 8, dtype=torch.int64)
        self.memory = Memory((self._storage.data_ptr() + 63) // 64 * 64, nbytes)
        self.device_pointer = self.memory.pointer

    def close(self) -> None:
        self._storage = torch.empty(0, dtype=torch.int64)


class HostEvent(Event):
    """Work on the host is done when the call returns."""

    def wait(self, stream: int | None = None) -> None:
        return

    def synchronize(self, timeout_s: float) -> bool:
        return True


class HostBackend(GpuBackend):
    """Runs kernels on threads of the CPU; memory is shared memory of the host."""

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "lanes": Option(
            1, "lanes of a warp: 1 is fastest, 32 and 64 run the kernels as a GPU does", choices=(1, 32, 64)
        ),
        "threads": Option(1, "CPU threads a rank runs kernels on", minimum=1, maximum=64),
    }

    def __init__(self, lanes: int, threads: int) -> None:
        self._launcher = _native_module(lanes).Launcher()
        self._limits = KernelLimits(
            max_blocks=threads,
            max_warps_per_block=1 << 12,
            warp_size=lanes,
            max_shared_bytes=1 << 30,
            block_teams=1 << 12,
        )

    @classmethod
    def probe(cls, options: Mapping[str, Any]) -> Sequence[Device]:
        lanes = options.get("lanes", 1)
        try:
            module = _native_module(lanes)
        except BackendUnavailableError as error:
            return [Device("cpu", False, str(error), "reinstall with these lanes, or use another lane count")]
        details = {"cores": os.cpu_count(), "kernels": module.__name__.rsplit(".", 1)[-1]}
        return [Device("cpu", True, "kernels run on CPU threads", details=details)]

    @classmethod
    def open(cls, device: str | None, options: Mapping[str, Any]) -> HostBackend:
        if device not in (None, "", "cpu"):
            raise BackendUnavailableError(f"the host backend has one device, 'cpu', not {device!r}")
        return cls(options.get("lanes", 1), options.get("threads", 1))

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def limits(self) -> KernelLimits:
        return self._limits

    @property
    def waiting_threads(self) -> int:
        return self._limits.max_blocks

    def share_cores(self) -> tuple[int, int] | None:
        function, argument = self._launcher.share_cores()
        return function, argument

    def allocate_data_window(self, nbytes: int, *, for_transport: bool, device_memory: bool) -> Window:
        return HostWindow(shared_memory.create(nbytes), exported=True)

    def allocate_host_window(self, nbytes: int) -> Window:
        return HostWindow(shared_memory.create(nbytes), exported=True)

    def allocate_device_memory(self, nbytes: int) -> Window:
        return HostMemory(nbytes)

    def copy_to_device(self, window: Window, data: bytes, offset: int = 0) -> None:
        window.check_range(offset, len(data))
        ctypes.memmove(window.memory.pointer + offset, data, len(data))

    def copy_from_device(self, window: Window, nbytes: int, offset: int = 0) -> bytes:
        window.check_range(offset, nbytes)
        return ctypes.string_at(window.memory.pointer + offset, nbytes)

    @property
    def traces_kernels(self) -> bool:
        return True

    def export_window(self, window: Window) -> bytes:
        assert window.memory.share_handle is not None, "only windows are exported"
        return window.memory.share_handle

    def import_window(self, handle: bytes) -> Window:
        return HostWindow(shared_memory.attach(handle), exported=False)

    def launch(
        self,
        kernel: str,
        parameters: bytes,
        *,
        num_blocks: int,
        warps_per_block: int,
        shared_bytes: int = 0,
        stream: int | None = None,
        cooperative: bool = True,
    ) -> None:
        self._launcher.launch(kernel, parameters, num_blocks, warps_per_block, shared_bytes)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return _POOL.empty(shape, dtype)

    def current_stream(self) -> int:
        return 0

    def communication_stream(self) -> int:
        return 0

    def record_event(self, stream: int | None = None) -> Event:
        return HostEvent()

    def synchronize(self, stream: int | None, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        return
