"""Runs a run-time compiler in a process of its own.

Releases of such compilers exist that end the process on valid input; a training job must survive
that, so the library is loaded only in a child, which reads a request and writes a result file.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import EPError

_WORKER = Path(__file__).with_name("compile_worker.py")


class CompileError(EPError):
    """The compiler refused the source, ended abnormally or took too long; carries its log."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(f"{message}\n{log}" if log else message)
        self.log = log


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Machine code and what the compiler printed (registers, spills, warnings)."""

    image: bytes
    log: str


@dataclasses.dataclass(frozen=True)
class CompilerLibrary:
    """A run-time compiler with the usual program interface (create, compile, get log, get code).

    Attributes:
        libraries: shared libraries in the order they must be opened, the compiler last.
        prefix: what its function names begin with.
        code: what its functions call machine code, as in ``<prefix>Get<code>Size``.
    """

    libraries: tuple[str, ...]
    prefix: str
    code: str

    @property
    def path(self) -> str:
        return self.libraries[-1]

    @property
    def identity(self) -> str:
        """Tells releases apart without loading the library: resolved name, size, time of change in ns."""
        resolved = os.path.realpath(self.path)
        state = os.stat(resolved)
        return f"{os.path.basename(resolved)} {state.st_size} {state.st_mtime_ns}"


def run_compiler(
    compiler: CompilerLibrary,
    *,
    name: str,
    source: str,
    headers: Mapping[str, str],
    options: Sequence[str],
    timeout_s: float = 120.0,
) -> Compiled:
    """Compile in a child process.

    Args:
        name: what messages call the source.
        headers: text by the name under which it is included.

    Raises:
        CompileError: with the compiler's words, or with how its process ended.
    """
    with tempfile.TemporaryDirectory(prefix="uccl_ep_compile_") as folder:
        output = Path(folder) / "image"
        request = {
            "libraries": list(compiler.libraries),
            "prefix": compiler.prefix,
            "code": compiler.code,
            "name": name,
            "source": source,
            "headers": dict(headers),
            "options": list(options),
            "output": str(output),
        }
        # -I: nothing of the caller's environment or folder can be imported by the worker.
        command = [sys.executable or "python3", "-I", str(_WORKER)]
        try:
            done = subprocess.run(command, input=json.dumps(request).encode(), capture_output=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise CompileError(f"compiling {name} took more than {timeout_s:g} s and was stopped") from None
        except OSError as error:
            raise CompileError(f"the compiler process {command[0]} cannot be started: {error}") from error
        log = (done.stdout + done.stderr).decode(errors="replace").strip()
        if done.returncode < 0:
            raise CompileError(
                f"{compiler.path} ended its process with signal {-done.returncode} while compiling {name}; "
                f"install another release of it",
                log,
            )
        if done.returncode != 0 or not output.is_file():
            raise CompileError(f"compiling {name} with {' '.join(options)} failed", log)
        return Compiled(output.read_bytes(), log)
