"""Compiled device code on disk: private, verified when read, and safe when many ranks start at once.

An entry's name is a hash of everything that decides its content. It is written to a temporary file
beside it and renamed, so a reader sees all of it or nothing; a lock per entry lets one process
compile while the others wait for the result, and a process that dies leaves the lock free.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import EPError

_POLL_S = 50e-6  # between tries for the lock; a compile takes 100 ms or more
_DIGEST_BYTES = 32


class CompileTimeoutError(EPError):
    """Another process holds an entry's lock for longer than the limit."""


def cache_key(*parts: str | bytes) -> str:
    """A name for the entry that these parts decide; parts cannot run into each other."""
    state = hashlib.sha256(b"uccl_ep device code 1")
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()


def default_directory() -> Path:
    """``$UCCL_EP_CACHE_DIR``, else the user's cache folder."""
    chosen = os.environ.get("UCCL_EP_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "uccl_ep"


class CompileCache:
    """Entries in one folder, which belongs to this user alone: what lies there runs on the GPU."""

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory or default_directory()
        self.problem = ""
        """Why nothing is kept on disk, "" where the folder serves."""
        try:
            _make_private(self.directory)
        except OSError as error:
            self.problem = f"{self.directory} cannot keep compiled kernels: {error}"

    def get(self, key: str, compile_entry: Callable[[], bytes], timeout_s: float = 300.0) -> bytes:
        """The entry, compiled by ``compile_entry`` if it is not there.

        Raises:
            CompileTimeoutError: another process compiles it and does not finish in time.
        """
        if self.problem:
            return compile_entry()
        path = self.directory / f"{key}.bin"
        found = _read(path)
        if found is not None:
            return found
        with _locked(self.directory / f"{key}.lock", timeout_s):
            found = _read(path)  # another rank may have compiled it meanwhile
            if found is None:
                found = compile_entry()
                _write(path, found)
        return found


def _make_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = directory.stat()
    if state.st_uid != os.geteuid():
        raise PermissionError(f"it belongs to user {state.st_uid}; set UCCL_EP_CACHE_DIR to a folder of your own")
    if stat.S_IMODE(state.st_mode) & 0o022:
        raise PermissionError("other users can write there; chmod 700 it, or set UCCL_EP_CACHE_DIR")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError("it is not writable; set UCCL_EP_CACHE_DIR to a folder that is")


def _read(path: Path) -> bytes | None:
    # The digest in front catches a file system that lost the end of a file in a crash.
    try:
        data = path.read_bytes()
    except OSError:
        return None
    payload = data[_DIGEST_BYTES:]
    return payload if hashlib.sha256(payload).digest() == data[:_DIGEST_BYTES] else None


def _write(path: Path, payload: bytes) -> None:
    # A full disk must not fail a run that already holds its code in memory.
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".new-", delete=False) as file:
            temporary = file.name
            file.write(hashlib.sha256(payload).digest() + payload)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


@contextlib.contextmanager
def _locked(path: Path, timeout_s: float) -> Iterator[None]:
    deadline = time.monotonic() + timeout_s
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise CompileTimeoutError(
                        f"another process has compiled for more than {timeout_s:g} s under {path}"
                    ) from None
                time.sleep(_POLL_S)
            except OSError:
                break  # a file system without locks: ranks may compile twice, the rename keeps that right
        yield
    finally:
        os.close(descriptor)
