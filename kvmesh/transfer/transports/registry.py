"""The transports by name, and how an engine starts them.

A transport is an entry point of the group `kvmesh.transports`: its name is what `EngineConfig.transports` says, its
value `module:factory`, and `factory(host, config)` makes a `Transport` of that name. kvmesh's own are such entry points
too, written down here so that they are known without an installed distribution; a third party's are found in the
metadata of installed distributions (docs/howto/add-a-transport.md). A transport's module is imported by the first
engine that uses it.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvmesh.errors import TransferError
from kvmesh.plugins import Plugins, load
from kvmesh.rpc.addresses import is_loopback

if TYPE_CHECKING:
    from kvmesh.transfer.config import EngineConfig
    from kvmesh.transfer.transports.base import Transport, TransportHost

GROUP = "kvmesh.transports"
AUTO = "auto"  # in the place of names: those of KNOWN_TRANSPORTS that can be had here and may be used
SYS_INFINIBAND = Path("/sys/class/infiniband")
KNOWN_TRANSPORTS = ("rdma", "shm", "tcp")  # kvmesh's own, fastest first

_TRANSPORTS = Plugins(
    GROUP,
    {name: f"kvmesh.transfer.transports.{name}.transport:{name.capitalize()}Transport" for name in KNOWN_TRANSPORTS},
    own_first=True,
    error=TransferError,
)


def known() -> tuple[str, ...]:
    """Returns every name: kvmesh's own transports, then those of installed distributions."""
    return tuple(_TRANSPORTS)


def find(name: str) -> EntryPoint:
    """Returns the transport of this name; kvmesh's own come first, so nothing can replace them. Raises TransferError
    when there is none, or when two distributions offer one."""
    return _TRANSPORTS.find(name, "transports")


@dataclass(frozen=True, slots=True)
class TransportChoice:
    """Whether an engine uses a transport, and the reason."""

    name: str
    used: bool
    why: str


def started(host: TransportHost, config: EngineConfig, wrapper: Any, choices: list[TransportChoice]) -> list[Transport]:
    """Starts each transport of the configuration, through the wrapper's `wrap` if there is one. `choices` gets an entry
    for each transport considered. Raises TransferError when one cannot start that the configuration names, or that is
    always available."""
    found: list[Transport] = []
    auto = config.transports == (AUTO,)
    try:
        for name in KNOWN_TRANSPORTS if auto else config.transports:
            why_not = why_not_chosen(name, config) if auto else ""
            if not auto and (seen := why_seen(name, leave_host=config.leave_host, inside=_inside(name, config))):
                raise TransferError(f"transports={name!r}: {seen}", field="transports")
            if not why_not:
                try:
                    found.append(_start(name, host, config, wrapper))
                except TransferError as err:
                    if not (auto and name == "rdma"):
                        raise
                    why_not = err.message.removeprefix("rdma: ")
            why = why_not or (_WHY[name] if auto else "the configuration names it")
            if not why_not and name == "tcp" and config.tls_cert:
                why += ", over TLS"
            choices.append(TransportChoice(name, not why_not, why))
    except BaseException:
        for transport in found:
            transport.close(config.close_timeout_s)
        raise
    return found


def _start(name: str, host: TransportHost, config: EngineConfig, wrapper: Any) -> Transport:
    transport: Transport = _TRANSPORTS.load(name, "transports")(host, config)
    if transport.name != name:
        raise TransferError(f"transports={name!r}: its transport calls itself {transport.name!r}", field="transports")
    transport.start()
    return transport if wrapper is None else wrapper.wrap(transport, host)


_WHY = {
    "rdma": "a device is usable",
    "shm": "for peers on this host",
    "tcp": "for peers that the others do not reach",
}


def why_not_chosen(name: str, config: EngineConfig) -> str:
    """Returns why "auto" leaves this transport out, judged without starting it; "" when it is worth a try."""
    if seen := why_seen(name, leave_host=config.leave_host, inside=_inside(name, config)):
        return seen
    if name != "rdma":
        return ""
    if not any(SYS_INFINIBAND.glob("*")):
        return "this host has no RDMA device"
    if find_spec("pyverbs") is None:
        return "pyverbs is not installed"
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit != resource.RLIM_INFINITY and os.geteuid() != 0:
        return f"only {limit >> 20} MiB may be locked, and rdma locks all memory that it moves (ulimit -l unlimited)"
    return ""


def _inside(name: str, config: EngineConfig) -> bool:
    """Says whether this transport shows the network nothing: tcp over TLS, or on loopback."""
    return name == "tcp" and (bool(config.tls_cert) or _on_loopback(config))


def why_seen(name: str, *, leave_host: bool, inside: bool = False) -> str:
    """Returns why this transport would show bytes to the network that must not leave this host unencrypted; "" when it
    does not, or may. shm never leaves the host, rdma does not encrypt; what others do is theirs to say."""
    if leave_host or inside or name not in ("rdma", "tcp"):
        return ""
    cure = ", or tls_cert, tls_key and tls_ca for TLS" if name == "tcp" else ""
    return (
        f"calls go over TLS, and {name} would carry bytes to other hosts unencrypted (transfer_network=trusted{cure})"
    )


def stays(config: EngineConfig) -> bool:
    """Says whether no byte may leave this host: nothing here encrypts it, and the network may not see it."""
    if config.leave_host or config.tls_cert:
        return False
    return set(config.transports) <= {AUTO, *KNOWN_TRANSPORTS}


def _on_loopback(config: EngineConfig) -> bool:
    if config.nics or config.tcp_nics:
        return False
    return all(is_loopback(host) for host in (config.host, config.advertise_host or config.host))


def described(choices: Sequence[TransportChoice]) -> str:
    """Returns one line for people: "shm, tcp; not rdma: pyverbs is not installed"."""
    used = ", ".join(choice.name for choice in choices if choice.used)
    return "; ".join([used, *(f"not {choice.name}: {choice.why}" for choice in choices if not choice.used)])


def may_use(transports: Sequence[str], name: str) -> bool:
    """Says whether an engine of such a configuration can have this transport."""
    return name in transports or AUTO in transports


def wrapper(config: EngineConfig) -> Any:
    """Calls what `config.wrapper` names with the text in `config.fault`; returns None when that text is empty."""
    if not config.fault:
        return None
    return load(EntryPoint("wrapper", config.wrapper, ""), "wrapper", TransferError)(config.fault)
