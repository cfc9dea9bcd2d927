"""Carries out removals in every tier of this node, and remembers beside its SSD which tombstones it has applied.

A removal by prefix lists in its first turn, by copying whole tables, every key that is sealed, being written or in a
lower tier; in later turns it looks through these names, and removes key by key in all tiers at once. So a listed block
goes whichever tier it moves to meanwhile, and one that came later stays, unless it has the key of a listed one: both
were put before the removal was acknowledged. What was under way when the removal began is not sealed, see `Watch`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

from kvmesh.blockservice.partitions import Partitions
from kvmesh.blockservice.removals import NotHere, Removals, Watch
from kvmesh.errors import ConfigError, Unavailable
from kvmesh.kvcache.keys import split
from kvmesh.kvcache.tombstones import Tombstone
from kvmesh.rpc.pb import store_pb2 as pb_store
from kvmesh.tiers.ssd.disk import medium_failed

log = logging.getLogger(__name__)

FILE = "removed_seq"
SLICE = 4096  # keys removed in one turn of the loop
LOOK = 16_384  # keys compared with a prefix in one turn: about a millisecond


class Forget(Protocol):
    """The type of `BlockService.forget`."""

    def __call__(self, keys: Sequence[bytes], /) -> Awaitable[int]: ...


class RemovalApplier:
    """Applies removals at one node. `lower_keys()` gives the keys of all blocks below DRAM, also of those that only
    some ranks have. `folder` is that of the SSD tier; None means that there is none, and that what was removed is gone
    with the process. `again` asks for all tombstones again, as blocks may come back that were not there when these were
    applied. Raises ConfigError when the number in the folder cannot be read."""

    def __init__(
        self,
        partitions: Partitions,
        forget: Forget,
        lower_keys: Callable[[], list[bytes]],
        folder: Path | None,
        *,
        again: bool = False,
    ) -> None:
        self._partitions = partitions
        self._forget = forget
        self._lower_keys = lower_keys
        self._path = None if folder is None else folder / FILE
        self._removals = Removals(0 if again else _read(self._path))
        # What was applied to a tier that is left out in this life; None: none is left out.
        self.lasting_seq: int | None = None
        self._applying = asyncio.Lock()
        self._advanced = asyncio.Event()
        # Called for each removed block in the turn of the loop in which it goes, and with a prefix before that: for
        # those who keep copies that no store knows of.
        self.listeners: list[Callable[[NotHere], None]] = []

    @property
    def removed_seq(self) -> int:
        """The last applied tombstone, for the master."""
        return self._removals.applied

    def leave_out_tier(self) -> None:
        """Notes that a tier is left out: what is removed from now on is still there when the node starts again, so
        nothing is written down, and the master is told to tell it again then."""
        self.lasting_seq, self._path = self._removals.applied, None

    @property
    def reached(self) -> int:
        """The last removal up to which all have been carried out, for readers."""
        return self._removals.reached

    def refuses(self, key: bytes, source_seq: int) -> bool:
        """Whether this block, from a node that had `reached` number `source_seq`, may have been removed here."""
        return self._removals.refuses(key, source_seq)

    def watch(self) -> Watch:
        """Returns a watch of what is removed from now on, until `unwatch`."""
        return self._removals.watch()

    def unwatch(self, watch: Watch) -> None:
        """Ends a watch."""
        self._removals.unwatch(watch)

    async def remove(self, keys: Sequence[bytes], prefix: bytes = b"", seq: int = 0) -> int:
        """Removes blocks from every tier, also for after a restart; returns how many there were. What is being written
        or pulled will not be sealed. Raises Unavailable when not all could be written: the removal is to be repeated
        then."""
        if seq and self._removals.carried_out(seq):
            return 0
        removed = await self._remove(keys, prefix, seq)
        self._removals.direct(seq)
        self._advance()
        return removed

    def heard_all(self, asked_ns: int) -> None:
        """See `Removals.heard_all`."""
        self._removals.heard_all(asked_ns)
        self._advance()

    async def wait_heard(self, seq: int, over_ns: int, timeout_s: float) -> bool:
        """Waits until this node has heard of every removal up to `seq` and carried it out, see `Removals.has_heard`;
        returns whether it has within `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._removals.has_heard(seq, over_ns):
                    await self._advanced.wait()
        return self._removals.has_heard(seq, over_ns)

    def _advance(self) -> None:
        self._advanced.set()
        self._advanced = asyncio.Event()

    async def _remove(self, keys: Sequence[bytes], prefix: bytes, seq: int) -> int:
        self._removals.removing(keys, prefix, seq)
        if prefix:
            self._tell(NotHere(frozenset(), prefix))
        removed = 0
        async for some in _matching(self._names(), prefix) if prefix else _slices(keys):
            self._tell(NotHere(frozenset(some)))
            removed += await self._forget(some)
        return removed

    def _tell(self, gone: NotHere) -> None:
        for listener in self.listeners:
            listener(gone)

    async def apply(self, told: Sequence[pb_store.Tombstone]) -> None:
        """Applies the tombstones of a master's answer. Raises Unavailable when not all could be written."""
        async with self._applying:
            tombstones = [Tombstone(t.seq, tuple(split(t.keys)), t.prefix) for t in told]
            last = max((tombstone.seq for tombstone in tombstones), default=0)
            if last <= self._removals.applied:
                return
            for tombstone in self._removals.due(tombstones):
                if tombstone.keys or tombstone.prefix:
                    removed = await self._remove(tombstone.keys, tombstone.prefix, tombstone.seq)
                else:
                    self._removals.everything(tombstone.seq)
                    self._tell(NotHere(frozenset(), b""))
                    removed = await self._remove(self._names(), b"", 0)
                self._removals.done(tombstone.seq)
                log.info("tombstone %d: %d blocks removed", tombstone.seq, removed)
            self._removals.done(last)
            self._advance()
            if self._path is not None:
                try:
                    await asyncio.to_thread(_write, self._path, last)
                except OSError as error:
                    raise Unavailable(f"removed_seq={last} could not be written to {self._path}: {error}") from error

    def _names(self) -> list[bytes]:
        """Returns every key that is sealed, being written, or in a lower tier; some twice. A million take some 10
        ms."""
        names = self._lower_keys()
        for partition in self._partitions.all():
            names += partition.store.keys()
            names += partition.store.written()
        return names


async def _slices(keys: Sequence[bytes]) -> AsyncIterator[Sequence[bytes]]:
    for start in range(0, len(keys), SLICE):
        if start:
            await asyncio.sleep(0)
        yield keys[start : start + SLICE]


async def _matching(names: Sequence[bytes], prefix: bytes) -> AsyncIterator[Sequence[bytes]]:
    for start in range(0, len(names), LOOK):
        if start:
            await asyncio.sleep(0)
        found = list(dict.fromkeys([name for name in names[start : start + LOOK] if name.startswith(prefix)]))
        async for some in _slices(found):
            yield some


def _read(path: Path | None) -> int:
    try:
        return int(path.read_text("ascii")) if path is not None and path.exists() else 0
    except (OSError, ValueError) as error:
        if medium_failed(error):
            log.warning("%s cannot be read (%s): the master is asked for all removals", path, error)
            return 0
        raise ConfigError(
            f"ssd_path={str(path and path.parent)!r}: {FILE} cannot be read: {error}", field="ssd_path"
        ) from None


def _write(path: Path, seq: int) -> None:
    """Writes the number so that all of it is there or nothing, also after a power loss. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    with open(new, "w", encoding="ascii") as file:
        file.write(str(seq))
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    with contextlib.suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
