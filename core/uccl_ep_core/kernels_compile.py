"""``python -m uccl_ep_core.kernels_compile``: compile every kernel for every architecture of every backend.

Needs no device. Prints a line for each kernel, fails on vector registers that spill and on figures
that grew beyond the table each backend keeps; ``--update`` accepts the new figures.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from . import registry
from .device_runtime.compiler import CompileError
from .device_runtime.offline import KernelResources, OfflineCompiler, offline_compiler
from .device_runtime.resource_table import Figures, read_table, regressions, write_table


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
    """Compile everything of one backend, printing as it goes; returns the figures and what failed."""
    figures: Figures = {}
    problems: list[str] = []
    for unit in compiler.units(traced):
        for architecture in architectures:
            start = time.monotonic()
            try:
                build = compiler.compile(unit, architecture)
            except CompileError as error:
                problems.append(f"{name} {architecture}: {error}")
                continue
            seconds = time.monotonic() - start
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
        architectures = [a for a in compiler.architectures if a in (chosen.architecture or compiler.architectures)]
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
