"""Pulls, loads and seals of a prefill instance whose model has several cache groups (ADR 0037). Pure.

A block is one object a group. What a prefix needs of each group is asked of `cache_groups`; what is here, or on its
way, is a bitset of blocks a group. Every reference taken here has one way back, as in `blocks`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

from kvmesh.kvcache.cache_groups import CacheGroup, GroupPages, PrefixHit, longest_hit, needed_blocks
from kvmesh.kvcache.grouped_prefix import GroupedPrefixCache
from kvmesh.kvcache.grouped_store import GroupedStore, Mask, written_mask
from kvmesh.kvcache.node_store import bits_of
from kvmesh.kvcache.page_pool import PagePool
from kvmesh.kvcache.sources import Pulled, PullJob, ranges_with
from kvmesh.ranks import protocol as m
from kvmesh.services.prefill import events as ev
from kvmesh.services.prefill.block_traffic import BlockPull, BlockTraffic, LoadUnderWay
from kvmesh.services.prefill.checks import BrainConfig
from kvmesh.services.prefill.handoff import PrefillHandoff
from kvmesh.services.prefill.prompt_pages import PromptPages, is_state

Bits = list[int]  # a bitset of blocks for each group


def joined(*several: Bits) -> Bits:
    """Returns what is in one of them at least."""
    found = list(several[0])
    for bits in several[1:]:
        found = [one | other for one, other in zip(found, bits, strict=True)]
    return found


@dataclass(slots=True)
class _GroupedSeal:
    """Is a copy of pages into WRITING extents: of block `first + i` of the chain `keys` the objects `masks[i]`."""

    keys: tuple[bytes, ...]
    first: int
    masks: list[Mask]
    pages: tuple[GroupPages, ...]  # one reference each; -1: none
    waiting: set[int]  # ranks that have not answered
    bad: set[tuple[int, int]] = field(default_factory=set)  # (group, block) whose numbers are not finite at some rank


@dataclass(slots=True, kw_only=True)
class GroupedLoad(LoadUnderWay):
    """Has the extents that are copied."""

    extents: tuple[GroupPages, ...]  # one reference each


class GroupedBlocks(BlockTraffic):
    """Keeps all pulls, loads and seals of one instance whose model has several cache groups. `pools[group]` are its
    pages, of which `cache` knows some by key."""

    def __init__(
        self,
        config: BrainConfig,
        store: GroupedStore,
        pools: Sequence[PagePool],
        cache: GroupedPrefixCache,
        emit: Callable[[ev.Action], None],
    ) -> None:
        super().__init__(config, emit)
        self.store = store
        self.groups: tuple[CacheGroup, ...] = store.groups
        self._pools = tuple(pools)
        self._cache = cache
        self._seals: dict[int, _GroupedSeal] = {}
        self._loads: dict[int, GroupedLoad] = {}
        self.snapshots: dict[bytes, int] = {}  # key → how many requests will keep their states behind that block

    # ── what is here and what is coming ──────────────────────────────────────────────────────────────────────

    def here(self, keys: Sequence[bytes]) -> Bits:
        """Returns what lies in pages or extents."""
        return joined(self._cache.held(keys), self.store.held(keys))

    def hit(self, bits: Bits, most: int) -> PrefixHit:
        """Returns the longest usable prefix of at most `most` blocks, of what these bitsets have."""
        return longest_hit(self.groups, self._block, most, bits)

    def promised_bits(self, keys: Sequence[bytes], promised: Container[bytes]) -> Bits:
        """Returns what will be sealed of blocks that are being computed."""
        masks = [
            written_mask(self.groups, block, last=key in self.snapshots) if key in promised else 0
            for block, key in enumerate(keys)
        ]
        return self._bits(masks)

    def sealing_bits(self, keys: Sequence[bytes]) -> Bits:
        """Returns what is being copied into extents by this instance's ranks."""
        coming = self.store.coming(keys)
        pulled = bits_of([key in self._pulling for key in reversed(keys)])
        return [bits & ~pulled for bits in coming]

    def pulling_bits(self, keys: Sequence[bytes]) -> Bits:
        """Returns what is being pulled by pulls that are worth waiting for."""
        masks = []
        for key in keys:
            pull = self._pulling.get(key)
            masks.append(pull.masks[key] if pull is not None and self._runs(pull) else 0)
        return self._bits(masks)

    def _bits(self, masks: Sequence[Mask]) -> Bits:
        return [bits_of([bool(mask >> g & 1) for mask in reversed(masks)]) for g in range(len(self.groups))]

    def _sources(self, h: PrefillHandoff, usable: Sequence[bytes]) -> Bits:
        """Returns what can be fetched: a hint covers it, or a lower tier of this node has it and may be read. A hint
        that names no groups is of a prefix that can be used. A block that was removed since the request came cannot be
        fetched."""
        count = len(usable)
        masks, ranges = [0] * count, list(h.start.pulls)
        if self.lower is not None:
            ranges += self.lower.ranges(usable[: h.start.load_until])
        for r in ranges:
            end = r.first_block + r.blocks
            for block in range(min(r.first_block, count), min(end, count)):
                masks[block] |= r.groups or written_mask(self.groups, block, last=block + 1 == end)
        masks[h.sealable :] = [0] * max(0, count - h.sealable)
        return self._bits(masks)

    # ── pulls ────────────────────────────────────────────────────────────────────────────────────────────────

    def _reach(self, h: PrefillHandoff, usable: Sequence[bytes], promised: Container[bytes]) -> int:
        return self.hit(self._all(h, usable, promised), len(usable)).blocks

    def _all(self, h: PrefillHandoff, usable: Sequence[bytes], promised: Container[bytes]) -> Bits:
        soon = joined(self.promised_bits(usable, promised), self.sealing_bits(usable), self.pulling_bits(usable))
        return joined(self.here(usable), soon, self._sources(h, usable))

    def _begin(
        self, h: PrefillHandoff, usable: Sequence[bytes], promised: Container[bytes], traffic_class: int
    ) -> PullJob | None:
        pulling, can_come = self.pulling_bits(usable), self._sources(h, usable)
        here = self.here(usable)
        soon = joined(here, self.promised_bits(usable, promised), self.sealing_bits(usable))
        whole = joined(soon, pulling, can_come)
        cut = self.hit(whole, len(usable)).blocks
        if cut <= self.hit(here, len(usable)).blocks:
            return None
        needed = [needed_blocks(group, self._block, cut * self._block) for group in self.groups]
        masks = [0] * cut
        for g, blocks_of in enumerate(needed):
            for block in blocks_of:
                if pulling[g] >> block & 1 and not soon[g] >> block & 1:
                    self._join(h, self._pulling[usable[block]])
                elif can_come[g] >> block & 1 and not soon[g] >> block & 1 and usable[block] not in self._pulling:
                    masks[block] |= 1 << g
        keys = tuple(usable[:cut])
        begun = self.store.begin(keys, masks)
        blocks = [block for block, extents in enumerate(begun) if any(extent is not None for extent in extents)]
        if not blocks:
            return None
        rows = [begun[block] for block in blocks]
        return PullJob(
            ticket=self._ticket(),
            blocks=tuple(blocks),
            keys=tuple(keys[block] for block in blocks),
            extents=(),
            ranges=ranges_with(h.start.pulls, self.lower, usable),
            timeout_ms=self._timeout_ms,
            request_id=h.start.request_id,
            traceparent=h.start.traceparent,
            traffic_class=traffic_class,
            groups=bytes(_mask_of(row) for row in rows),
            places=tuple(
                GroupPages(g, 0, tuple(-1 if extent is None else extent for extent in column))
                for g, column in enumerate(zip(*rows, strict=True))
                if any(extent is not None for extent in column)
            ),
        )

    def joins(self, h: PrefillHandoff, usable: Sequence[bytes], here: Bits, found: int) -> bool:
        """Whether a queued request should wait for pulls that others have begun and that make its prefix longer than
        `found` blocks. It joins those that it needs."""
        if self.now >= h.patient_until_ns:
            return False
        pulling = self.pulling_bits(usable)
        cut = self.hit(joined(here, pulling), len(usable)).blocks
        if cut <= found:
            return False
        for g, group in enumerate(self.groups):
            for block in needed_blocks(group, self._block, cut * self._block):
                if pulling[g] >> block & 1 and not here[g] >> block & 1:
                    self._join(h, self._pulling[usable[block]])
        return True

    def _unpin(self, h: PrefillHandoff) -> None:
        self.store.release(h.pinned_groups)
        h.pinned_groups = []

    def _take(self, pull: BlockPull, result: Pulled) -> None:
        job = pull.job
        came = dict(zip(result.arrived, result.groups, strict=True))
        lower = set(result.lower)
        for at in reversed(range(len(job.keys))):
            key, mask = job.keys[at], came.get(at, 0) & job.groups[at]
            self.store.abandon(key, job.groups[at] & ~mask)
            for h in pull.waiters.values() if mask else ():
                held = [one for one in job.places if mask >> one.group & 1]
                mine = [GroupPages(one.group, job.blocks[at], (one.ids[at - one.first],)) for one in held]
                for group, _, extents in mine:
                    self.store.stores[group].share(extents)
                h.pinned_groups += mine
                (h.raised if at in lower else h.arrived).add(key)
            self.store.seal(key, mask)
        for h in pull.waiters.values():
            self.store.touch(h.start.block_keys, use=False)

    # ── loads ────────────────────────────────────────────────────────────────────────────────────────────────

    def load(self, h: PrefillHandoff, memory: PromptPages, wanted: Sequence[dict[int, bytes]], end: int) -> None:
        """Copies objects, `wanted[group]` of which says the key by block, from extents into the pages that the prompt
        has for these blocks. All are sealed. The ranks carry the copy out before every step that is sent later; `end`
        is how many blocks are whole in pages then."""
        extents, pages = [], []
        for g, blocks in enumerate(wanted):
            if not blocks:
                continue
            order = sorted(blocks)
            held = dict(zip(order, self.store.hold_of(g, [blocks[at] for at in order]), strict=True))
            state = is_state(self.groups[g])
            first = order[0]
            span = range(first, order[-1] + 1)
            extents.append(GroupPages(g, first, tuple(held.get(at, -1) for at in span)))
            named = GroupPages(g, first, (memory.slot(g),)) if state else memory.named(g, order)
            pages.append(named)
        if not extents:
            return
        ticket = h.loading = self._ticket()
        self._loads[ticket] = GroupedLoad(handoff=h, end=end, extents=tuple(extents), waiting=set(range(self._world)))
        self._to_ranks(m.LoadCopy(ticket, (), (), tuple(pages), tuple(extents)))

    def loaded(self, rank: int, copied: m.LoadCopied) -> GroupedLoad | None:
        """Notes a rank's answer. Returns the load that is complete with it, whose pages anybody may read now, or
        None."""
        load = self._loads.get(copied.ticket)
        if load is None or not load.carried_out(rank, copied):
            return None
        del self._loads[copied.ticket]
        self.store.release(load.extents)
        return load

    # ── seals ────────────────────────────────────────────────────────────────────────────────────────────────

    def seal(self, h: PrefillHandoff, memory: PromptPages, first: int, full: int, states: dict[int, int]) -> None:
        """Copies the blocks first .. full - 1, which are complete in pages, into the store: what it lacks of them and
        has room for. `states` are slots, by group, with the states at the end of the last one."""
        keys = h.start.block_keys[:full]
        masks = [
            sum(1 << g for g, group in enumerate(self.groups) if not is_state(group) and block in memory.held[g])
            for block in range(first, full)
        ]
        if masks and states:
            masks[-1] |= sum(1 << g for g in states)
        if not any(masks):
            return
        begun = self.store.begin(keys, masks, first)
        taken = [_mask_of(row) for row in begun]
        if not any(taken):
            return
        pages, extents = [], []
        for g, column in enumerate(zip(*begun, strict=True)):
            if all(extent is None for extent in column):
                continue
            named = [
                -1 if extent is None else states[g] if g in states else memory.held[g][first + i]
                for i, extent in enumerate(column)
            ]
            pages.append(GroupPages(g, first, tuple(named)))
            extents.append(GroupPages(g, first, tuple(-1 if extent is None else extent for extent in column)))
            self._pools[g].share(page for page in named if page >= 0)
        ticket = self._ticket()
        self._seals[ticket] = _GroupedSeal(tuple(keys), first, taken, tuple(pages), set(range(self._world)))
        self._to_ranks(m.SealCopy(ticket, (), (), tuple(pages), tuple(extents)))

    def sealed(self, rank: int, copied: m.SealCopied) -> None:
        """Notes that a rank has copied its shards. After the last rank, objects whose numbers are finite are sealed,
        the others dropped."""
        seal = self._seals.get(copied.ticket)
        if seal is None or rank not in seal.waiting:
            return
        seal.waiting.discard(rank)
        seal.bad.update(copied.bad_groups)
        if seal.waiting:
            return
        del self._seals[copied.ticket]
        bad = [(group, block - seal.first) for group, block in seal.bad]
        self.store.end(seal.keys[seal.first :], seal.masks, bad)
        self._cache.forget([seal.keys[block] for _, block in seal.bad])
        self.store.touch(seal.keys, use=False)
        self._release(seal)

    def _release(self, seal: _GroupedSeal) -> None:
        for group, _, pages in seal.pages:
            self._pools[group].release(page for page in pages if page >= 0)

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def seals(self) -> bool:
        """Whether blocks are being copied out of pages."""
        return bool(self._seals)

    def lost(self) -> None:
        """Drops every block and every copy because the ranks are gone. Pulls are still to be answered."""
        for seal in self._seals.values():
            for i, mask in enumerate(seal.masks):
                self.store.abandon(seal.keys[seal.first + i], mask)
            self._release(seal)
        for load in self._loads.values():
            self.store.release(load.extents)
            load.handoff.loading = 0
        self._seals.clear()
        self._loads.clear()
        self.store.drop_all()

    # ── tests ────────────────────────────────────────────────────────────────────────────────────────────────

    def sealing_pages(self, group: int) -> list[int]:
        """Returns the pages of a group that are held for seals, with repetition."""
        named = [one for seal in self._seals.values() for one in seal.pages if one.group == group]
        return [page for one in named for page in one.ids if page >= 0]

    def check_integrity(self, handoffs: dict[int, PrefillHandoff], *, alone: bool = True) -> None:
        """Raises AssertionError unless extents are held by what is under way, and by nothing else, where nobody else
        (`alone`) writes to the stores. Its cost is O(everything)."""
        self.store.check_integrity()
        assert {h.loading for h in handoffs.values() if h.loading} == set(self._loads)
        writing: dict[bytes, Mask] = {}
        for pull in self._pulls.values():
            writing.update(zip(pull.job.keys, pull.job.groups, strict=True))
        assert set(writing) == set(self._pulling)
        for seal in self._seals.values():
            for i, mask in enumerate(seal.masks):
                key = seal.keys[seal.first + i]
                assert not writing.get(key, 0) & mask, "an object has two writers"
                writing[key] = writing.get(key, 0) | mask
        for g, store in enumerate(self.store.stores):
            own = {key for key, mask in writing.items() if mask >> g & 1}
            assert own == set(store.written()) if alone else own <= set(store.written())
        self._check_waiters(handoffs)


def _mask_of(extents: Sequence[int | None]) -> Mask:
    return sum(1 << g for g, extent in enumerate(extents) if extent is not None)
