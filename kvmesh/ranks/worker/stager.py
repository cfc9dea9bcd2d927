"""Pushes out of pages that the transfer engine cannot read go through slots of registered memory.

    pages ──copy, beside the steps──▶ slot ──posted once the copy is done──▶ landing ──acknowledged──▶ slot is free

A handoff's pieces wait in the order in which they were asked for; no handoff holds more than half of the slots, so that
a reader that does not answer stops no other. Everything runs on the rank's main thread, except that slots come back on
others.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple, Protocol

from kvmesh.ranks.worker.device import CopiesDone, StagedMemory, byte_view, region_bytes
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


class _Piece(NamedTuple):
    segment: str
    place: int  # offset in the pages' bytes
    offset: int  # offset in the segment
    length: int


@dataclass(slots=True)
class _Queue:
    write: GroupWrite
    pieces: deque[_Piece] = field(default_factory=deque)
    copying: int = 0  # copies under way
    slots: int = 0  # slots held
    mark: bool = False


class Stager:
    """Posts out of a device's pages, through staging. Addresses of copies count from the first byte of the pages."""

    def __init__(self, memory: StagedMemory) -> None:
        self.lock = threading.RLock()
        self._memory = memory
        self._slot_bytes = memory.slot_bytes
        self._pages = byte_view(memory.pages)
        self._staging = region_bytes(memory.staging)
        self._free = list(range(memory.slots))
        self._most = max(1, memory.slots // 2)
        self._queues: dict[GroupWrite, _Queue] = {}

    def write(self, write: GroupWrite, segment: str, copies: Iterable[Copy]) -> None:
        with self.lock:
            pieces = self._queue(write).pieces
            for place, offset, length in copies:
                for at in range(0, length, self._slot_bytes):
                    pieces.append(_Piece(segment, place + at, offset + at, min(self._slot_bytes, length - at)))
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
        count = min(len(queue.pieces), len(self._free), self._most - queue.slots)
        pieces = [queue.pieces.popleft() for _ in range(count)]
        slots = [self._free.pop() for _ in range(count)]
        queue.slots += count
        queue.copying += 1
        queue.write.hold()  # so that the write does not end while pages are read for it
        pairs = []
        for slot, piece in zip(slots, pieces, strict=True):
            at = slot * self._slot_bytes
            source = self._pages[piece.place : piece.place + piece.length]
            pairs.append((self._staging[at : at + piece.length], source))

        def copied(_: CopiesDone) -> None:
            with self.lock:
                queue.copying -= 1
                self._post(queue, slots, pieces)
                queue.write.release()
                self.pump()

        self._memory.copy(pairs, copied, into_pages=False)

    def _post(self, queue: _Queue, slots: list[int], pieces: list[_Piece]) -> None:
        """Posts what lies in slots now. A write that is over posts nothing and gives the slots back."""
        base = self._memory.staging.address
        for segment, some in groupby(zip(slots, pieces, strict=True), lambda both: both[1].segment):
            group = list(some)
            taken = [slot for slot, _ in group]

            def back(taken: list[int] = taken) -> None:
                self._free.extend(taken)
                queue.slots -= len(taken)

            copies = [(base + slot * self._slot_bytes, piece.offset, piece.length) for slot, piece in group]
            queue.write.write(segment, copies, back)
