"""Which NICs a memory location prefers, and which are used when those fail.

    {"cpu:0":  (("mlx5_0", "mlx5_1"), ("mlx5_2", "mlx5_3")),
     "cuda:3": (("mlx5_3",),          ("mlx5_2", "mlx5_0", "mlx5_1"))}

A location's preferred NICs are those of the smallest distance: below the same PCIe switch, at the same root complex, at
the same NUMA node, at another node; the rest follow, nearest first. Each transport's NICs are ranked among themselves.
A NIC that is much slower than the transport's fastest one is never preferred: crossing between sockets costs less.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from kvmesh.errors import TransferError
from kvmesh.transfer import checks
from kvmesh.transfer.host import DeviceLocation, Host
from kvmesh.transfer.segment import NicInfo

Topology = dict[str, tuple[tuple[str, ...], tuple[str, ...]]]

SLOW = 0.5  # of the fastest: below it a NIC is not preferred
MAX_BYTES = 1 << 20
_LOCAL, _REMOTE = 10, 20  # NUMA distances where the firmware tells none


class Distance(enum.IntEnum):
    """What lies between memory and a NIC, nearest first."""

    SWITCH = 0  # one PCIe switch (or root port)
    ROOT = 1  # one root complex
    NODE = 2  # one NUMA node
    OTHER = 3  # the link between nodes

    @property
    def words(self) -> str:
        return ("same PCIe switch", "same root complex", "same NUMA node", "other NUMA node")[self]


def distance(host: Host, location: str, nic: DeviceLocation) -> tuple[Distance, int]:
    """Returns the distance between a memory location and a NIC, and a finer one within that: bridges between a GPU and
    the NIC, or the firmware's NUMA distance. Where a node is unknown it counts as near, as on a machine with one node.
    """
    place = next((gpu.place for gpu in host.gpus if gpu.location == location), None)
    if place is None:
        node = int(location.partition(":")[2])
    else:
        node = place.numa
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(place.chain, nic.chain, strict=False)))
        if same > 1:
            return Distance.SWITCH, len(place.chain) + len(nic.chain) - 2 * same
        if same == 1:
            return Distance.ROOT, 0
    if node < 0 or nic.numa < 0 or node == nic.numa:
        return Distance.NODE, _LOCAL
    far = host.distances.get((node, nic.numa), _REMOTE)
    return Distance.OTHER, far


def discover(host: Host, nics: Sequence[NicInfo]) -> Topology:
    """Returns the ranked NICs of every memory location of this host; empty where no transport has a choice of NICs."""
    if not nics:
        return {}
    return {location: _ranked(host, location, nics) for location in host.locations}


def _ranked(host: Host, location: str, nics: Sequence[NicInfo]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    preferred: list[str] = []
    secondary: list[str] = []
    for transport in dict.fromkeys(nic.transport for nic in nics):
        rivals = [nic for nic in nics if nic.transport == transport]
        fastest = max(nic.gbps for nic in rivals)
        far = {nic.name: distance(host, location, place_of(host, nic)) for nic in rivals}
        slow = {nic.name for nic in rivals if 0 < nic.gbps < fastest * SLOW}
        rivals.sort(key=lambda nic: (nic.name in slow, far[nic.name], -nic.gbps))
        for nic in rivals:
            near = far[nic.name] == far[rivals[0].name] and nic.name not in slow
            (preferred if near else secondary).append(nic.name)
    return tuple(preferred), tuple(secondary)


def place_of(host: Host, nic: NicInfo) -> DeviceLocation:
    """Returns where a NIC is plugged in, by its device name; for a device that /sys does not know, by the NUMA node
    that its transport names."""
    found = host.place_of(nic.name)
    return found if found is not None else DeviceLocation(numa=nic.numa)


# ── the operator's word ───────────────────────────────────────────────────────────────────────────


def resolve(override: str, host: Host, nics: Sequence[NicInfo]) -> Topology:
    """Returns the discovered topology, changed by `override`: JSON such as {"cpu:0": [["eth0"], ["eth1"]]}, or the path
    of a file of it. NICs that `override` leaves out for a location come last there. Raises TransferError (field
    "topology") for an unreadable file, malformed JSON, another form, or a location or NIC that this host lacks."""
    found = discover(host, nics)
    if override.strip():
        found.update(parse(override, host.locations, [nic.name for nic in nics]))
    return found


def parse(override: str, locations: Sequence[str], nics: Sequence[str]) -> Topology:
    """Returns the topology that `override` describes. Raises TransferError as `resolve` does."""
    text, where = _load(override)
    try:
        told = json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise _bad(where, "nested too deep") from None
    except ValueError as err:
        raise _bad(where, f"is not JSON: {err}") from None
    if not isinstance(told, dict):
        raise _bad(where, 'must be an object like {"cpu:0": [["mlx5_0"], ["mlx5_1"]]}')
    topology: Topology = {}
    for location, ranks in told.items():
        if location not in locations:
            raise _bad(where, f"no memory location {location!r} on this host, it has {', '.join(locations)}")
        topology[location] = _checked(location, ranks, where, nics)
    return topology


def _load(override: str) -> tuple[str, str]:
    """Returns the JSON text, and its name for error messages."""
    if override.lstrip().startswith(("{", "[")):
        if len(override) > MAX_BYTES:
            raise _bad("topology", f"is over {MAX_BYTES} bytes")
        return override, f"topology={checks.shown(override)}"
    where = f"topology={override!r}"
    try:
        with open(Path(override).expanduser(), encoding="utf-8") as file:
            text = file.read(MAX_BYTES + 1)
    except (OSError, UnicodeDecodeError, ValueError) as err:
        why = err.strerror if isinstance(err, OSError) and err.strerror else str(err)
        raise _bad(where, f"cannot be read: {why}; give a file, or JSON that begins with {{") from None
    if len(text) > MAX_BYTES:
        raise _bad(where, f"is over {MAX_BYTES} bytes")
    return text, where


def _unique(pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return made


def _checked(location: str, ranks: object, where: str, nics: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    form = f"{location!r} must be [[preferred NICs], [secondary NICs]], both lists of names"
    if not isinstance(ranks, list) or len(ranks) not in (1, 2):
        raise _bad(where, form)
    if not all(isinstance(rank, list) and all(isinstance(name, str) for name in rank) for rank in ranks):
        raise _bad(where, form)
    named = [name for rank in ranks for name in rank]
    for name in named:
        if name not in nics:
            has = f"the transports here use {', '.join(nics)}" if nics else "the transports here have no choice of NICs"
            raise _bad(where, f"{location!r} names NIC {name!r}, but {has}")
        if named.count(name) > 1:
            raise _bad(where, f"{location!r} names NIC {name!r} twice")
    return tuple(ranks[0]), tuple(ranks[1] if len(ranks) == 2 else ())


def _bad(where: str, why: str) -> TransferError:
    return TransferError(f"{where}: {why}", field="topology")
