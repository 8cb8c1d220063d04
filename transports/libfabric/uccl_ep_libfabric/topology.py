"""How far a NIC is from a GPU, in hops of the PCIe tree as sysfs shows it."""

from __future__ import annotations

import pathlib
import sys

SYSFS = pathlib.Path("/sys/bus/pci/devices")
OTHER_ROOT = 100  # added where the way leads over the CPU: no switch path is ever that long
OTHER_NUMA = 200  # ... and to the other socket


def pci_address(domain: int, bus: int, device: int, function: int) -> str:
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"


def distance(one: str, other: str, sysfs: pathlib.Path = SYSFS) -> int | None:
    """Bridges between two PCI functions; None where sysfs does not know one of them."""
    places = [sysfs / address.lower() for address in (one, other)]
    if not all(place.exists() for place in places):
        return None
    # A resolved path reads .../pci0000:00/0000:00:01.0/0000:01:00.0: one component a bridge.
    first, second = (
        [part for part in place.resolve().parts if part.startswith("pci") or ":" in part] for place in places
    )
    shared = 0
    while shared < min(len(first), len(second)) and first[shared] == second[shared]:
        shared += 1
    hops = (len(first) - shared) + (len(second) - shared)
    if shared == 0:
        hops += OTHER_ROOT if _numa(places[0]) == _numa(places[1]) else OTHER_NUMA
    return hops


def _numa(place: pathlib.Path) -> str:
    node = place / "numa_node"
    return node.read_text().strip() if node.exists() else ""


def current_gpu() -> str:
    """PCI address of the GPU that torch uses in this process, "" where it uses none. Initialises nothing."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    if not hasattr(properties, "pci_bus_id"):
        return ""
    return pci_address(properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id, 0)
