"""A sender with transports that a test drives by hand, in virtual time: nothing happens unless the test says so."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmesh.transfer.api import BatchId, Opcode, TransferRequest, TransferState, TransferStatus
from kvmesh.transfer.batch import AfterUnlock
from kvmesh.transfer.config import EngineConfig
from kvmesh.transfer.peer_link import PeerLink
from kvmesh.transfer.segment import LocalRegion, LocalSegment, NicInfo, RegionInfo, SegmentDescriptor
from kvmesh.transfer.sender import Sender
from kvmesh.transfer.transports.base import Frame, FrameKind, FrameLimits, Rail, Transport

BASE = 1 << 20  # offset of the only region of every peer
KIB = 1 << 10


class FakeTransport(Transport):
    """Keeps what it is given in `posted`, until the test has it `done` or `lost`."""

    def __init__(self, name: str, limits: FrameLimits, pairs: tuple[tuple[str, str], ...] = (("", ""),)) -> None:
        self.name = name
        self.limits = limits
        self.pairs = pairs
        self.posted: dict[int, Frame] = {}
        self.expired: list[Frame] = []
        self.forgotten: list[tuple[str, Rail | None]] = []
        self.recalls = False

    def start(self) -> None: ...

    def endpoint(self) -> dict[str, str]:
        return {}

    def reaches(self, descriptor: SegmentDescriptor) -> bool:
        return True

    def nics(self) -> tuple[NicInfo, ...]:
        return ()

    def rails(self, descriptor: SegmentDescriptor) -> tuple[Rail, ...]:
        return tuple(Rail(self, near, far) for near, far in self.pairs)

    def carries(self, kind: FrameKind, local: LocalRegion, remote: RegionInfo) -> bool:
        return True

    def post(self, frame: Frame) -> None:
        assert frame.serial not in self.posted
        assert not frame.answered
        self.posted[frame.serial] = frame

    def recall(self, frame: Frame) -> bool:
        return self.recalls and self.posted.pop(frame.serial, None) is not None

    def expire(self, frame: Frame, idle_s: float) -> None:
        self.expired.append(frame)

    def forget(self, segment: str, cause: str, rail: Rail | None = None) -> None:
        self.forgotten.append((segment, rail))

    def idle(self, segment: str, rail: Rail) -> bool:
        return True

    def close(self, timeout_s: float) -> None: ...

    # ── the test's side ───────────────────────────────────────────────────────────────────────────

    def on(self, local: str = "", segment: str = "") -> list[Frame]:
        """Posted frames over this NIC (to this segment), oldest first."""
        return [
            f for f in self.posted.values() if local in ("", f.rail.local) and segment in ("", f.link.descriptor.name)
        ]

    def done(self, frame: Frame, refused: tuple[int, ...] = (), cause: str = "") -> None:
        del self.posted[frame.serial]
        frame.done(refused, cause)

    def lost(self, frame: Frame, cause: str = "broken", *, settled: bool = True, down: bool = False) -> None:
        del self.posted[frame.serial]
        frame.lost(cause, settled=settled, down=down)


@dataclass
class World:
    """One engine without threads or sockets. `memory` is all of its memory."""

    transports: tuple[FakeTransport, ...]
    config: EngineConfig = field(default_factory=EngineConfig)
    memory: bytearray = field(default_factory=lambda: bytearray(64 * KIB))
    remote_bytes: int = 1 << 40
    now: float = 1000.0
    topology: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.segment = LocalSegment()
        self.sender = Sender(self.config, self.segment, lambda: self.now)
        self.sender.topology = self.topology
        view = memoryview(self.memory)
        self.address = 1 << 30  # of no real memory: nothing here is dereferenced by address
        self.region = self.segment.add(self.address, 1 << 40, "cpu:0", view, self.memory, -1)

    def open(
        self, name: str = "peer#1", topology: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] | None = None
    ) -> PeerLink:
        region = RegionInfo(BASE, self.remote_bytes, "cpu:0", True)
        descriptor = SegmentDescriptor(name, "machine", "token", (region,), {}, (), topology or {})
        rails = tuple(rail for t in self.transports for rail in t.rails(descriptor))
        sender = self.sender
        link = sender.links[name] = PeerLink(
            descriptor, rails, sender, sender.serials, sender.board, sender.dealer, sender.finals
        )
        return link

    def submit(
        self,
        *lengths: int,
        peer: str = "peer#1",
        opcode: Opcode = Opcode.WRITE,
        epoch: int = 1,
        traffic_class: int = 0,
        verify: bool = False,
        timeout_s: float = 1e6,
        at: int = 0,
    ) -> BatchId:
        """Requests of these lengths, one after the other from offset `at`, as one batch."""
        requests = []
        for length in lengths:
            requests.append(
                TransferRequest(opcode, self.address + at, peer, BASE + at, length, epoch, traffic_class, verify=verify)
            )
            at += length
        batch_id = self.sender.new_batch(len(requests))
        self.sender.submit(batch_id, requests, self.now + timeout_s)
        return batch_id

    def statuses(self, batch: BatchId) -> list[TransferStatus]:
        known = self.sender.batch(batch)
        return [known.status(i) for i in range(len(known.states))]

    def cancel(self, batch: BatchId) -> None:
        after = AfterUnlock()
        with self.sender.lock:
            self.sender.cancel(self.sender.batch(batch), TransferState.CANCELLED, "cancelled", after)
        self.sender.conclude(after)

    def wait(self, seconds: float) -> None:
        """Virtual time passes; the timer does what is due."""
        self.now += seconds
        self.sender.tick()
