"""Pushes out of pages that the transfer engine cannot read go through slots of registered memory.

    pages ──copy, beside the steps──▶ slot ──posted once the copy is done──▶ landing ──acknowledged──▶ slot is free

Pages that a NIC reads itself (`push_region`) are posted as they lie, as `pages_rule.straight` decides, once the steps
that wrote them are done.

A slot holds many pieces side by side, so the runs of a reader that cuts the model differently take no more slots than
whole layers would. Pieces that are neighbours in the pages are one copy, and one post those that become neighbours in
the slot and are neighbours in the landing: K and V of a reader's few heads, layer after layer.

A handoff's pieces wait in the order in which they were asked for; no handoff holds more than half of the slots, so that
a reader that does not answer stops no other. Everything runs on the rank's main thread, except that slots come back on
others.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import groupby
from typing import NamedTuple, Protocol

from kvmesh.kvcache.layout import joined
from kvmesh.ranks.worker.device import CopiesDone, CopyPieces, StagedMemory, region_bytes
from kvmesh.ranks.worker.pages_rule import straight
from kvmesh.transfer.groups import Copy, GroupWrite


class StagedPushes(Protocol):
    """Decides how a pusher's bytes leave. `lock` guards it and every `GroupWrite` that is given to it."""

    lock: threading.RLock

    def write(self, write: GroupWrite, segment: str, copies: Iterable[Copy]) -> None:
        """Posts copies as soon as may be: (address in pages, offset in `segment`, length)."""

    def mark(self, write: GroupWrite) -> None:
        """Sends the end mark after the last byte, as all copies have been asked for. It may be called more than
        once."""

    def pump(self) -> None:
        """Goes on with what waits."""

    @property
    def busy(self) -> bool:
        """Whether `pump` is to be called soon."""


class Direct:
    """Posts out of pages that the engine reads itself."""

    busy = False

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def write(self, write: GroupWrite, segment: str, copies: Iterable[Copy]) -> None:
        write.write(segment, copies)

    def mark(self, write: GroupWrite) -> None:
        write.mark()

    def pump(self) -> None:
        """Does nothing: nothing waits."""


class StagedPiece(NamedTuple):
    """Names bytes of pages that go to one place of a segment. It is never longer than a slot."""

    segment: str
    place: int  # offset in the pages' bytes
    offset: int  # offset in the segment
    length: int


def pack(pieces: deque[StagedPiece], slots: int, slot_bytes: int) -> list[list[StagedPiece]]:
    """Takes pieces from the front of `pieces`, as many as `slots` slots have room for, and returns what lies side by
    side in each. All pieces of a slot go to one segment."""
    packed: list[list[StagedPiece]] = []
    room = 0
    while pieces:
        piece = pieces[0]
        if piece.length > room or piece.segment != packed[-1][0].segment:
            if len(packed) == slots:
                break
            packed.append([])
            room = slot_bytes
        packed[-1].append(pieces.popleft())
        room -= piece.length
    return packed


@dataclass(slots=True)
class _Queue:
    write: GroupWrite
    pieces: deque[StagedPiece] = field(default_factory=deque)
    copying: int = 0  # copies under way
    slots: int = 0  # slots held
    mark: bool = False


class Stager:
    """Posts out of a device's pages, through staging. Addresses of copies count from the first byte of the pages.
    `reaches` says whether the engine can post a device's memory to a segment now."""

    def __init__(self, memory: StagedMemory, reaches: Callable[[str], bool] | None = None) -> None:
        self.lock = threading.RLock()
        self._memory = memory
        self._reaches = reaches
        self._slot_bytes = memory.slot_bytes
        self._staging = region_bytes(memory.staging)
        self._free = list(range(memory.slots))  # a heap: slots taken together are mostly neighbours
        self._most = max(1, memory.slots // 2)
        self._queues: dict[GroupWrite, _Queue] = {}

    def write(self, write: GroupWrite, segment: str, copies: Iterable[Copy]) -> None:
        with self.lock:
            if self._memory.push_region is not None and self._reaches is not None:
                copies = list(copies)
                if straight(self._reaches(segment), [length for _, _, length in copies]):
                    self._post_pages(self._queue(write), segment, copies, self._memory.push_region.address)
                    return
            pieces = self._queue(write).pieces
            for place, offset, length in copies:
                for at in range(0, length, self._slot_bytes):
                    pieces.append(StagedPiece(segment, place + at, offset + at, min(self._slot_bytes, length - at)))
            self.pump()

    def mark(self, write: GroupWrite) -> None:
        with self.lock:
            self._queue(write).mark = True
            self.pump()

    @property
    def busy(self) -> bool:
        return any(queue.pieces or queue.copying or queue.mark for queue in self._queues.values())

    def _queue(self, write: GroupWrite) -> _Queue:
        return self._queues.setdefault(write, _Queue(write))

    def pump(self) -> None:
        with self.lock:
            for queue in list(self._queues.values()):
                if queue.write.over:
                    queue.pieces.clear()
                while queue.pieces and self._free and queue.slots < self._most:
                    self._launch(queue)
                if queue.copying or queue.pieces:
                    continue
                if queue.mark or queue.write.over:
                    del self._queues[queue.write]
                    queue.write.mark()

    def _launch(self, queue: _Queue) -> None:
        """Copies as many pieces as there is room for into slots."""
        room = min(len(self._free), self._most - queue.slots)
        packed = [(heappop(self._free), pieces) for pieces in pack(queue.pieces, room, self._slot_bytes)]
        queue.slots += len(packed)
        queue.copying += 1
        queue.write.hold()  # so that the write does not end while pages are read for it
        runs = [(piece.place, at, piece.length) for slot, pieces in packed for at, piece in self._placed(slot, pieces)]

        def copied(_: CopiesDone) -> None:
            with self.lock:
                queue.copying -= 1
                self._post(queue, packed)
                queue.write.release()
                self.pump()

        self._memory.copy(
            CopyPieces(self._memory.page_blocks.data, self._staging, joined(runs)), copied, into_pages=False
        )

    def _post_pages(self, queue: _Queue, segment: str, copies: Iterable[Copy], base: int) -> None:
        """Posts copies out of pages once the steps that wrote them are done, as a copy of nothing is then."""
        queue.copying += 1
        queue.write.hold()

        def written(_: CopiesDone) -> None:
            with self.lock:
                queue.copying -= 1
                queue.write.write(segment, ((base + place, offset, length) for place, offset, length in copies))
                queue.write.release()
                self.pump()

        self._memory.copy(CopyPieces(self._memory.page_blocks.data, self._staging, ()), written, into_pages=False)

    def _placed(self, slot: int, pieces: list[StagedPiece]) -> Iterator[tuple[int, StagedPiece]]:
        """Yields each piece of a slot with its place in staging memory."""
        at = slot * self._slot_bytes
        for piece in pieces:
            yield at, piece
            at += piece.length

    def _post(self, queue: _Queue, packed: list[tuple[int, list[StagedPiece]]]) -> None:
        """Posts what lies in slots now. A write that is over posts nothing and gives the slots back."""
        base = self._memory.staging.address
        for segment, some in groupby(packed, lambda both: both[1][0].segment):
            group = list(some)
            taken = [slot for slot, _ in group]

            def back(taken: list[int] = taken) -> None:
                for slot in taken:
                    heappush(self._free, slot)
                queue.slots -= len(taken)

            placed = (both for slot, pieces in group for both in self._placed(slot, pieces))
            queue.write.write(segment, joined((base + at, piece.offset, piece.length) for at, piece in placed), back)
