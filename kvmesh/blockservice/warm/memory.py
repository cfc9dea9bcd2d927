"""For memory that outlives it (`--warm-segment`) the front keeps a table, and sends messages to its ranks.

<warm_segment>/table    `warm_table.BlockTable`; ranks keep rank-N.kv and rank-N.sums (`warm_segment`)
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from kvmesh.blockservice.warm.store import ExtentLayout, WarmStore
from kvmesh.clock import lease_clock
from kvmesh.errors import ConfigError
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.ranks import protocol as m
from kvmesh.ranks.warm_table import BlockTable, Entry
from kvmesh.telemetry import names

log = logging.getLogger(__name__)

VERIFY_S = 60.0  # blocks that are not verified by then are given up
ROWS = 4096  # rows in one message

Found = Iterable[tuple[int, Entry | None]]  # extents that held something, with the block's entry where it is known


class KeptStore(NamedTuple):
    """The store of one cache group of an instance: extents of `shard_bytes`, the first of which begins at offset
    `start` of the host region, at every rank."""

    store: NodeStore
    shard_bytes: int
    start: int


class Rank(Protocol):
    """The part of kvmesh.ranks.client.RankClient that is needed here."""

    @property
    def ready(self) -> m.Ready: ...

    def send(self, message: m.ToRank, /) -> None: ...


class WarmMemory:
    """Manages the warm memory of one process, on its event loop. `close` it when nobody can ask its stores for anything
    any more. `settled` is set when all blocks that can come back are back, and no extent is held back for readers of
    the last incarnation."""

    def __init__(self, folder: str, ranks: Sequence[Rank], slots: int, incarnation: int) -> None:
        """Raises ConfigError naming warm_segment when another living process has the table."""
        self.folder = folder
        self._ranks = ranks
        readies = [rank.ready for rank in ranks]
        names = [ready.warm_segment for ready in readies]
        assert all(names), "a rank without a warm segment"
        self.segments = hashlib.sha256(b"".join(names)).digest()
        try:
            self.table = BlockTable(f"{folder}/table", self.segments, slots, incarnation)
        except ConfigError as error:
            raise ConfigError(f"warm_segment={folder!r}: {error.message}", field="warm_segment") from None
        self._until_ns = max(ready.warm_until_ns for ready in readies)
        self._rows: list[m.WarmRow] = []
        self._flushing: asyncio.Handle | None = None
        self._letting_go: asyncio.TimerHandle | None = None
        self._restoring: list[WarmStore] = []
        self._then: Callable[[], None] = _nothing
        self._stores: weakref.WeakSet[WarmStore] = weakref.WeakSet()  # weak, as a pool node's stores come and go
        self._started = time.monotonic()
        self._found = 0
        self._closed = False
        self.settled = asyncio.Event()

    @property
    def unknown(self) -> bool:
        """Whether the memory is the last incarnation's and it is unknown what was where."""
        return self._until_ns > 0 and not self.table.kept

    def journal(self, store: NodeStore, place: ExtentLayout) -> WarmStore:
        """Writes down what this store does from now on."""
        found = WarmStore(store, place, self.table, len(self._ranks), self._add)
        self._stores.add(found)
        return found

    def keep(self, store: NodeStore, shard_bytes: int) -> None:
        """Keeps all blocks of an instance's store, whose extents are the ranks' host extents. It is called once: what
        the last incarnation left comes back, block by block."""
        found: Found = []
        if self.table.kept:
            found = [(e.slot, e) if isinstance(e, Entry) else (e, None) for e in self.table.entries()]
        elif self.unknown:
            found = [(extent, None) for extent in range(store.total)]
        place = ExtentLayout(shard_bytes, _same, lambda extent: extent * shard_bytes)
        self.restore([(self.journal(store, place), found)])

    def keep_groups(self, stores: Sequence[KeptStore]) -> None:
        """Keeps all objects of an instance's stores, one a cache group, as `keep` does. The slots of a group follow
        those of the group before it, and an entry's kind is 1 + the group."""
        entries = list(self.table.entries()) if self.table.kept else []
        restores: list[tuple[WarmStore, Found]] = []
        first = 0
        for group, kept in enumerate(stores):
            place = _grouped(kept, first, group)
            found: list[tuple[int, Entry | None]] = []
            for entry in entries:
                slot = entry.slot if isinstance(entry, Entry) else entry
                if first <= slot < first + kept.store.total:
                    mine = isinstance(entry, Entry) and entry.kind == 1 + group
                    found.append((slot - first, entry if mine and isinstance(entry, Entry) else None))
            if self.unknown:
                found = [(extent, None) for extent in range(kept.store.total)]
            restores.append((self.journal(kept.store, place), found))
            first += kept.store.total
        self.restore(restores)

    def restore(self, restores: Sequence[tuple[WarmStore, Found]], then: Callable[[], None] | None = None) -> None:
        """Begins to bring blocks back; `then` is called when no reader of the last incarnation is left."""
        self._restoring = [warm for warm, _ in restores]
        self._then = then or _nothing
        rows = [row for warm, found in restores for row in warm.restore(found)]
        self._found = len(rows)
        deadline_ns = time.monotonic_ns() + int(VERIFY_S * 1e9)
        for at in range(0, len(rows), ROWS):
            self._tell(m.WarmVerify(tuple(rows[at : at + ROWS]), deadline_ns))
        self._progress()

    def candidates(self) -> list[bytes]:
        """Returns the keys that may still come back: a removal by prefix must look at these too."""
        return [key for warm in self._restoring for key in warm.candidates()]

    def rank_said(self, message: m.ToFront) -> bool:
        """Takes a message of a rank; returns whether it was for the warm memory."""
        if not isinstance(message, m.WarmVerified):
            return False
        names.NODE_TIER_FAULTS.labels(tier="warm", fault="damaged").inc(message.damaged)
        if not self._closed:
            for warm in self._restoring:
                warm.verified(message.slots, message.good)
            self._progress()
        return True

    def close(self) -> None:
        """Leaves everything to the next incarnation. It may be called more than once."""
        if self._closed:
            return
        self._flush()
        self._closed = True
        for handle in (self._flushing, self._letting_go):
            if handle is not None:
                handle.cancel()
        for warm in list(self._stores):
            warm.close()
        self.table.close()

    # ── inner ─────────────────────────────────────────────────────────────────────────────────────

    def _add(self, row: m.WarmRow) -> None:
        self._rows.append(row)
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = None
        rows, self._rows = self._rows, []
        for at in range(0, len(rows), ROWS):
            self._tell(m.WarmSum(tuple(rows[at : at + ROWS])))

    def _tell(self, message: m.ToRank) -> None:
        for rank in self._ranks:
            rank.send(message)

    def _progress(self) -> None:
        if self._letting_go is not None or not all(warm.looked_through for warm in self._restoring):
            return
        left_s = 0.0
        if self._until_ns:
            back, took = sum(warm.back for warm in self._restoring), time.monotonic() - self._started
            log.info("warm segment: %d of %d blocks are here again after %.2f s", back, self._found, took)
            left_s = max(0.0, self._until_ns * 1e-9 - lease_clock())
        self._letting_go = asyncio.get_running_loop().call_later(left_s, self._let_go)

    def _let_go(self) -> None:
        restoring, self._restoring = self._restoring, []
        for warm in restoring:
            warm.let_go()
        self._then()
        self.settled.set()


def _grouped(kept: KeptStore, first: int, group: int) -> ExtentLayout:
    _, shard_bytes, start = kept
    return ExtentLayout(
        shard_bytes, lambda extent: first + extent, lambda extent: start + extent * shard_bytes, 1 + group
    )


def _same(extent: int) -> int:
    return extent


def _nothing() -> None:
    pass
