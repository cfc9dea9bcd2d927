"""An engine's transports: made and started in the order of its config, and the NICs that each memory prefers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

from kvmesh.rpc.errors import TransferError
from kvmesh.transfer import host as this_host
from kvmesh.transfer import topology
from kvmesh.transfer.config import EngineConfig
from kvmesh.transfer.fault import FaultControl, FaultTransport
from kvmesh.transfer.segment import SegmentDescriptor
from kvmesh.transfer.shm import ShmTransport
from kvmesh.transfer.tcp import TcpTransport
from kvmesh.transfer.transport import Rail, Transport, TransportHost


def _rdma(host: TransportHost, config: EngineConfig) -> Transport:
    from kvmesh.transfer.rdma.transport import RdmaTransport  # only who names it needs what it needs

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
            have = f"have {', '.join(names)}" if names else "have no choice of NICs"
            kinds = ", ".join(config.transports)
            raise TransferError(f"nics={name!r}: the transports here ({kinds}) {have}", field="nics")
    if not names and not config.topology:
        return {}
    return topology.resolve(config.topology, this_host.look(env=os.environ), nics)


def ways(
    descriptor: SegmentDescriptor, transports: Sequence[Transport], only: Callable[[Rail], bool] | None
) -> tuple[Rail, ...]:
    """Every rail to this segment, by transport; those that `only` takes."""
    rails = tuple(rail for transport in transports for rail in transport.rails(descriptor))
    return rails if only is None else tuple(rail for rail in rails if only(rail))
