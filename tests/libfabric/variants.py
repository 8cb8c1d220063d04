"""The libraries and providers that every test of this folder runs over, where the machine has them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from uccl_ep_core.errors import BackendUnavailableError


@dataclasses.dataclass(frozen=True)
class Variant:
    """One library with one provider, on loopback."""

    library: str
    provider: str

    @property
    def options(self) -> dict[str, Any]:
        return {"library": self.library, "provider": self.provider, "address": "127.0.0.1"}

    @property
    def same_host(self) -> bool:
        return self.provider == "shm"

    def __str__(self) -> str:
        return f"{self.library}-{self.provider}"


VARIANTS = [
    Variant("system", "tcp;ofi_rxm"),
    Variant("system", "shm"),
    Variant("mpich", "tcp"),
    Variant("mpich", "tcp;ofi_rxm"),
    Variant("mpich", "shm"),
]
NETWORK = [variant for variant in VARIANTS if not variant.same_host]


@functools.cache
def missing(library: str, provider: str) -> str:
    """Why a variant cannot run here, "" where it can."""
    from uccl_ep_libfabric import LibfabricTransport

    options = Variant(library, provider).options
    try:
        LibfabricTransport.open(None, options).close()
    except BackendUnavailableError as error:
        return str(error)
    return ""
