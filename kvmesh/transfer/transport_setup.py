"""An engine's transports: made and started in the order of its config, and the NICs that each memory prefers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

from kvmesh.errors import TransferError
from kvmesh.transfer import host as this_host
from kvmesh.transfer import topology
from kvmesh.transfer.config import EngineConfig
from kvmesh.transfer.segment import SegmentDescriptor, machine_id
from kvmesh.transfer.transports.base import Rail, Transport, TransportHost
from kvmesh.transfer.transports.fault.transport import FaultControl, FaultTransport
from kvmesh.transfer.transports.shm.transport import ShmTransport
from kvmesh.transfer.transports.tcp.transport import TcpTransport


def _rdma(host: TransportHost, config: EngineConfig) -> Transport:
    from kvmesh.transfer.transports.rdma.transport import RdmaTransport  # only who names it needs what it needs

    return RdmaTransport(host, config)


_TRANSPORTS: dict[str, Callable[[TransportHost, EngineConfig], Transport]] = {
    "rdma": _rdma,
    "shm": ShmTransport,
    "tcp": TcpTransport,
}


def started(host: TransportHost, config: EngineConfig, fault: FaultControl) -> Iterator[Transport]:
    """Each transport of the config, listening; with a fault script, in its fault transport. TransferError when one
    cannot be had: those before it are the caller's to close."""
    for kind in config.transports:
        transport = _TRANSPORTS[kind](host, config)
        transport.start()
        yield FaultTransport(transport, fault, host) if config.fault else transport


def placed(transports: Sequence[Transport], config: EngineConfig) -> topology.Topology:
    """Which NICs each memory location of this host prefers. TransferError: the config names others."""
    nics = [nic for transport in transports for nic in transport.nics()]
    names = [nic.name for nic in nics]
    for name in config.nics:
        if name not in names:
            raise TransferError(_no_nic(name, names, config), field="nics")
    if not names and not config.topology:
        return {}
    return topology.resolve(config.topology, this_host.look(env=os.environ), nics)


def _no_nic(name: str, used: Sequence[str], config: EngineConfig) -> str:
    """As a user is told: what it could have named instead."""
    here = this_host.look()
    devices, nets = [d.name for d in here.rdma], [n.name for n in here.nets]
    kinds = ", ".join(config.transports)
    if name in devices or name in nets:
        why = "no transport here uses it: rdma takes RDMA devices that are up, tcp interfaces that have an address"
    else:
        why = f"not here: RDMA devices {', '.join(devices) or 'none'}; interfaces {', '.join(nets) or 'none'}"
    return f"nics={name!r}: {why} (transports: {kinds}; in use: {', '.join(used) or 'none'})"


def why_unreachable(descriptor: SegmentDescriptor, transports: Sequence[Transport]) -> str:
    """Why no transport reaches it, by transport."""
    causes = []
    for transport in transports:
        name = transport.name
        if name not in descriptor.endpoints:
            causes.append(f"{name}: it has none")
        elif name != "shm":
            causes.append(f"{name}: no NIC here and there that can reach each other")
        elif descriptor.machine != machine_id():
            causes.append("shm: it is on another host, or in another user namespace")
        else:
            causes.append("shm: it is in another network namespace, and no shm_dir is set")
    has = ", ".join(descriptor.endpoints) or "none"
    return f"segment {descriptor.name!r} cannot be reached ({'; '.join(causes)}); its transports: {has}"


def ways(
    descriptor: SegmentDescriptor, transports: Sequence[Transport], only: Callable[[Rail], bool] | None
) -> tuple[Rail, ...]:
    """Every rail to this segment, by transport; those that `only` takes."""
    rails = tuple(rail for transport in transports for rail in transport.rails(descriptor))
    return rails if only is None else tuple(rail for rail in rails if only(rail))
