"""The set-up half: opens the inner transport, adds a bounce region to it, puts the simulator before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from uccl_ep_core import registry, shared_memory
from uccl_ep_core.capabilities import Capabilities
from uccl_ep_core.errors import ConfigurationError, TransportError
from uccl_ep_core.options import SHARED_TRANSPORT_OPTIONS, convert, did_you_mean
from uccl_ep_core.transport import Device, Memory, Option, Transport

from . import _native
from .profiles import CHOICES, MAX_BOUNCE_BYTES, OVERRIDES, PROFILES, UNSET, Profile

DRAIN_US = 500_000  # microseconds that close() gives to what is still under way


def _override_option(name: str) -> Option:
    if name in CHOICES:
        return Option("", f"{OVERRIDES[name]}; empty: the profile's", choices=CHOICES[name])
    return Option(UNSET[name], f"{OVERRIDES[name]}; -1: the profile's", minimum=-1)


def _inner_class(name: str) -> type[Transport]:
    if name == "sim":
        raise ConfigurationError("sim.inner = 'sim': a simulator cannot wrap itself, use another transport, e.g. 'shm'")
    return registry.load(registry.TRANSPORTS, name, "option sim.inner")


def _inner_options(inner: type[Transport], text: str, outer: Mapping[str, Any]) -> dict[str, Any]:
    """The inner transport's options: its defaults, what all transports share, then ``text``."""
    options = {name: option.default for name, option in inner.OPTIONS.items()}
    options |= {name: outer.get(name, option.default) for name, option in SHARED_TRANSPORT_OPTIONS.items()}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = item.partition("=")
        declared = inner.OPTIONS.get(name)
        if declared is None or not equals:
            hint = did_you_mean(name, inner.OPTIONS)
            raise ConfigurationError(f"sim.inner_options: {item!r} is no name=value of the inner transport: {hint}")
        options[name] = convert(declared, value, name, "option sim.inner_options")
    return options


class SimTransport(Transport):
    """Wraps the transport that the option ``inner`` names."""

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "inner": Option("shm", "transport that moves the bytes"),
        "inner_options": Option("", "options of that transport: name=value, separated by commas"),
        "profile": Option("srd", "device to imitate", choices=tuple(PROFILES)),
        "seed": Option(1, "equal seeds and equal posts meet equal fates", minimum=0),
        "bounce_bytes": Option(
            8 << 20,
            "bytes of writes that completed before they were placed; with no room, writes complete late",
            minimum=0,
            maximum=MAX_BOUNCE_BYTES,
        ),
    } | {name: _override_option(name) for name in OVERRIDES}

    def __init__(self, inner: Transport, profile_name: str, profile: Profile, options: Mapping[str, Any]) -> None:
        self._inner = inner
        self._profile_name = profile_name
        self._profile = profile
        self._options = options
        self._capabilities = profile.claims(inner.capabilities)
        self._memories: list[Memory] = []
        self._bounce: shared_memory.SharedMemory | None = None
        self._simulator: _native.Simulator | None = None
        self._closed = False

    @classmethod
    def probe(cls, options: Mapping[str, Any]) -> Sequence[Device]:
        """The devices of the inner transport."""
        try:
            inner = _inner_class(options.get("inner", "shm"))
            return inner.probe(_inner_options(inner, options.get("inner_options", ""), options))
        except Exception as error:  # a probe never raises: a broken inner transport is a refused device
            return [Device("sim", False, str(error), "choose another inner transport with the option inner")]

    @classmethod
    def open(cls, device: str | None, options: Mapping[str, Any]) -> SimTransport:
        name = options.get("profile", "srd")
        if name not in PROFILES:
            raise ConfigurationError(f"sim.profile = {name!r}: {did_you_mean(name, PROFILES)}")
        profile = PROFILES[name].override(options)
        inner = _inner_class(options.get("inner", "shm"))
        opened = inner.open(device, _inner_options(inner, options.get("inner_options", ""), options))
        return cls(opened, name, profile, options)

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def inner(self) -> Transport:
        """The wrapped transport."""
        return self._inner

    def register(self, memory: Memory) -> int:
        if memory.device is not None:
            raise TransportError(
                f"sim cannot copy memory of GPU {memory.device}: register host memory (device_memory is false)"
            )
        if self._bounce is not None:
            raise TransportError("sim: register all memory before address(), whose regions follow the caller's")
        region = self._inner.register(memory)
        self._memories.append(memory)
        return region

    def address(self) -> bytes:
        # Registered last, so that the caller's regions keep their numbers.
        if self._bounce is None and self._bounce_bytes():
            self._bounce = shared_memory.create(self._bounce_bytes())
            self._inner.register(Memory(self._bounce.pointer, self._bounce.nbytes, share_handle=self._bounce.handle()))
        return self._inner.address()

    def _bounce_bytes(self) -> int:
        return int(self._options.get("bounce_bytes", 8 << 20)) if self._profile.early_completion > 0 else 0

    def connect(
        self, rank: int, addresses: Sequence[bytes], peers: Sequence[int], lanes: int, timeout_s: float
    ) -> None:
        self._inner.connect(rank, addresses, peers, lanes, timeout_s)
        regions = [(memory.pointer, memory.nbytes) for memory in self._memories]
        regions.append((self._bounce.pointer, self._bounce.nbytes) if self._bounce is not None else (0, 0))
        claims = self._capabilities
        inner = self._inner.capabilities
        self._simulator = _native.Simulator(
            inner=self._inner.native_ops,
            faults=self._faults(),
            rank=rank,
            num_ranks=len(addresses),
            num_lanes=lanes,
            regions=regions,
            with_signals=claims.native_signal != "none",
            with_immediates=claims.imm_bits > 0,
            with_peer_state=inner.peer_failure != "none" or self._profile.kill_peer >= 0,
        )

    def _faults(self) -> _native.Faults:
        profile, claims, inner = self._profile, self._capabilities, self._inner.capabilities
        faults = _native.Faults()
        faults.seed = int(self._options.get("seed", 1))
        faults.microseconds = profile.clock == "microseconds"
        faults.early_immediate = profile.imm_bits > 0 and not profile.imm_after_payload
        # A piece posted earlier must not outlast the piece with the immediate, so the inner order is needed.
        faults.max_segments = profile.max_segments if inner.write_order else 1
        faults.imm_bits = claims.imm_bits or 64
        faults.max_message = claims.max_message
        faults.alignment = claims.alignment
        for name in ("ordered", *OVERRIDES):
            if name not in ("clock", "max_segments"):
                setattr(faults, name, getattr(profile, name))
        return faults

    @property
    def native_ops(self) -> int:
        if self._simulator is None:
            raise TransportError("sim: native_ops is valid from connect() to close()")
        return int(self._simulator.ops)

    @property
    def statistics(self) -> Mapping[str, int]:
        """What was done to the operations so far; equal ``decisions`` mean equal fates. Empty before `connect`."""
        return dict(self._simulator.statistics) if self._simulator is not None else {}

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._simulator is not None:
            self._simulator.drain(DRAIN_US)
        self._simulator = None
        self._inner.close()
        if self._bounce is not None:
            self._bounce.close()
        self._memories.clear()

    def describe(self) -> Mapping[str, Any]:
        return {
            "profile": f"{self._profile_name}: {self._profile.summary}",
            "seed": self._options.get("seed", 1),
            "inner": self._options.get("inner", "shm"),
        } | {f"inner {name}": value for name, value in self._inner.describe().items()}
