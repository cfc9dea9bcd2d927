"""A segment: all registered memory of one engine in one 64-bit offset space, and how it is described to peers.

0x1000 ┌────────────┐  region 0  (base_offset names it for ever: offsets are never reused)
       └────────────┘
         guard page       no request or window can run from one region into the next
       ┌────────────┐  region 1
"""

from __future__ import annotations

import os
import secrets
import threading
from bisect import bisect_right
from dataclasses import dataclass, field

import msgspec

from kvmesh.errors import TransferError
from kvmesh.rpc.addresses import is_loopback
from kvmesh.transfer import checks
from kvmesh.transfer.api import Region
from kvmesh.transfer.memory import PAGE, Mapping
from kvmesh.transfer.served_reads import ServedReads
from kvmesh.transfer.transports.wire import UNREADABLE

DESCRIPTOR_VERSION = 2
MAX_DESCRIPTOR_BYTES = 1 << 20
MAX_OFFSET = 1 << 62  # so that sums of offsets and addresses fit 64 bits


@dataclass(frozen=True, slots=True)
class RegionInfo:
    """A region as peers see it. `shared` says that its owner can hand out a read-only descriptor of the memory."""

    base_offset: int
    length: int
    location: str
    shared: bool


@dataclass(frozen=True, slots=True)
class NicInfo:
    """A NIC that a transport of the segment's owner uses. `name` is unique in the descriptor ("mlx5_0", "eth1");
    `address` is what the transport dials or routes to (an IP address, a GID). `numa` is -1 and `gbps` 0 where unknown.
    """

    transport: str
    name: str
    address: str
    numa: int = -1
    gbps: float = 0.0


@dataclass(frozen=True, slots=True)
class SegmentDescriptor:
    """What a peer needs to open a segment. `endpoints` maps a transport to its address fields. `token` is quoted in
    every greeting, so that a connection to a restarted or foreign process is refused instead of being taken for this
    one. `topology` maps a memory location to the names of (preferred, secondary) NICs."""

    name: str
    machine: str
    token: str
    regions: tuple[RegionInfo, ...]
    endpoints: dict[str, dict[str, str]]
    nics: tuple[NicInfo, ...] = ()
    topology: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = field(default_factory=dict)
    version: int = DESCRIPTOR_VERSION

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> SegmentDescriptor:
        """Decodes a descriptor. Raises TransferError when it is malformed or of an unknown version."""
        if len(data) > MAX_DESCRIPTOR_BYTES:
            why = f"segment descriptor of {len(data)} bytes is over {MAX_DESCRIPTOR_BYTES}"
            raise TransferError(why, field="descriptor")
        try:
            version = msgspec.msgpack.decode(data, type=_Versioned).version
            if version != DESCRIPTOR_VERSION:
                raise TransferError(
                    f"segment descriptor has version {version}, this build knows {DESCRIPTOR_VERSION}", field="version"
                )
            found = msgspec.msgpack.decode(data, type=cls)
        except UNREADABLE as err:
            why = f"segment descriptor of {len(data)} bytes is malformed: {err}"
            raise TransferError(why, field="descriptor") from err
        for region in found.regions:
            if not 0 <= region.base_offset < region.base_offset + region.length <= MAX_OFFSET:
                why = f"region ({region.base_offset}, {region.length}) of segment {found.name!r} cannot be"
                raise TransferError(f"segment descriptor is malformed: {why}", field="descriptor")
        return found

    def region_at(self, offset: int, length: int) -> RegionInfo | None:
        """Returns the region that holds all of [offset, offset + length), or None."""
        for region in self.regions:
            if region.base_offset <= offset and offset + length <= region.base_offset + region.length:
                return region
        return None


class _Versioned(msgspec.Struct):
    version: int


def network_id() -> str:
    """Returns a value that is equal for two processes of one network namespace, in which abstract unix-domain sockets
    are found too."""
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return "?"


def machine_id() -> str:
    """Returns a value that is equal for two processes that may share memory: same boot, same user namespace."""
    parts = []
    for path in ("/proc/sys/kernel/random/boot_id",):
        try:
            with open(path) as file:
                parts.append(file.read().strip())
        except OSError:
            return secrets.token_hex(16)  # unknown: reachable by nobody over shm
    for namespace in ("user",):
        try:
            parts.append(os.readlink(f"/proc/self/ns/{namespace}"))
        except OSError:
            parts.append("?")
    return " ".join(parts)


def why_no_answer(descriptor: SegmentDescriptor, transport: str) -> str:
    """Returns what to mend where a peer that did not answer names a loopback address although it is known to run on
    another machine, or in another network namespace of this one; "" otherwise."""
    endpoint = descriptor.endpoints.get(transport, {})
    host, network = endpoint.get("host", ""), endpoint.get("network", "")
    if not is_loopback(host) or (descriptor.machine == machine_id() and network in ("", network_id())):
        return ""
    where = "another machine" if descriptor.machine != machine_id() else "this machine in another network namespace"
    return (
        f"{descriptor.name} runs on {where} and says host={host!r}, which is dialled here and not there: set its host, "
        "or advertise_host, to an address that others reach"
    )


@dataclass(eq=False, slots=True)
class LocalRegion:
    """A registered region of this process. `fd` is its read-only descriptor or -1; `keep` keeps the memory alive."""

    public: Region
    view: memoryview
    keep: object
    fd: int = -1
    uses: int = 0  # servings of a peer's READ that touch it now
    registrations: int = 1  # of the same memory of the caller

    @property
    def base(self) -> int:
        return self.public.base_offset

    @property
    def on_host(self) -> bool:
        """Whether this process may touch the memory."""
        return checks.on_host(self.public.location)

    @property
    def address(self) -> int:
        return self.public.address

    @property
    def length(self) -> int:
        return self.public.length

    def slice_at(self, offset: int, length: int) -> memoryview:
        """Returns the memory at `offset` of the segment."""
        start = offset - self.public.base_offset
        return self.view[start : start + length]


@dataclass(eq=False, slots=True)
class LocalSegment:
    """The regions of this engine. It is thread-safe; look-ups read immutable snapshots and take no lock."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    reads: ServedReads = field(default_factory=ServedReads)
    _next_base: int = PAGE
    _by_base: tuple[LocalRegion, ...] = ()
    _by_address: tuple[LocalRegion, ...] = ()
    _addresses: list[int] = field(default_factory=list)
    _bases: list[int] = field(default_factory=list)

    @property
    def regions(self) -> tuple[LocalRegion, ...]:
        return self._by_base

    def add(self, address: int, length: int, location: str, view: memoryview, keep: object, fd: int) -> LocalRegion:
        """Registers a region. Raises TransferError when it overlaps a registered one."""
        with self.changed:
            for other in self._by_base:
                if address < other.address + other.length and other.address < address + length:
                    raise TransferError(_overlap(address, length, location, other.public), field="buffer")
            base = self._next_base
            self._next_base += -(-length // PAGE) * PAGE + PAGE
            kept = isinstance(keep, Mapping) and keep.kept
            region = LocalRegion(Region(address, length, base, location, view, kept), view, keep, fd)
            self._publish((*self._by_base, region))
            return region

    def again(self, address: int, length: int, location: str, keep: object) -> LocalRegion | None:
        """Counts one more registration of exactly the same memory and returns its region; None when there is none."""
        with self.changed:
            region = self.by_address(address, length)
            if region is None or (region.address, region.length) != (address, length):
                return None
            if region.public.location != location or isinstance(region.keep, Mapping):
                return None
            region.registrations += 1
            region.keep = (region.keep[0] if isinstance(region.keep, tuple) else region.keep, keep)
            return region

    def let_go(self, region: LocalRegion) -> bool:
        """Takes back one of several registrations. Returns False, and changes nothing, when it is the last."""
        with self.changed:
            if region.registrations == 1:
                return False
            region.registrations -= 1
            return True

    def hide(self, region: LocalRegion) -> None:
        """Makes a region impossible to find; `remove` must follow. Raises TransferError when it is not registered, or
        was registered again meanwhile."""
        with self.changed:
            if region not in self._by_base:
                raise TransferError(f"region at offset {region.base} is not registered")
            if region.registrations > 1:
                raise TransferError(f"region at offset {region.base} was registered again meanwhile")
            self._publish(tuple(r for r in self._by_base if r is not region))

    def remove(self, region: LocalRegion, timeout_s: float) -> None:
        """Hides a region if it is not hidden yet, and waits until no peer's READ is served from it. Raises
        TransferError after `timeout_s`; the region then stays registered."""
        with self.changed:
            if region in self._by_base:
                self.hide(region)
            if not self.changed.wait_for(lambda: region.uses == 0, timeout_s):
                self._publish(tuple(sorted((*self._by_base, region), key=lambda r: r.base)))
                raise TransferError(f"region at offset {region.base} is still being read after {timeout_s} s")
        self._release(region)

    def close(self) -> None:
        with self.changed:
            regions = self._by_base
            self._publish(())
        for region in regions:
            self._release(region)

    def by_address(self, address: int, length: int) -> LocalRegion | None:
        by_address, addresses = self._by_address, self._addresses
        at = bisect_right(addresses, address) - 1
        if 0 <= at < len(by_address):
            region = by_address[at]
            if address + length <= region.address + region.length:
                return region
        return None

    def by_offset(self, offset: int, length: int) -> LocalRegion | None:
        by_base, bases = self._by_base, self._bases
        at = bisect_right(bases, offset) - 1
        if 0 <= at < len(by_base):
            region = by_base[at]
            if region.base <= offset and offset + length <= region.base + region.length:
                return region
        return None

    def use(self, offset: int, length: int) -> LocalRegion | None:
        """Finds a region of host memory as `by_offset` does, and keeps it from being removed until `unuse`."""
        with self.changed:
            region = self.by_offset(offset, length)
            if region is None or not region.on_host:
                return None
            region.uses += 1
            return region

    def unuse(self, region: LocalRegion) -> None:
        with self.changed:
            region.uses -= 1
            if region.uses == 0:
                self.changed.notify_all()

    def _publish(self, regions: tuple[LocalRegion, ...]) -> None:
        by_address = tuple(sorted(regions, key=lambda r: r.address))
        self._addresses = [r.address for r in by_address]
        self._by_address = by_address
        self._bases = [r.base for r in regions]
        self._by_base = regions

    @staticmethod
    def _release(region: LocalRegion) -> None:
        if region.fd >= 0:
            os.close(region.fd)
            region.fd = -1
        if isinstance(region.keep, Mapping):
            region.keep = None


def _overlap(address: int, length: int, location: str, other: Region) -> str:
    if (address, length) == (other.address, other.length) and location != other.location:
        return f"location={location!r}: this memory is registered already, with {other.location!r}"
    mine, its = (f"[{at:#x}, {at + n:#x})" for at, n in ((address, length), (other.address, other.length)))
    return f"buffer at {mine} overlaps the registered region at {its}: register the larger one of them alone"


def describe(
    name: str,
    token: str,
    segment: LocalSegment,
    endpoints: dict[str, dict[str, str]],
    nics: tuple[NicInfo, ...] = (),
    topology: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] | None = None,
) -> SegmentDescriptor:
    regions = tuple(RegionInfo(r.base, r.length, r.public.location, r.fd >= 0) for r in segment.regions)
    return SegmentDescriptor(name, machine_id(), token, regions, endpoints, nics, topology or {})
