"""Memory that processes of one host share; nothing is left behind when one of them is killed.

By default the memory has no name (a memfd that peers open through ``/proc``), so ``/dev/shm`` neither
limits it nor shows it. ``named=True`` is for peers in another pid namespace: a random file in
``/dev/shm``, mode 0600, that the creator unlinks as soon as all have attached.
"""

from __future__ import annotations

from ._native import SharedMemory

__all__ = ["SharedMemory", "attach", "create"]


def create(nbytes: int, *, named: bool = False) -> SharedMemory:
    """Zeroed, page-aligned memory that others can `attach` by its ``handle()``.

    Args:
        nbytes: length in bytes.
        named: keep it under a name in ``/dev/shm`` until ``unlink()`` or ``close()``.

    Raises:
        RuntimeError: the system refuses; says what would help.
    """
    return SharedMemory.create(nbytes, named)


def attach(handle: bytes) -> SharedMemory:
    """Map the memory of another process of this host.

    Raises:
        RuntimeError: it cannot be reached (another user, pid namespace or host, or its owner is gone).
        ValueError: the bytes are no handle.
    """
    return SharedMemory.attach(handle)
