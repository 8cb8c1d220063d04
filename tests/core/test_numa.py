"""Which NUMA node is chosen, from a file system that says so, and that refusal is silent."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from uccl_ep_core import _native, numa, shared_memory
from uccl_ep_core.capabilities import Capabilities


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    """A sysfs of two nodes: the CPUs of this process are on node 1, a GPU too, a NIC on node 0."""
    mine = sorted(os.sched_getaffinity(0))
    for node, cpus in ((0, "900-903,910"), (1, ",".join(map(str, mine)))):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    for address, node in (("0000:1b:00.0", 1), ("0000:2a:00.0", 0), ("0000:3c:00.0", -1)):
        folder = tmp_path / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    return tmp_path


def test_lists_of_cpus() -> None:
    assert numa.parse_list("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert numa.parse_list("\n") == []


def test_the_node_of_the_device_then_that_of_this_cpu(two_nodes: Path) -> None:
    mine = sorted(os.sched_getaffinity(0))
    assert numa.nodes(two_nodes)[0] == [900, 901, 902, 903, 910]
    assert numa.home("0000:1B:00.0", two_nodes) == (1, mine)
    assert numa.home("0000:2a:00.0", two_nodes) is None, "no CPU of that node may be used"
    for unknown in ("0000:3c:00.0", "0000:ff:00.0", None):
        assert numa.home(unknown, two_nodes) == (1, mine)
    assert "on node 1" in numa.describe(None, two_nodes)


def test_one_node_or_none_is_no_choice(tmp_path: Path) -> None:
    assert numa.nodes(tmp_path) == {} and numa.home(None, tmp_path) is None
    assert "nothing to choose" in numa.describe(None, tmp_path)


def test_memory_stays_usable_whatever_the_system_says() -> None:
    memory = shared_memory.create(4 * mmap.PAGESIZE)
    memory.view()[:4] = b"abcd"
    assert isinstance(numa.prefer(memory.pointer, memory.nbytes, 0), bool)
    assert not numa.prefer(memory.pointer + 8, 64, 0) and not numa.prefer(memory.pointer, 64, -1)
    assert bytes(memory.view()[:4]) == b"abcd"
    memory.close()
    for node in (None, 0, 1023, 5000):
        with numa.preferring(node):
            fresh = shared_memory.create(mmap.PAGESIZE)
            fresh.view()[:1] = b"x"
            fresh.close()


def test_the_engine_takes_cpus() -> None:
    layout = _native.Layout(
        num_ranks=2, ranks_per_domain=1, num_channels=1, num_slots=8, slot_bytes=1024, has_remote=True
    )
    control = shared_memory.create(layout.control_bytes())
    ring = shared_memory.create(_native.Channel.host_bytes(1, 16))
    state = shared_memory.create(_native.Channel.state_bytes(1))
    network = _native.NullTransport(1)
    before = set(os.listdir("/proc/self/task"))
    cpu = max(os.sched_getaffinity(0))
    engine = _native.Engine(
        rank=0,
        layout=layout,
        data_pointer=0,
        control_pointer=control.pointer,
        ops_pointer=network.ops,
        plan="native",
        capabilities=Capabilities(write_order=True, signal_order=True, native_signal="host"),
        remote_peers=[1],
        channel=_native.Channel(1, 16, ring.pointer, ring.pointer, state.pointer),
        num_proxies=1,
        options={"cpus": [cpu]},
    )
    engine.start()
    (thread,) = set(os.listdir("/proc/self/task")) - before
    for _ in range(10_000):  # the thread sets it first of all
        if os.sched_getaffinity(int(thread)) == {cpu}:
            break
        os.sched_yield()
    assert os.sched_getaffinity(int(thread)) == {cpu}
    assert engine.stop(5.0)
