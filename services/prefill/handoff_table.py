"""This module keeps all handoffs of one instance with what they hold: pages, and promises to requests with the same
prefix. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvmesh.blockservice.removals import NotHere
from kvmesh.errors import HandoffLost, InternalError, KvmeshError
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.page_pool import PagePool
from kvmesh.kvcache.prefix_cache import PrefixCache
from kvmesh.ranks import protocol as m
from kvmesh.services.prefill import events as ev
from kvmesh.services.prefill.blocks import SharedBlocks
from kvmesh.services.prefill.checks import BrainConfig
from kvmesh.services.prefill.handoff import PrefillHandoff, PrefillPhase, Push
from kvmesh.services.prefill.planner import Chunk, Planner, Wait


class HandoffTable:
    """Maps handles to handoffs, and has the transitions that give and take back pages.

    `actions` collects what the current event leads to. A handoff is in `handoffs` exactly as long as it holds something
    or decode waits to be told how it ended.
    """

    def __init__(self, config: BrainConfig, pool: PagePool, store: NodeStore, planner: Planner) -> None:
        self.pool = pool
        self.cache = PrefixCache(pool)
        self.blocks = SharedBlocks(config, store, pool, self.cache, lambda action: self.actions.append(action))
        self.planner = planner
        self.handoffs: dict[int, PrefillHandoff] = {}
        self.promised: dict[bytes, int] = {}  # key → how many admitted handoffs will compute or load that block
        self.actions: list[ev.Action] = []
        # Pages that no new prompt may take, because answers that decode in the same pool need them.
        self.reserve: Callable[[], int] = lambda: 0
        self.idle = True  # no step is at the ranks
        self._block = planner.config.block_tokens

    def tell(self, h: PrefillHandoff, action: ev.Action) -> None:
        """Sends something to decode, unless the handoff's stream is gone."""
        if not h.deaf:
            self.actions.append(action)

    # ── in ───────────────────────────────────────────────────────────────────────────────────────

    def usable(self, h: PrefillHandoff) -> Sequence[bytes]:
        """Returns the keys of the blocks that may come from the cache. The block with the last token is never among
        them: that token is computed, as it gives the answer's first token."""
        return h.start.block_keys[: (h.prompt_tokens - 1) // self._block]

    def arrive(self, h: PrefillHandoff) -> int:
        """Takes a handoff that has joined the queue: its pull begins or is planned. Returns the time until which it
        waits for its own pull; 0 if it began none."""
        return self.blocks.arrive(h, self.usable(h), self.promised, next_up=self._next_up())

    def fetch(self, h: PrefillHandoff) -> int:
        """Begins the pull of a handoff when the pull's planned time has come, or the handoff's turn. Returns as
        `arrive` does."""
        return self.blocks.fetch(h, self.usable(h), self.promised, next_up=self._next_up())

    def _next_up(self) -> bool:
        """Whether nothing else is computed while the only handoff in the queue waits."""
        computing = any(other.phase is PrefillPhase.COMPUTING for other in self.handoffs.values())
        return len(self.planner.waiting) == 1 and not computing

    def comes_first(self, handle: int) -> bool:
        """Whether the pull of a handoff whose turn has come before the pull's planned time should begin now; if not,
        its blocks are computed."""
        h = self.handoffs[handle]
        if not h.pull_at_ns or self.blocks.waits(h):
            return False
        usable = self.usable(h)
        found = self.cache.peek(usable)
        return self._pays(h, found + self.blocks.store.peek(usable[found:]))

    def _pays(self, h: PrefillHandoff, found: int) -> bool:
        """Whether to wait for the planned pull now: because waiting keeps nobody else from computing, or because
        pulling is faster than computing. `found` is how many leading blocks are here already."""
        alone = self.idle and len(self.planner.waiting) == 1 and not self.planner.unsubmitted_tokens
        return found < h.planned_to and (not alone or self.blocks.rates.pull_pays)

    def rest(self, handle: int) -> int | Wait:
        """Returns how many tokens are not cached now, in device pages or the host segment; TWIN or PULL when the first
        of those tokens' blocks are on their way here."""
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
        """Returns how many tokens will have to be computed if everything on its way here arrives."""
        h = self.handoffs[handle]
        usable = self.usable(h)
        found = self.cache.peek(usable)
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
        h.promised_from = len(found)
        for key in h.start.block_keys[len(found) :]:
            self.promised[key] = self.promised.get(key, 0) + 1
        h.phase = PrefillPhase.COMPUTING
        return h.cached_tokens

    def loaded(self, rank: int, copied: m.LoadCopied) -> None:
        """Notes that a rank has copied its shards. After the last rank the pages may be matched and pushed."""
        load = self.blocks.loaded(rank, copied)
        if load is None:
            return
        h, end = load.handoff, load.end
        h.loading = 0
        h.ready_tokens = end * self._block
        h.found = replace(h.found, load_from_ns=load.from_ns, load_until_ns=load.until_ns)
        self._cache(h, end, load.first)
        if not h.ending:
            self._unpromise(h, end)
        self.settle(h)

    def computed(self, h: PrefillHandoff, chunk: Chunk, sampled: m.Sampled | None, end_ns: int) -> None:
        """Notes that the KV of one chunk is in its pages: its full blocks may be matched from now on, and are sealed in
        the store."""
        assert not h.loading, "a step was answered before the load that it was sent after"
        h.computed_tokens = chunk.end
        full = chunk.end // self._block
        self._cache(h, full, h.promised_from)
        self._unpromise(h, full)
        self.blocks.seal(h.start.block_keys[: min(full, h.sealable)], chunk.start // self._block, h.pages)
        if not chunk.last:
            return
        if sampled is None:
            self.abort(h, InternalError(f"no rank sampled the first token of {h.start.request_id}"))
            return
        h.phase = PrefillPhase.PUSHING
        h.sampled_ns = end_ns
        queue, prefill = max(h.first_step_ns - h.arrived_ns, 0), h.sampled_ns - h.first_step_ns
        first = ev.SendFirstToken(h.handle, sampled, h.found, queue, prefill)
        if h.start.adopt:
            self._hand_over(h, first)
        else:
            self.tell(h, first)

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

    def removed(self, gone: NotHere) -> None:
        """Forgets removed blocks that lie in pages, and keeps every handoff from sealing or caching them again."""
        if gone.prefix is None:
            self.cache.forget(list(gone.keys))
        else:
            self.cache.forget([key for key in self.cache.keys() if key in gone])  # noqa: SIM118
        for h in self.handoffs.values():
            if (first := gone.first(h.start.block_keys)) < len(h.start.block_keys):
                h.sealable = min(h.sealable, first)

    def _unpromise(self, h: PrefillHandoff, until: int | None = None) -> None:
        keys = h.start.block_keys[h.promised_from : until]
        for key in keys:
            self.promised[key] -= 1
            if not self.promised[key]:
                del self.promised[key]
        h.promised_from += len(keys)

    # ── out ──────────────────────────────────────────────────────────────────────────────────────

    def abort(self, h: PrefillHandoff, error: KvmeshError | None = None, reason: str = "") -> None:
        """Begins nothing more for a handoff: it failed (`error`) or is no longer wanted (`reason`). The first cause
        counts."""
        if h.ending:
            return
        if h.phase is PrefillPhase.COMPUTING:
            self._unpromise(h)
        self.blocks.leave(h, cancel=True)
        h.phase = PrefillPhase.CANCELLING
        h.error, h.reason = error, reason
        self.planner.drop(h.handle)
        for rank, push in enumerate(h.pushes):
            if push is Push.OPEN:
                h.pushes[rank] = Push.DRAINING
            known = push is Push.NONE and h.chunks > 0 and not h.start.adopt  # the rank only has to forget it
            if push is Push.OPEN or known:
                self.actions.append(m.TellRank(rank, m.PushCancel(h.handle)))
        self.settle(h)

    def settle(self, h: PrefillHandoff) -> None:
        """Tells decode how the handoff ended once that is known; gives everything back once nothing can touch it."""
        if h.ending and not h.told and (h.quiet or h.in_doubt):
            h.told = True
            if h.in_doubt or h.error is not None:
                error = h.error or HandoffLost(f"cancelled ({h.reason}), and its last bytes may still be on the way")
                self.tell(h, ev.SendFailed(h.handle, error, drained=not h.in_doubt))
            else:
                self.tell(h, ev.SendDrained(h.handle, h.epoch))
        if h.over and self.handoffs.pop(h.handle, None) is not None:
            self.pool.release(h.pages)
            self.blocks.store.touch(h.start.block_keys if h.pages else ())
            self.actions.append(h.ended())

    # ── tests ────────────────────────────────────────────────────────────────────────────────────

    def check_integrity(self, others: Sequence[int] = ()) -> None:
        """Raises AssertionError unless references equal holders and promises equal what is being computed. `others` are
        pages that somebody else holds, with repetition. Its cost is O(everything); it is for tests."""
        self.cache.check_integrity()
        self.blocks.check_integrity(self.handoffs)
        held = [page for h in self.handoffs.values() for page in h.pages] + self.blocks.sealing_pages()
        held += others
        cached = self.cache.pages()
        for page in range(self.pool.total):
            holders = held.count(page) + (page in cached)
            assert self.pool.refcount(page) == holders, f"page {page} has {holders} holders"
        promised: dict[bytes, int] = {}
        for h in self.handoffs.values():
            assert (h.phase is PrefillPhase.QUEUED) == (h.handle in self.planner.waiting), (
                f"handle {h.handle}: the queue"
            )
            assert not h.over, f"handle {h.handle} should have ended"
            waits = h.pulls or h.pinned or h.pull_at_ns
            assert h.phase is PrefillPhase.QUEUED or not waits, f"handle {h.handle} still waits for pulls"
            if h.phase is PrefillPhase.COMPUTING:
                for key in h.start.block_keys[h.promised_from :]:
                    promised[key] = promised.get(key, 0) + 1
        assert promised == self.promised, "promised blocks are not those being computed"
