"""Which provider, on which NIC or address: asked of fi_getinfo, chosen with reasons."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from uccl_ep_core.errors import BackendUnavailableError, ConfigurationError

from . import network, topology
from .library import Library, constants, native

MAX_ANSWERS = 128


@dataclasses.dataclass(frozen=True)
class Provider:
    """One provider as users name it.

    Attributes:
        name: the option's value.
        filters: provider names to ask libfabric for, in this order; the first that answers is taken.
        fabric: only answers of this fabric, "" for any.
        not_fabric: no answers of this fabric, "" for none.
    """

    name: str
    filters: tuple[str, ...]
    fabric: str = ""
    not_fabric: str = ""


# In the order of `auto`: fabrics that the NIC itself drives, then the network of the kernel. shm is never
# taken by itself, since whether all ranks are on one machine is not known when a transport opens.
KNOWN = (
    Provider("efa-direct", ("efa",), fabric="efa-direct"),
    Provider("efa", ("efa",), not_fabric="efa-direct"),
    Provider("cxi", ("cxi",)),
    Provider("verbs", ("verbs", "verbs;ofi_rxm")),
    Provider("tcp", ("tcp", "tcp;ofi_rxm")),
    Provider("tcp;ofi_rxm", ("tcp;ofi_rxm",)),
    Provider("shm", ("shm",)),
)
AUTO = ("efa-direct", "efa", "cxi", "verbs", "tcp")


def by_name(name: str) -> Provider:
    """The provider of that name; one that is not known here is handed to libfabric as it is."""
    return next((provider for provider in KNOWN if provider.name == name), Provider(name, (name,)))


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer of fi_getinfo and the question that brings it again.

    Attributes:
        info: `fab_info` of interface.h.
        query: `fab_query` of interface.h.
        index: place of the answer in the list.
        array: what `info` lies in; held so that it stays valid.
    """

    info: Any
    query: Any
    index: int
    array: Any = dataclasses.field(repr=False)

    def text(self, field: str) -> str:
        return str(native().ffi.string(getattr(self.info, field)).decode(errors="replace"))

    @property
    def pci(self) -> str:
        info = self.info
        if not info.has_pci:
            return ""
        return topology.pci_address(info.pci_domain, info.pci_bus, info.pci_device, info.pci_function)

    @property
    def is_ip(self) -> bool:
        return self.info.address_format in (constants().sockaddr_in, constants().sockaddr_in6)


def ask(library: Library, **fields: Any) -> list[Answer]:
    """Put one question (fields of `fab_query`); an empty list where the library has no answer.

    Raises:
        BackendUnavailableError: libfabric itself failed.
    """
    module = native()
    query = module.ffi.new("fab_query *")
    for name, value in fields.items():
        setattr(query, name, value.encode() if isinstance(value, str) else value)
    infos = module.ffi.new(f"fab_info[{MAX_ANSWERS}]")
    count = module.lib.fab_query_infos(library.handle, query, infos, MAX_ANSWERS)
    if count == -constants().error_no_data:
        return []
    if count < 0:
        words = module.ffi.string(module.lib.fab_error_text(library.handle, count)).decode()
        raise BackendUnavailableError(f"{library}: fi_getinfo failed: {words}")
    return [Answer(infos[i], query, i, infos) for i in range(count)]


def answers_of(library: Library, provider: Provider, **fields: Any) -> list[Answer]:
    """Answers of one provider. No order is asked for: no plan here needs it, and asking costs shm its fast path."""
    for name in provider.filters:
        # Receives posted for immediates are a burden: only where the provider gives nothing without.
        for receive_mode in (0, 1):
            found = [
                answer
                for answer in ask(library, provider=name, receive_mode=receive_mode, **fields)
                if answer.text("provider") == name
                and provider.fabric in ("", answer.text("fabric"))
                and provider.not_fabric != answer.text("fabric")
            ]
            if found:
                return found
    return []


@dataclasses.dataclass(frozen=True)
class Choice:
    """What was chosen, and why.

    Attributes:
        provider: as users name it.
        rails: one answer for each rail.
        reasons: one sentence for each decision.
    """

    provider: Provider
    rails: tuple[Answer, ...]
    reasons: tuple[str, ...]


def choose(library: Library, options: Mapping[str, Any], device: str | None) -> Choice:
    """The provider and NICs that the options ask for.

    Raises:
        BackendUnavailableError: nothing fits; says what there is, and why each provider was refused.
    """
    from .explain import why_absent

    wanted = str(options.get("provider", "auto"))
    names: Sequence[str] = AUTO if wanted == "auto" else (wanted,)
    refused = []
    for name in names:
        provider = by_name(name)
        try:
            choice = _choose_rails(library, provider, options, device)
        except BackendUnavailableError as error:
            refused.append(f"{name}: {error}")
            continue
        if choice is None:
            reason, remedy = why_absent(library, provider)
            refused.append(f"{name}: {reason}" + (f" ({remedy})" if wanted != "auto" and remedy else ""))
            continue
        how = "asked for" if wanted == "auto" else "option provider"
        first = f"provider {name}: " + (
            "; ".join(["first of " + ", ".join(AUTO) + " that answers", *refused]) if wanted == "auto" else how
        )
        return dataclasses.replace(choice, reasons=(first, *choice.reasons))
    raise BackendUnavailableError(f"{library} has no usable provider. " + ". ".join(refused))


def _choose_rails(
    library: Library, provider: Provider, options: Mapping[str, Any], device: str | None
) -> Choice | None:
    everything = answers_of(library, provider)
    if not everything:
        return None
    rails = int(options.get("rails", 1))
    if everything[0].is_ip and not any(answer.pci for answer in everything):
        return _choose_addresses(library, provider, options, device, max(rails, 1))
    return _choose_nics(provider, everything, options, device, rails)


def _choose_addresses(
    library: Library, provider: Provider, options: Mapping[str, Any], device: str | None, rails: int
) -> Choice:
    addresses, reason = local_addresses(options, device)
    found = []
    for address in addresses:
        answers = answers_of(library, provider, node=address)
        if not answers:
            raise BackendUnavailableError(
                f"it cannot bind to {address} ({reason}); interfaces of this machine: {', '.join(network.interfaces())}"
            )
        found.append(answers[0])
    while len(found) < rails:  # more endpoints than addresses: several on one
        found.append(found[len(found) % len(addresses)])
    return Choice(provider, tuple(found), (f"bound to {', '.join(addresses)}: {reason}",))


def local_addresses(options: Mapping[str, Any], device: str | None) -> tuple[list[str], str]:
    """The addresses to bind to, and why these."""
    if options.get("address"):
        return [part.strip() for part in str(options["address"]).split(",")], "option address"
    interface = options.get("interface") or device
    if interface:
        addresses = []
        for name in str(interface).split(","):
            name = name.strip().partition(":")[2] or name.strip()
            address = network.address_of(name)
            if address is None:
                raise ConfigurationError(
                    f"network interface {name!r} has no IP address; interfaces of this machine: "
                    f"{', '.join(network.interfaces())}"
                )
            addresses.append(address)
        return addresses, f"address of interface {interface}"
    address, why = network.default_address()
    return [address], why


def _choose_nics(
    provider: Provider, everything: list[Answer], options: Mapping[str, Any], device: str | None, rails: int
) -> Choice:
    by_domain: dict[str, Answer] = {}
    for answer in everything:
        by_domain.setdefault(answer.text("domain"), answer)
    wanted = str(options.get("interface") or device or "")
    if wanted:
        names = [part.strip().partition(":")[2] or part.strip() for part in wanted.split(",")]
        missing = [name for name in names if name not in by_domain]
        if missing:
            raise BackendUnavailableError(f"it has no {', '.join(missing)}; there is {', '.join(sorted(by_domain))}")
        return Choice(provider, tuple(by_domain[name] for name in names), ("NICs by option",))
    gpu = str(options.get("near") or topology.current_gpu())
    ranked = sorted(by_domain.items(), key=lambda item: (_far(item[1], gpu), item[0]))
    down = [name for name, answer in ranked if answer.info.link_up == 0]
    ranked = [item for item in ranked if item[1].info.link_up != 0] or ranked
    if rails == 0:  # all that are as near as the nearest
        rails = sum(_far(answer, gpu) == _far(ranked[0][1], gpu) for _, answer in ranked)
    chosen = [ranked[i % len(ranked)] for i in range(rails)]
    reasons = [f"nearest to GPU {gpu} by PCIe distance" if gpu else "no GPU to be near to: in order of name"]
    if down:
        reasons.append(f"left out, link down: {', '.join(down)}")
    return Choice(provider, tuple(answer for _, answer in chosen), tuple(reasons))


def _far(answer: Answer, gpu: str) -> int:
    hops = topology.distance(answer.pci, gpu) if gpu and answer.pci else None
    return 1000 if hops is None else hops
