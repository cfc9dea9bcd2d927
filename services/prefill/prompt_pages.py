"""The pages of prompts of a model with several cache groups: how many each needs, gets and gives back. Pure.

A prompt of P tokens has, from its admission to its end, the pages of what decode may need (`needed_blocks` of P) in
every group, and one slot of each state. In a group that gives back what lies behind, the blocks before that only
*pass*: they get a page when a chunk is computed, and give it back when no step at the ranks sees it any more.

A step leaves the state where a chunk ends in the slot, and a copy of it in another, a *snapshot*, which is copied into
the store while the next chunks change the first.

How many pages of a group a prompt has at a time is bounded, and that number is its *claim*. The claims of all prompts
never exceed the pool. A page that two prompts share counts for both, so pages that nobody holds but the cache are never
fewer than what claims are short of, but for those that a copy into the store still reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvmesh.kvcache.cache_groups import CacheGroup, CacheKind, GroupPages, freed_blocks, needed_blocks, peak_blocks
from kvmesh.kvcache.grouped_prefix import GroupedPrefixCache
from kvmesh.kvcache.page_pool import PagePool


def is_state(group: CacheGroup) -> bool:
    """Says whether the group keeps states, not tokens."""
    return group.kind is CacheKind.STATE


@dataclass(frozen=True, slots=True)
class PageRules:
    """Says which pages a prompt has, of blocks of `block_tokens` tokens, while at most `step_tokens` of its tokens are
    at the ranks. `snapshots` is how many slots for snapshots it has at most, of each state."""

    groups: tuple[CacheGroup, ...]
    block_tokens: int
    step_tokens: int
    snapshots: int = 0
    least: tuple[int, ...] = ()  # of each group, that a prompt claims in any case: rows that adopt prompts need them

    def blocks(self, tokens: int) -> int:
        """Returns how many blocks these tokens fill, the last one perhaps in part."""
        return -(-tokens // self.block_tokens)

    def kept(self, group: int, tokens: int) -> range:
        """Returns the blocks of a prompt of so many tokens that have a page to its end. Of a state it is the last."""
        end = self.blocks(tokens)
        if is_state(self.groups[group]):
            return range(end - 1, end)
        return needed_blocks(self.groups[group], self.block_tokens, tokens)

    def claim(self, group: int, tokens: int) -> int:
        """Returns how many pages of the group a prompt of so many tokens has at most at a time."""
        kept, least = self.kept(group, tokens), self.least[group] if self.least else 0
        if is_state(self.groups[group]):
            return max(least, len(kept) + self.snapshots)
        peak = peak_blocks(self.groups[group], self.block_tokens, self.step_tokens)
        return max(least, len(kept) + (kept.start if peak is None else min(kept.start, peak)))

    def seen(self, group: int, start: int) -> range:
        """Returns the blocks that the token at `start` sees in a group of tokens; the last one may be its own, of which
        it sees the tokens before it."""
        return needed_blocks(self.groups[group], self.block_tokens, start)


class PromptPages:
    """The pages that one prompt of `tokens` tokens holds, one reference each: `held[group][block]`. A state's slot is
    that of the last block; `snapshots[end]` are the slots, by group, for the state after `end` tokens."""

    __slots__ = ("_rules", "held", "snapshots", "tokens")

    def __init__(self, rules: PageRules, tokens: int) -> None:
        self._rules = rules
        self.tokens = tokens
        self.held: tuple[dict[int, int], ...] = tuple({} for _ in rules.groups)
        self.snapshots: dict[int, dict[int, int]] = {}

    @property
    def blocks(self) -> int:
        """The blocks of the prompt, the last perhaps filled in part."""
        return self._rules.blocks(self.tokens)

    @property
    def kept(self) -> tuple[range, ...]:
        """The blocks of each group that decode may need."""
        return tuple(self._rules.kept(g, self.tokens) for g in range(len(self.held)))

    def slot(self, group: int) -> int:
        """Returns the slot of a state."""
        return self.held[group][self.blocks - 1]

    def missing(self, group: int, start: int, end: int) -> list[int]:
        """Returns the blocks without a page that tokens [start, end) are written to."""
        if is_state(self._rules.groups[group]):
            return []
        held, block = self.held[group], self._rules.block_tokens
        return [at for at in range(start // block, self._rules.blocks(end)) if at not in held]

    def named(self, group: int, blocks: Iterable[int]) -> GroupPages:
        """Returns the pages of these blocks, which ascend; -1 for those between them and those without a page."""
        wanted = list(blocks)
        if not wanted:
            return GroupPages(group, 0, ())
        held, asked = self.held[group], set(wanted)
        span = range(wanted[0], wanted[-1] + 1)
        return GroupPages(group, span.start, tuple(held.get(at, -1) if at in asked else -1 for at in span))

    def for_step(self, end: int) -> tuple[GroupPages, ...]:
        """Returns what a step takes that computes this prompt up to token `end`."""
        found = []
        for number, group in enumerate(self._rules.groups):
            if is_state(group):
                snapshot = self.snapshots.get(end, {}).get(number)
                slots = (self.slot(number),) if snapshot is None else (self.slot(number), snapshot)
                found.append(GroupPages(number, 0, slots))
                continue
            last = self._rules.blocks(end)
            first = min((at for at in self.held[number] if at < last), default=last)
            found.append(self.named(number, range(first, last)))
        return tuple(found)

    def for_decode(self) -> tuple[GroupPages, ...]:
        """Returns the pages that decode may need, of every group."""
        return tuple(self.named(g, blocks) for g, blocks in enumerate(self.kept))

    def sent(self, group: int, first: int, count: int) -> GroupPages:
        """Returns the pages of `count` blocks from `first` on."""
        return self.named(group, range(first, first + count))

    def behind(self, group: int, computed: int) -> list[int]:
        """Returns the blocks with a page that no step from token `computed` on sees, and decode does not need."""
        rules = self._rules
        first = rules.kept(group, self.tokens).start
        if not is_state(rules.groups[group]):
            first = min(first, freed_blocks(rules.groups[group], rules.block_tokens, computed))
        return [at for at in self.held[group] if at < first]


@dataclass(slots=True)
class PromptPools:
    """The page pools of one instance, `pools[group]`, and what prompts claim of them. `reserve(group)` says how many
    pages prompts may not claim, because others have or need them."""

    rules: PageRules
    pools: tuple[PagePool, ...]
    cache: GroupedPrefixCache
    reserve: Callable[[int], int] = lambda _: 0
    claimed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.claimed = [0] * len(self.pools)

    def free(self, group: int) -> int:
        """Returns how many pages can be taken now."""
        return self.pools[group].free + self.cache.evictable(group)

    def short_group(self, tokens: int) -> int | None:
        """Returns the first group in which a prompt of so many tokens would never find its pages; None if it would."""
        numbers = range(len(self.pools))
        return next((g for g in numbers if self.rules.claim(g, tokens) > self.pools[g].total), None)

    def admits(self, pages: PromptPages) -> bool:
        """Says whether the claims leave room for this prompt's, and the pages that it keeps to its end, and does not
        hold yet, can be taken now."""
        for group, pool in enumerate(self.pools):
            claim, reserve = self.rules.claim(group, pages.tokens), self.reserve(group)
            new = sum(at not in pages.held[group] for at in self.rules.kept(group, pages.tokens))
            if self._keeps_all(group):  # nothing is claimed beyond what is held
                if new > self.free(group) - reserve:
                    return False
            elif claim > pool.total - self.claimed[group] - reserve or new > self.free(group):
                return False
        return True

    def claim(self, pages: PromptPages) -> None:
        """Notes the claims of a prompt that `admits` has let in."""
        for group in range(len(self.pools)):
            self.claimed[group] += 0 if self._keeps_all(group) else self.rules.claim(group, pages.tokens)

    def give(self, pages: PromptPages, wanted: Sequence[Sequence[int]]) -> bool:
        """Gives a prompt pages for the blocks `wanted[group]`, evicting what is idle. Returns False, and gives none,
        when there are too few in a group."""
        if any(len(blocks) > self.free(group) for group, blocks in enumerate(wanted)):
            return False
        for group, blocks in enumerate(wanted):
            pool = self.pools[group]
            self.cache.evict(group, max(0, len(blocks) - pool.free))
            pages.held[group].update(zip(blocks, pool.allocate(len(blocks)), strict=True))
        return True

    def give_snapshots(self, pages: PromptPages, end: int) -> bool:
        """Gives a prompt slots for the states after `end` tokens. Returns False, and gives none, when it has to wait
        for those of earlier chunks."""
        states = [g for g, group in enumerate(self.rules.groups) if is_state(group)]
        if len(pages.snapshots) >= self.rules.snapshots or any(not self.free(g) for g in states):
            return False
        pages.snapshots[end] = {g: self.pools[g].allocate(1)[0] for g in states}
        return True

    def end_snapshots(self, slots: dict[int, int]) -> None:
        """Takes the slots of snapshots back."""
        for group, slot in slots.items():
            self.pools[group].release((slot,))

    def give_back(self, pages: PromptPages, computed: int) -> None:
        """Takes the pages back that nothing of a prompt sees any more when `computed` of its tokens are."""
        for group, pool in enumerate(self.pools):
            behind = pages.behind(group, computed)
            pool.release([pages.held[group].pop(at) for at in behind])

    def end(self, pages: PromptPages, *, keep: Sequence[GroupPages] = ()) -> None:
        """Takes back all that a prompt holds, but the references of `keep`, and ends its claims."""
        kept = [set(one.ids) for one in keep] or [set() for _ in self.pools]
        for group, pool in enumerate(self.pools):
            pool.release([page for page in pages.held[group].values() if page not in kept[group]])
            pages.held[group].clear()
            self.claimed[group] -= 0 if self._keeps_all(group) else self.rules.claim(group, pages.tokens)

        for slots in pages.snapshots.values():
            self.end_snapshots(slots)
        pages.snapshots.clear()

    def _keeps_all(self, group: int) -> bool:
        return self.rules.groups[group].kind is CacheKind.ALL
