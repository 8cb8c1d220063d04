"""The data plane through its table of functions: two or three ranks of one process on one device."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator

import pytest
from wire import CONTROL, DATA, FENCED, IMMEDIATE, Endpoint, Signal, Write, connect_all, wait

from uccl_ep_core.errors import BackendUnavailableError, TransportError

MEGABYTE = 1 << 20


@pytest.fixture
def opened() -> Iterator[list[Endpoint]]:
    """A list for endpoints that are closed when the test ends."""
    endpoints: list[Endpoint] = []
    yield endpoints
    for it in endpoints:
        it.close()


def pair(opened: list[Endpoint], device: str, lanes: int = 1, data_bytes: int = MEGABYTE, **options: object) -> None:
    opened += [Endpoint(device, options, data_bytes) for _ in range(2)]
    connect_all(opened, lanes)


def fill(endpoint: Endpoint, seed: int) -> bytes:
    content = random.Random(seed).randbytes(len(endpoint.data))
    ctypes.memmove(endpoint.data, content, len(content))
    return content


def flags_of(endpoint: Endpoint) -> int:
    """What makes a write provable on this device: an immediate, or a fence."""
    return IMMEDIATE if endpoint.transport.capabilities.imm_bits else FENCED


def test_a_write_lands_at_its_place_and_nowhere_else(opened: list[Endpoint], device: str) -> None:
    pair(opened, device)
    sender, receiver = opened
    content = fill(sender, 1)
    for length in (1, 7, 64, 65, 4096, 100_001):
        ctypes.memset(receiver.data, 0xEE, len(receiver.data))
        assert sender.write(Write(1, FENCED, DATA, DATA, 33, 5000, length, 0, length)) == 1
        assert sender.settle(1) == [(length, 1, 0)]
        assert receiver.data[5000 : 5000 + length] == content[33 : 33 + length]
        assert set(receiver.data[:5000]) == {0xEE}
        assert set(receiver.data[5000 + length :]) == {0xEE}


def test_every_write_completes_once_and_one_doorbell_posts_many(opened: list[Endpoint], device: str) -> None:
    pair(opened, device)
    sender, receiver = opened
    content = fill(sender, 2)
    rounds, batch = 40, 32
    for number in range(rounds):
        writes = [Write(1, FENCED, DATA, DATA, i * 512, i * 512, 512, 0, number * batch + i) for i in range(batch)]
        sent = 0
        while sent < batch:
            sent += sender.write(*writes[sent:])
        assert [it[0] for it in sender.settle(batch)] == [number * batch + i for i in range(batch)]
    assert receiver.data[: batch * 512] == content[: batch * 512]
    counts = sender.transport.statistics(0)  # type: ignore[attr-defined]
    assert counts["doorbells"] == rounds, "a batch to one peer needs one doorbell"
    assert counts["completions"] == rounds, "only the last of a chain is signalled"
    assert counts["flushes"] == rounds, "one read proves a whole chain"


def test_full_queue_says_so_and_nothing_is_lost(opened: list[Endpoint], device: str) -> None:
    pair(opened, device, send_depth=16)
    sender, _ = opened
    accepted, completed = 0, 0
    writes = [Write(1, 0, DATA, DATA, 0, 0, 65536, 0, i) for i in range(200)]
    refused = False
    while accepted < len(writes):
        taken = sender.write(*writes[accepted:])
        assert taken >= 0, sender.error()
        refused |= taken < len(writes) - accepted
        accepted += taken
        completed += len(sender.completions())
    assert refused, "a queue of 16 took 200 writes at once"
    sender.settle(len(writes) - completed)


def test_immediates_arrive_once_with_their_peer(opened: list[Endpoint], connected_device: str) -> None:
    opened += [Endpoint(connected_device, {"receive_depth": 16}) for _ in range(3)]
    connect_all(opened)
    expected = []
    for number in range(100):  # many times the receive queue: it is refilled on the way
        for rank in (0, 1):
            immediate = (0xFFFFFF00 + number) & 0xFFFFFFFF if rank else number
            flags = IMMEDIATE
            while opened[rank].write(Write(2, flags, DATA, DATA, 0, 0, number % 3 * 8, immediate, number)) == 0:
                opened[rank].completions()
            expected.append((immediate, rank))
    found: list[tuple[int, int]] = []
    wait(lambda: found.extend(opened[2].arrivals()) or len(found) >= 200, 30, "200 arrivals")
    assert sorted(found) == sorted(expected)
    assert [it for it in found if it[1] == 0] == [it for it in expected if it[1] == 0], "a lane keeps its order"


def test_a_signal_follows_the_data(opened: list[Endpoint], connected_device: str) -> None:
    pair(opened, connected_device)
    sender, receiver = opened
    signal = ctypes.c_uint64.from_buffer(receiver.control, 64)
    for value in range(1, 51):
        ctypes.memset(sender.data, value, 200_000)
        assert sender.write(Write(1, 0, DATA, DATA, 0, 0, 200_000, 0, 1)) == 1
        assert sender.signal(Signal(1, CONTROL, 64, value, 2)) == 1
        wait(lambda value=value: signal.value == value, 30, f"signal {value}")
        assert set(receiver.data[:200_000]) == {value}, "the signal came before the data"
        sender.settle(2)


def test_lanes_and_rails(opened: list[Endpoint], connected_device: str) -> None:
    from uccl_ep_ibverbs import discovery

    twins = [name for name in discovery.names() if name.rstrip("0123456789") == connected_device.rstrip("0123456789")]
    rails = ",".join(twins[:2])
    pair(opened, rails, lanes=4)
    sender, receiver = opened
    content = fill(sender, 3)
    for lane in range(4):
        assert sender.write(Write(1, FENCED, DATA, DATA, lane * 1000, lane * 1000, 1000, 0, lane), lane=lane) == 1
    for lane in range(4):
        assert sender.settle(1, lane=lane) == [(lane, 1, 0)]
    assert receiver.data[:4000] == content[:4000]
    assert len(sender.transport.describe()["rails"]) == len(rails.split(","))


def test_memory_in_parts(opened: list[Endpoint], device: str) -> None:
    part = 16 * MEGABYTE  # the least: a write crosses at most one end of a part on each side
    pair(opened, device, data_bytes=3 * part - 12345, max_registration=part)
    sender, receiver = opened
    assert sender.transport.describe()["rails"][0]["registrations"][0] == 3
    content = fill(sender, 4)
    most = sender.transport.capabilities.max_message
    for local, remote in ((part - 100, 500), (500, part - 100), (part - 4000, 2 * part - 1), (2 * part - 7, part - 8)):
        length = min(most, 1_000_003)
        assert sender.write(Write(1, FENCED, DATA, DATA, local, remote, length, 0, 9)) == 1
        assert sender.settle(1) == [(9, 1, 0)], "one write, one completion, however many parts"
        got = ctypes.string_at(ctypes.addressof(receiver.data) + remote, length)
        assert got == content[local : local + length]


def test_bad_writes_are_refused_with_words(opened: list[Endpoint], device: str) -> None:
    pair(opened, device)
    sender, _ = opened
    size = len(sender.data)
    for write, words in (
        (Write(1, 0, DATA, DATA, size - 4, 0, 8, 0, 0), "leaves its windows"),
        (Write(1, 0, DATA, DATA, 0, 2**64 - 4, 8, 0, 0), "leaves its windows"),
        (Write(1, 0, 7, DATA, 0, 0, 8, 0, 0), "local region 7"),
        (Write(9, 0, DATA, DATA, 0, 0, 8, 0, 0), "rank 9"),
        (Write(0, 0, DATA, DATA, 0, 0, 8, 0, 0), "rank 0"),
        (Write(1, 0, DATA, DATA, 0, 0, 64 * MEGABYTE, 0, 0), "max_message"),
    ):
        assert sender.write(write) < 0
        assert words in sender.error()
    if not sender.transport.capabilities.imm_bits:
        assert sender.write(Write(1, IMMEDIATE, DATA, DATA, 0, 0, 8, 1, 0)) < 0
        assert "no immediate data" in sender.error()
    assert sender.write(Write(1, FENCED, DATA, DATA, 0, 0, 8, 0, 5)) == 1, "the lane goes on after a refusal"
    assert sender.settle(1) == [(5, 1, 0)]


def test_a_closed_peer_is_named_and_nothing_is_owed(opened: list[Endpoint], device: str) -> None:
    opened += [Endpoint(device, {"timeout": 10, "retry": 3}) for _ in range(3)]
    connect_all(opened)
    sender = opened[0]
    opened[1].close()
    posted = 0
    failed: list[tuple[int, int, int]] = []

    def write_on() -> bool:
        nonlocal posted
        posted += max(0, sender.write(Write(1, 0, DATA, DATA, 0, 0, 64, 0, posted)))
        failed.extend(sender.completions())
        return any(status < 0 for _, _, status in failed)

    wait(write_on, 20, "an error completion")
    wait(lambda: failed.extend(sender.completions()) or len(failed) == posted, 20, "what is owed")
    assert [token for token, _, _ in failed] == list(range(posted)), "each write completes once, in order"
    text = sender.error()
    assert "rank 1" in text and device in text and "queue pair" in text and "Try:" in text, text
    wait(lambda: sender.dead(1) or sender.completions(), 5, "the peer's end")
    assert not sender.dead(2)
    assert sender.write(Write(1, 0, DATA, DATA, 0, 0, 64, 0, 77)) == 1, "later writes complete, with the error"
    assert [(token, status < 0) for token, _, status in sender.settle(1)] == [(77, True)]
    assert sender.write(Write(2, FENCED, DATA, DATA, 0, 0, 64, 0, 78)) == 1
    assert sender.settle(1) == [(78, 2, 0)], "other peers are not harmed"


def test_contradicting_handles_are_refused(opened: list[Endpoint], device: str) -> None:
    from uccl_ep_ibverbs import raw
    from uccl_ep_ibverbs.loader import data_plane

    pair(opened, device)
    transport = opened[0].transport
    (mine,) = transport._pairs  # type: ignore[attr-defined]
    (other,) = opened[1].transport._pairs  # type: ignore[attr-defined]
    plane = data_plane().Plane(num_ranks=2, max_message=1024, immediates=False, signals=False, renewals=False)
    queues = {"send_queue": raw.handle(mine.send_queue), "receive_queue": raw.handle(mine.receive_queue)}
    plane.add_lane(device=device, local=[], flush_address=0, flush_key=0, wake_fd=-1, **queues)
    good = {
        "lane": 0,
        "peer": 1,
        "queue_pair": raw.handle(mine.qp),
        "protection_domain": raw.handle(mine.rail.domain),
        "qp_num": mine.number,
        "send_depth": 8,
        "receive_depth": 4,
        "inline_bytes": 0,
        "remote": [],
    }
    for wrong in (
        {"qp_num": mine.number + 1},
        {"queue_pair": raw.handle(other.qp)},
        {"protection_domain": raw.handle(other.rail.domain)},
        {"queue_pair": 0},
        {"queue_pair": raw.handle(mine.qp) + 1},
    ):
        with pytest.raises(ValueError, match="handle"):
            plane.add_pair(**{**good, **wrong})


def test_connect_names_the_peer_that_is_missing(opened: list[Endpoint], device: str) -> None:
    opened += [Endpoint(device, {}) for _ in range(2)]
    addresses = [it.transport.address() for it in opened]
    with pytest.raises(TransportError, match=r"rank 1.*in time"):
        opened[0].connect(0, addresses, 1, timeout_s=1.0)


def test_an_unknown_device_is_refused_with_those_present(connected_device: str) -> None:
    from uccl_ep_ibverbs import IbverbsTransport

    with pytest.raises(BackendUnavailableError, match=f"no RDMA device nosuch; present: .*{connected_device}"):
        IbverbsTransport.open("nosuch", {})
    with pytest.raises(BackendUnavailableError, match=r"no GID fits gid_index=200.*1: "):
        IbverbsTransport.open(connected_device, {"gid_index": 200})


def test_relaxed_ordering_takes_the_order_promises_away(opened: list[Endpoint], connected_device: str) -> None:
    from uccl_ep_core.ordering import choose_plan

    pair(opened, connected_device, relaxed_ordering=True)
    promises = opened[0].transport.capabilities
    assert not promises.write_order
    assert not promises.signal_order
    assert choose_plan(promises).name == "counted"


@pytest.mark.parametrize("plan", ["native", "counted", "fenced"])
def test_which_plans_hold(connected_device: str, iwarp_device: str, plan: str) -> None:
    from uccl_ep_core.ordering import missing_promises
    from uccl_ep_ibverbs import IbverbsTransport

    missing = {}
    for device in (connected_device, iwarp_device):
        transport = IbverbsTransport.open(device, {})
        missing[device] = missing_promises(transport.capabilities, plan)  # type: ignore[arg-type]
        transport.close()
    assert missing[connected_device] == []
    assert bool(missing[iwarp_device]) == (plan != "fenced")
