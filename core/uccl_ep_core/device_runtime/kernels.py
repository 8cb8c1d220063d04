"""The kernels of a device: loaded once, checked before every launch."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Sequence

from ..errors import ArgumentError
from .driver import DeviceFacts, Driver
from .sources import Unit


@dataclasses.dataclass
class _Kernel:
    function: int
    parameter_bytes: int | None
    allowed_shared_bytes: int = 48 << 10  # what every block may use without asking
    checked: set[tuple[int, int, int]] = dataclasses.field(default_factory=set)


class KernelTable:
    """Functions by kernel name.

    Args:
        image_of: machine code of a unit for this device, and where it came from ("built", "compiled").
    """

    def __init__(
        self, driver: Driver, facts: DeviceFacts, units: Sequence[Unit], image_of: Callable[[Unit], tuple[bytes, str]]
    ) -> None:
        self._driver = driver
        self._facts = facts
        self._modules: list[int] = []
        self._kernels: dict[str, _Kernel] = {}
        self.origin: dict[str, str] = {}
        try:
            for unit in units:
                image, self.origin[unit.name] = image_of(unit)
                module = driver.load_module(image)
                self._modules.append(module)
                for name in unit.kernels:
                    function = driver.get_function(module, name)
                    self._kernels[name] = _Kernel(function, driver.parameter_bytes(function))
        except BaseException:
            self.close()
            raise

    def ready(
        self, name: str, parameters: bytes, blocks: int, threads: int, shared_bytes: int, cooperative: bool
    ) -> int:
        """The function, after checks that a driver would not make or would answer with one word.

        Raises:
            ArgumentError: unknown kernel, parameters of another size, or blocks that would not all run
                at once though they wait for each other.
        """
        kernel = self._kernels.get(name)
        if kernel is None:
            near = difflib.get_close_matches(name, self._kernels, n=1, cutoff=0.0)
            raise ArgumentError(f"no kernel is named {name!r}; did you mean {near[0] if near else 'another build'!r}?")
        if kernel.parameter_bytes is not None and kernel.parameter_bytes != len(parameters):
            raise ArgumentError(
                f"kernel {name} takes {kernel.parameter_bytes} bytes of parameters, given {len(parameters)}: "
                f"the bindings and the kernels are of different builds"
            )
        if shared_bytes > kernel.allowed_shared_bytes:
            self._driver.allow_shared_bytes(kernel.function, shared_bytes)
            kernel.allowed_shared_bytes = shared_bytes
        shape = (blocks, threads, shared_bytes)
        if cooperative and shape not in kernel.checked:
            fit = self._driver.resident_blocks(kernel.function, threads, shared_bytes) * self._facts.multiprocessors
            if blocks > fit:
                raise ArgumentError(
                    f"num_blocks = {blocks}: kernel {name} with {threads} threads and {shared_bytes} bytes of shared "
                    f"memory runs at most {fit} blocks at once on {self._facts.name}"
                )
            kernel.checked.add(shape)
        return kernel.function

    def close(self) -> None:
        while self._modules:
            self._driver.unload_module(self._modules.pop())
        self._kernels.clear()
