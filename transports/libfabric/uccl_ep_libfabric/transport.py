"""The set-up half of the libfabric transport; native/ holds the data half."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import pathlib
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from uccl_ep_core.capabilities import Capabilities
from uccl_ep_core.errors import BackendUnavailableError, EPError, TransportError
from uccl_ep_core.transport import Device, Memory, Transport

from . import leftovers, network
from .address import Address, Endpoint, check_peer, unpack
from .benchmark import Loops
from .explain import why_absent
from .facts import device_of, facts_of
from .library import Library, constants, find, native
from .options import OPTIONS
from .promises import promises
from .providers import KNOWN, Choice, answers_of, choose

HANDSHAKE_SLICE_US = 20_000
MAX_NAME = 256


class LibfabricTransport(Transport):
    """Writes over any libfabric provider that has reliable datagram endpoints and remote writes."""

    OPTIONS = OPTIONS

    def __init__(self, library: Library, choice: Choice, options: Mapping[str, Any]) -> None:
        self._library = library
        self._choice = choice
        self._options = {**{name: option.default for name, option in OPTIONS.items()}, **options}
        self._capabilities, self._notes = promises(library, choice, self._options)
        self._regions: list[Memory] = []
        self._here = leftovers.Process.current()
        self._record: pathlib.Path | None = None
        self._files: list[str] = []
        self._peer_files: list[tuple[leftovers.Process, list[str]]] = []
        self._connected = False
        self._context = self._open_rails()

    # ---- finding and opening ----

    @classmethod
    def probe(cls, options: Mapping[str, Any]) -> Sequence[Device]:
        """Every provider this transport knows, by NIC or interface, and each absent one with its reason."""
        try:
            library = find(str(options.get("library", "")))
        except BackendUnavailableError as error:
            reason, _, remedy = str(error).partition("Remedy: ")
            return [Device("libfabric", False, reason.rstrip(". "), remedy or "see the reason")]
        devices: list[Device] = []
        for provider in KNOWN:
            try:
                answers = answers_of(library, provider)
            except EPError as error:
                devices.append(Device(provider.name, False, str(error), "run fi_info to see more"))
                continue
            if not answers:
                reason, remedy = why_absent(library, provider)
                devices.append(Device(provider.name, False, reason, remedy))
            seen: set[str] = set()
            for answer in answers:
                domain = answer.text("domain")
                if domain not in seen:
                    seen.add(domain)
                    devices.append(device_of(library, provider.name, domain, answer))
        return devices

    @classmethod
    def open(cls, device: str | None, options: Mapping[str, Any]) -> LibfabricTransport:
        """Open the device (``provider:nic`` as `probe` lists it, or just the NIC or interface) or the best one."""
        options = dict(options)
        if device and device.partition(":")[0] in {provider.name for provider in KNOWN}:
            name, _, device = device.partition(":")
            if options.get("provider", "auto") == "auto":
                options["provider"] = name
        library = find(str(options.get("library", "")))
        leftovers.sweep(leftovers.Process.current())
        return cls(library, choose(library, options, device or None), options)

    def _open_rails(self) -> Any:
        module, options = native(), self._options
        depth = self._capabilities.send_queue_depth
        context = module.lib.fab_create(
            self._library.handle,
            options["lanes"],
            len(self._choice.rails),
            depth,
            options["receive_depth"],
            options["stripe_bytes"] if self._capabilities.delivery_complete else 0,
            self._capabilities.max_message,
        )
        if context == module.ffi.NULL:
            raise TransportError(f"libfabric: out of memory for {options['lanes']} lanes of depth {depth}")
        several = len(self._choice.rails) > 1
        reaches_others = self._capabilities.peer_failure != "none"
        module.lib.fab_set_delivery(context, several and self._capabilities.delivery_complete, reaches_others)
        module.lib.fab_set_revoke_limit(context, int(options["revoke_timeout_s"] * 1e9))
        for rail, answer in enumerate(self._choice.rails):
            code = module.lib.fab_open_rail(context, rail, answer.query, answer.index)
            if code:
                words = self._words(context)
                module.lib.fab_close(context)
                raise BackendUnavailableError(f"libfabric: cannot open {words}. {self._open_remedy(code)}")
        return context

    def _open_remedy(self, code: int) -> str:
        if code == -errno.EADDRNOTAVAIL:
            return (
                f"{self._options['address'] or 'That'} is no address of this machine; its interfaces: "
                f"{', '.join(network.interfaces())}"
            )
        return (
            "With many ranks on a machine lower the options lanes and send_depth, or raise the limits on open "
            "files and locked memory (ulimit -n, ulimit -l)"
        )

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    # ---- memory and addresses ----

    def register(self, memory: Memory) -> int:
        if memory.device is not None and not self._capabilities.device_memory:
            raise TransportError(
                f"libfabric: {self._notes['device_memory']}, so it cannot register memory of GPU {memory.device}: "
                "pass pinned host memory"
            )
        if memory.device is not None and memory.dmabuf_fd is None:
            raise TransportError(
                "libfabric: GPU memory is registered through a dma-buf, and this memory came with none"
            )
        device = -1 if memory.device is None else memory.device
        code = native().lib.fab_register(
            self._context,
            len(self._regions),
            memory.pointer,
            memory.nbytes,
            device,
            -1 if memory.dmabuf_fd is None else memory.dmabuf_fd,
        )
        if code:
            kind = "host memory" if device < 0 else f"memory of GPU {device}"
            raise TransportError(
                f"libfabric: {self._words()} ({memory.nbytes} bytes of {kind}). "
                + ("Pinned host memory would do" if device >= 0 else "Raise the limit on locked memory (ulimit -l)")
            )
        self._regions.append(memory)
        return len(self._regions) - 1

    def address(self) -> bytes:
        lanes = tuple(
            tuple(self._endpoint(lane, rail) for rail in range(len(self._choice.rails)))
            for lane in range(self._capabilities.lanes)
        )
        files = [name for lane in lanes for end in lane if (name := leftovers.file_name(end.name))]
        if files and self._record is None:
            self._files = files
            self._record = leftovers.record(self._here, files)
        first = self._choice.rails[0]
        return Address(
            first.text("provider"),
            first.text("protocol"),
            f"{self._library.version[0]}.{self._library.version[1]}",
            self._here,
            socket.gethostname(),
            self._is_local_only(),
            lanes,
        ).pack()

    def _is_local_only(self) -> bool:
        addresses = [answer.text("source").partition("://")[2] for answer in self._choice.rails]
        loopback = any(network.is_loopback(text.rpartition(":")[0].strip("[]")) for text in addresses)
        return loopback or self._capabilities.peer_failure == "none"

    def _endpoint(self, lane: int, rail: int) -> Endpoint:
        module = native()
        room = module.ffi.new(f"uint8_t[{MAX_NAME}]")
        length = module.lib.fab_endpoint_name(self._context, lane, rail, room, MAX_NAME)
        if length < 0:
            raise TransportError(f"libfabric: an endpoint has no address: {self._error(length)}")
        keys, bases = [], []
        for region in range(len(self._regions)):
            key, base = module.ffi.new("uint64_t *"), module.ffi.new("uint64_t *")
            code = module.lib.fab_region_key(self._context, lane, rail, region, key, base)
            if code:
                raise TransportError(f"libfabric: memory {region} has no key: {self._error(code)}")
            keys.append(int(key[0]))
            bases.append(int(base[0]))
        return Endpoint(
            bytes(module.ffi.buffer(room, length)),
            tuple(keys),
            tuple(bases),
            tuple(memory.nbytes for memory in self._regions),
        )

    # ---- connecting ----

    def connect(
        self, rank: int, addresses: Sequence[bytes], peers: Sequence[int], lanes: int, timeout_s: float
    ) -> None:
        module = native()
        if not 1 <= lanes <= self._capabilities.lanes:
            raise TransportError(
                f"libfabric: {lanes} lanes were asked for: use 1 to {self._capabilities.lanes}, "
                "or raise the option lanes on all ranks"
            )
        parsed = {peer: unpack(addresses[peer], peer) for peer in (rank, *peers)}
        digest = hashlib.blake2b(b"".join(addresses), digest_size=8).digest()
        code = module.lib.fab_begin_connect(
            self._context, rank, len(addresses), lanes, int.from_bytes(digest, "little")
        )
        if code:
            raise TransportError(f"libfabric: {self._words()}")
        for peer in peers:
            check_peer(parsed[rank], peer, parsed[peer])
            self._add_peer(peer, parsed[peer], lanes)
        self._shake_hands(parsed, timeout_s)
        # Who greeted this rank has its memory mapped: names are of no more use, and would outlive a kill.
        self._remove_names()
        # From here on every connection stands, so one that refuses writes is one that broke.
        if self._capabilities.peer_failure == "error_completion":
            module.lib.fab_set_patience(self._context, int(self._options["reconnect_s"] * 1e9))
        self._connected = True

    def _add_peer(self, peer: int, address: Address, lanes: int) -> None:
        module = native()
        for lane, ends in enumerate(address.lanes[:lanes]):
            for rail, end in enumerate(ends):
                code = module.lib.fab_add_peer(
                    self._context,
                    lane,
                    rail,
                    peer,
                    end.name,
                    len(end.name),
                    len(end.keys),
                    end.keys,
                    end.bases,
                    end.sizes,
                )
                if code:
                    raise TransportError(f"libfabric: {self._words()}")
        process = address.process
        if self._here.same_view(process) and process.pid != self._here.pid:
            with contextlib.suppress(OSError):  # gone already: the handshake will say so
                module.lib.fab_watch_peer(self._context, peer, os.pidfd_open(process.pid))
            names = [name for ends in address.lanes for end in ends if (name := leftovers.file_name(end.name))]
            self._peer_files.append((process, names))

    def _shake_hands(self, parsed: Mapping[int, Address], timeout_s: float) -> None:
        lib, deadline = native().lib, time.monotonic() + timeout_s
        while (state := lib.fab_handshake(self._context, HANDSHAKE_SLICE_US)) != 1:
            peer = lib.fab_handshake_missing(self._context)
            where = f"rank {peer}" + (f" on {parsed[peer].host}" if peer in parsed else "")
            if state < 0:
                raise TransportError(f"libfabric: cannot reach {where}: {self._words()}. {self._reach_remedy()}")
            if peer >= 0 and lib.fab_peer_is_dead(self._context, peer):
                raise TransportError(f"libfabric: the process of {where} ended while connecting")
            if time.monotonic() > deadline:
                raise TransportError(
                    f"libfabric: {where} did not answer within {timeout_s:g} s. {self._reach_remedy()}"
                )

    def _reach_remedy(self) -> str:
        sources = ", ".join(answer.text("source") or answer.text("domain") for answer in self._choice.rails)
        return f"This rank listens on {sources}; choose other NICs by the options interface or address"

    # ---- data, description, end ----

    @property
    def native_ops(self) -> int:
        if not self._connected:
            raise TransportError("libfabric: native_ops is valid between connect and close")
        module = native()
        return int(module.ffi.cast("uintptr_t", module.lib.fab_operations(self._context)))

    @property
    def native_context(self) -> Any:
        """The C context, for benchmarks and tests of this plugin."""
        return self._context

    def benchmark_loops(self) -> Loops | None:
        """For ``uccl-ep bench transport``; None with several rails, which the bare loop knows nothing of."""
        return Loops(self._context, self._library) if len(self._choice.rails) == 1 else None

    def statistics(self) -> dict[str, int]:
        """Counts of `fab_statistics`, over all lanes."""
        if self._context is None:
            return {}
        module = native()
        values = module.ffi.new("fab_statistics *")
        module.lib.fab_get_statistics(self._context, values)
        return {name: int(getattr(values, name)) for name, _ in module.ffi.typeof("fab_statistics").fields}

    def close(self) -> None:
        context, self._context, self._connected = self._context, None, False
        if context is not None:
            native().lib.fab_close(context)
        for process, names in self._peer_files:
            leftovers.remove(process, names, self._here)
        self._peer_files = []
        self._remove_names()

    def _remove_names(self) -> None:
        for name in self._files:
            with contextlib.suppress(OSError):
                (leftovers.SHARED_MEMORY / name).unlink()
        self._files = []
        if self._record is not None:
            self._record.unlink(missing_ok=True)
            self._record = None

    def __del__(self) -> None:
        if getattr(self, "_context", None) is not None:
            self.close()

    def describe(self) -> Mapping[str, Any]:
        first = self._choice.rails[0]
        mode = first.info.mr_mode
        return {
            "library": str(self._library),
            "provider": first.text("provider"),
            "protocol": first.text("protocol"),
            "chosen because": list(self._choice.reasons),
            "rails": [facts_of(answer, str(self._options["near"])) for answer in self._choice.rails],
            "lanes": self._capabilities.lanes,
            "addresses": "virtual" if mode & constants().mr_virtual_address else "offsets",
            "keys": "of the provider" if mode & constants().mr_provider_key else "ours",
            "receives for immediates": bool(first.info.mode & constants().mode_receive_data),
            "notes": dict(self._notes),
            "statistics": self.statistics(),
        }

    def _words(self, context: Any = None) -> str:
        module = native()
        text = module.ffi.string(module.lib.fab_words(context or self._context))
        return str(text.decode(errors="replace"))

    def _error(self, code: int) -> str:
        module = native()
        return str(module.ffi.string(module.lib.fab_error_text(self._library.handle, code)).decode())
