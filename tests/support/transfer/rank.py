"""One rank of a group in a process of its own: an actor (see peer.py) with `GroupWrite` and `GroupLanding`."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvmesh.errors import TransferError
from kvmesh.transfer import EngineConfig, Notification, Range
from kvmesh.transfer.groups import Copy, GroupLanding, GroupWrite
from tests.support.transfer.peer import Actor

Leg = tuple[str, Sequence[Copy]]  # a reader's segment, and (offset in our region, offset in its segment, length)


class RankActor(Actor):
    """An actor that takes part in one group transfer after the other."""

    def __init__(self, name: str, config: EngineConfig) -> None:
        super().__init__(name, config)
        self._write: GroupWrite | None = None
        self._over = threading.Event()
        self._landing: GroupLanding | None = None

    def put(self, offset: int, data: bytes) -> None:
        assert self.region is not None and self.region.memory is not None
        self.region.memory[offset : offset + len(data)] = data

    def write(self, epoch: int, legs: Sequence[Leg], batch_bytes: int, mark: bool = True) -> None:
        assert self.region is not None
        self._over.clear()
        segments = [segment for segment, _ in legs]
        group = GroupWrite(self.engine, epoch, segments, self._over.set, batch_bytes=batch_bytes)
        self._write = group
        for segment, copies in legs:
            group.write(segment, [(self.region.address + near, far, length) for near, far, length in copies])
        if mark:
            group.mark()

    def written(self) -> tuple[str, bool, int]:
        """(cause, certain, bytes) once it has ended."""
        assert self._write is not None and self._over.wait(30), "the write never ended"
        return self._write.cause, self._write.certain, self._write.bytes_done

    def land(self, epoch: int, writers: Sequence[str]) -> None:
        """Over the whole region."""
        assert self.region is not None
        landing = GroupLanding(self.engine, epoch, writers, [Range(self.region.base_offset, self.region.length)])
        landing.open()
        self._landing = landing
        self.engine.on_notify = self._heard

    def _heard(self, note: Notification) -> None:
        assert self._landing is not None
        self._landing.heard(note)

    def landed(self, idle_s: float, timeout_s: float = 60.0) -> str:
        """ "" when every mark came, else why not."""
        assert self._landing is not None
        try:
            self._landing.wait(idle_s, timeout_s)
        except TransferError as error:
            return error.message
        return ""

    def missing(self) -> list[str]:
        assert self._landing is not None
        return sorted(self._landing.missing)

    def fence_all(self) -> None:
        assert self._landing is not None
        self._landing.fence(10.0)
