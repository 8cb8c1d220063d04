"""Options of the ibverbs transport."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from uccl_ep_core.transport import Option

OPTIONS: dict[str, Option] = {
    "port": Option(0, "port of the device; 0: the first active one", minimum=0, maximum=255),
    "interface": Option("", "network interface whose address is used; empty: any of the device's"),
    "gid_index": Option(-1, "index of the source GID; -1: RoCE v2, IPv4 before IPv6", minimum=-1, maximum=65535),
    "service_level": Option(0, "InfiniBand service level", minimum=0, maximum=15),
    "traffic_class": Option(0, "traffic class (RoCE: DSCP times 4)", minimum=0, maximum=255),
    "mtu": Option(
        0, "path MTU in bytes at most; 0: the smaller of the ports'", choices=(0, 256, 512, 1024, 2048, 4096)
    ),
    "timeout": Option(18, "acknowledgement time-out, 4.096 us times 2 to this power", minimum=1, maximum=31),
    "retry": Option(6, "retries after a time-out; 7 is for ever on SoftRoCE", minimum=0, maximum=7),
    "rnr_retry": Option(7, "retries while a receiver posts no receives; 7: for ever", minimum=0, maximum=7),
    "renew_timeout_s": Option(
        5.0,
        "seconds in which a queue pair in error is replaced by a new one, else its peer counts as dead; 0: an error is "
        "final. iWARP: always final",
        minimum=0.0,
        maximum=3600.0,
    ),
    "send_depth": Option(512, "work requests in flight to each peer on a lane", minimum=16, maximum=32768),
    "receive_depth": Option(512, "receives kept posted for each peer on a lane", minimum=8, maximum=32768),
    "inline_bytes": Option(64, "writes up to this length are copied into the work request", minimum=0, maximum=4096),
    "lanes": Option(16, "most lanes to each peer", minimum=1, maximum=64),
    "relaxed_ordering": Option(False, "let PCIe reorder writes; then only the counted plan holds"),
    "gpu_memory": Option("auto", "register GPU memory where the device can, or stage it", choices=("auto", "staged")),
    "near": Option("", "PCI address of the GPU to be near to; empty: torch's current one"),
    "max_registration": Option(0, "largest single registration in bytes; 0: no limit", minimum=0),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The values of `OPTIONS`, defaults filled in."""

    port: int
    interface: str
    gid_index: int
    service_level: int
    traffic_class: int
    mtu: int
    timeout: int
    retry: int
    rnr_retry: int
    renew_timeout_s: float
    send_depth: int
    receive_depth: int
    inline_bytes: int
    lanes: int
    relaxed_ordering: bool
    gpu_memory: str
    near: str
    max_registration: int

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Settings:
        return cls(**{name: options.get(name, option.default) for name, option in OPTIONS.items()})
