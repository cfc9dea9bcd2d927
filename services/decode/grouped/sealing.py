"""Blocks of running requests are copied into the node store, group by group (ADR 0037). Pure.

All groups of a block begin in one turn. Of a running request what is live in its pages is sealed; a state only at the
end, as it is changed in place: at the last block border.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvmesh.clock import NEVER
from kvmesh.kvcache.cache_groups import GroupPages
from kvmesh.kvcache.grouped_store import GroupedStore, Mask
from kvmesh.kvcache.page_pool import Pages
from kvmesh.ranks import protocol as m
from kvmesh.services.decode.grouped.handoff import BlockRun, GroupedHandoff, is_state

Found = dict[tuple[int, int], int]  # (block, group) → the page that has it


@dataclass(slots=True)
class _GroupedCopy:
    keys: tuple[bytes, ...]  # a run of the chain
    masks: list[Mask]  # what was begun of each
    pages: tuple[GroupPages, ...]
    start: int  # the block that the first of `keys` is of
    ranks: set[int]  # that still copy
    chain: Sequence[bytes]  # up to the run's end
    bad: set[tuple[int, int]] = field(default_factory=set)  # (group, which of `keys`) not finite at some rank


class GroupedSealing:
    """Keeps the copies from pages into the stores that are under way. `pools[g]` has the pages of group g."""

    def __init__(
        self, store: GroupedStore, pools: Sequence[Pages], block_tokens: int, ranks: int, new_ticket: Callable[[], int]
    ) -> None:
        self._store = store
        self._pools = pools
        self._step = block_tokens
        self._ranks = ranks
        self._new_ticket = new_ticket
        self._copies: dict[int, _GroupedCopy] = {}
        self.closed = False  # nothing more is sealed

    def __len__(self) -> int:
        return len(self._copies)

    @property
    def pages(self) -> list[tuple[int, int]]:
        """The (group, page) under a copy, each as often as a copy holds it."""
        return [(g, page) for copy in self._copies.values() for g, _, ids in copy.pages for page in ids if page >= 0]

    @property
    def frees_pages(self) -> bool:
        """Whether pages come back soon: pages that only a copy still holds."""
        return any(self._pools[g].refcount(page) == 1 for g, page in self.pages)

    def running(self, h: GroupedHandoff, room: Sequence[int]) -> m.SealCopy | None:
        """Begins to copy what a running request has of full blocks and the stores lack, at most `room[g]` objects of
        group g. Returns the message for the ranks, or None if there is nothing to copy."""
        keys = h.chain.upto(h.context // self._step)
        h.seal_at = NEVER
        if h.chain.pending is not None:
            h.seal_at = (len(keys) + 1) * self._step - h.spec.prompt_tokens + 1
        return self._copy(keys[: h.sealable], self._full(h, h.runs, min(len(keys), h.sealable)), room)

    def last(self, h: GroupedHandoff, runs: Mapping[int, BlockRun], room: Sequence[int]) -> m.SealCopy | None:
        """Begins to copy what a request that has ended has of full blocks, as `running` does, and its state at the last
        of them for which there is one. Nobody touches its pages `runs`, which are about to be given back."""
        keys = h.chain.upto(h.context // self._step)
        found = self._full(h, runs, min(len(keys), h.sealable))
        states = h.states()
        if states is not None and 0 < states[0] <= len(keys) * self._step:
            self._add_states(found, h, runs, states[0] // self._step - 1, states[1])
        return self._copy(keys[: h.sealable], found, room)

    def _full(self, h: GroupedHandoff, runs: Mapping[int, BlockRun], blocks: int) -> Found:
        """Returns the pages of full blocks, of groups of tokens."""
        return {
            (block, g): run.ids[block - run.first]
            for g, run in runs.items()
            if not is_state(h.groups[g])
            for block in range(run.first, min(run.end, blocks))
        }

    def _add_states(
        self, found: Found, h: GroupedHandoff, runs: Mapping[int, BlockRun], block: int, which: int
    ) -> None:
        for g, run in runs.items():
            if is_state(h.groups[g]) and which < len(run.ids):
                found[block, g] = run.ids[which]

    def _copy(self, keys: Sequence[bytes], found: Found, room: Sequence[int]) -> m.SealCopy | None:
        """Copies in the order of the chain. Where group 0 finds no room it stops, as no hit goes on over a block that
        group 0 lacks; what finds none in another group is left out."""
        if self.closed or not keys:
            return None
        here = [h | c for h, c in zip(self._store.held(keys), self._store.coming(keys), strict=True)]
        left, masks, end = list(room), [0] * len(keys), len(keys)
        for block, g in sorted(found):
            if block >= end or here[g] >> block & 1:
                continue
            if left[g] > 0:
                left[g] -= 1
                masks[block] |= 1 << g
            elif g == 0:
                end = block
        chain = keys[:end]
        start = next((at for at in range(end) if masks[at]), end)
        if start == end:
            return None
        begun = self._store.begin(chain, masks[start:end], start)
        taken = [sum(1 << g for g, x in enumerate(given) if x is not None) for given in begun]
        if not any(taken):
            return None
        pages, extents = [], []
        for g in range(len(room)):
            at = [i for i, mask in enumerate(taken) if mask >> g & 1]
            if not at:
                continue
            run = range(at[0], at[-1] + 1)
            mine = [found[start + i, g] if taken[i] >> g & 1 else -1 for i in run]
            self._pools[g].share(page for page in mine if page >= 0)
            pages.append(GroupPages(g, start + at[0], tuple(mine)))
            given = [begun[i][g] if taken[i] >> g & 1 else None for i in run]
            extents.append(GroupPages(g, start + at[0], tuple(-1 if x is None else x for x in given)))
        ticket = self._new_ticket()
        ranks = set(range(self._ranks))
        self._copies[ticket] = _GroupedCopy(tuple(chain[start:]), taken, tuple(pages), start, ranks, chain)
        return m.SealCopy(ticket, (), (), tuple(pages), tuple(extents))

    def copied(self, rank: int, ticket: int, bad: Sequence[tuple[int, int]] = ()) -> bool:
        """Notes that a rank has copied; what the (group, block) in `bad` name is not finite. Returns True when it was
        the last rank: then what is finite is sealed, the rest dropped, and the pages given back."""
        copy = self._copies.get(ticket)
        if copy is None:
            return False
        copy.ranks.discard(rank)
        copy.bad.update((g, block - copy.start) for g, block in bad)
        if copy.ranks:
            return False
        del self._copies[ticket]
        self._release(copy)
        self._store.end(copy.keys, copy.masks, copy.bad)
        self._store.touch(copy.chain)
        return True

    def drop(self) -> None:
        """Drops all copies because the ranks are gone: nothing more is sealed."""
        self.closed = True
        for copy in self._copies.values():
            self._release(copy)
            for key, mask in zip(copy.keys, copy.masks, strict=True):
                self._store.abandon(key, mask)
        self._copies.clear()

    def _release(self, copy: _GroupedCopy) -> None:
        for g, _, ids in copy.pages:
            self._pools[g].release(page for page in ids if page >= 0)
