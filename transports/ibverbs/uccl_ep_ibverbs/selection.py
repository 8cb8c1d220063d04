"""Which of this host's devices are used: what a probe tells of all, and the choice among them."""

from __future__ import annotations

from typing import Any

from uccl_ep_core.errors import BackendUnavailableError
from uccl_ep_core.transport import Device

from . import discovery
from .settings import Settings


def listing(settings: Settings, library: str) -> list[Device]:
    """Every RDMA device, or one entry that says why there is none. ``library``: where pyverbs was found."""
    nics = [discovery.nic(name, settings) for name in discovery.names()]
    if not nics:
        return [Device("ibverbs", False, "this host has no RDMA device", discovery.NO_DEVICE_REMEDY)]
    gpu = discovery.gpu_pci_path(settings.near)
    best = discovery.rank_devices(nics, gpu)
    order = {nic.name: place for place, nic in enumerate(best)}
    found = []
    for nic in sorted(nics, key=lambda it: (order.get(it.name, len(nics)), it.name)):
        details: dict[str, Any] = {
            "kind": nic.kind,
            "driver": nic.driver,
            "ports": {port.number: f"{port.state}, {port.gbits:g} Gbit/s" for port in nic.ports},
            "pyverbs": library,
        }
        if gpu and nic.pci_path:
            details["links_to_gpu"] = discovery.distance(gpu, nic.pci_path)
        why = "chosen where no device is named" if nic.usable and order[nic.name] == 0 else ""
        found.append(Device(nic.name, nic.usable, nic.reason or why, nic.remedy, details))
    return found


def choose(device: str | None, settings: Settings) -> tuple[list[discovery.Nic], str]:
    """The devices that ``device`` names, separated by commas, or else the best one; and why these.

    Raises:
        BackendUnavailableError: a name that is not there, or no device that can be used.
    """
    present = discovery.names()
    if device:
        names = [name.strip() for name in device.split(",") if name.strip()]
        unknown = [name for name in names if name not in present]
        if unknown or not names:
            wanted = ", ".join(unknown) or repr(device)
            others = ", ".join(present) or "none"
            raise BackendUnavailableError(f"ibverbs: there is no RDMA device {wanted}; present: {others}")
        return [discovery.nic(name, settings) for name in names], "named by the caller"
    gpu = discovery.gpu_pci_path(settings.near)
    every = [discovery.nic(name, settings) for name in present]
    nics = discovery.rank_devices(every, gpu)[:1]
    if not nics:
        reasons = "; ".join(f"{nic.name}: {nic.reason}, {nic.remedy}" for nic in every)
        raise BackendUnavailableError(
            f"ibverbs: {reasons or f'this host has no RDMA device; {discovery.NO_DEVICE_REMEDY}'}"
        )
    return nics, f"the nearest to the GPU of {len(every)}" if gpu else f"the best of {len(every)}"
