"""Typed options: what values an option takes, and errors that name the value that would do."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable
from typing import Any

from .errors import ConfigurationError
from .transport import Option

TRUE_WORDS = ("1", "true", "yes", "on")
FALSE_WORDS = ("0", "false", "no", "off")


LEAST_LIKENESS = 1.2
"""Of 2: below, a word is no slip of the pen for another (``smh`` and ``shm`` have 1.7, ``foo`` and ``libfabric`` 0.3,
``cpu`` and ``cuda`` 1.1)."""


def nearest(word: str, valid: Iterable[str]) -> str:
    """The valid word that looks most like ``word``; "" where none looks like it."""
    wanted = word.lower()

    def likeness(candidate: str) -> float:
        # Letters in order, and letters in any order: the latter finds swapped ones ("smh" is shm, not sim).
        pairs = ((wanted, candidate.lower()), (sorted(wanted), sorted(candidate.lower())))
        return sum(difflib.SequenceMatcher(None, one, other).ratio() for one, other in pairs)

    best = max(sorted(valid), key=likeness, default="")
    return best if best and likeness(best) >= LEAST_LIKENESS else ""


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """Words for an error message: the nearest valid word, and all of them where they are few or none is near."""
    words = sorted(set(valid))
    if not words:
        return "there is none"
    likely = nearest(word, words)
    if not likely:
        return f"valid are {', '.join(words)}"
    listing = f" (valid: {', '.join(words)})" if len(words) <= 24 else ""
    return f"did you mean {likely!r}?{listing}"


def _expected(option: Option) -> str:
    kind = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}[type(option.default)]
    return f"expected {kind}, for example {option.default!r}"


def _from_text(option: Option, text: str) -> Any:
    kind = type(option.default)
    if kind is bool:
        word = text.strip().lower()
        if word not in TRUE_WORDS + FALSE_WORDS:
            raise ValueError(text)
        return word in TRUE_WORDS
    return int(text, 0) if kind is int else kind(text)


def convert(option: Option, value: Any, name: str, origin: str) -> Any:
    """``value`` as the option's type, checked against its choices and limits.

    Text is parsed, since the environment and command lines have nothing else.

    Raises:
        ConfigurationError: names the option, the nearest valid value, and ``origin``.
    """
    where = f"{name} = {value!r} ({origin})"
    kind = type(option.default)
    if isinstance(value, str) and kind is not str:
        try:
            value = _from_text(option, value)
        except ValueError:
            raise ConfigurationError(f"{where}: {_expected(option)}") from None
    elif kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise ConfigurationError(f"{where}: {_expected(option)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigurationError(f"{where}: {_expected(option)}; infinite and undefined numbers are refused")
    if option.choices is not None and value not in option.choices and value != option.default:
        raise ConfigurationError(f"{where}: {did_you_mean(str(value), map(str, option.choices))}")
    if isinstance(value, (int, float)):
        if option.minimum is not None and value < option.minimum:
            raise ConfigurationError(f"{where}: too small, the least valid value is {kind(option.minimum)!r}")
        if option.maximum is not None and value > option.maximum:
            raise ConfigurationError(f"{where}: too large, the greatest valid value is {kind(option.maximum)!r}")
    return value


def _option(
    default: Any,
    help: str,
    *,
    choices: tuple[Any, ...] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    return dataclasses.field(
        default=default,
        metadata={"option": Option(default, help, choices=choices, minimum=minimum, maximum=maximum)},
    )


@dataclasses.dataclass(frozen=True)
class General:
    """Options of the library itself. Each is also the environment variable ``UCCL_EP_<NAME>``."""

    gpu_backend: str = _option("auto", "GPU backend by name; auto: the first usable one in order of preference")
    transport: str = _option("auto", "transport by name; auto: the first usable one in order of preference")
    plan: str = _option(
        "auto", "ordering plan; auto: the cheapest that holds", choices=("auto", "native", "counted", "fenced")
    )
    timeout_s: float = _option(300.0, "seconds that any wait may last before it raises", minimum=0.01, maximum=1e6)
    domain_size: int = _option(
        0, "most ranks of a scale-up domain; 0: all whose memory can be imported", minimum=0, maximum=4096
    )
    num_proxies: int = _option(
        0,
        "proxy threads a rank, each with one lane; 0: 4 where a GPU's windows lie in host memory, else 1",
        minimum=0,
        maximum=64,
    )
    num_channels: int = _option(
        0, "channels of the high-throughput mode; 0: what keeps the device busy", minimum=0, maximum=1024
    )
    num_sms: int = _option(
        0,
        "multiprocessors that a high-throughput kernel takes at most; 0: all; channels follow",
        minimum=0,
        maximum=4096,
    )
    block_teams: int = _option(
        0,
        "teams of several warps that share a block of a high-throughput kernel at most; 0: as suits the device",
        minimum=0,
        maximum=6,
    )
    slot_bytes: int = _option(
        0,
        "bytes of a high-throughput slot, a multiple of 64, 4096 at least; 0: as suits the device",
        minimum=0,
        maximum=1 << 24,
    )
    num_slots: int = _option(8, "slots of one ring of slots", minimum=2, maximum=32)
    ring_capacity: int = _option(
        1024, "commands of one ring of the channel, a power of two", minimum=16, maximum=1 << 20
    )
    low_latency_path: str = _option(
        "auto",
        "how low-latency rows travel within one domain; auto: directly to their places on GPUs, packed on CPUs",
        choices=("auto", "direct", "packed"),
    )
    max_inflight_bytes_per_peer: int = _option(
        0, "bytes in flight towards one peer at most; 0: no limit but the transport's", minimum=0
    )
    max_inflight_bytes_per_nic: int = _option(0, "bytes in flight on one NIC at most; 0: no limit", minimum=0)
    pin_proxies: bool = _option(False, "bind each proxy thread to one core")
    log_level: str = _option("warning", "least level that is logged", choices=("debug", "info", "warning", "error"))
    trace: str = _option("", "file for a trace of all commands; empty: none")
    trace_kernels: bool = _option(
        False,
        "kernels record what they do and when, for the trace and Buffer.profile(); on GPUs another build",
    )
    trace_kernel_spans: int = _option(
        2048, "spans that each warp of a traced kernel keeps, the newest, a power of two", minimum=16, maximum=1 << 20
    )
    cache_dir: str = _option("", "folder for compiled kernels; empty: uccl_ep in the user's cache folder")

    def __post_init__(self) -> None:
        if 0 < self.slot_bytes < 4096:
            raise ConfigurationError(f"general.slot_bytes = {self.slot_bytes}: must be at least 4096, or 0")
        if self.slot_bytes % 64:
            rounded = self.slot_bytes // 64 * 64
            raise ConfigurationError(f"general.slot_bytes = {self.slot_bytes}: must be a multiple of 64, use {rounded}")
        if self.ring_capacity & (self.ring_capacity - 1):
            raise _no_power_of_two("ring_capacity", self.ring_capacity)
        if self.trace_kernel_spans & (self.trace_kernel_spans - 1):
            raise _no_power_of_two("trace_kernel_spans", self.trace_kernel_spans)


def _no_power_of_two(name: str, value: int) -> ConfigurationError:
    lower = 1 << (value.bit_length() - 1)
    return ConfigurationError(f"general.{name} = {value}: must be a power of two, use {lower} or {2 * lower}")


GENERAL_OPTIONS: dict[str, Option] = {field.name: field.metadata["option"] for field in dataclasses.fields(General)}

SHARED_TRANSPORT_OPTIONS: dict[str, Option] = {
    "plan": GENERAL_OPTIONS["plan"],
    "timeout_s": GENERAL_OPTIONS["timeout_s"],
    "device": Option("", "device by name; empty: the best one"),
}
"""What every transport takes besides its own `OPTIONS`; the first two default to the general value."""

SHARED_BACKEND_OPTIONS: dict[str, Option] = {
    "cache_dir": GENERAL_OPTIONS["cache_dir"],
    "trace_kernels": GENERAL_OPTIONS["trace_kernels"],
    "device": Option("", "device by name; empty: that of the tensors"),
}
"""Likewise for GPU backends; the first two default to the general value."""
