"""``python -m uccl_ep_core.kernels_compile``: compile every kernel for every architecture of every backend.

Needs no device. Prints a line for each kernel, fails on vector registers that spill and on figures
that grew beyond the table each backend keeps; ``--update`` accepts the new figures.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from . import registry
from .device_runtime.compiler import CompileError
from .device_runtime.offline import KernelResources, OfflineBuild, OfflineCompiler, offline_compiler
from .device_runtime.resource_table import Figures, read_table, regressions, write_table
from .device_runtime.sources import Unit


def offline_compilers() -> dict[str, OfflineCompiler]:
    """Compilers by backend, for those whose package has one."""
    found = {}
    for plugin in registry.plugins(registry.GPU_BACKENDS):
        package = plugin.target.split(":")[0].split(".")[0]
        try:
            found[plugin.name] = offline_compiler(package)
        except (ModuleNotFoundError, AttributeError):
            continue
    return found


def compile_backend(
    name: str, compiler: OfflineCompiler, architectures: Sequence[str], traced: bool = False
) -> tuple[Figures, list[str]]:
    """Compile everything of one backend, printing in order as it goes; returns the figures and what failed.

    Each compiler is a process of its own, so as many run at once as this process has cores.
    """
    figures: Figures = {}
    problems: list[str] = []

    def compiled(unit: Unit, architecture: str) -> tuple[OfflineBuild | CompileError, float]:
        start = time.monotonic()
        try:
            return compiler.compile(unit, architecture), time.monotonic() - start
        except CompileError as error:
            return error, 0.0

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        under_way = [
            (unit, architecture, pool.submit(compiled, unit, architecture))
            for unit in compiler.units(traced)
            for architecture in architectures
        ]
        for unit, architecture, future in under_way:
            build, seconds = future.result()
            if isinstance(build, CompileError):
                problems.append(f"{name} {architecture}: {build}")
                continue
            print(f"{name:5} {architecture:8} {unit.name}: {len(build.image):7} bytes in {seconds:.1f} s")
            for kernel, taken in sorted(build.resources.items()):
                print(f"{name:5} {architecture:8}   {kernel:30} {_words(taken)}")
            figures.setdefault(architecture, {}).update(build.resources)
            sys.stdout.flush()
    return figures, problems


def _words(taken: KernelResources) -> str:
    return (
        f"{taken.registers:4} registers {taken.stack_bytes:5} B stack {taken.shared_bytes:6} B shared "
        f"{taken.spills:4} spilled {taken.scalar_spills:4} scalar spilled"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compile every kernel for every listed architecture.")
    parser.add_argument("--backend", action="append", help="only this backend; may be given several times")
    parser.add_argument("--architecture", action="append", help="only this architecture")
    parser.add_argument("--one-each", action="store_true", help="only the last architecture of each backend")
    parser.add_argument("--update", action="store_true", help="accept the figures as the new table")
    parser.add_argument(
        "--traced", action="store_true",
        help="compile the kernels that record what they do (option trace_kernels), which may spill and have no table",
    )  # fmt: skip
    parser.add_argument(
        "--skip-unavailable", action="store_true", help="pass over a backend whose compiler is not installed"
    )
    chosen = parser.parse_args(arguments)
    compilers = offline_compilers()
    unknown = sorted(set(chosen.backend or ()) - set(compilers))
    if unknown:
        parser.error(f"no backend {', '.join(unknown)} compiles offline; there are {', '.join(sorted(compilers))}")
    problems: list[str] = []
    for name, compiler in compilers.items():
        if chosen.backend and name not in chosen.backend:
            continue
        reason = compiler.unavailable_because()
        if reason:
            print(f"{name:5} not compiled: {reason}")
            if not chosen.skip_unavailable:
                problems.append(f"{name}: {reason}")
            continue
        known = compiler.architectures[-1:] if chosen.one_each else compiler.architectures
        architectures = [a for a in known if a in (chosen.architecture or known)]
        figures, failed = compile_backend(name, compiler, architectures, chosen.traced)
        problems += failed
        if chosen.traced:
            continue
        accepted = read_table(compiler.table)
        if chosen.update and not failed:
            write_table(compiler.table, accepted | figures)
            accepted = accepted | figures
        problems += [f"{name}: {problem}" for problem in regressions(accepted, figures)]
    for problem in problems:
        print(f"FAILED {problem}", file=sys.stderr)
    if not problems:
        print("every kernel compiles" + ("" if chosen.traced else ", nothing spills, no figure grew"))
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
