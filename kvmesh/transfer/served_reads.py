"""Counts which bytes of chosen ranges peers have READ from this process, for traces."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

MOST = 1024  # counts at once: beyond that, the oldest ends


@dataclass(slots=True)
class ReadCount:
    """So many requests and bytes were served, or are being sent; the first came at `start_ns`, the last ended at
    `end_ns` (monotonic)."""

    reads: int = 0
    nbytes: int = 0
    start_ns: int = 0
    end_ns: int = 0


@dataclass(slots=True)
class _Watched:
    """Ranges that are apart from each other, ascending."""

    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    count: ReadCount = field(default_factory=ReadCount)
    sending: int = 0  # requests

    def overlap(self, offset: int, length: int) -> int:
        """Returns how many of these bytes are watched."""
        end, found = offset + length, 0
        at = max(bisect_right(self.starts, offset) - 1, 0)
        while at < len(self.starts) and self.starts[at] < end:
            found += max(0, min(end, self.ends[at]) - max(offset, self.starts[at]))
            at += 1
        return found


class ServedReads:
    """Counts reads of watched ranges of a segment, whoever makes them. It is thread-safe. While nothing is watched, a
    server looks at `watching` alone."""

    def __init__(self) -> None:
        self.watching = False
        self._lock = threading.Lock()
        self._watched: dict[Hashable, _Watched] = {}  # the oldest first

    def watch(self, name: Hashable, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        """Begins a count under this name."""
        watched = _Watched()
        for offset, size in sorted(zip(offsets, sizes, strict=True)):
            if watched.ends and offset <= watched.ends[-1]:
                watched.ends[-1] = max(watched.ends[-1], offset + size)
            else:
                watched.starts.append(offset)
                watched.ends.append(offset + size)
        with self._lock:
            self._watched[name] = watched
            if len(self._watched) > MOST:
                del self._watched[next(iter(self._watched))]
            self.watching = True

    def unwatch(self, name: Hashable, now_ns: int) -> ReadCount | None:
        """Ends a count and returns it; None when there is none of this name. What is still being sent ends now: its
        reader may have all of it, and have said so."""
        with self._lock:
            watched = self._watched.pop(name, None)
            self.watching = bool(self._watched)
        if watched is None:
            return None
        if watched.sending:
            watched.count.end_ns = now_ns
        return watched.count

    def begin(self, offsets: Sequence[int], lengths: Sequence[int], start_ns: int) -> None:
        """Counts a request for these ranges, which came at `start_ns` and is answered next: before its reader can have
        the last byte, which then gives back the lease and ends the count."""
        with self._lock:
            for watched in self._watched.values():
                nbytes = sum(map(watched.overlap, offsets, lengths))
                if not nbytes:
                    continue
                count = watched.count
                count.start_ns = min(count.start_ns or start_ns, start_ns)
                count.reads += 1
                count.nbytes += nbytes
                watched.sending += 1

    def end(self, offsets: Sequence[int], lengths: Sequence[int], end_ns: int) -> None:
        """Notes that a request that was begun was sent until `end_ns`."""
        with self._lock:
            for watched in self._watched.values():
                if watched.sending and any(map(watched.overlap, offsets, lengths)):
                    watched.sending -= 1
                    watched.count.end_ns = max(watched.count.end_ns, end_ns)
