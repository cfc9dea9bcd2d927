"""Full blocks of running requests are copied from their pages into the node store, where everybody can use them. Pure.

A page under a copy has a reference of its own until every rank has copied it, so its request may leave, be preempted or
end at any moment. Sealing takes only room that nothing else needs: without it a block is sealed later, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvmesh.clock import NEVER
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.page_pool import Pages
from kvmesh.ranks import protocol as m
from kvmesh.services.decode.handoff import Handoff


@dataclass(slots=True)
class _Copy:
    keys: tuple[bytes, ...]
    pages: tuple[int, ...]
    ranks: set[int]  # that still copy
    chain: Sequence[bytes]  # keys to touch when the copy is done, so that a chain's head outlives its tail
    bad: set[int] = field(default_factory=set)  # positions whose KV is not finite at some rank


class Sealing:
    """Keeps the copies from pages into the store that are under way."""

    def __init__(self, store: NodeStore, pages: Pages, ranks: int, new_ticket: Callable[[], int]) -> None:
        self._store = store
        self._pages = pages
        self._ranks = ranks
        self._new_ticket = new_ticket
        self._copies: dict[int, _Copy] = {}
        self.closed = False  # set when the instance stops or its ranks are gone: nothing more is sealed

    def __len__(self) -> int:
        return len(self._copies)

    @property
    def pages(self) -> list[int]:
        """The pages under a copy, each as often as a copy holds it."""
        return [page for copy in self._copies.values() for page in copy.pages]

    def pages_of(self, ticket: int) -> Sequence[int]:
        """Returns the pages of one copy."""
        return self._copies[ticket].pages if ticket in self._copies else ()

    @property
    def frees_pages(self) -> bool:
        """Whether pages come back soon: pages that only a copy still holds."""
        return any(self._pages.refcount(page) == 1 for page in self.pages)

    def running(self, h: Handoff, room: int) -> m.SealCopy | None:
        """Begins to copy the full blocks of a running request that the store lacks, at most `room` of them. Returns the
        message for the ranks, or None if there is nothing to copy."""
        keys = h.chain.upto(h.context // h.shape.block_tokens)
        h.seal_at = NEVER
        if h.chain.pending is not None:
            h.seal_at = (len(keys) + 1) * h.shape.block_tokens - h.spec.prompt_tokens + 1
        return self._copy(keys[: h.sealable], h.pages, room)

    def last(self, h: Handoff, pages: Sequence[int], room: int) -> m.SealCopy | None:
        """Begins to copy the full blocks of a request that has ended, as `running` does. Nobody touches its `pages`,
        which are about to be given back."""
        keys = h.chain.upto(h.context // h.shape.block_tokens)
        return self._copy(keys[: h.sealable], pages, room, last=True)

    def _copy(self, keys: list[bytes], pages: Sequence[int], room: int, *, last: bool = False) -> m.SealCopy | None:
        """Copies in the order of the chain and stops where there is no room: a block without its predecessors is of no
        use."""
        store, missing, end = self._store, 0, 0
        for key in keys if not self.closed else ():
            if not (store.holds(key) or store.writing(key)):
                if missing >= room:
                    break
                missing += 1
            end += 1
        # Sealed blocks are passed, too: that touches them, so that they are not evicted for their own successors.
        chain = keys[:end]
        begun = zip(chain, pages[:end], store.begin(chain), strict=True)
        taken = [(key, page, x) for key, page, x in begun if x is not None]
        if not taken:
            return None
        named, copied, given = zip(*taken, strict=True)
        ticket = self._new_ticket()
        self._pages.share(copied)
        self._copies[ticket] = _Copy(named, copied, set(range(self._ranks)), chain if last else ())
        return m.SealCopy(ticket, copied, given)

    def copied(self, rank: int, ticket: int, bad: Sequence[int] = ()) -> bool:
        """Notes that a rank has copied; the KV at the positions `bad` is not finite. Returns True when it was the last
        rank: then the finite blocks are sealed, the others dropped, and the pages given back."""
        copy = self._copies.get(ticket)
        if copy is None:
            return False
        copy.ranks.discard(rank)
        copy.bad.update(bad)
        if copy.ranks:
            return False
        del self._copies[ticket]
        self._pages.release(copy.pages)
        for at, key in enumerate(copy.keys):
            if at in copy.bad:
                self._store.abandon(key)
            else:
                self._store.seal(key)
        if copy.chain:
            self._store.touch(copy.chain)
        return True

    def drop(self) -> None:
        """Drops all copies because the ranks are gone: nothing more is sealed."""
        self.closed = True
        for copy in self._copies.values():
            self._pages.release(copy.pages)
            for key in copy.keys:
                self._store.abandon(key)
        self._copies.clear()
