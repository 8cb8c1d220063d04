"""Choice of devices and addresses on a made-up sysfs; needs no device."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest

from uccl_ep_ibverbs import IbverbsTransport, discovery, loader
from uccl_ep_ibverbs.settings import Settings

ROOT = "devices/pci0000:00"


def settings(**options: object) -> Settings:
    return Settings.of(options)


class FakeSysfs:
    """A folder laid out as sysfs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._verbs = 0

    def file(self, path: str, text: str) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text + "\n")

    def link(self, path: str, target: str) -> None:
        (self.root / target).mkdir(parents=True, exist_ok=True)
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(self.root / target)

    def device(
        self,
        name: str,
        *,
        node: str = "1: CA",
        layer: str = "Ethernet",
        pci: str = "",
        driver: str = "mlx5_core",
        state: str = "4: ACTIVE",
        rate: str = "400 Gb/sec (4X NDR)",
    ) -> None:
        folder = f"class/infiniband/{name}"
        self.file(f"{folder}/node_type", node)
        for file, text in (("state", state), ("rate", rate), ("link_layer", layer)):
            self.file(f"{folder}/ports/1/{file}", text)
        if pci:
            self.link(f"{folder}/device", f"{ROOT}/{pci}")
            self.link(f"{ROOT}/{pci}/driver", f"bus/pci/drivers/{driver}")
        self.file(f"class/infiniband_verbs/uverbs{self._verbs}/ibdev", name)
        self._verbs += 1


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSysfs:
    monkeypatch.setattr(discovery, "SYSFS", tmp_path)
    monkeypatch.setattr(discovery.os, "access", lambda path, mode: True)
    return FakeSysfs(tmp_path)


def found() -> list[discovery.Nic]:
    return [discovery.nic(name, settings()) for name in discovery.names()]


def test_the_nearest_nic_is_first(sysfs: FakeSysfs) -> None:
    sysfs.device("mlx5_0", pci="0000:00:01.0/0000:01:00.0/0000:02:00.0")
    sysfs.device("mlx5_1", pci="0000:00:03.0/0000:41:00.0/0000:42:01.0")
    sysfs.device("mlx5_2", pci="0000:00:03.0/0000:41:00.0/0000:42:00.0/0000:43:00.0", rate="100 Gb/sec")
    gpu = "0000:00:03.0/0000:41:00.0/0000:42:00.0/0000:44:00.0"
    sysfs.link("bus/pci/devices/0000:44:00.0", f"{ROOT}/{gpu}")
    path = discovery.gpu_pci_path("0000:44:00.0")
    assert [nic.name for nic in discovery.rank_devices(found(), path)] == ["mlx5_2", "mlx5_1", "mlx5_0"]
    distances = {nic.name: discovery.distance(path, nic.pci_path) for nic in found()}
    assert distances == {"mlx5_2": 2, "mlx5_1": 3, "mlx5_0": 7}


def test_without_a_gpu_hardware_then_speed_decides(sysfs: FakeSysfs) -> None:
    sysfs.device("siw0", node="4: RNIC")
    sysfs.device("rxe0", rate="10 Gb/sec")
    sysfs.device("slow", pci="0000:00:01.0", rate="100 Gb/sec")
    sysfs.device("fast", pci="0000:00:02.0", rate="400 Gb/sec")
    assert [nic.name for nic in discovery.rank_devices(found(), ())] == ["fast", "slow", "rxe0", "siw0"]


@pytest.mark.parametrize(
    ("arguments", "reason", "remedy"),
    [
        ({"node": "7: <unknown>", "pci": "0000:00:01.0", "driver": "efa"}, "efa", "provider=efa"),
        ({"state": "1: DOWN"}, "1: DOWN", "subnet manager"),
    ],
)
def test_refused_devices_say_why(sysfs: FakeSysfs, arguments: dict[str, str], reason: str, remedy: str) -> None:
    sysfs.device("nic0", **arguments)  # type: ignore[arg-type]
    nic = found()[0]
    assert not nic.usable
    assert reason in nic.reason
    assert remedy in nic.remedy
    assert discovery.rank_devices([nic], ()) == []


def test_no_permission_says_which_file(sysfs: FakeSysfs, monkeypatch: pytest.MonkeyPatch) -> None:
    sysfs.device("mlx5_0")
    monkeypatch.setattr(discovery.os, "access", lambda path, mode: False)
    nic = found()[0]
    assert "/dev/infiniband/uverbs0" in nic.reason
    assert "/dev/infiniband/uverbs0" in nic.remedy


def gid(index: int, text: str, version: str = "RoCE v2", interface: str = "eth0") -> discovery.Gid:
    return discovery.Gid(index, ipaddress.IPv6Address(text), version, interface)


TABLE = [
    gid(0, "fe80::1", "RoCE v1"),
    gid(1, "fe80::1"),
    gid(2, "::ffff:10.0.0.1", "RoCE v1"),
    gid(3, "2001:db8::1"),
    gid(4, "::ffff:10.0.0.1"),
    gid(5, "::ffff:10.1.0.1", interface="eth0.7"),
]


@pytest.mark.parametrize(
    ("kind", "options", "index"),
    [
        ("roce", {}, 4),
        ("roce", {"interface": "eth0.7"}, 5),
        ("roce", {"gid_index": 3}, 3),
        ("infiniband", {}, 0),
    ],
)
def test_choice_of_the_gid(kind: discovery.Kind, options: dict[str, object], index: int) -> None:
    assert discovery.choose_gid(TABLE, kind, settings(**options)).index == index


def test_no_gid_lists_what_there_is() -> None:
    with pytest.raises(LookupError, match=r"interface='eth9'; the port has .*4: ::ffff:a00:1 RoCE v2 eth0"):
        discovery.choose_gid(TABLE, "roce", settings(interface="eth9"))


@pytest.mark.parametrize(
    ("status", "name", "advice"),
    [
        (12, "retry counter exceeded", "timeout and retry"),
        (5, "flushed", "first error"),
        (10, "remote access", "closed"),
    ],
)
def test_completions_in_words(status: int, name: str, advice: str) -> None:
    native = pytest.importorskip("uccl_ep_ibverbs._native", reason="built without rdma-core's headers")
    text = native.describe_completion(status, "mlx5_0 port 1", 3, 2, 77)
    for part in ("mlx5_0 port 1", "rank 3", "lane 2", "queue pair 77", f"status {status}", name, "Try:", advice):
        assert part in text


def test_without_pyverbs_the_plugin_is_there_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> loader.Verbs:
        raise loader.VerbsMissingError("pyverbs is not installed", loader.INSTALL)

    monkeypatch.setattr("uccl_ep_ibverbs.transport.verbs", missing)
    (device,) = IbverbsTransport.probe({})
    assert not device.usable
    assert device.reason == "pyverbs is not installed"
    assert "python3-pyverbs" in device.remedy


def test_a_build_without_headers_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import uccl_ep_ibverbs

    monkeypatch.setattr("uccl_ep_ibverbs.transport.verbs", lambda: loader.Verbs(*[None] * 11, origin="here"))
    monkeypatch.delattr(uccl_ep_ibverbs, "_native", raising=False)
    monkeypatch.setitem(loader.sys.modules, "uccl_ep_ibverbs._native", None)
    (device,) = IbverbsTransport.probe({})
    assert not device.usable
    assert "no ibverbs data plane" in device.reason
    assert "libibverbs-dev" in device.remedy


def test_without_a_device_the_remedy_is_named(sysfs: FakeSysfs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uccl_ep_ibverbs.transport.verbs", lambda: loader.Verbs(*[None] * 11, origin="here"))
    monkeypatch.setattr("uccl_ep_ibverbs.transport.data_plane", lambda: None)
    (device,) = IbverbsTransport.probe({})
    assert not device.usable
    assert "no RDMA device" in device.reason
    assert "rdma link add" in device.remedy


def test_a_broken_pyverbs_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "pyverbs"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "base.py").write_text("raise ImportError('undefined symbol: ibv_nothing, version IBVERBS_PRIVATE_59')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in loader.sys.modules if name.split(".")[0] == "pyverbs"]:
        monkeypatch.delitem(loader.sys.modules, name)
    loader._load.cache_clear()
    try:
        with pytest.raises(loader.VerbsMissingError) as first:
            loader.verbs()
        assert "IBVERBS_PRIVATE_59" in first.value.args[0]
        assert "same rdma-core" in first.value.args[1]
        (package / "base.py").write_text("")
        with pytest.raises(loader.VerbsMissingError):
            loader.verbs()
    finally:
        loader._load.cache_clear()
        loader.sys.modules.pop("pyverbs", None)
