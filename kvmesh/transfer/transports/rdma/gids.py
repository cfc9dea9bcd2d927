"""Which GID of a port to use, and which pairs of NICs reach each other: pure, from the text of /sys and /proc.

A GID is an IP address on RoCE v2 (IPv4 as ::ffff:a.b.c.d), a MAC's link-local address on RoCE v1, and a subnet prefix
with a port's number on InfiniBand. Best first: RoCE v2 over IPv4, over global IPv6 (also where there is nothing else),
InfiniBand, then link-local addresses, which say nothing about who is reachable.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvmesh.errors import TransferError

SYS_INFINIBAND = Path("/sys/class/infiniband")
ROCE_V2, ROCE_V1, INFINIBAND = "v2", "v1", "ib"
_KINDS = {"RoCE v2": ROCE_V2, "IB/RoCE v1": ROCE_V1, "RoCE v1": ROCE_V1}
_MAX_GIDS = 256
_EMPTY = ipaddress.IPv6Address(0)
_GLOBAL, _LINK_LOCAL = 2, 4  # worst ranks of addresses that say who is reachable, and of those that do not


@dataclass(frozen=True, slots=True)
class Gid:
    """An entry of a GID table. `interface` is the network interface behind it ("" on InfiniBand, and for a peer's)."""

    index: int
    kind: str
    address: ipaddress.IPv6Address
    interface: str = ""

    @property
    def family(self) -> str:
        if self.kind == INFINIBAND:
            return "ib"
        if self.address.ipv4_mapped is not None:
            return "ipv4"
        return "link" if self.address.is_link_local else "ipv6"

    @property
    def rank(self) -> int:
        """How well the GID suits; lower is better."""
        if self.kind == ROCE_V1:
            return _LINK_LOCAL + 1
        return {"ipv4": 0, "ipv6": 1, "ib": 2, "link": _LINK_LOCAL}[self.family]


@dataclass(frozen=True, slots=True)
class Network:
    """Addresses that an interface reaches: on its link, or through a gateway."""

    interface: str
    network: ipaddress.IPv4Network | ipaddress.IPv6Network
    gateway: bool


def is_gone(inode: int, root: Path = SYS_INFINIBAND) -> bool:
    """Says whether the kernel has removed the device whose folder had this inode, with all resources it held for us.
    Another device may have its name by now."""
    for entry in root.iterdir():
        try:
            if entry.stat().st_ino == inode:
                return False
        except FileNotFoundError:
            continue  # while it is being removed
    return True


def read_gids(device: str, port: int, root: Path = SYS_INFINIBAND) -> list[Gid]:
    """Returns all GIDs of a port, by index."""
    folder = root / device / "ports" / str(port)
    ethernet = _text(folder / "link_layer") != "InfiniBand"
    found: list[Gid] = []
    for index in sorted(int(entry.name) for entry in (folder / "gids").glob("*") if entry.name.isdecimal()):
        if len(found) >= _MAX_GIDS or (index >= _MAX_GIDS and found):
            break
        text = _text(folder / "gids" / str(index))
        address = ipaddress.IPv6Address(text) if text else _EMPTY
        if address == _EMPTY:
            continue
        kind = _KINDS.get(_text(folder / "gid_attrs" / "types" / str(index)), ROCE_V1) if ethernet else INFINIBAND
        found.append(Gid(index, kind, address, _text(folder / "gid_attrs" / "ndevs" / str(index))))
    return found


def usable_gids(gids: Sequence[Gid], device: str, only_index: int = -1) -> list[Gid]:
    """Returns usable GIDs, best first; only that of `only_index` when it is not negative. Raises TransferError when
    there is none."""
    if only_index >= 0:
        gids = [gid for gid in gids if gid.index == only_index]
        if not gids:
            raise TransferError(
                f"rdma_gid_index={only_index}: {device} has no GID at that index", field="rdma_gid_index"
            )
    if not gids:
        raise TransferError(f"rdma: {device} has no GID: give its interface an address", field="nics")
    return sorted(gids, key=lambda gid: (gid.rank, gid.index))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # an unused entry answers EINVAL
        return ""


# ── in descriptors ────────────────────────────────────────────────────────────────────────────────


def encode(nics: Mapping[str, Sequence[Gid]]) -> str:
    return ",".join(f"{name}|{gid.kind}|{gid.address}" for name, gids in nics.items() for gid in gids)


def decode(text: str) -> dict[str, list[Gid]]:
    """Decodes what `encode` wrote. Raises TransferError for anything else."""
    found: dict[str, list[Gid]] = {}
    for entry in text.split(",") if text else ():
        try:
            name, kind, address = entry.split("|")
            gid = Gid(-1, kind, ipaddress.IPv6Address(address))
            if kind not in (ROCE_V1, ROCE_V2, INFINIBAND):
                raise ValueError(kind)
        except ValueError as err:
            raise TransferError(f"rdma endpoint: bad GID {entry!r}", field="segment") from err
        found.setdefault(name, []).append(gid)
    return found


# ── who reaches whom ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Pair:
    """A path from a local NIC to a remote NIC over these GIDs."""

    local: str
    remote: str
    local_gid: Gid
    remote_gid: Gid
    rank: int


def pairs(
    local: Mapping[str, Sequence[Gid]], remote: Mapping[str, Sequence[Gid]], networks: Sequence[Network]
) -> list[Pair]:
    """Returns every pair of NICs that should reach each other, best first. Link-local addresses are tried only where
    nothing better connects any pair; NICs are then paired by their order, which is how rails are cabled."""
    found = []
    for here, (name, gids) in enumerate(local.items()):
        for there, (far, far_gids) in enumerate(remote.items()):
            best = _best(name, gids, far, far_gids, networks)
            if best is not None:
                found.append((best.rank, here != there, here, there, best))
    found.sort(key=lambda entry: entry[:4])
    if found and found[0][0] >= _LINK_LOCAL:
        in_order = [entry for entry in found if not entry[1]]
        found = in_order or found
    elif found:
        found = [entry for entry in found if entry[0] < _LINK_LOCAL]
    return [entry[4] for entry in found]


def given_pairs(
    given: Sequence[str], local: Mapping[str, Sequence[Gid]], remote: Mapping[str, Sequence[Gid]]
) -> list[Pair]:
    """Returns the pairs of "LOCAL=REMOTE" that both hosts have, in that order, over their best GIDs of one kind."""
    found = []
    for text in given:
        name, far = text.split("=")
        both = [
            Pair(name, far, gid, far_gid, gid.rank)
            for gid in local.get(name, ())
            for far_gid in remote.get(far, ())
            if (gid.kind, gid.family) == (far_gid.kind, far_gid.family)
        ]
        if both:
            found.append(min(both, key=lambda pair: pair.rank))
    return found


def _best(
    name: str, gids: Sequence[Gid], far: str, far_gids: Sequence[Gid], networks: Sequence[Network]
) -> Pair | None:
    candidates = []
    for gid in gids:
        for far_gid in far_gids:
            beyond = _beyond(gid, far_gid, networks)
            if beyond is not None:
                candidates.append(Pair(name, far, gid, far_gid, gid.rank + (_GLOBAL if beyond else 0)))
    return min(candidates, key=lambda pair: pair.rank, default=None)


def _beyond(gid: Gid, far: Gid, networks: Iterable[Network]) -> bool | None:
    """Says whether a router is between the two GIDs; None when they cannot reach each other."""
    if gid.kind != far.kind or gid.family != far.family:
        return None
    if gid.family == "ib":
        return False if gid.address.packed[:8] == far.address.packed[:8] else None
    if gid.kind == ROCE_V1 or gid.family == "link":
        return False
    target = far.address.ipv4_mapped or far.address
    beyond = None
    for network in networks:
        fits = network.interface == gid.interface and target.version == network.network.version
        if fits and target in network.network:
            if not network.gateway:
                return False
            beyond = True
    return beyond


def read_networks(proc: Path = Path("/proc/net")) -> list[Network]:
    return [*ipv4_networks(_text(proc / "route")), *ipv6_networks(_text(proc / "ipv6_route"))]


def ipv4_networks(text: str) -> list[Network]:
    """Parses the text of /proc/net/route, whose numbers are little-endian hexadecimal."""
    found = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 8 or not int(fields[3], 16) & 1:
            continue
        address, gateway, mask = (int.from_bytes(bytes.fromhex(fields[i]), "little") for i in (1, 2, 7))
        network = ipaddress.IPv4Network((address, bin(mask).count("1")), strict=False)
        found.append(Network(fields[0], network, gateway != 0))
    return found


def ipv6_networks(text: str) -> list[Network]:
    """Parses the text of /proc/net/ipv6_route, without multicast, link-local and rejecting routes."""
    found = []
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 10 or int(fields[8], 16) & 0x200:  # RTF_REJECT
            continue
        address = ipaddress.IPv6Address(bytes.fromhex(fields[0]))
        network = ipaddress.IPv6Network((address, int(fields[1], 16)), strict=False)
        if not (address.is_multicast or address.is_link_local):
            found.append(Network(fields[9], network, int(fields[4], 16) != 0))
    return found
