"""A prefill instance takes blocks from the shared pool and gives blocks to it: pulls, loads, seals. Pure.

    other nodes ──pull──▶ host extents ──load──▶ device pages ──step──▶ more pages ──seal──▶ host extents
    own SSD ──────┘

A pull begins when its request arrives, or later when the conductor asked for that: where a long queue is ahead, blocks
that come early hold extents and bandwidth that others need. It runs while the request waits. Blocks that arrive are
sealed in the node store (so other nodes can pull them from here in turn) and pinned for the requests that waited;
whatever does not arrive is computed. A pull brings whole blocks before the first step: fetching layer by layer, beside
the computation, is not built.

Every reference taken here has one way back: an extent being written is sealed or abandoned when its pull or copy is
answered, a held extent is released when its load is, a page that is being sealed when its copy is.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace

from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.page_pool import PagePool
from kvmesh.kvcache.prefix_cache import PrefixCache
from kvmesh.kvcache.sources import Pulled, PullJob, ranges_with
from kvmesh.ranks import protocol as m
from kvmesh.services.prefill import events as ev
from kvmesh.services.prefill.block_traffic import BlockPull, BlockTraffic, LoadUnderWay, covered_blocks
from kvmesh.services.prefill.checks import BrainConfig
from kvmesh.services.prefill.handoff import PrefillHandoff


@dataclass(slots=True)
class _Seal:
    """Is a copy of pages into WRITING extents: `blocks` are indices into the chain `keys`."""

    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]
    pages: tuple[int, ...]  # one reference each
    waiting: set[int]  # ranks that have not answered
    bad: set[int] = field(default_factory=set)  # positions whose KV is not finite at some rank


@dataclass(slots=True, kw_only=True)
class PrefixLoad(LoadUnderWay):
    """Has the extents that are copied."""

    first: int  # blocks [first, end) of its prompt
    extents: list[int]  # of blocks [first, end), one reference each


class SharedBlocks(BlockTraffic):
    """Keeps all pulls, loads and seals of one instance whose model has one cache group."""

    def __init__(
        self,
        config: BrainConfig,
        store: NodeStore,
        pool: PagePool,
        cache: PrefixCache,
        emit: Callable[[ev.Action], None],
    ) -> None:
        super().__init__(config, emit)
        self.store = store
        self._pool = pool
        self._cache = cache
        self._seals: dict[int, _Seal] = {}
        self._loads: dict[int, PrefixLoad] = {}

    # ── pulls ────────────────────────────────────────────────────────────────────────────────────

    def _begin(
        self, h: PrefillHandoff, usable: Sequence[bytes], promised: Container[bytes], traffic_class: int
    ) -> PullJob | None:
        needed = self._needed(h, usable, promised)
        # `begin` gives None for blocks that the store has, and does not evict those to make room for the others.
        extents = self.store.begin([usable[i] for i in needed])
        begun = [(i, extent) for i, extent in zip(needed, extents, strict=True) if extent is not None]
        if not begun:
            return None
        return PullJob(
            ticket=self._ticket(),
            blocks=tuple(i for i, _ in begun),
            keys=tuple(usable[i] for i, _ in begun),
            extents=tuple(extent for _, extent in begun),
            ranges=ranges_with(h.start.pulls, self.lower, usable),
            timeout_ms=self._timeout_ms,
            request_id=h.start.request_id,
            traceparent=h.start.traceparent,
            traffic_class=traffic_class,
        )

    def _needed(self, h: PrefillHandoff, usable: Sequence[bytes], promised: Container[bytes]) -> list[int]:
        """Returns the indices of the blocks to be read from the host segment, up to the first block that is neither in
        it nor coming, nor in a lower tier, nor covered by a hint."""
        can_come = self._sources(h, usable)
        needed = []
        for i in range(self._cache.peek(usable), len(usable)):
            key = usable[i]
            pull = self._pulling.get(key)
            if self.store.holds(key):
                needed.append(i)
            elif key in promised:
                continue
            elif pull is not None and self._runs(pull):
                self._join(h, pull)
            elif can_come(i) and not self.store.writing(key):
                needed.append(i)
            else:
                break
        return needed

    def _reach(self, h: PrefillHandoff, usable: Sequence[bytes], promised: Container[bytes]) -> int:
        can_come = self._sources(h, usable)
        for i in range(self._cache.peek(usable), len(usable)):
            key = usable[i]
            if not (can_come(i) or key in promised or key in self._pulling or self.store.holds(key)):
                return i
        return len(usable)

    def _sources(self, h: PrefillHandoff, usable: Sequence[bytes]) -> Callable[[int], bool]:
        """Returns the test whether block i can be fetched: a hint covers it, or a lower tier of this node has it and
        may be read. A block that was removed since the request came cannot, as the request's pull may have been planned
        for later."""
        covered, lower = covered_blocks(h.start.pulls, len(usable)), self.lower
        until = len(usable) if h.start.load_until is None else h.start.load_until

        def can_come(i: int) -> bool:
            return i < h.sealable and (bool(covered[i]) or (lower is not None and i < until and lower.holds(usable[i])))

        return can_come

    def coming(self, keys: Sequence[bytes]) -> int:
        """Returns how many leading blocks of `keys` are in the host segment or on their way to it."""
        here = self.store.peek(keys)
        for n in range(here, len(keys)):
            pull = self._pulling.get(keys[n])
            if not self.store.holds(keys[n]) and (pull is None or not self._runs(pull)):
                return n
        return len(keys)

    def _unpin(self, h: PrefillHandoff) -> None:
        self.store.release(h.pinned)
        h.pinned = []

    def _take(self, pull: BlockPull, result: Pulled) -> None:
        job, arrived, lower = pull.job, set(result.arrived), set(result.lower)
        for at in reversed(range(len(job.keys))):
            key, extent = job.keys[at], job.extents[at]
            if at not in arrived:
                self.store.abandon(key)
                continue
            for h in pull.waiters.values():
                self.store.share((extent,))
                h.pinned.append(extent)
                (h.raised if at in lower else h.arrived).add(key)
            self.store.seal(key)

    # ── loads ────────────────────────────────────────────────────────────────────────────────────

    def load(self, h: PrefillHandoff, usable: Sequence[bytes], first: int) -> int:
        """Copies the blocks from `first` on that the host segment has into the handoff's pages; returns the end of that
        run of blocks. The ranks carry the copy out before every step that is sent later."""
        # What is read on the device must not become the least recently used in the host segment.
        self.store.touch(usable[:first], use=False)
        extents = self.store.hold(usable[first:])
        end = first + len(extents)
        if extents:
            ticket = h.loading = self._ticket()
            self._loads[ticket] = PrefixLoad(
                handoff=h, first=first, end=end, extents=extents, waiting=set(range(self._world))
            )
            self._to_ranks(m.LoadCopy(ticket, tuple(extents), tuple(h.pages[first:end])))
        pulled = sum(key in h.arrived for key in usable[first:end])
        raised = sum(key in h.raised for key in usable[first:end])
        block = self._block
        h.found = replace(
            h.found,
            device_tokens=first * block,
            host_tokens=(end - first - pulled) * block,
            pulled_tokens=pulled * block,
            lower_tokens=raised * block,
        )
        return end

    def loaded(self, rank: int, copied: m.LoadCopied) -> PrefixLoad | None:
        """Notes a rank's answer. Returns the load that is complete with it, whose pages anybody may read now, or
        None."""
        load = self._loads.get(copied.ticket)
        if load is None or not load.carried_out(rank, copied):
            return None
        del self._loads[copied.ticket]
        self.store.release(load.extents)
        return load

    # ── seals ────────────────────────────────────────────────────────────────────────────────────

    def seal(self, keys: tuple[bytes, ...], first: int, pages: Sequence[int]) -> None:
        """Copies blocks that are complete in pages into the store: those from `first` on of the chain `keys` that the
        store lacks and has room for. `pages` are the pages of the whole chain."""
        extents = self.store.begin(keys[first:])
        blocks = tuple(first + n for n, extent in enumerate(extents) if extent is not None)
        if not blocks:
            return
        taken = tuple(pages[i] for i in blocks)
        self._pool.share(taken)
        ticket = self._ticket()
        self._seals[ticket] = _Seal(keys, blocks, taken, set(range(self._world)))
        self._to_ranks(m.SealCopy(ticket, taken, tuple(extent for extent in extents if extent is not None)))

    def sealed(self, rank: int, copied: m.SealCopied) -> None:
        """Notes that a rank has copied its shards. After the last rank, blocks whose KV is finite are sealed, the
        others dropped."""
        seal = self._seals.get(copied.ticket)
        if seal is None or rank not in seal.waiting:
            return
        seal.waiting.discard(rank)
        seal.bad.update(copied.bad)
        if seal.waiting:
            return
        del self._seals[copied.ticket]
        for at in reversed(range(len(seal.blocks))):
            end = self.store.abandon if at in seal.bad else self.store.seal
            end(seal.keys[seal.blocks[at]])
        self._cache.forget([seal.keys[seal.blocks[at]] for at in seal.bad])
        self.store.touch(seal.keys, use=False)  # the head of the chain is to be evicted last
        self._pool.release(seal.pages)

    # ── the end ──────────────────────────────────────────────────────────────────────────────────

    @property
    def seals(self) -> bool:
        """Whether blocks are being copied out of pages."""
        return bool(self._seals)

    def lost(self) -> None:
        """Drops every block and every copy because the ranks are gone. Pulls are still to be answered."""
        for seal in self._seals.values():
            for i in seal.blocks:
                self.store.abandon(seal.keys[i])
            self._pool.release(seal.pages)
        for load in self._loads.values():
            self.store.release(load.extents)
            load.handoff.loading = 0
        self._seals.clear()
        self._loads.clear()
        self.store.drop_all()

    # ── tests ────────────────────────────────────────────────────────────────────────────────────

    def sealing_pages(self) -> list[int]:
        """Returns the pages held for seals, with repetition."""
        return [page for seal in self._seals.values() for page in seal.pages]

    def check_integrity(self, handoffs: dict[int, PrefillHandoff]) -> None:
        """Raises AssertionError unless extents are held by what is under way, and by nothing else. Its cost is
        O(everything)."""
        self.store.check_integrity()
        assert {h.loading for h in handoffs.values() if h.loading} == set(self._loads)
        writing = {key for pull in self._pulls.values() for key in pull.job.keys}
        assert writing == set(self._pulling)
        for seal in self._seals.values():
            writing.update(seal.keys[i] for i in seal.blocks)
        assert all(self.store.writing(key) for key in writing)
        self._check_waiters(handoffs)
