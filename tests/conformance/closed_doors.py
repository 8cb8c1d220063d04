"""Transports that do not open: on no rank, on one, with an error of a stranger's code, or only the first time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from liar import Liar

from uccl_ep_core.errors import BackendUnavailableError


class NoDevice(Liar):
    @classmethod
    def open(cls, device: str | None, options: Mapping[str, Any]) -> Liar:
        raise BackendUnavailableError("this host has no such NIC; plug one in")


class NoDeviceOfOneRank(Liar):
    @classmethod
    def open(cls, device: str | None, options: Mapping[str, Any]) -> Liar:
        """One process of a parent opens, the other finds the device taken."""
        try:
            os.close(os.open(f"/tmp/uccl_ep_one_device_{os.getppid()}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            os.unlink(f"/tmp/uccl_ep_one_device_{os.getppid()}")
            raise BackendUnavailableError("the device is taken") from None
        return super().open(device, options)


class Stumbles(Liar):
    @classmethod
    def open(cls, device: str | None, options: Mapping[str, Any]) -> Liar:
        return cls(1 // 0)  # type: ignore[arg-type]


class OpensTwice(Liar):
    _times = 0

    @classmethod
    def open(cls, device: str | None, options: Mapping[str, Any]) -> Liar:
        cls._times += 1
        if cls._times > 2:
            raise BackendUnavailableError("the device is used up")
        return super().open(device, options)
