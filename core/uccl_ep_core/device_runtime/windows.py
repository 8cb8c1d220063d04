"""The kinds of memory a driver-based backend hands out, and the handles that carry them to peers."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from typing import Any

from ..errors import EPError
from ..gpu_backend import Window
from ..transport import Memory
from .driver import Driver

_MAGIC = "uccl_ep window 1"


class WindowImportError(EPError):
    """A peer's window cannot be mapped here; the peer is then reached through a transport."""


@dataclasses.dataclass(frozen=True)
class WindowHandle:
    """What a process must know to map another's window.

    Attributes:
        driver: name of the driver that made it; only the same one can open it.
        host: identity of the machine and boot, since the handles of drivers mean nothing elsewhere.
        process: the exporting process; a driver refuses to import within it, and there is no need to.
        device: unique id of the device that holds the memory, "" for host memory.
        payload: the driver's handle, or that of shared host memory.
    """

    driver: str
    host: str
    process: str
    pointer: int
    nbytes: int
    device: str
    payload: bytes

    def pack(self) -> bytes:
        fields = dataclasses.asdict(self) | {"magic": _MAGIC, "payload": self.payload.hex()}
        return json.dumps(fields).encode()

    @classmethod
    def unpack(cls, data: bytes) -> WindowHandle:
        try:
            fields: dict[str, Any] = json.loads(data)
            if fields.pop("magic") != _MAGIC:
                raise ValueError("made by another release")
            return cls(**(fields | {"payload": bytes.fromhex(fields["payload"])}))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WindowImportError(f"not a window handle of this release: {error}") from None


_TOKEN = os.urandom(8).hex()


def process_identity() -> str:
    """Unlike a process number alone, different in containers that number their processes alike."""
    return f"{os.getpid()}-{_TOKEN}"


def machine_identity() -> str:
    """Equal in all processes between which driver handles can be passed, and nowhere else."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        boot = os.uname().nodename
    return boot


class RuntimeWindow(Window):
    """Memory with a list of what must be undone, last first, when it is closed.

    Attributes:
        payload: the driver's or the shared memory's handle, None where it cannot be exported.
    """

    def __init__(
        self, memory: Memory, device_pointer: int, undo: list[Callable[[], None]], payload: bytes | None = None
    ) -> None:
        self.memory = memory
        self.device_pointer = device_pointer
        self.payload = payload
        self._undo = undo

    def when_closed(self, call: Callable[[], None]) -> None:
        """Call this once, after everything else is undone."""
        self._undo.insert(0, call)

    def close(self) -> None:
        while self._undo:
            self._undo.pop()()


def on_device(driver: Driver, ordinal: int, call: Callable[[int], None], pointer: int) -> Callable[[], None]:
    """A deferred call that applies to one device, whatever thread makes it."""

    def run() -> None:
        with driver.active(ordinal):
            call(pointer)

    return run
