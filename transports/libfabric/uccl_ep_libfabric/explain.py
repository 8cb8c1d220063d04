"""Why a provider is not there, in words, with what a person can do about it."""

from __future__ import annotations

import functools
import mmap
import pathlib

from .library import Library
from .providers import Provider

PCI = pathlib.Path("/sys/bus/pci/devices")
RDMA = pathlib.Path("/sys/class/infiniband")
CXI = pathlib.Path("/sys/class/cxi")
AMAZON = "0x1d0f"
EFA_DEVICE_PREFIX = "0xefa"
# A name that a provider's code cannot do without: found in the library's file, the provider is compiled in.
MARKS = {"efa": (b"efadv_query_device", b"efadv_create_qp_ex"), "verbs": (b"ibv_create_qp", b"rdma_create_ep")}


@functools.cache
def compiled_in(path: str, family: str) -> bool:
    """Whether a library's file, or a provider file beside it, has a provider's code."""
    plugins = pathlib.Path(path).parent / "libfabric" / f"lib{family}-fi.so"
    if plugins.exists():
        return True
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return any(content.find(mark) >= 0 for mark in MARKS.get(family, ()))
    except (OSError, ValueError):
        return False


def efa_pci_functions(pci: pathlib.Path = PCI) -> list[str]:
    """PCI addresses of EFA functions, whether or not a driver has them."""
    found = []
    for place in sorted(pci.iterdir()) if pci.is_dir() else []:
        try:
            vendor, device = (place / "vendor").read_text().strip(), (place / "device").read_text().strip()
        except OSError:
            continue
        if vendor == AMAZON and device.startswith(EFA_DEVICE_PREFIX):
            found.append(place.name)
    return found


def rdma_devices(driver: str = "", rdma: pathlib.Path = RDMA) -> list[str]:
    """Names of RDMA devices the kernel has, of one driver or of any."""
    found = []
    for place in sorted(rdma.iterdir()) if rdma.is_dir() else []:
        link = place / "device" / "driver"
        name = link.resolve().name if link.exists() else ""
        if driver in ("", name):
            found.append(place.name)
    return found


def why_absent(library: Library, provider: Provider) -> tuple[str, str]:
    """Reason and remedy for a provider that gave no answer."""
    if provider.name in ("efa", "efa-direct"):
        return _why_no_efa(library, provider.name)
    if provider.name == "verbs":
        devices = rdma_devices()
        if not devices:
            return "this machine has no RDMA device", "load its driver; for software RDMA: modprobe rdma_rxe"
        if not compiled_in(library.path, "verbs"):
            return f"{library} was built without verbs", "use another libfabric by option library, or transport ibverbs"
        return (
            f"the verbs provider offers no reliable datagram endpoint on {', '.join(devices)}",
            "check that its ports are up (ibv_devinfo), or use transport ibverbs",
        )
    if provider.name == "cxi":
        if not CXI.is_dir():
            return "this machine has no Slingshot NIC (no /sys/class/cxi)", "use provider tcp here"
        return f"{library} has no cxi provider", "use the libfabric of the Slingshot host software by option library"
    if provider.name == "shm":
        return f"{library} was built without shm", "use another libfabric by option library, or transport shm"
    if provider.name in ("tcp", "tcp;ofi_rxm"):
        return f"{library} was built without tcp", "use another libfabric by option library"
    return f"{library} has no provider of that name with reliable datagrams and remote writes", "fi_info lists them"


def _why_no_efa(library: Library, name: str) -> tuple[str, str]:
    built = compiled_in(library.path, "efa")
    functions = efa_pci_functions()
    if not functions:
        state = "is compiled into" if built else "is not in"
        return (
            f"the EFA provider {state} {library}, but this machine has no EFA device (no PCI function 1d0f:efa*)",
            "start an instance type with EFA, its network interface of type efa; elsewhere use provider tcp",
        )
    drivers = rdma_devices("efa")
    if not drivers:
        return (
            f"EFA device {', '.join(functions)} is there, but the kernel driver has not taken it",
            "modprobe efa, or run the EFA installer; in a container pass /dev/infiniband through",
        )
    if not built:
        return f"{library} was built without EFA", "use the EFA installer's library: /opt/amazon/efa/lib"
    if name == "efa-direct":
        return f"{library} has no efa-direct fabric", "libfabric 2.1 or later has it; provider efa works without"
    return (
        f"EFA device {', '.join(drivers)} is there, but the provider gives no endpoint with remote writes",
        "check ulimit -l (it must be unlimited), /dev/infiniband/uverbs*, and FI_LOG_LEVEL=info fi_info -p efa",
    )
