"""The native engine over shared memory: every ordering plan, a killed peer, refused commands."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from uccl_ep_core import _native, shared_memory
from uccl_ep_shm import ShmTransport

sys.path.insert(0, str(Path(__file__).parent))
import engine_ranks as ranks


def start(target, arguments):
    """Two rank processes, their addresses exchanged; returns [(process, pipe)]."""
    pairs = []
    for rank in range(2):
        mine, theirs = ranks.SPAWN.Pipe()
        process = ranks.SPAWN.Process(target=target, args=(rank, *arguments, theirs), daemon=True)
        process.start()
        theirs.close()
        pairs.append((process, mine))
    addresses = [ranks.receive(pipe) for _, pipe in pairs]
    for _, pipe in pairs:
        pipe.send(addresses)
    assert [ranks.receive(pipe) for _, pipe in pairs] == ["ready", "ready"]
    return pairs


EMULATION = {
    "native": set(),
    "counted": {"emulated_immediates", "emulated_counts"},
    "fenced": {"emulated_fences", "emulated_signal_writes"},
}


@pytest.mark.parametrize("num_proxies", [1, 2])
@pytest.mark.parametrize("plan", ["native", "counted", "fenced"])
def test_messages_arrive_before_their_signal(plan, num_proxies):
    rounds = 200
    pairs = start(ranks.exchange, (rounds, plan, num_proxies))
    for _, pipe in pairs:
        pipe.send("go")
    assert [ranks.receive(pipe) for _, pipe in pairs] == ["done", "done"]
    for _, pipe in pairs:
        pipe.send("close")
    for process, pipe in pairs:
        ended, stats, error, aborted, _ = ranks.receive(pipe)
        process.join(ranks.WAIT_S)
        assert process.exitcode == 0
        assert ended and error == "" and not aborted
        assert stats["commands"] == 2 * rounds * 4
        assert stats["bytes"] == 2 * rounds * 3000
        used = {name for name, count in stats.items() if name.startswith("emulated_") and count}
        assert used == EMULATION[plan]
        assert (stats["native_signals"] != 0) == (plan == "native")
        # Messages of one signal that complete one after another are raised once.
        assert (0 < stats["signals_raised"] <= 4 * rounds) if plan == "counted" else stats["signals_raised"] == 0


@pytest.mark.parametrize("plan", ["native", "counted"])
def test_a_killed_peer_is_noticed(plan):
    (victim, _), (_, pipe) = start(ranks.wait_for_death, (plan,))
    begin = time.monotonic()
    os.kill(victim.pid, signal.SIGKILL)
    assert ranks.receive(pipe) == (0, "DEAD", 1)
    assert time.monotonic() - begin < 10


@pytest.fixture
def pair():
    """Both ranks in this process."""
    both = [ranks.Rank(rank, 2, ShmTransport.open(None, {})) for rank in range(2)]
    yield both
    for rank in both:
        rank.close()


def connect(pair, plan="native", **arguments):
    addresses = [rank.transport.address() for rank in pair]
    for rank in pair:
        rank.connect(addresses, plan, 1, **arguments)


BAD_COMMANDS = {
    "source outside the data window": {"local_offset": 1 << 35},
    "target outside the data window": {"remote_offset": 1 << 35},
    "no rank that is reached through the transport": {"peer": 7},
    "no such signal": {"signal": 1 << 20},
    "a signal that another rank writes": {"signal": None},
    "message out of sequence": {"value": 0},
}


@pytest.mark.parametrize("words", BAD_COMMANDS)
def test_a_bad_command_is_refused_before_a_byte_moves(pair, words):
    connect(pair)
    sender, receiver = pair
    good = sender.layout.signal_index(_native.SignalKind.DIRECT_DATA, 0, 0)
    command = {"peer": 1, "local_offset": 0, "remote_offset": 0, "bytes": 64, "signal": good, "value": 1}
    command.update(BAD_COMMANDS[words])
    if command["signal"] is None:
        command["signal"] = sender.layout.signal_index(_native.SignalKind.DIRECT_DATA, 1, 0)
    sender.data.view()[0:64] = b"x" * 64
    sender.push(0, **command)
    for rank in pair:
        deadline = time.monotonic() + ranks.WAIT_S
        while not rank.verdicts.aborted and time.monotonic() < deadline:
            time.sleep(0.001)
        verdict = rank.verdicts.agree(0.1)
        assert (verdict.culprit, verdict.reason) == (0, _native.Reason.BAD_COMMAND)
    assert words in sender.engine.error()
    assert receiver.engine.error() == ""
    assert bytes(receiver.data.view()[0:64]) == bytes(64)


def test_contiguous_commands_become_one_write_and_large_ones_several(pair):
    small = dataclasses.replace(pair[0].transport.capabilities, max_message=1024)
    connect(pair, capabilities=small)
    sender, receiver = pair
    name = sender.layout.signal_index(_native.SignalKind.DIRECT_DATA, 0, 0)
    sender.data.view()[0:4096] = bytes(range(256)) * 16
    sender.push(0, peer=1, local_offset=0, remote_offset=8, bytes=3000, signal=name, value=1)
    receiver.wait_signal(name, 1)
    assert bytes(receiver.data.view()[8:3008]) == (bytes(range(256)) * 16)[:3000]
    sender.wait_completed(0, 1)
    stats = sender.engine.stats()
    assert (stats["writes"], stats["split"]) == (3, 2)
    assert stats["bytes"] == 3000


@pytest.mark.parametrize("plan", ["native", "counted", "fenced"])
def test_skipped_numbers_count_as_empty_messages(pair, plan):
    connect(pair, plan)
    sender, receiver = pair
    name = sender.layout.signal_index(_native.SignalKind.DIRECT_CREDIT, 0, 0)
    for value in (1, 2, 5, 30, 31, 40):
        sender.push(0, peer=1, local_offset=0, remote_offset=0, bytes=0, signal=name, value=value)
        assert receiver.wait_signal(name, value) == value


def test_a_small_remote_queue_is_never_overrun(pair):
    narrow = dataclasses.replace(pair[0].transport.capabilities, remote_queue_depth=8)
    connect(pair, "counted", capabilities=narrow)
    sender, receiver = pair
    name = sender.layout.signal_index(_native.SignalKind.DIRECT_DATA, 0, 0)
    for value in range(1, 301):
        sender.push(0, peer=1, local_offset=0, remote_offset=0, bytes=64, signal=name, value=value)
        if value > 16:
            receiver.wait_signal(name, value - 16)
    receiver.wait_signal(name, 300)
    assert receiver.engine.stats()["emulated_credits"] >= 300 // 8 - 1


def test_in_flight_caps_hold_and_let_large_writes_through(pair):
    connect(pair, options={"max_inflight_peer": 1000, "max_inflight_nic": 1500})
    sender, receiver = pair
    name = sender.layout.signal_index(_native.SignalKind.DIRECT_DATA, 0, 0)
    for value in range(1, 201):
        sender.push(
            0, peer=1, local_offset=0, remote_offset=0, bytes=600 if value % 7 else 4000, signal=name, value=value
        )
    receiver.wait_signal(name, 200)
    sender.wait_completed(0, 200)


def test_on_a_crowded_host_proxies_look_away_and_wake_who_waits(pair):
    """Whoever waits is told of raised signals and of completed commands, and hears its own argument."""
    heard = []
    wake = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(heard.append)
    address = ctypes.cast(wake, ctypes.c_void_p).value
    options = {"crowded": True, "wake_function": address, "wake_context": 7}
    connect(pair, options=options, plan="counted")
    sender, receiver = pair
    name = sender.layout.signal_index(_native.SignalKind.DIRECT_DATA, 0, 0)
    for value in range(1, 101):
        sender.push(0, peer=1, local_offset=0, remote_offset=0, bytes=600, signal=name, value=value)
    receiver.wait_signal(name, 100)
    sender.wait_completed(0, 100)
    assert sender.engine.stop(5.0)
    assert receiver.engine.stop(5.0)
    assert len(heard) >= 2
    assert set(heard) == {7}


def test_an_orderly_stop_sends_everything_and_says_goodbye(pair):
    connect(pair)
    sender, receiver = pair
    name = sender.layout.signal_index(_native.SignalKind.DIRECT_DATA, 0, 0)
    for value in range(1, 51):
        sender.push(0, peer=1, local_offset=0, remote_offset=0, bytes=128, signal=name, value=value)
    assert sender.engine.stop(5.0)
    assert receiver.wait_signal(name, 50) == 50
    assert receiver.verdicts.peer_closed(0)
    assert not receiver.verdicts.aborted


def test_shared_memory_leaves_nothing_behind_and_knows_its_own():
    memory = shared_memory.create(100_000)
    assert memory.pointer % 4096 == 0
    handle = memory.handle()
    other = shared_memory.attach(handle)
    memory.view()[99_999] = 7
    assert other.view()[99_999] == 7
    forged = bytearray(handle)
    forged[25] ^= 1
    with pytest.raises(RuntimeError, match="cookie"):
        shared_memory.attach(bytes(forged))
    with pytest.raises(ValueError, match="handle"):
        shared_memory.attach(b"nothing")
    memory.close()
    memory.close()
    with pytest.raises(RuntimeError):
        shared_memory.attach(handle)
    named = shared_memory.create(4096, named=True)
    second = shared_memory.attach(named.handle())
    named.unlink()
    named.view()[0] = 3
    assert second.view()[0] == 3
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("uccl_ep_")]
