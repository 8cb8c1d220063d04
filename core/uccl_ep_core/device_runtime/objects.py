"""Machine code that was compiled when the package was built: a folder of files and a manifest.

An object counts only if the sources are byte for byte those it was made from, so an edited checkout
never runs stale code.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

MANIFEST = "manifest.json"


def find_object(folder: Path, unit: str, digest: str, runs_on: Callable[[str], bool]) -> bytes | None:
    """The object of a unit for an architecture that ``runs_on`` accepts, or None."""
    try:
        entries = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    for entry in entries:
        if entry["unit"] == unit and entry["digest"] == digest and runs_on(entry["architecture"]):
            try:
                return (folder / entry["file"]).read_bytes()
            except OSError:
                return None
    return None


def write_manifest(folder: Path, entries: list[dict[str, str]]) -> None:
    """Describe the objects of a folder; each entry has unit, digest, architecture and file."""
    (folder / MANIFEST).write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")
