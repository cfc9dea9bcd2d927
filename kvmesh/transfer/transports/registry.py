"""Which transports there are by name, and how an engine gets them.

A transport is an entry point of the group `kvmesh.transports`: its name is what `EngineConfig.transports` says, its
value `module:factory`, and `factory(host, config)` makes a `Transport` of that name. kvmesh's own are such entry points
too, written down here so that they are known without an installed distribution; a third party's are found in the
metadata of installed distributions (docs/howto/add-a-transport.md). A transport's module is imported by the first
engine that uses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from kvmesh.errors import TransferError

if TYPE_CHECKING:
    from kvmesh.transfer.config import EngineConfig
    from kvmesh.transfer.transports.base import Transport, TransportHost

GROUP = "kvmesh.transports"
KNOWN_TRANSPORTS = ("rdma", "shm", "tcp")  # kvmesh's own, fastest first

_OWN = {
    name: EntryPoint(name, f"kvmesh.transfer.transports.{name}.transport:{name.capitalize()}Transport", GROUP)
    for name in KNOWN_TRANSPORTS
}


def known() -> tuple[str, ...]:
    """Every name: kvmesh's own, then those of installed distributions."""
    return (*KNOWN_TRANSPORTS, *sorted(entry_points(group=GROUP).names - set(KNOWN_TRANSPORTS)))


def find(name: str) -> EntryPoint:
    """The transport of this name. kvmesh's own go first: nobody can stand in for them. TransferError: there is none."""
    if name in _OWN:
        return _OWN[name]
    for point in entry_points(group=GROUP, name=name):
        return point
    raise TransferError(f"transports={name!r}: not one of {', '.join(known())}", field="transports")


def started(host: TransportHost, config: EngineConfig, wrapper: Any) -> Iterator[Transport]:
    """Each transport of the config, listening; with a wrapper, what its `wrap` made of it. TransferError when one
    cannot be had: those before it are the caller's to close."""
    for name in config.transports:
        transport: Transport = _load(find(name), "transports")(host, config)
        if transport.name != name:
            raise TransferError(
                f"transports={name!r}: its transport calls itself {transport.name!r}", field="transports"
            )
        transport.start()
        yield transport if wrapper is None else wrapper.wrap(transport, host)


def wrapper(config: EngineConfig) -> Any:
    """What `config.wrapper` names, made of the text in `config.fault`; None when that is empty, which is the rule."""
    if not config.fault:
        return None
    return _load(EntryPoint("wrapper", config.wrapper, ""), "wrapper")(config.fault)


def _load(point: EntryPoint, field: str) -> Any:
    """TransferError when the module or the name in it is not there, or the module raises as it is imported."""
    try:
        return point.load()
    except Exception as err:
        why = f"{type(err).__name__}: {err}"
        raise TransferError(f"{field}={point.name!r}: {point.value} cannot be loaded: {why}", field=field) from err
