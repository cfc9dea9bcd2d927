"""What an engine's own reports say that it holds, and whether that is all of it. Pure.

Batches of events are numbered from 0 in the life of an engine. What they say is exact only where none is missing since
the engine began, or since its cache was emptied. A reader begins with `begin`, feeds batches to `take`, and says with
`caught_up` that there is none left which it could read at once. A gap makes it inexact at once; it may be filled by
feeding what is missing, else `skip_to` goes on behind it, and the knowledge stays a belief until the engine says that
its cache was emptied, or begins anew.

An engine reports a block for each place that has it, and the same tokens may be at several; one is held as long as it
has been removed less often than stored. Its hash is the engine's own affair: block keys are made from the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvmesh.external.engine_blocks import EngineBlocks
from kvmesh.external.kv_events import (
    AllRemoved,
    BlockHash,
    BlocksRemoved,
    BlocksStored,
    KvEvent,
    KvEventsUnusable,
)
from kvmesh.kvcache.keys import DIGEST_BYTES, KEY_BYTES, TOKEN_BYTES, extend

MAX_SEQ = (1 << 63) - 1


class _ReportedBlock:
    """`digest` is the end of its chain; None: its tokens before are not known, or its KV depends on other things."""

    __slots__ = ("count", "digest")

    def __init__(self, digest: bytes | None) -> None:
        self.digest, self.count = digest, 0


class ReportedBlocks:
    """Follows the events of one engine of `capacity` blocks and keeps `held` as they say. `root` is the digest that
    chains without a salt start from. `exact` says whether what is held is all that the engine has; `why` says why it is
    not."""

    def __init__(self, held: EngineBlocks, root: bytes, block_tokens: int, capacity: int) -> None:
        self._held, self._root = held, root
        self._block_tokens, self._capacity = block_tokens, capacity
        self._blocks: dict[BlockHash, _ReportedBlock] = {}
        self._places = 0  # of all blocks
        self._whole = False  # nothing is missing in _blocks
        self.next = 0  # the number of the batch to come
        self.why = "the engine has reported nothing yet"

    @property
    def exact(self) -> bool:
        """Whether exactly the blocks that the engine holds are held."""
        return self._held.reported

    def begin(self) -> None:
        """A connection was made: the engine's first batch is expected."""
        self._forget("the engine has reported nothing yet")
        self._whole, self.next = True, 0

    def lost(self, why: str) -> None:
        """Nobody reports any longer. Another engine may answer at the same place next."""
        self._forget(why)

    def _forget(self, why: str) -> None:
        self._held.believe()
        self._blocks.clear()
        self._places = 0
        self._whole, self.why = False, why

    def take(self, seq: int, events: Sequence[KvEvent]) -> bool:
        """Takes the batch of that number; returns False where there is a gap before it, and takes nothing then. One
        that was taken before is passed over. Raises KvEventsUnusable for what cannot be."""
        if seq < self.next:
            return True
        if seq > self.next:
            self._held.believe()
            self.why = f"batches {self.next} to {seq - 1} of the engine's events are missing"
            return False
        self.next = seq + 1
        for event in events:
            self._apply(event)
        return True

    def caught_up(self) -> None:
        """What was taken is all that there is now."""
        if self._whole and not self.exact:
            self.why = ""
            digests = (block.digest for block in self._blocks.values())
            self._held.report([digest[:KEY_BYTES] for digest in digests if digest is not None])

    def skip_to(self, seq: int) -> None:
        """The gap before the batch of that number cannot be filled."""
        self._forget(self.why)
        self.next = seq

    def _apply(self, event: KvEvent) -> None:
        match event:
            case AllRemoved():
                for found in list(self._blocks):
                    self._remove(found, whole=True)
                self._whole = True
            case BlocksStored() if self._whole:
                self._store(event)
            case BlocksRemoved() if self._whole:
                for found in event.hashes:
                    self._remove(found)

    def _store(self, event: BlocksStored) -> None:
        digest = self._start(event)
        step = event.block_tokens * TOKEN_BYTES
        for at, name in enumerate(event.hashes):
            if digest is not None:
                _, digest = extend(digest, event.tokens[at * step : (at + 1) * step])
            block = self._blocks.get(name)
            if block is None:
                block = self._blocks[name] = _ReportedBlock(digest)
                if digest is not None and self.exact:
                    self._held.hold(digest[:KEY_BYTES])
            block.count += 1
            self._places += 1
        if self._places > self._capacity:
            why = f"the engine reports more than the {self._capacity} blocks that it has"
            self._forget(why)
            raise KvEventsUnusable(why)

    def _start(self, event: BlocksStored) -> bytes | None:
        """Returns the digest before its first block; None: there is none in the namespaces of this mesh."""
        if event.foreign or event.block_tokens != self._block_tokens:
            return None
        if event.parent is not None:
            parent = self._blocks.get(event.parent)
            return None if parent is None else parent.digest
        if not event.salt:
            return self._root
        # The mesh salts with the root of a tenant's own namespace.
        try:
            root = bytes.fromhex(event.salt)
        except ValueError:
            return None
        return root if len(root) == DIGEST_BYTES else None

    def _remove(self, name: BlockHash, *, whole: bool = False) -> None:
        block = self._blocks.get(name)
        if block is None:
            self._forget("the engine removed a block that it had not reported")
            return
        gone = block.count if whole else 1
        block.count -= gone
        self._places -= gone
        if block.count:
            return
        del self._blocks[name]
        if block.digest is not None and self.exact:
            self._held.drop(block.digest[:KEY_BYTES])
