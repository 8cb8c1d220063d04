#!/usr/bin/env python3
"""Run a command in one guest, or one command each in two guests that are linked.

    guest.py [--timeout S] [--memory 4G] [--cpu N] [--env NAME=VALUE]... -- COMMAND
    guest.py --nodes 2 ... -- COMMAND_OF_NODE_0 COMMAND_OF_NODE_1

A guest is a User-Mode Linux process (kernel: ``build_kernel.sh``) that sees the host's files read-only
and runs the host's programs. Before the command runs, ``devices.sh`` makes the RDMA devices: ``rxe0``
and ``siw0``. In the command, NODE is 0 or 1 and JOB a folder that guest and host both write. Two guests
are joined by two socket pairs, so nothing touches the host's network.

The exit code is the command's (of two, the first that is not 0); 124 when the time is up, 97 when a
guest did not come up, with its console on stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import pathlib
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

HERE = pathlib.Path(__file__).resolve().parent
TIMED_OUT, NOT_UP = 124, 97


@dataclasses.dataclass(frozen=True)
class Result:
    """What a guest left behind."""

    node: int
    status: int
    log: str
    kernel_log: str


def build_kernel() -> str:
    """The path of the test kernel, built at the first call."""
    done = subprocess.run([str(HERE / "build_kernel.sh")], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"build_kernel.sh ended with {done.returncode}; its own messages say why")
    return done.stdout.strip()


def _link() -> tuple[socket.socket, socket.socket]:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    for end in ends:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, 4 << 20)  # bytes; small ones drop bursts of jumbo frames
    return ends


def _start(
    kernel: str,
    node: int,
    cpu: int,
    command: str,
    job: pathlib.Path,
    memory: str,
    env: Mapping[str, str],
    links: Sequence[int],
) -> subprocess.Popen[bytes]:
    exports = {"NODE": str(node), "JOB": "/run/job", "PATH": os.environ["PATH"], **env}
    lines = [f"export {name}={shlex.quote(value)}" for name, value in exports.items()]
    lines += [f". {shlex.quote(str(HERE / 'devices.sh'))} || exit {NOT_UP}", f"cd {shlex.quote(os.getcwd())}", command]
    (job / "command").write_text("\n".join(lines) + "\n")
    arguments = [kernel, f"mem={memory}", "root=none", "rootfstype=hostfs", "rootflags=/", "ro"]
    arguments += [f"init={HERE / 'guest_init.sh'}", "con=null", "con0=null,fd:1", "quiet"]
    arguments += [f"uccl_job={job}", f"umid=uccl_ep_{os.getpid()}_{node}"]
    arguments += [f"vec{number}:transport=fd,fd={fd},mtu=9200" for number, fd in enumerate(links)]
    # A guest has one CPU, and every system call of its processes passes between two host threads:
    # on one core that is about four times faster than across two.
    cpus = sorted(os.sched_getaffinity(0))
    arguments = ["taskset", "-c", str(cpus[(cpu + node) % len(cpus)]), *arguments]
    with open(job / "console", "wb") as console:
        return subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            pass_fds=links,
            env={**os.environ, "TMPDIR": "/dev/shm"},  # the guest's memory is a sparse file there
            start_new_session=True,
        )


def _read(path: pathlib.Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def run(
    commands: Sequence[str],
    *,
    timeout_s: float = 600,
    memory: str = "4G",
    env: Mapping[str, str] | None = None,
    kernel: str | None = None,
    cpu: int = 0,
) -> list[Result]:
    """Run one or two commands, each in a guest of its own, and wait for all of them."""
    if len(commands) not in (1, 2):
        raise ValueError(f"{len(commands)} guests were asked for: one or two can be linked")
    kernel = kernel or build_kernel()
    with contextlib.ExitStack() as cleanup:
        links = [_link() for _ in range(2)] if len(commands) == 2 else []
        for end in itertools.chain(*links):
            cleanup.enter_context(end)
        jobs = []
        processes: list[subprocess.Popen[bytes]] = []
        for node, command in enumerate(commands):
            job = pathlib.Path(tempfile.mkdtemp(prefix="uccl_ep-guest-"))
            cleanup.callback(shutil.rmtree, job, ignore_errors=True)
            jobs.append(job)
            ends = [link[node].fileno() for link in links]
            process = _start(kernel, node, cpu, command, job, memory, env or {}, ends)
            cleanup.callback(_stop, process)
            processes.append(process)
        deadline = time.monotonic() + timeout_s
        results = []
        for node, (job, process) in enumerate(zip(jobs, processes, strict=True)):
            status = NOT_UP
            try:
                process.wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                status = TIMED_OUT
                _stop(process)
            written = _read(job / "status").strip()
            console = _read(job / "console")[-4000:]
            log = _read(job / "log") or f"(no output; the console says)\n{console}"
            results.append(Result(node, int(written) if written else status, log, _read(job / "dmesg") or console))
        return results


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a guest: its kernel, and the host threads that stand for its processes."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1, choices=(1, 2))
    parser.add_argument("--timeout", type=float, default=600, help="seconds")
    parser.add_argument("--memory", default="4G", help="of each guest")
    parser.add_argument("--cpu", type=int, default=0, help="index of the core of the first guest")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("commands", nargs="+")
    arguments = parser.parse_args()
    if len(arguments.commands) != arguments.nodes:
        parser.error(f"{arguments.nodes} command(s) expected, {len(arguments.commands)} given: quote each as one word")
    env = dict(pair.split("=", 1) for pair in arguments.env)
    results = run(arguments.commands, timeout_s=arguments.timeout, memory=arguments.memory, env=env, cpu=arguments.cpu)
    for result in results:
        if len(results) > 1:
            print(f"--- node {result.node} ended with {result.status}")
        print(result.log, end="" if result.log.endswith("\n") else "\n")
    return next((result.status for result in results if result.status), 0)


if __name__ == "__main__":
    sys.exit(main())
