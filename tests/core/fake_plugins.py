"""Packages that a stranger might have installed: a module and its metadata in a temporary folder on sys.path."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from uccl_ep_core import registry

TRANSPORT = """
from uccl_ep_core.capabilities import Capabilities
from uccl_ep_core.transport import Device, Option, Transport


class Fake(Transport):
    OPTIONS = {{
        "rails": Option(2, "how many", minimum=1, maximum=8),
        "mode": Option("fast", "which way", choices=("fast", "exact")),
        "verbose": Option(False, "say more"),
    }}

    @classmethod
    def probe(cls, options):
        return {devices}

    @classmethod
    def open(cls, device, options):
        return cls()

    capabilities = property(lambda self: Capabilities())
    native_ops = property(lambda self: 0)

    def register(self, memory):
        return 0

    def address(self):
        return b""

    def connect(self, rank, addresses, peers, lanes, timeout_s):
        pass

    def close(self):
        pass
"""

USABLE = '[Device("nic0", True, "it is fake"), Device("nic1", False, "cable is out", "plug it in")]'
UNUSABLE = '[Device("nic0", False, "cable is out", "plug it in")]'

Install = Callable[..., None]


@contextmanager
def installed(folder: Path) -> Iterator[Install]:
    """Gives ``install(name, source)``; everything installed is gone afterwards."""
    before = set(sys.modules)

    def install(
        name: str, source: str, *, attribute: str = "Fake", package: str = "", group: str = "transports"
    ) -> None:
        package = package or f"stranger_{name.replace('-', '_').lower()}"
        place = folder / package
        place.mkdir()
        (place / f"{package}.py").write_text(source)
        metadata = place / f"{package}-1.5.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.5\n")
        (metadata / "entry_points.txt").write_text(f"[uccl_ep.{group}]\n{name} = {package}:{attribute}\n")
        sys.path.append(str(place))
        registry.refresh()

    path = list(sys.path)
    try:
        yield install
    finally:
        sys.path[:] = path
        for module in set(sys.modules) - before:
            if module.startswith("stranger_"):
                del sys.modules[module]
        registry.refresh()


def transport(devices: str = USABLE) -> str:
    """Source of a complete transport whose probe returns ``devices``."""
    return TRANSPORT.format(devices=devices)
