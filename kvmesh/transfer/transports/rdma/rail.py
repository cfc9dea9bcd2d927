"""One queue pair of a rail of an opened segment, at the opener: what is on it, and what waits for it.

    NEW ─ begin ─▶ CONNECTING ─ Connected ─▶ READY ─ failed ─▶ RESETTING ─ ResetDone ─▶ NEW
                                               ▲ chains: WRITE, READ; letters: NOTIFY

A frame that was on a queue pair which failed is stranded: it is lost and settled once the target has said that its
queue pair is destroyed (a READ: once ours is). `path` drives this; its lock is held around every call.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvmesh.transfer.memory import Mapping
from kvmesh.transfer.transports import wire
from kvmesh.transfer.transports.base import Frame, FrameKind, Rail
from kvmesh.transfer.transports.rdma import protocol, verbs
from kvmesh.transfer.transports.rdma.device import RdmaNic, Registration
from kvmesh.transfer.transports.rdma.gids import Pair
from kvmesh.transfer.transports.rdma.queue_pair import QueuePair

if TYPE_CHECKING:
    from kvmesh.transfer.transports.rdma.path import RdmaPath

Later = list[Callable[[], None]]  # to be called once the lock is released


class RailPhase(enum.Enum):
    NEW = 0
    CONNECTING = 1
    READY = 2
    RESETTING = 3


@dataclass(eq=False, slots=True)
class Posted:
    """A frame on the queue pair; its parts in `refused` were not posted."""

    frame: Frame
    refused: tuple[int, ...] = ()
    cause: str = ""


@dataclass(eq=False, slots=True)
class OutgoingNotification:
    """A notification on its way: in the mailbox's `slot`, or (-1) over the control connection."""

    frame: Frame
    slot: int


class OutgoingMailbox:
    """The local memory that notifications are written from, slot by slot, into the target's mailbox."""

    def __init__(self, nic: RdmaNic) -> None:
        self._nic = nic
        nbytes = protocol.SLOTS * protocol.SLOT_BYTES
        self.mapping = Mapping(-1, nbytes + 64, writable=True)
        self.scratch = self.mapping.address + nbytes  # where a flush puts its byte
        self.registration: Registration = nic.register_memory(self.mapping.address, self.mapping.length)

    def write(self, slot: int, letter: bytes) -> int:
        """Copies a letter into a slot and returns its address."""
        at = slot * protocol.SLOT_BYTES
        self.mapping.view[at : at + len(letter)] = letter
        return self.mapping.address + at

    def close(self) -> None:
        self._nic.deregister(self.registration)


@dataclass(eq=False, slots=True)
class WriteTracker:
    """One queue pair of a rail with its frames (a `queue_pair.Sink`). `dirty` maps (epoch, region) to (address, key) of
    what was written since the last flush; `flushing` maps those under flush to their turn. `doomed` are queue pairs
    that the path's thread must destroy."""

    path: RdmaPath
    rail: Rail
    pair: Pair
    nic: RdmaNic
    state: RailPhase = RailPhase.NEW
    queue: deque[Frame] = field(default_factory=deque)
    queue_pair: QueuePair | None = None
    made: QueuePair | None = None  # ours, while the target has not answered
    number: int = 0  # of the queue pair that the target knows
    outgoing: OutgoingMailbox | None = None
    mailbox: tuple[int, int] = (0, 0)  # address and key
    slots: list[int] = field(default_factory=list)
    turn: int = 0
    posted: dict[int, Posted] = field(default_factory=dict)
    letters: dict[int, OutgoingNotification] = field(default_factory=dict)
    checks: dict[int, Frame] = field(default_factory=dict)
    stranded: list[Frame] = field(default_factory=list)
    doomed: list[QueuePair | OutgoingMailbox] = field(default_factory=list)
    dirty: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    flushing: dict[tuple[int, int], int] = field(default_factory=dict)
    fault: tuple[str, bool] = ("", False)
    progress_at: float = 0.0
    forgotten: bool = False

    def busy(self) -> bool:
        return bool(self.queue or self.posted or self.letters or self.checks or self.stranded)

    def load(self) -> int:
        """Returns how many frames a further one would queue behind."""
        return len(self.queue) + len(self.posted) + len(self.letters)

    def holds(self, frame: Frame) -> bool:
        """Says whether the frame is on the queue pair."""
        return any(posted.frame is frame for posted in self.posted.values()) or any(
            letter.frame is frame and letter.slot >= 0 for letter in self.letters.values()
        )

    def asks(self, frame: Frame) -> bool:
        """Says whether the frame went over the control connection."""
        return frame in self.checks.values() or any(
            letter.frame is frame and letter.slot < 0 for letter in self.letters.values()
        )

    def break_off(self, cause: str, *, down: bool) -> None:
        """Takes the queue pair out of use; its frames are stranded."""
        self.doomed += [pair for pair in (self.queue_pair, self.made) if pair is not None]
        self.queue_pair = self.made = None
        if self.outgoing is not None:
            self.doomed.append(self.outgoing)
            self.outgoing = None
        self.stranded += [posted.frame for posted in self.posted.values()]
        self.posted.clear()
        lost = [seq for seq, letter in self.letters.items() if letter.slot >= 0]
        self.stranded += [self.letters.pop(seq).frame for seq in lost]
        self.slots = []
        self.state = RailPhase.RESETTING
        self.fault = (cause, down)

    def ended(self) -> None:
        """Notes that the target has destroyed its queue pair, so that nothing on it is on its way any more."""
        self.state = RailPhase.NEW
        self.dirty.clear()
        self.flushing.clear()

    def post(self, frame: Frame, rkey: int, lkey: int, delta: int, refused: tuple[int, ...], cause: str) -> None:
        """Posts a frame's parts. Raises OSError when the NIC does not take them all; the frame counts as posted then,
        too."""
        assert self.queue_pair is not None
        parts = frame.parts
        if refused:
            out = frozenset(refused)
            parts = [part for i, part in enumerate(parts) if i not in out]
        self.turn += 1  # not the frame's serial: a test's fault may send one frame twice
        self.posted[self.turn] = Posted(frame, refused, cause)
        opcode = verbs.READ
        if frame.kind is FrameKind.WRITE:
            opcode = verbs.WRITE
            assert frame.group is not None
            base = frame.group.remote.base_offset
            self.dirty[(frame.epoch, base)] = (base + delta, rkey)
            self.flushing.pop((frame.epoch, base), None)
        self.queue_pair.post(opcode, parts, delta, lkey, rkey, self.turn)

    def flush(self, epoch: int) -> bool:
        """Begins flushes of an epoch where it can; returns whether there is nothing left to flush. Raises OSError as
        `post` does."""
        wanted = [key for key in self.dirty if key[0] == epoch]
        for key in wanted:
            pair, outgoing = self.queue_pair, self.outgoing
            if key not in self.flushing and pair is not None and outgoing is not None and pair.free:
                self.turn += 1
                self.flushing[key] = self.turn
                address, rkey = self.dirty[key]
                part = (0, outgoing.scratch, address, 1)  # of no bytes it would not go to the memory
                pair.post(verbs.READ, [part], 0, outgoing.registration.lkey, rkey, (key, self.turn))
        return not wanted

    def flushed(self, key: tuple[int, int], turn: int) -> None:
        if self.flushing.get(key) == turn:  # nothing was written behind it
            del self.flushing[key], self.dirty[key]

    def post_letter(self, seq: int, frame: Frame, admission: int) -> bool:
        """Posts a notification into the target's mailbox. Returns False when there is no room now. Raises OSError as
        `post` does."""
        notice = frame.notice
        assert notice is not None and self.queue_pair is not None and self.outgoing is not None
        if not self.slots or self.queue_pair.free < 1:
            return False
        slot = self.slots.pop()
        self.letters[seq] = OutgoingNotification(frame, slot)
        head = protocol.LETTER.pack(seq, frame.epoch, notice.serial, admission, len(notice.payload))
        address = self.outgoing.write(slot, head + notice.payload)
        at, rkey = self.mailbox
        part = (0, address, slot * protocol.SLOT_BYTES, len(head) + len(notice.payload))
        lkey = self.outgoing.registration.lkey
        self.queue_pair.post(verbs.WRITE_WITH_IMM, [part], at, lkey, rkey, None, imm=slot)
        return True

    def answered(self, seq: int, answer: protocol.Answer, later: Later) -> bool:
        """Handles the answer to a notification or checksum; returns False when it belongs to another rail."""
        cause = wire.CAUSES[answer.code] if answer.code < len(wire.CAUSES) else "unknown cause"
        letter = self.letters.pop(seq, None)
        if letter is not None:
            if letter.slot >= 0:
                self.slots.append(letter.slot)
            later.append(lambda frame=letter.frame: frame.done((), cause))  # type: ignore[misc]
            return True
        frame = self.checks.pop(seq, None)
        if frame is None:
            return False
        if cause or len(answer.sums) != len(frame.parts):
            everything = tuple(range(len(frame.parts)))
            later.append(lambda: frame.done(everything, cause or "no checksums came"))
        else:
            frame.sums = answer.sums
            later.append(frame.done)
        return True

    # ── queue_pair.Sink ───────────────────────────────────────────────────────────────────────────

    def chain_done(self, queue_pair: QueuePair, token: object) -> None:
        self.path.chain_done(self, queue_pair, token)

    def failed(self, queue_pair: QueuePair, status: int, cause: str, *, down: bool) -> None:
        self.path.failed(self, queue_pair, status, cause, down=down)

    def received(self, queue_pair: QueuePair, imm: int) -> None:
        return  # a target never writes to us with an immediate
