"""The requests of a batch, and their states.

    Batch: the caller's handle. One slot per request, as plain lists: no object per request, none per slice.
    RequestGroup: requests of one submit that share (segment, opcode, epoch, memory); it is cut into frames.
    Part:  one slice: (slot, local address, remote offset, length).
    RetriedParts: parts that wait to go once more, or to be verified.

A slot is final when its outcome is known *and* none of its parts is on a path; until then a doomed slot (a refused
part, a cancel) only stops posting. The one exception is a path that the target does not confirm to be dead in time:
`drained` is false then.

Nothing here locks: the sender's lock is held around every call.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from kvmesh.transfer.api import BatchId, Opcode, TransferRequest, TransferState, TransferStatus
from kvmesh.transfer.transports.base import Frame, FrameKind, Rail

if TYPE_CHECKING:
    from kvmesh.transfer.peer_link import PeerLink
    from kvmesh.transfer.rails import Tiers
    from kvmesh.transfer.segment import LocalRegion, RegionInfo


@dataclass(eq=False, slots=True)
class Batch:
    """The requests of one batch, one slot each. By slot: `left` are bytes not yet acknowledged, `flight` counts parts
    that are on a path, and `doom` holds the outcome that the slot gets once its `flight` is 0. `open` counts slots that
    are not final."""

    id: BatchId
    capacity: int
    states: list[TransferState] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    flight: list[int] = field(default_factory=list)
    doom: dict[int, tuple[TransferState, str]] = field(default_factory=dict)
    causes: dict[int, str] = field(default_factory=dict)
    undrained: set[int] = field(default_factory=set)
    groups: dict[int, RequestGroup] = field(default_factory=dict)  # those not final, by serial
    open: int = 0
    callbacks: list[Callable[[], None]] = field(default_factory=list)
    rails: dict[Rail, int] = field(default_factory=dict)  # bytes acknowledged on each
    resent: int = 0  # frames

    def add(self, requests: Sequence[TransferRequest]) -> int:
        """Appends a slot for each request, and returns the first slot's number."""
        first = len(self.states)
        lengths = [r.length for r in requests]
        count = len(lengths)
        self.states += [TransferState.WAITING] * count
        self.lengths += lengths
        self.left += lengths
        self.flight += [0] * count
        self.open += count
        return first

    def frame(self) -> Frame | None:
        """Returns some frame of this batch that is on its way, or None."""
        for group in self.groups.values():
            for frame in group.frames.values():
                return frame
        return None

    def status(self, slot: int) -> TransferStatus:
        done = self.lengths[slot] - self.left[slot]
        return TransferStatus(self.states[slot], done, self.causes.get(slot, ""), slot not in self.undrained)


class RequestGroup(msgspec.Struct, eq=False):
    """Requests of one submit that share peer, direction, epoch, class and regions. The first `at` slots are wholly cut
    into frames, and `skip` bytes of the slot at `at`; `todo` bytes are not cut yet; `open` slots are not final.
    `spoilt` is the cause of the first slot that did not complete. `frames` are those on their way."""

    serial: int
    link: PeerLink
    batch: Batch
    opcode: Opcode
    epoch: int
    local: LocalRegion
    remote: RegionInfo
    routes: Tiers
    deadline: float
    slots: list[int]
    addresses: list[int]
    offsets: list[int]
    rank: int = 0  # of its traffic class
    verify: bool = False
    open: int = 0
    at: int = 0
    skip: int = 0
    todo: int = 0
    spoilt: str | None = None
    frames: dict[int, Frame] = {}

    def finish(self, slot: int, state: TransferState, cause: str, after: AfterUnlock, *, drained: bool = True) -> None:
        """Makes a slot final. The caller handles `self.open == 0`."""
        batch = self.batch
        batch.states[slot] = state
        if cause:
            batch.causes[slot] = cause
        if not drained:
            batch.undrained.add(slot)
        batch.doom.pop(slot, None)
        finals, key = self.link.finals, (self.rank, state)
        finals[key] = finals.get(key, 0) + 1
        if state is not TransferState.COMPLETED and self.spoilt is None:
            self.spoilt = cause
        self.open -= 1
        batch.open -= 1
        if batch.open == 0:
            after.callbacks += batch.callbacks
            batch.callbacks = []

    def doom(self, slot: int, state: TransferState, cause: str, after: AfterUnlock) -> None:
        """Stops a slot: it becomes final now if none of its parts is on a path, else when the last of them
        is answered."""
        batch = self.batch
        if batch.states[slot].final:
            return
        if batch.flight[slot] == 0:
            known = batch.doom.get(slot, (state, cause))
            self.finish(slot, known[0], known[1], after)
        else:
            batch.doom.setdefault(slot, (state, cause))

    def landed(
        self, frame: Frame, refused: Sequence[int], cause: str, after: AfterUnlock
    ) -> tuple[int, int, list[Part]]:
        """Notes the answer to a frame: all its parts landed except `refused`. Returns the bytes that landed, the number
        of parts refused, and the parts whose checksums are to be compared."""
        batch = self.batch
        refusals = frozenset(refused)
        states, flight, left, dooms = batch.states, batch.flight, batch.left, batch.doom
        pending, verify = TransferState.PENDING, self.verify
        carried = turned_away = 0
        to_verify: list[Part] = []
        for i, part in enumerate(frame.parts):
            slot = part[0]
            flight[slot] -= 1
            if states[slot] is not pending:
                continue
            if i in refusals:
                turned_away += 1
                self.doom(slot, TransferState.FAILED, cause, after)
                continue
            carried += part[3]
            if not verify:
                left[slot] -= part[3]
                if left[slot] == 0:
                    self.finish(slot, TransferState.COMPLETED, "", after)
                    continue
            elif slot not in dooms:
                to_verify.append(part)
            if slot in dooms:
                self.doom(slot, *dooms[slot], after)
        return carried, turned_away, to_verify

    def strayed(self, frame: Frame, cause: str, *, settled: bool, again: bool, after: AfterUnlock) -> bool:
        """Notes that a frame was lost. If it is not `settled` its parts may still land, so their slots fail undrained.
        Returns whether some of its parts are to be sent again. A CHECKSUM frame writes no memory, so it never leaves a
        slot undrained."""
        batch = self.batch
        wanted = False
        for slot, _, _, _ in frame.parts:
            batch.flight[slot] -= 1
            if batch.states[slot].final:
                continue
            if not settled and frame.kind is not FrameKind.CHECKSUM:
                self.finish(slot, TransferState.FAILED, cause, after, drained=False)
            elif slot in batch.doom or not again:
                self.doom(slot, TransferState.FAILED, cause, after)
            else:
                wanted = True
        return wanted

    def verified(
        self, frame: Frame, refused: Sequence[int], cause: str, sums: Sequence[int], after: AfterUnlock
    ) -> list[Part]:
        """Compares the peer's checksums (in `frame`) with `sums`, those of the memory here. Returns the parts that
        differ."""
        batch = self.batch
        refusals = frozenset(refused)
        differ: list[Part] = []
        for i, part in enumerate(frame.parts):
            slot = part[0]
            batch.flight[slot] -= 1
            if batch.states[slot].final:
                continue
            if i in refusals:
                self.doom(slot, TransferState.FAILED, cause, after)
            elif i >= len(frame.sums) or frame.sums[i] != sums[i]:
                differ.append(part)
            else:
                batch.left[slot] -= part[3]
                if batch.left[slot] == 0:
                    self.finish(slot, TransferState.COMPLETED, "", after)
                    continue
            if slot in batch.doom:
                self.doom(slot, *batch.doom[slot], after)
        return [part for part in differ if not batch.states[part[0]].final and part[0] not in batch.doom]


Part = tuple[int, int, int, int]


@dataclass(eq=False, slots=True)
class RetriedParts:
    """Parts that go out once more in frames of `kind`: those of a lost frame, or landed parts to be verified (kind
    CHECKSUM). The first `at` of them have been taken. `avoid` is the rail that lost or brought them."""

    group: RequestGroup
    kind: FrameKind
    parts: list[Part]
    sendings: int
    checks: int
    avoid: Rail | None
    at: int = 0


class AfterUnlock(msgspec.Struct, eq=False):
    """What is done once the sender's lock is released: callbacks to call, and frames to hand to their transports."""

    callbacks: list[Callable[[], None]] = []
    frames: list[Frame] = []


def local_sums(frame: Frame) -> list[int]:
    """Returns the CRC-32 of each part's local memory. It is slow and releases the GIL: the caller must hold no lock."""
    region = frame.local
    base, view = region.address, region.view
    return [zlib.crc32(view[at - base : at - base + length]) for _, at, _, length in frame.parts]
