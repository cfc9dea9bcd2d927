"""This module keeps all handoffs of one instance with what they hold: pages, and promises to requests with the same
prefix. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvmesh.errors import KvmeshError
from kvmesh.kvcache.cache_groups import GroupPages
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.page_pool import PagePool
from kvmesh.kvcache.prefix_cache import PrefixCache
from kvmesh.ranks import protocol as m
from kvmesh.services.prefill import events as ev
from kvmesh.services.prefill.blocks import SharedBlocks
from kvmesh.services.prefill.checks import BrainConfig, refusal
from kvmesh.services.prefill.handoff import PrefillHandoff, PrefillPhase
from kvmesh.services.prefill.handoff_book import HandoffBook
from kvmesh.services.prefill.planner import Chunk, Planner, Wait


class HandoffTable(HandoffBook):
    """The handoffs of an instance whose model has one cache group: it has the transitions that give and take back
    pages."""

    blocks: SharedBlocks

    def __init__(self, config: BrainConfig, pool: PagePool, store: NodeStore, planner: Planner) -> None:
        super().__init__(planner)
        self.pool = pool
        self.cache = PrefixCache(pool)
        self.blocks = SharedBlocks(config, store, pool, self.cache, lambda action: self.actions.append(action))
        # Pages that no new prompt may take, because answers that decode in the same pool need them.
        self.reserve: Callable[[], int] = lambda: 0
        self._config = config

    # ── in ───────────────────────────────────────────────────────────────────────────────────────

    def refusal(self, start: ev.Start) -> KvmeshError | None:
        return refusal(start, self._config, self.pool.total)

    def _found(self, h: PrefillHandoff) -> int:
        usable = self.usable(h)
        found = self.cache.peek(usable)
        return found + self.blocks.store.peek(usable[found:])

    def rest(self, handle: int) -> int | Wait:
        h = self.handoffs[handle]
        if self.blocks.waits(h):
            return Wait.PULL
        usable = self.usable(h)
        found = self.cache.peek(usable)
        if found < len(usable) and usable[found] in self.promised:
            return Wait.TWIN
        found += self.blocks.store.peek(usable[found:])
        if found < len(usable) and usable[found] in self.promised:
            return Wait.TWIN
        if found < len(usable) and self.blocks.waits(h, usable[found]):
            return Wait.PULL
        if h.pull_at_ns and self._pays(h, found):
            found = h.planned_to
        return h.prompt_tokens - found * self._block

    def expected_rest(self, handle: int) -> int:
        h = self.handoffs[handle]
        usable = self.usable(h)
        found = self.cache.peek(usable)
        while found < len(usable) and usable[found] in self.promised:
            found += 1
        found += self.blocks.coming(usable[found:])
        return h.prompt_tokens - max(found, h.planned_to if h.pull_at_ns else 0) * self._block

    def admit(self, handle: int) -> int | Wait:
        """Gives a waiting request all of its pages: cached ones first, then those that the host segment's blocks are
        loaded into. Returns how many tokens need not be computed, or PAGES."""
        h = self.handoffs[handle]
        usable = self.usable(h)
        found = self.cache.match(usable)
        need = -(-h.prompt_tokens // self._block) - len(found)
        if need > self.pool.free + self.cache.evictable - self.reserve():
            self.pool.release(found)
            return Wait.PAGES
        self.cache.evict(need - self.pool.free)
        h.pages = found + self.pool.allocate(need)
        h.ready_tokens = len(found) * self._block
        h.cached_tokens = h.computed_tokens = self.blocks.load(h, usable, len(found)) * self._block
        self.blocks.leave(h, cancel=False)
        self._promise(h, len(found))
        h.phase = PrefillPhase.COMPUTING
        return h.cached_tokens

    def for_step(self, h: PrefillHandoff, end: int) -> tuple[tuple[int, ...], tuple[GroupPages, ...]]:
        return tuple(h.pages[: -(-end // self._block)]), ()

    def loaded(self, rank: int, copied: m.LoadCopied) -> None:
        load = self.blocks.loaded(rank, copied)
        if load is None:
            return
        h, end = load.handoff, load.end
        self._load_over(h, load.from_ns, load.until_ns)
        h.ready_tokens = end * self._block
        self._cache(h, end, load.first)
        if not h.ending:
            self._unpromise(h, end)
        self.settle(h)

    def sealed(self, rank: int, copied: m.SealCopied) -> None:
        self.blocks.sealed(rank, copied)

    def _written(self, h: PrefillHandoff, chunk: Chunk) -> None:
        full = min(chunk.end // self._block, h.sealable)
        self.blocks.seal(h.start.block_keys[:full], chunk.start // self._block, h.pages)

    def _hand_over(self, h: PrefillHandoff, first: ev.SendFirstToken) -> None:
        """Hands the pages and their references over to decode in this instance. Nobody else writes in them: full blocks
        are complete, and the last one, if it is not full, was never cached or sealed."""
        self.actions.append(ev.SendAdopted(h.handle, first, tuple(h.pages)))
        h.pages = []
        h.fill_told = True  # there is nothing to fill
        self.blocks.store.touch(h.start.block_keys)

    def _cache(self, h: PrefillHandoff, end: int, start: int) -> None:
        end = min(end, h.sealable)
        self.cache.insert(h.start.block_keys[:end], h.pages[:end], start=min(start, end))

    def forget(self, keys: Sequence[bytes]) -> None:
        self.cache.forget(keys)

    def cached_keys(self) -> list[bytes]:
        return self.cache.keys()

    def clear(self) -> None:
        self.cache.clear()

    @property
    def free_pages(self) -> int:
        return self.pool.free + self.cache.evictable

    # ── out ──────────────────────────────────────────────────────────────────────────────────────

    def _give_back(self, h: PrefillHandoff) -> None:
        self.pool.release(h.pages)
        self.blocks.store.touch(h.start.block_keys if h.pages else ())

    # ── tests ────────────────────────────────────────────────────────────────────────────────────

    def check_integrity(self, others: Sequence[int] = ()) -> None:
        self.cache.check_integrity()
        self.blocks.check_integrity(self.handoffs)
        held = [page for h in self.handoffs.values() for page in h.pages] + self.blocks.sealing_pages()
        held += others
        cached = self.cache.pages()
        for page in range(self.pool.total):
            holders = held.count(page) + (page in cached)
            assert self.pool.refcount(page) == holders, f"page {page} has {holders} holders"
        self._check_promises()
