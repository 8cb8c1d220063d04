"""Files that a killed process leaves in shared memory, and who removes them.

The shm provider names its files after the process. Once all ranks are connected the names are removed, the
memory stays. A process that is killed before cannot do that, so the survivors do, who know the names from the
exchange of addresses; where nobody survives, the next run does, from a record that each process keeps until
it is connected. A file is removed only when the process that made it
is certainly gone: same machine, same PID namespace, and no process with that number and start time.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import tempfile
from collections.abc import Iterable

SHARED_MEMORY = pathlib.Path("/dev/shm")
PREFIX = "fi_shm://"
# What the provider appends to an address for files of one endpoint.
VALID_NAME = re.compile(r"[0-9]+(:[0-9]+){0,3}(_[a-z0-9]+)?")


@dataclasses.dataclass(frozen=True)
class Process:
    """One process, told apart from any later one with the same number.

    Attributes:
        pid: its number in its namespace.
        start: its start time in clock ticks since boot.
        boot: this boot of this machine.
        namespace: inode of its PID namespace.
    """

    pid: int
    start: int
    boot: str
    namespace: int

    @staticmethod
    def current() -> Process:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        pid = os.getpid()
        return Process(pid, start_time(pid) or 0, boot, os.stat("/proc/self/ns/pid").st_ino)

    def same_view(self, other: Process) -> bool:
        """Whether each of the two can look the other up by its number."""
        return (self.boot, self.namespace) == (other.boot, other.namespace)

    def is_gone(self) -> bool:
        """Whether this process, which must be of the caller's namespace, has ended (or is a zombie)."""
        return start_time(self.pid) != self.start


def start_time(pid: int) -> int | None:
    """Start time of a living process, None for one that has ended."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def file_name(endpoint: bytes) -> str | None:
    """The file in shared memory that belongs to an endpoint's address, None for another provider's address."""
    text = endpoint.rstrip(b"\0").decode("ascii", errors="replace")
    name = text.removeprefix(PREFIX)
    return name if text.startswith(PREFIX) and VALID_NAME.fullmatch(name) else None


def remove(process: Process, names: Iterable[str], here: Process) -> list[str]:
    """Remove a dead process's files; which ones there were."""
    if not here.same_view(process) or not process.is_gone():
        return []
    removed = []
    for name in names:
        # The names came from another process: never trust them with more than a file of its own number.
        if VALID_NAME.fullmatch(name) and name.split(":")[0] == str(process.pid):
            try:
                (SHARED_MEMORY / name).unlink()
                removed.append(name)
            except OSError:
                pass
    return removed


def _folder() -> pathlib.Path:
    return pathlib.Path(tempfile.gettempdir()) / f"uccl_ep-libfabric-{os.getuid()}"


def record(process: Process, names: Iterable[str]) -> pathlib.Path | None:
    """Note this process's files for a later run; the note's place, to be removed on a clean end."""
    folder = _folder()
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return None  # somebody else's folder: leave no note there
        handle, path = tempfile.mkstemp(dir=folder, prefix=f"{process.pid}-", suffix=".json")
        with os.fdopen(handle, "w") as file:
            json.dump({**dataclasses.asdict(process), "names": list(names)}, file)
    except OSError:
        return None
    return pathlib.Path(path)


def sweep(here: Process) -> list[str]:
    """Remove what earlier, killed runs of this user left; which files there were."""
    removed: list[str] = []
    folder = _folder()
    if folder.is_symlink() or not folder.is_dir() or folder.stat().st_uid != os.getuid():
        return removed
    for note in folder.glob("*.json"):
        try:
            content = json.loads(note.read_text())
            process = Process(content["pid"], content["start"], content["boot"], content["namespace"])
            names = [str(name) for name in content["names"]]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # half-written by a living process
        if process.boot != here.boot or (here.same_view(process) and process.is_gone()):
            removed += remove(process, names, here)
            note.unlink(missing_ok=True)
    return removed
