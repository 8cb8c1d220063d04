"""Writes the kernel objects of a backend and their manifest; the package's build runs it:
``python -m uccl_ep_core.device_runtime.build_objects PACKAGE FOLDER [ARCHITECTURE ...]``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from .compiler import CompileError
from .objects import write_manifest
from .offline import OfflineCompiler, offline_compiler


def write_objects(compiler: OfflineCompiler, folder: Path, architectures: Sequence[str] = ()) -> list[Path]:
    """Compile every unit and describe the objects in a manifest; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    entries: list[dict[str, str]] = []
    for unit in compiler.units():
        for architecture in architectures or compiler.architectures:
            file = folder / f"{unit.name}.{architecture}.{compiler.suffix}"
            file.write_bytes(compiler.compile(unit, architecture).image)
            files.append(file)
            entries.append({"unit": unit.name, "digest": unit.digest, "architecture": architecture, "file": file.name})
    write_manifest(folder, entries)
    return files


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the kernel objects of a GPU backend.")
    parser.add_argument("package", help="import name of the backend, e.g. uccl_ep_cuda")
    parser.add_argument("folder", type=Path)
    parser.add_argument("architectures", nargs="*", help="default: all that the backend lists")
    parser.add_argument("--optional", action="store_true", help="write no object where no compiler is found")
    chosen = parser.parse_args(arguments)
    compiler = offline_compiler(chosen.package)
    reason = compiler.unavailable_because()
    if reason and chosen.optional:
        chosen.folder.mkdir(parents=True, exist_ok=True)
        write_manifest(chosen.folder, [])
        print(f"{chosen.package}: no kernel objects, they are compiled at first use ({reason})")
        return 0
    if reason:
        parser.error(reason)
    try:
        files = write_objects(compiler, chosen.folder, chosen.architectures)
    except CompileError as error:
        # An install must not fail for a compiler that it can do without; `make kernels` is the check.
        print(f"{chosen.package}: no kernel objects, they are compiled at first use ({error})")
        write_manifest(chosen.folder, [])
        return 0 if chosen.optional else 1
    for file in files:
        print(f"{file.name}: {file.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
