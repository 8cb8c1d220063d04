"""The figures of compiled kernels, kept in a file, so that a change for the worse is seen.

The file belongs to one compiler release; another release may move a few registers, so a small
growth is allowed. Spills are not: a kernel that had none must have none.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from .offline import KernelResources

Figures = dict[str, dict[str, KernelResources]]
"""Resources by architecture and kernel."""

_GROWTH = 1.15  # of registers and stack
_SLACK = 8  # registers or bytes, for kernels with few


def read_table(path: Path) -> Figures:
    """The accepted figures; empty where there is no file yet."""
    if not path.is_file():
        return {}
    content = json.loads(path.read_text())
    return {
        architecture: {kernel: KernelResources(**figures) for kernel, figures in kernels.items()}
        for architecture, kernels in content.items()
    }


def write_table(path: Path, figures: Figures) -> None:
    content = {
        architecture: {kernel: dataclasses.asdict(resources) for kernel, resources in sorted(kernels.items())}
        for architecture, kernels in sorted(figures.items())
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def regressions(accepted: Figures, now: Figures) -> list[str]:
    """What got worse, in words; spills of a vector register are reported in any case."""
    problems = []
    for architecture, kernels in now.items():
        for kernel, figures in kernels.items():
            where = f"{kernel} on {architecture}"
            if figures.spills:
                problems.append(f"{where} spills ({figures.spills})")
            before = accepted.get(architecture, {}).get(kernel)
            if before is None:
                problems.append(f"{where} is not in the table")
                continue
            for field in ("registers", "stack_bytes", "scalar_spills", "shared_bytes"):
                old, new = getattr(before, field), getattr(figures, field)
                if new > old * _GROWTH + _SLACK:
                    problems.append(f"{where}: {field} grew from {old} to {new}")
    return problems
