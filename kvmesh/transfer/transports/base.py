"""The one interface of all transports, and the frame: the unit that they carry.

    engine ──post(frame)──▶ transport ══ bytes ══▶ peer's transport: window check, landing, acknowledgement
       ▲                        │
       └── frame.done(...) ─────┤  the target has answered for every part: landed, or refused
       └── frame.lost(...) ─────┘  the path broke; `settled`: the target confirmed that the path can land nothing more

A frame holds the parts (slices) of one peer, one kind and one handoff epoch. Exactly one of `done` and `lost` is called
for each posted frame, from any thread, never from inside `post` with a lock of the transport held. A transport that is
one-sided in hardware (rdma) fits by posting work requests in `post`, reporting from its completion thread, destroying
the peer's queue pairs in `fence`, and announcing its keys in `endpoint`.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from kvmesh.transfer.batch import Part, RequestGroup
    from kvmesh.transfer.epochs import EndMark
    from kvmesh.transfer.peer_link import PeerLink
    from kvmesh.transfer.rails import RailState
    from kvmesh.transfer.segment import LocalRegion, LocalSegment, NicInfo, RegionInfo, SegmentDescriptor
    from kvmesh.transfer.windows import Windows


class FrameKind(enum.IntEnum):
    """What a frame asks of the target."""

    WRITE = 1
    READ = 2
    NOTIFY = 3
    CHECKSUM = 4  # parts as of a READ; the target answers with zlib.crc32 of each part of its memory


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """How the engine cuts for a transport: the largest slice, the largest frame, and how much may be posted to one
    peer before it answers."""

    slice_bytes: int
    frame_bytes: int
    frame_parts: int
    inflight_frames: int


class FrameOwner(Protocol):
    """Who posted a frame."""

    def frame_done(self, frame: Frame, refused: Sequence[int], cause: str) -> None: ...

    def frame_lost(self, frame: Frame, cause: str, *, settled: bool, down: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class Rail:
    """One way to one peer: a transport, a NIC of this host, a NIC of the peer's. The names are those of the
    descriptor's topology; "" where the transport has no choice (shm, tcp on one address). `detour`: the two are not on
    one network; such a rail is for when all the transport's straight ones rest."""

    transport: Transport
    local: str = ""
    remote: str = ""
    detour: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return f"{self.transport.name} {self.local}→{self.remote}" if self.local else self.transport.name


class Frame(msgspec.Struct, eq=False):
    """`parts[i]` is (slot, local address, remote offset, length), all in one local region. `serial` is unique in the
    engine. `sendings` counts this one."""

    serial: int
    owner: FrameOwner
    link: PeerLink
    rail: Rail
    kind: FrameKind
    epoch: int
    parts: list[Part]
    nbytes: int
    group: RequestGroup | None = None  # none: a NOTIFY
    notice: EndMark | None = None
    source: LocalRegion | None = None  # stands for the group's local region
    sendings: int = 1
    posted_at: float = 0.0
    answered: bool = False
    way: RailState | None = None  # the engine's record of the rail
    checks: int = 0  # how often its bytes were verified, and differed
    avoid: Rail | None = None  # of a CHECKSUM: the rail that brought the bytes
    burden: int = 0  # bytes that it moves over the rail
    sums: tuple[int, ...] = ()  # of a CHECKSUM: the target's, one per part, set by the transport before `done`

    @property
    def transport(self) -> Transport:
        return self.rail.transport

    @property
    def local(self) -> LocalRegion:
        if self.source is not None:
            return self.source
        assert self.group is not None, "a NOTIFY has no memory"
        return self.group.local

    def done(self, refused: Sequence[int] = (), cause: str = "") -> None:
        """Every part has landed (or was read), except the refused ones, of which no byte has."""
        self.owner.frame_done(self, refused, cause)

    def lost(self, cause: str, *, settled: bool, down: bool = False) -> None:
        """No answer will come. `settled`: nothing of it can land any more. `down`: this rail cannot reach the peer
        at all for now."""
        self.owner.frame_lost(self, cause, settled=settled, down=down)


class TransportHost(Protocol):
    """What a transport may use of its engine."""

    name: str
    token: str
    segment: LocalSegment
    windows: Windows[LocalRegion]

    def deliver(self, peer: str, epoch: int, serial: int, payload: bytes) -> int:
        """Hands a notification to the engine's user; 0 or a cause (index in `wire.CAUSES`)."""
        ...

    def count(self, what: str, n: int = 1) -> None: ...


class Transport(ABC):
    """Thread-safe. `limits` may be read before `start`."""

    name: str
    limits: FrameLimits

    @abstractmethod
    def start(self) -> None:
        """Listens. TransferError when it cannot be had on this machine."""

    @abstractmethod
    def endpoint(self) -> dict[str, str]:
        """The fields that peers need to connect, for the segment descriptor."""

    @abstractmethod
    def reaches(self, descriptor: SegmentDescriptor) -> bool:
        """Whether it is worth trying; no I/O."""

    def nics(self) -> tuple[NicInfo, ...]:
        """The NICs that it uses here, once started; none where it has no choice."""
        return ()

    def rails(self, descriptor: SegmentDescriptor) -> tuple[Rail, ...]:
        """Every way to this peer, by pairs of NICs; no I/O. Asked again when its descriptor changes."""
        return (Rail(self),)

    @abstractmethod
    def carries(self, kind: FrameKind, local: LocalRegion, remote: RegionInfo) -> bool:
        """Whether it can move bytes between these two memories."""

    @abstractmethod
    def post(self, frame: Frame) -> None:
        """Takes the frame and carries it over its rail; never blocks on the network; connects when need be."""

    @abstractmethod
    def recall(self, frame: Frame) -> bool:
        """Takes a frame back of which nothing has been sent; true: neither done nor lost will be called."""

    def assist(self, frame: Frame, seconds: float) -> None:
        """The caller has nothing to do but wait for this frame, at most so long: the transport may use its thread to
        have it answered sooner. Called without the sender's lock."""
        return

    @abstractmethod
    def expire(self, frame: Frame, idle_s: float) -> None:
        """The frame is overdue: give up its path if nothing was acknowledged on it for `idle_s` (0: at once), which
        ends in `lost` for everything that was on it. Called without the sender's lock."""

    @abstractmethod
    def forget(self, segment: str, cause: str, rail: Rail | None = None) -> None:
        """Closes every connection to this segment (on this rail); its frames are lost, reported from the transport's
        own threads (the sender's lock may be held by the caller)."""

    @abstractmethod
    def idle(self, segment: str, rail: Rail) -> bool:
        """Whether its connections on this rail carry nothing and may be closed to make room."""

    @abstractmethod
    def close(self, timeout_s: float) -> None:
        """Ends all threads and sockets. Idempotent."""

    def fence(self, peer: str, epoch: int) -> None:
        """The window is closed, and the engine is about to wait for its own threads: make sure that nothing posted by
        the peer's hardware can land. Software receivers check windows themselves and need nothing. TransferError when
        that cannot be made sure; called again then."""
        return

    def registered(self, region: LocalRegion) -> None:
        """A region was added (rdma: register it with the NICs)."""
        return

    def unregistered(self, region: LocalRegion) -> None:
        """A region is about to go."""
        return
