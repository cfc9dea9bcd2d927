"""The handoffs of a prefill instance whose model has several cache groups, with what they hold (ADR 0037). Pure.

A prompt finds block by block and group by group what lies in pages, else what lies in extents and is loaded. States lie
in no page but the slot of whoever computes; a hit loads a snapshot into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvmesh.errors import ContextTooLong, KvmeshError
from kvmesh.kvcache.cache_groups import CacheKind, GroupPages, longest_hit, needed_blocks
from kvmesh.kvcache.grouped_prefix import GroupedPrefixCache
from kvmesh.kvcache.grouped_store import GroupedStore, Mask, written_mask
from kvmesh.kvcache.page_pool import PagePool
from kvmesh.ranks import protocol as m
from kvmesh.services.prefill import events as ev
from kvmesh.services.prefill.checks import BrainConfig, refusal
from kvmesh.services.prefill.grouped_blocks import Bits, GroupedBlocks, joined
from kvmesh.services.prefill.handoff import PrefillHandoff, PrefillPhase
from kvmesh.services.prefill.handoff_book import HandoffBook
from kvmesh.services.prefill.planner import Chunk, Planner, Wait
from kvmesh.services.prefill.prompt_pages import PageRules, PromptPages, PromptPools, is_state

NO_LIMIT = 1 << 62


class GroupedTable(HandoffBook):
    """The handoffs of an instance with `pools[group]` pages of each of `store.groups`. It gives the chunks that the
    planner plans their pages (`Planner.prepare`)."""

    blocks: GroupedBlocks

    def __init__(self, config: BrainConfig, pools: Sequence[PagePool], store: GroupedStore, planner: Planner) -> None:
        super().__init__(planner)
        plan = config.plan
        slots = [pool.total for pool, group in zip(pools, store.groups, strict=True) if is_state(group)]
        kept = bool(slots) and all(store.stores[g].total for g, group in enumerate(store.groups) if is_state(group))
        snapshots = min([plan.pipeline_depth, *(max(0, count - 1) for count in slots)]) if kept else 0
        at_ranks = plan.pipeline_depth * plan.prefill_chunk_tokens
        rules = PageRules(store.groups, plan.block_tokens, at_ranks, snapshots)
        self.cache = GroupedPrefixCache(store.groups, pools, plan.block_tokens)
        self.pages = PromptPools(rules, tuple(pools), self.cache)
        self.blocks = GroupedBlocks(config, store, pools, self.cache, lambda action: self.actions.append(action))
        self.groups = store.groups
        self._config = config
        self._numbers = range(len(self.groups))
        self._anchored = self.groups[0].kind is CacheKind.ALL  # group 0 has a page of every block that it has found
        self._states = sum(1 << g for g in self._numbers if is_state(self.groups[g]))
        planner.prepare = self._prepare
        planner.ends = lambda handle: self.handoffs[handle].snapshots

    # ── in ───────────────────────────────────────────────────────────────────────────────────────

    def refusal(self, start: ev.Start) -> KvmeshError | None:
        error = refusal(start, self._config, NO_LIMIT)
        if error is not None or (group := self.pages.short_group(len(start.token_ids))) is None:
            return error
        needed, total = self.pages.rules.claim(group, len(start.token_ids)), self.pages.pools[group].total
        return ContextTooLong(
            f"token_ids holds {len(start.token_ids)} tokens, for {needed} pages of cache group "
            f"{self.groups[group].name}: this prefill instance has {total}",
            field="token_ids",
        )

    def _found(self, h: PrefillHandoff) -> int:
        usable = self.usable(h)
        return self.blocks.hit(self.blocks.here(usable), len(usable)).blocks

    def rest(self, handle: int) -> int | Wait:
        h = self.handoffs[handle]
        if self.blocks.waits(h):
            return Wait.PULL
        usable, blocks = self.usable(h), self.blocks
        here = blocks.here(usable)
        found = blocks.hit(here, len(usable)).blocks
        on_device = self.cache.held(usable)[0] if self._anchored else (1 << found) - 1
        first = (~on_device & on_device + 1).bit_length() - 1
        if first < found and usable[first] in self.promised:
            return Wait.TWIN  # it is being loaded for another
        soon = joined(here, blocks.promised_bits(usable, self.promised), blocks.sealing_bits(usable))
        if blocks.hit(soon, len(usable)).blocks > found:
            return Wait.TWIN
        if blocks.joins(h, usable, here, found):
            return Wait.PULL
        if h.pull_at_ns and self._pays(h, found):
            found = h.planned_to
        return h.prompt_tokens - found * self._block

    def expected_rest(self, handle: int) -> int:
        h = self.handoffs[handle]
        usable = self.usable(h)
        coming = joined(self.blocks.sealing_bits(usable), self.blocks.pulling_bits(usable))
        soon = joined(self.blocks.here(usable), coming, self.blocks.promised_bits(usable, self.promised))
        found = self.blocks.hit(soon, len(usable)).blocks
        return h.prompt_tokens - max(found, h.planned_to if h.pull_at_ns else 0) * self._block

    def admit(self, handle: int) -> int | Wait:
        """Gives a waiting request the pages that it keeps to its end and those that its first token sees: cached ones
        first, then those that extents are loaded into. Returns how many tokens need not be computed, or PAGES."""
        h = self.handoffs[handle]
        usable, blocks = self.usable(h), self.blocks
        here = blocks.here(usable)
        hit = blocks.hit(here, len(usable))
        full = hit.blocks
        start = full * self._block
        memory = PromptPages(self.pages.rules, h.prompt_tokens)
        loads: list[dict[int, bytes]] = [{} for _ in self.groups]
        for g in self._numbers:
            loads[g] = self._take(memory, g, usable, full)
        wanted = [
            sorted(set(self.pages.rules.kept(g, h.prompt_tokens)).union(() if is_state(self.groups[g]) else loads[g]))
            for g in self._numbers
        ]
        new = [[at for at in wanted[g] if at not in memory.held[g]] for g in self._numbers]
        if not self.pages.admits(memory) or not self.pages.give(memory, new):
            self._release(memory)
            return Wait.PAGES
        self.pages.claim(memory)
        h.memory = memory
        h.snapshots = self._snapshots(h, usable, here, start)
        self._begin(h, memory, usable, full, start, loads)
        if hit.short:
            longest = max(limit for limit, group in zip(hit.limits, self.groups, strict=True) if not group.optional)
            h.found = replace(h.found, short=hit.short, short_blocks=longest - hit.blocks)
        return start

    def _take(self, memory: PromptPages, g: int, usable: Sequence[bytes], full: int) -> dict[int, bytes]:
        """Takes the cached pages of what a prefix of `full` blocks needs of a group. Returns what is to be loaded: the
        key by block."""
        group = self.groups[g]
        if is_state(group):
            return {full - 1: usable[full - 1]} if full else {}
        seen = needed_blocks(group, self._block, full * self._block)
        pages = self.cache.take(g, usable[seen.start : seen.stop])
        memory.held[g].update((at, page) for at, page in zip(seen, pages, strict=True) if page >= 0)
        return {at: usable[at] for at in seen if at not in memory.held[g]}

    def _begin(
        self,
        h: PrefillHandoff,
        memory: PromptPages,
        usable: Sequence[bytes],
        full: int,
        start: int,
        loads: Sequence[dict[int, bytes]],
    ) -> None:
        """Lets a prompt that has its pages begin: what it has found in extents is loaded."""
        store = self.blocks.store
        store.touch(usable[:full], use=False)
        first = min(loads[0], default=full) if self._anchored else full
        loaded = [min(loads[g], default=full) for g in self._numbers if not is_state(self.groups[g])]
        h.ready_tokens = min([full, *loaded]) * self._block
        h.cached_tokens = h.computed_tokens = start
        self.blocks.load(h, memory, loads, full)
        came = [at for at in range(first, full) if usable[at] in h.arrived]
        raised = [at for at in range(first, full) if usable[at] in h.raised]
        h.found = replace(
            h.found,
            device_tokens=first * self._block,
            host_tokens=start - (first + len(came)) * self._block,
            pulled_tokens=len(came) * self._block,
            lower_tokens=len(raised) * self._block,
        )
        self.blocks.leave(h, cancel=False)
        self._promise(h, first)
        h.phase = PrefillPhase.COMPUTING

    def _prepare(self, handle: int, start: int, end: int) -> bool:
        """Gives a chunk the pages that its blocks lack, and slots for its snapshots, unless too many of them are still
        being copied into the store."""
        h = self.handoffs[handle]
        assert h.memory is not None
        if not self.pages.give(h.memory, [h.memory.missing(g, start, end) for g in self._numbers]):
            return False
        return not self._kept(h, end) or self.pages.give_snapshots(h.memory, end)

    def for_step(self, h: PrefillHandoff, end: int) -> tuple[tuple[int, ...], tuple[GroupPages, ...]]:
        assert h.memory is not None
        return (), h.memory.for_step(end)

    def loaded(self, rank: int, copied: m.LoadCopied) -> None:
        load = self.blocks.loaded(rank, copied)
        if load is None:
            return
        h = load.handoff
        self._load_over(h, load.from_ns, load.until_ns)
        h.ready_tokens = load.end * self._block
        self._cache(h, load.end, 0)
        if not h.ending:
            self._unpromise(h, max(load.end, h.promised_from))
        self.settle(h)

    def sealed(self, rank: int, copied: m.SealCopied) -> None:
        self.blocks.sealed(rank, copied)

    def _written(self, h: PrefillHandoff, chunk: Chunk) -> None:
        assert h.memory is not None
        full = chunk.end // self._block
        slots = h.memory.snapshots.pop(chunk.end, {})
        kept = self._kept(h, chunk.end) if full <= h.sealable else 0
        states = {g: slot for g, slot in slots.items() if kept >> g & 1}
        self.blocks.seal(h, h.memory, chunk.start // self._block, min(full, h.sealable), states)
        self.pages.end_snapshots(slots)
        self.pages.give_back(h.memory, chunk.end)

    def _kept(self, h: PrefillHandoff, end: int) -> Mask:
        """Returns of which groups the states are kept after `end` tokens of a prompt."""
        if not self.pages.rules.snapshots or end % self._block:
            return 0
        return self._states & written_mask(self.groups, end // self._block - 1, last=end in h.snapshots)

    def _snapshots(self, h: PrefillHandoff, usable: Sequence[bytes], here: Bits, start: int) -> tuple[int, ...]:
        """Returns after which tokens, off the grid, the states of a prompt are to be kept that computes from `start`
        on: at the end of what it would find again, and where it leaves a prefix of which all but the states is here,
        as others may leave it, too."""
        if not self.pages.rules.snapshots:
            return ()
        others = [g for g in self._numbers if not is_state(self.groups[g]) and not self.groups[g].optional]
        groups, held = [self.groups[g] for g in others], [here[g] for g in others]
        shared = longest_hit(groups, self._block, len(usable), held).blocks if others else 0
        ends = {min(blocks, h.sealable) for blocks in (shared, len(usable))}
        return tuple(sorted(end * self._block for end in ends if end * self._block > start))

    def _promise(self, h: PrefillHandoff, first: int) -> None:
        super()._promise(h, first)
        for key in self._snapshot_keys(h, len(h.start.block_keys)):
            self.blocks.snapshots[key] = self.blocks.snapshots.get(key, 0) + 1

    def _unpromise(self, h: PrefillHandoff, until: int | None = None) -> None:
        for key in self._snapshot_keys(h, len(h.start.block_keys) if until is None else until):
            self.blocks.snapshots[key] -= 1
            if not self.blocks.snapshots[key]:
                del self.blocks.snapshots[key]
        super()._unpromise(h, until)

    def _snapshot_keys(self, h: PrefillHandoff, until: int) -> list[bytes]:
        """Returns the keys of the blocks, of those promised and before block `until`, behind which states are kept."""
        blocks = [end // self._block - 1 for end in h.snapshots]
        return [h.start.block_keys[block] for block in blocks if h.promised_from <= block < until]

    def _hand_over(self, h: PrefillHandoff, first: ev.SendFirstToken) -> None:
        """Hands over the pages that decode may need, and the slots. Nobody else writes in them."""
        assert h.memory is not None
        groups = h.memory.for_decode()
        self.actions.append(ev.SendAdopted(h.handle, first, (), groups))
        self.pages.end(h.memory, keep=groups)
        h.memory = None
        h.fill_told = True  # there is nothing to fill
        self.blocks.store.touch(h.start.block_keys)

    def _cache(self, h: PrefillHandoff, end: int, start: int) -> None:
        assert h.memory is not None
        end = min(end, h.sealable)
        named = []
        for g in self._numbers:
            held = [at for at in h.memory.held[g] if at < end]
            if held and not is_state(self.groups[g]):
                named.append(h.memory.named(g, range(min(held), end)))
        self.cache.renew(h.start.block_keys[:end], named, min(start, end))
        self.cache.insert(h.start.block_keys[:end], named, start=min(start, end))

    def forget(self, keys: Sequence[bytes]) -> None:
        self.cache.forget(keys)

    def cached_keys(self) -> list[bytes]:
        return self.cache.keys()

    def clear(self) -> None:
        self.cache.clear()

    @property
    def free_pages(self) -> int:
        return self.pages.free(0)

    # ── out ──────────────────────────────────────────────────────────────────────────────────────

    def _give_back(self, h: PrefillHandoff) -> None:
        if h.memory is not None:
            self.pages.end(h.memory)
            self.blocks.store.touch(h.start.block_keys)

    def _release(self, memory: PromptPages) -> None:
        for g, held in enumerate(memory.held):
            self.pages.pools[g].release(held.values())
            held.clear()

    # ── tests ────────────────────────────────────────────────────────────────────────────────────

    def check_integrity(self, others: Sequence[Any] = ()) -> None:
        """`others` has the (group, page) that others hold, as often as they do."""
        self.cache.check_integrity()
        self.blocks.check_integrity(self.handoffs, alone=not others)
        memories = [h.memory for h in self.handoffs.values() if h.memory is not None]
        for g, pool in enumerate(self.pages.pools):
            held = [page for memory in memories for page in memory.held[g].values()] + self.blocks.sealing_pages(g)
            held += [page for group, page in others if group == g]
            held += [slots[g] for memory in memories for slots in memory.snapshots.values() if g in slots]
            for page in range(pool.total):
                holders = held.count(page) + self.cache.holds_page(g, page)
                assert pool.refcount(page) == holders, f"page {page} of group {g} has {holders} holders"
            claims = [self.pages.rules.claim(g, memory.tokens) for memory in memories]
            for memory, claim in zip(memories, claims, strict=True):
                assert len(memory.held[g]) <= claim, f"more pages of group {g} than claimed"
            if self.groups[g].kind is not CacheKind.ALL:
                assert self.pages.claimed[g] == sum(claims), "claims are not those of the prompts that have pages"
        self._check_promises()
