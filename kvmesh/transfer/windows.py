"""The windows of a segment: which peer may write where now. It is the target's side of the fence.

    open(peer, epoch, ranges)                      fence(peer, epoch)
          │                                              │ no new slice is admitted
          ▼                                              ▼
    OPEN ── admit ─▶ thread inside ── leave ─▶   CLOSING ── all outside ─▶ gone (landed: no byte can follow)
                                                         └─ after a grace: interrupt whoever is inside

Every thread that lands bytes (shm copier, tcp receiver) asks `admit` *before* it takes a slice and says `leave` once it
can touch the memory no more. `fence` closes first, then waits until the inside is empty: a slice is either admitted
before the fence, and then waited for, or refused. Whoever does not leave by itself (a receiver in the middle of a slice
of a frozen writer) is interrupted: its connection is shut down.

The ranges of a window are sorted and adjacent ones are merged, so a check is one bisection per slice however many
blocks the window holds. All methods are thread-safe.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import Generic, Protocol, TypeVar

from kvmesh.errors import TransferError

MAX_UNINVITED = 4096
MAX_NOTIFICATIONS = 65536  # of one window
MAX_FENCED = 65536  # fenced epochs that are remembered, so that they are not opened again

HomeT = TypeVar("HomeT")


class WindowHolder(Protocol):
    """A thread that lands bytes. Other threads call `interrupt` to make it leave its slice soon."""

    def interrupt(self) -> None: ...


@dataclass(eq=False, slots=True)
class _Window(Generic[HomeT]):
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    homes: list[HomeT | None] = field(default_factory=list)
    inside: list[WindowHolder] = field(default_factory=list)
    landed_bytes: int = 0
    closing: bool = False
    notified: set[int] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class WindowAdmission(Generic[HomeT]):
    """The right to land slices now: `homes[i]` is where slice i lies, None if slice i is refused. It must be given back
    with `Windows.leave`."""

    homes: list[HomeT | None]
    refused: list[int]
    window: _Window[HomeT]
    holder: WindowHolder


class Windows(Generic[HomeT]):
    """All windows of one segment. `HomeT` is what the caller attaches to a range (the region that it lies in)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._windows: dict[tuple[str, int], _Window[HomeT]] = {}
        self._uninvited: OrderedDict[tuple[str, int], None] = OrderedDict()  # notifications of epoch 0
        self._fenced: OrderedDict[tuple[str, int], None] = OrderedDict()  # the last MAX_FENCED, oldest first
        self._clock = clock

    def open(self, peer: str, epoch: int, ranges: Iterable[tuple[int, int, HomeT | None]]) -> None:
        """Allows `peer` to write (offset, length) ranges in this epoch; a window that is already open grows. Where the
        home is None, hardware may land bytes and `admit` refuses them: the memory is a device's. Raises
        TransferError for an empty range, for a peer without a name, and for an epoch that is being or was fenced: a
        slice of such an epoch may still arrive and must never land."""
        if not peer:
            raise TransferError("peer='': a window needs the writer's name", field="peer")
        fresh = [(offset, offset + length, home) for offset, length, home in ranges]
        for start, end, _ in fresh:
            if start < 0 or end <= start:
                raise TransferError(f"range={start, end - start}: must have a positive length", field="ranges")
        with self._changed:
            window = self._windows.get((peer, epoch))
            if window is None:
                if (peer, epoch) in self._fenced:
                    why = f"that window of {peer!r} has been fenced, use a new epoch"
                    raise TransferError(f"handoff_epoch={epoch}: {why}", field="handoff_epoch")
                window = self._windows[(peer, epoch)] = _Window()
            elif window.closing:
                raise TransferError(f"window ({peer!r}, {epoch}) is being fenced", field="handoff_epoch")
            known = list(zip(window.starts, window.ends, window.homes, strict=True))
            _merge_into(window, known + fresh)

    def admit(
        self, peer: str, epoch: int, offsets: Sequence[int], lengths: Sequence[int], holder: WindowHolder
    ) -> WindowAdmission[HomeT] | None:
        """Admits slices that lie in an open window; the caller is then inside the window until `leave`. Returns None
        when no such window is open or it holds none of the slices."""
        homes: list[HomeT | None] = []
        refused: list[int] = []
        with self._changed:
            window = self._windows.get((peer, epoch))
            if window is None or window.closing:
                return None
            starts, ends, owners = window.starts, window.ends, window.homes
            first = min(offsets, default=-1)
            at = bisect_right(starts, first) - 1
            if at >= 0 and max(map(add, offsets, lengths)) <= ends[at] and owners[at] is not None:  # all in one range
                window.inside.append(holder)
                return WindowAdmission([owners[at]] * len(offsets), refused, window, holder)
            for offset, length in zip(offsets, lengths, strict=True):
                at = bisect_right(starts, offset) - 1
                if at >= 0 and offset + length <= ends[at] and owners[at] is not None:
                    homes.append(owners[at])
                else:
                    refused.append(len(homes))
                    homes.append(None)
            if len(refused) == len(homes):
                return None
            window.inside.append(holder)
        return WindowAdmission(homes, refused, window, holder)

    def leave(self, admission: WindowAdmission[HomeT], landed_bytes: int) -> None:
        """Ends an admission: the caller cannot touch the memory any more, and `landed_bytes` of its slices are
        whole."""
        with self._changed:
            window = admission.window
            window.inside.remove(admission.holder)
            window.landed_bytes += landed_bytes
            if window.closing and not window.inside:
                self._changed.notify_all()

    def ranges(self, peer: str, epoch: int) -> tuple[list[int], list[int]] | None:
        """Returns the sorted starts and ends of the window's ranges, or None while it is not open. It is for transports
        whose hardware lands bytes; these must make sure themselves that landing stops at a fence."""
        with self._changed:
            window = self._windows.get((peer, epoch))
            if window is None or window.closing:
                return None
            return list(window.starts), list(window.ends)

    def landed(self, peer: str, epoch: int, nbytes: int) -> None:
        """Counts bytes that hardware landed and the writer reported."""
        with self._changed:
            window = self._windows.get((peer, epoch))
            if window is not None:
                window.landed_bytes += nbytes

    def take_notification(self, peer: str, epoch: int, serial: int) -> bool | None:
        """Says what to do with a notification: True to deliver it, False when it was delivered before (it was sent
        again), None when the window is not open. Epoch 0 needs no window; its most recent serials of all peers are
        remembered."""
        with self._changed:
            if epoch == 0:
                if (peer, serial) in self._uninvited:
                    return False
                self._uninvited[(peer, serial)] = None
                if len(self._uninvited) > MAX_UNINVITED:
                    self._uninvited.popitem(last=False)
                return True
            window = self._windows.get((peer, epoch))
            if window is None or window.closing:
                return None
            if serial in window.notified:
                return False
            if len(window.notified) >= MAX_NOTIFICATIONS:
                return None
            window.notified.add(serial)
            return True

    def shut(self, peer: str, epoch: int) -> bool:
        """Refuses all further slices of a window, without waiting. Returns False when there is no such window."""
        with self._changed:
            window = self._windows.get((peer, epoch))
            if window is not None:
                window.closing = True
            return window is not None

    def fence(self, peer: str, epoch: int, timeout_s: float, grace_s: float) -> None:
        """Returns when no byte of (peer, epoch) can land any more; at once when there is no such window. Raises
        TransferError when a thread is still inside after `timeout_s`; the window stays closed, and the fence must be
        repeated."""
        started = self._clock()
        with self._changed:
            window = self._windows.get((peer, epoch))
            if window is None:
                return
            window.closing = True
            if not self._await_empty(window, min(grace_s, timeout_s)):
                for holder in list(window.inside):
                    holder.interrupt()
                if not self._await_empty(window, timeout_s - (self._clock() - started)):
                    raise TransferError(
                        f"fence of ({peer!r}, {epoch}): {len(window.inside)} threads inside after {timeout_s} s"
                    )
            if self._windows.get((peer, epoch)) is window:
                del self._windows[(peer, epoch)]
                self._fenced[(peer, epoch)] = None
                if len(self._fenced) > MAX_FENCED:
                    self._fenced.popitem(last=False)

    def epochs(self, peer: str) -> list[int]:
        """Returns every epoch of this peer that has a window, open or closing."""
        with self._changed:
            return [epoch for name, epoch in self._windows if name == peer]

    def close_all(self) -> None:
        """Refuses every slice from now on, without waiting."""
        with self._changed:
            for window in self._windows.values():
                window.closing = True

    def landed_bytes(self, peer: str, epoch: int) -> int:
        """Returns the bytes of whole slices that landed in this window, 0 when there is none. A slice that was sent
        twice counts twice."""
        with self._changed:
            window = self._windows.get((peer, epoch))
            return 0 if window is None else window.landed_bytes

    def overlapping(self, offset: int, length: int) -> tuple[str, int] | None:
        """Returns (peer, epoch) of a window that has a range overlapping these bytes, or None."""
        with self._changed:
            for key, window in self._windows.items():
                at = bisect_right(window.starts, offset + length - 1) - 1
                if at >= 0 and window.ends[at] > offset:
                    return key
        return None

    def _await_empty(self, window: _Window[HomeT], timeout_s: float) -> bool:
        return self._changed.wait_for(lambda: not window.inside, timeout=max(0.0, timeout_s))


def _merge_into(window: _Window[HomeT], ranges: list[tuple[int, int, HomeT | None]]) -> None:
    ranges.sort(key=lambda r: r[0])
    starts: list[int] = []
    ends: list[int] = []
    homes: list[HomeT | None] = []
    for start, end, home in ranges:
        if ends and start <= ends[-1] and homes[-1] is home:
            ends[-1] = max(ends[-1], end)
        else:
            starts.append(start)
            ends.append(end)
            homes.append(home)
    window.starts, window.ends, window.homes = starts, ends, homes
