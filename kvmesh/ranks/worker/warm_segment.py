"""A rank's host region in memory that outlives it, and the checksums that tell the next incarnation which bytes to
believe.

    <warm_segment>/rank-N.kv    the region (`kvmesh.transfer.segment_file`)
    <warm_segment>/rank-N.sums  checksums of its blocks (`warm_table`)

Checksums are made by a thread of its own, which holds up nobody: hashing releases the GIL and costs 0.1 s a GB. (It has
no lower priority than others: it would keep the GIL, once taken, for as long as it waits for a core.) A block that the
thread has not got to when its extent is sealed again is not summed at all, so no more wait than there are extents.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from pathlib import Path

import xxhash

from kvmesh.clock import lease_clock_ns
from kvmesh.errors import ConfigError
from kvmesh.ranks import protocol as m
from kvmesh.ranks.warm_table import SumTable
from kvmesh.transfer import Region, TransferEngine

log = logging.getLogger("kvmesh.rank")

POOL_SLOT_BYTES = (
    4096  # a pool node's extents have many sizes, none smaller: so a slot for each page at which one may begin
)
VERIFIERS = 4
TELL_BYTES = 64 << 20  # verified blocks are reported, and so served, after so many bytes
TELL_ROWS = 512
CLOSE_S = 1.0


def host_region(
    engine: TransferEngine,
    nbytes: int,
    location: str,
    configure: m.Configure,
    identity: str,
    slots: int,
    send: Callable[[m.ToFront], None],
) -> tuple[Region, WarmSegment | None]:
    """Returns the host region of a rank. With `warm_segment` it is in a file there, with what an earlier incarnation of
    the same `identity` left in it. Raises ConfigError naming warm_segment when that cannot be used, or another living
    process has it."""
    if not configure.warm_segment:
        return engine.allocate(nbytes, location), None
    folder = Path(configure.warm_segment)
    sums: SumTable | None = None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        base = str(folder / f"rank-{configure.rank}")
        owner = hashlib.sha256(f"{slots} {nbytes} {identity}".encode()).digest()
        sums = SumTable(f"{base}.sums", owner, slots, configure.warm_lease_ms)
        region = engine.allocate(nbytes, location, path=f"{base}.kv", keep=sums.kept)
    except (ConfigError, OSError) as error:
        if sums is not None:
            sums.close()
        why = error.message if isinstance(error, ConfigError) else str(error)
        raise ConfigError(f"warm_segment={configure.warm_segment!r}: {why}", field="warm_segment") from None
    if sums.kept and not region.kept:
        sums.start_anew(configure.warm_lease_ms)
    return region, WarmSegment(region, sums, send)


class WarmSegment:
    """Makes and verifies the checksums of one region. `handle` and `close` run on the main thread. Before `until_ns`
    (lease clock) readers of an earlier incarnation may still read what they were given."""

    def __init__(self, region: Region, sums: SumTable, send: Callable[[m.ToFront], None]) -> None:
        self.name = sums.segment
        self.until_ns = lease_clock_ns() + sums.old_lease_ms * 1_000_000 if sums.kept else 0
        self._region = region
        self._sums = sums
        self._send = send
        self._waiting: OrderedDict[int, m.WarmRow] = OrderedDict()  # by slot; only the last sealing of a slot counts
        self._changed = threading.Condition()
        self._ended = False
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._spawn(self._summing, "warm sums")

    def handle(self, message: m.ToRank) -> bool:
        """Takes a message; returns, at once, whether it was for the warm segment."""
        match message:
            case m.WarmSum(rows):
                with self._changed:
                    for row in rows:
                        self._waiting[row.slot] = row
                    self._changed.notify()
            case m.WarmVerify(rows, deadline_ns):
                cut = deque(_cut(rows))
                for _ in range(min(VERIFIERS, os.cpu_count() or 1, len(cut))):
                    self._spawn(lambda: self._verifying(cut, deadline_ns), "warm verify")
            case _:
                return False
        return True

    def close(self) -> None:
        """Sums what still waits, for up to CLOSE_S, and ends the threads."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        until = time.monotonic() + CLOSE_S
        self._threads[0].join(CLOSE_S)
        self._closing.set()
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.1))
        if not any(thread.is_alive() for thread in self._threads):
            self._sums.close()

    def _spawn(self, run: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _sum(self, row: m.WarmRow) -> int:
        memory = self._region.memory
        assert memory is not None, "allocated memory has a view"
        if not 0 <= row.offset <= self._region.length - row.nbytes:
            raise ValueError(f"{row.nbytes} bytes at {row.offset} are not in the host region")
        return xxhash.xxh3_64_intdigest(memory[row.offset : row.offset + row.nbytes])

    def _summing(self) -> None:
        while (row := self._next()) is not None and not self._closing.is_set():
            try:
                self._sums.put(row.slot, row.life, row.serial, self._sum(row))
            except ValueError as error:
                log.error("warm segment: %s", error)

    def _next(self) -> m.WarmRow | None:
        """Returns the row that waits longest; None if none is left and the segment is closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended)
            return self._waiting.popitem(last=False)[1] if self._waiting else None

    def _verifying(self, cut: deque[list[m.WarmRow]], deadline_ns: int) -> None:
        while not self._closing.is_set():
            try:
                rows = cut.popleft()
            except IndexError:
                return
            found = {row.slot: self._whole(row) for row in rows if time.monotonic_ns() < deadline_ns}
            good = tuple(slot for slot, whole in found.items() if whole)
            damaged = sum(whole is False for whole in found.values())
            if damaged:
                log.warning("warm segment: %d of %d blocks are damaged, and are not used", damaged, len(rows))
            self._send(m.WarmVerified(tuple(row.slot for row in rows), good, damaged))

    def _whole(self, row: m.WarmRow) -> bool | None:
        """Says whether the bytes are those that were sealed; None when no checksum of that sealing is there."""
        wanted = self._sums.get(row.slot, row.life, row.serial)
        try:
            return None if wanted is None else self._sum(row) == wanted
        except ValueError as error:
            log.error("warm segment: %s", error)
            return False


def _cut(rows: Iterable[m.WarmRow]) -> Iterable[list[m.WarmRow]]:
    """Yields pieces of about TELL_BYTES."""
    piece: list[m.WarmRow] = []
    nbytes = 0
    for row in rows:
        piece.append(row)
        nbytes += row.nbytes
        if nbytes >= TELL_BYTES or len(piece) >= TELL_ROWS:
            yield piece
            piece, nbytes = [], 0
    if piece:
        yield piece
