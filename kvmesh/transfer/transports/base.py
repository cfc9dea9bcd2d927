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
    """How the engine cuts for a transport: the largest slice, the largest frame (in bytes and parts), and how many
    frames may be on their way to one peer."""

    slice_bytes: int
    frame_bytes: int
    frame_parts: int
    inflight_frames: int


class FrameOwner(Protocol):
    """The one who posted a frame, and hears of its end."""

    def frame_done(self, frame: Frame, refused: Sequence[int], cause: str) -> None: ...

    def frame_lost(self, frame: Frame, cause: str, *, settled: bool, down: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class Rail:
    """One path to one peer: a transport, a local NIC and a remote NIC. The names are those of the descriptor's
    topology; "" where the transport has no choice (shm, tcp on one address). `detour` marks NICs on different networks;
    such a rail is used when all direct rails of its transport rest."""

    transport: Transport
    local: str = ""
    remote: str = ""
    detour: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return f"{self.transport.name} {self.local}→{self.remote}" if self.local else self.transport.name


class Frame(msgspec.Struct, eq=False):
    """The unit that a transport carries. `parts[i]` is (slot, local address, remote offset, length), all of one local
    region. `serial` is unique in the engine; `sendings` counts how often its parts were sent, this time included."""

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
        """Reports that every part landed (or was read) except the refused ones, of which no byte did."""
        self.owner.frame_done(self, refused, cause)

    def lost(self, cause: str, *, settled: bool, down: bool = False) -> None:
        """Reports that no answer will come. `settled` says that none of its bytes can land any more, `down` that this
        rail cannot reach the peer at all for now."""
        self.owner.frame_lost(self, cause, settled=settled, down=down)


class TransportHost(Protocol):
    """What a transport may use of its engine."""

    name: str
    token: str
    segment: LocalSegment
    windows: Windows[LocalRegion]

    def deliver(self, peer: str, epoch: int, serial: int, payload: bytes) -> int:
        """Hands a notification to the engine's user; returns 0, or a cause as an index of `wire.CAUSES`."""
        ...

    def count(self, what: str, n: int = 1) -> None: ...


class Transport(ABC):
    """One way to move bytes. Implementations are thread-safe; `limits` may be read before `start`."""

    name: str
    limits: FrameLimits
    device_memory = False  # whether it reaches memory of a GPU, at either end; host memory is reached by every one

    @abstractmethod
    def start(self) -> None:
        """Listens. Raises TransferError when the transport cannot be used on this machine."""

    @abstractmethod
    def endpoint(self) -> dict[str, str]:
        """Returns the address fields that peers need to connect, for the segment descriptor."""

    @abstractmethod
    def reaches(self, descriptor: SegmentDescriptor) -> bool:
        """Says whether connecting is worth a try; it does no I/O."""

    def nics(self) -> tuple[NicInfo, ...]:
        """Returns the local NICs in use, once started; empty where the transport has no choice."""
        return ()

    def rails(self, descriptor: SegmentDescriptor) -> tuple[Rail, ...]:
        """Returns the rails to this peer, one for each usable pair of NICs. It does no I/O, and is asked again when the
        descriptor changes."""
        return (Rail(self),)

    @abstractmethod
    def carries(self, kind: FrameKind, local: LocalRegion, remote: RegionInfo) -> bool:
        """Says whether the transport can move bytes between these two memories."""

    @abstractmethod
    def post(self, frame: Frame) -> None:
        """Takes a frame and carries it over its rail. It connects when needed, and never blocks on the network."""

    @abstractmethod
    def recall(self, frame: Frame) -> bool:
        """Takes a frame back. Returns True if nothing of it was sent; neither `done` nor `lost` is called then."""

    def assist(self, frame: Frame, seconds: float) -> None:
        """Lets the transport use the caller's thread, which only waits for this frame, to get its answer sooner; it
        returns after at most `seconds`. It is called without the sender's lock."""
        return

    @abstractmethod
    def expire(self, frame: Frame, idle_s: float) -> None:
        """Gives up the path of an overdue frame if nothing was acknowledged on it for `idle_s` seconds (0: in any
        case); everything on the path is then lost. It is called without the sender's lock."""

    @abstractmethod
    def forget(self, segment: str, cause: str, rail: Rail | None = None) -> None:
        """Closes every connection to this segment, or those on `rail`. Their frames are lost, which the transport's own
        threads report, since the caller may hold the sender's lock."""

    @abstractmethod
    def idle(self, segment: str, rail: Rail) -> bool:
        """Says whether the connections on this rail carry nothing and may be closed to make room."""

    @abstractmethod
    def close(self, timeout_s: float) -> None:
        """Ends all threads and closes all sockets. It is idempotent."""

    def fence(self, peer: str, epoch: int) -> None:
        """Makes sure that nothing posted by the peer's hardware can land; the window is already closed. Transports that
        land bytes in software check windows themselves and need nothing. Raises TransferError when this cannot be made
        sure; it is then called again."""
        return

    def registered(self, region: LocalRegion) -> None:
        """Notes a new region (rdma registers it with the NICs). Raises TransferError when the region cannot be used."""
        return

    def unregistered(self, region: LocalRegion) -> None:
        """Notes that a region is about to be freed."""
        return
