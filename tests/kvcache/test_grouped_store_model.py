"""GroupedStore against a dict of (group, key) → extent: after every rule all stores are whole, what was asked for was
begun as far as there was room, and what is gone went for a reason. Broken stores are found."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvmesh.errors import PinLimit
from kvmesh.kvcache.cache_groups import CacheGroup, CacheKind, GroupPages, needed_blocks
from kvmesh.kvcache.grouped_store import GroupedStore, Mask, written_mask
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.page_pool import PageInvariantError
from kvmesh.kvcache.quotas import NoTagQuotas, TagQuotas
from kvmesh.kvcache.store_stats import Changes
from tests.kvcache import test_grouped_store as alone
from tests.kvcache.test_cache_groups import group, model_hit

BLOCK = 2
ALL = group(CacheKind.ALL, 0, "all")
WINDOW = group(CacheKind.WINDOW, 5, "window")  # two blocks
SHORT = group(CacheKind.WINDOW, 2, "short")  # one
CHUNK = group(CacheKind.CHUNK, 6, "chunk")  # up to two blocks before a cut
STATE = group(CacheKind.STATE, 2, "state")
EXTRA = group(CacheKind.ALL, 0, "extra", optional=True)
MODELS = [
    (ALL, WINDOW),
    (ALL, STATE),
    (ALL, WINDOW, CHUNK, EXTRA),
    (WINDOW, SHORT),
    (ALL, SHORT, STATE),
    (WINDOW,),
]
TAGS = (b"xxxx", b"yyyy")


def chain(path: str) -> list[bytes]:
    """Keys of a prompt; its first character is the tenant, which is no block."""
    return [(path[0] * 4 + path[1 : at + 2]).encode().ljust(16, b".") for at in range(len(path) - 1)]


PATHS = st.builds("".join, st.tuples(st.sampled_from("xxy"), st.text("ab", min_size=1, max_size=6)))


@dataclass(eq=False)
class Holder:
    """Somebody with one reference to each of these (group, extent)."""

    extents: list[tuple[int, int]]


class GroupedModel(RuleBasedStateMachine):
    make: type[GroupedStore] = GroupedStore

    @initialize(
        groups=st.sampled_from(MODELS),
        totals=st.lists(st.integers(1, 9), min_size=4, max_size=4),
        marks=st.sampled_from([(100, 100), (100, 100), (60, 30)]),
    )
    def begin_life(self, groups: tuple[CacheGroup, ...], totals: list[int], marks: tuple[int, int]) -> None:
        self.groups, self.totals, self.exact = groups, totals[: len(groups)], marks[0] == 100
        self.quotas = TagQuotas()
        stores = [
            NodeStore(
                total,
                high_percent=marks[0],
                low_percent=marks[1],
                pinned_percent=60,
                quotas=NoTagQuotas() if g else self.quotas,
            )
            for g, total in enumerate(self.totals)
        ]
        self.store = self.make(groups, stores, BLOCK)
        self.chained = groups[0].kind is CacheKind.ALL
        self.sealed: dict[tuple[int, bytes], int] = {}
        self.writing: dict[tuple[int, bytes], int] = {}
        self.orphans: set[tuple[int, bytes]] = set()
        self.runs: list[tuple[list[bytes], list[Mask]]] = []
        self.holders: list[Holder] = []
        self.hard: set[tuple[int, bytes]] = set()
        self.exempt: set[tuple[int, bytes]] = set()  # used in ways that nobody knows to be useless
        self.told: dict[bytes, int] = {}

    # ── what follows ─────────────────────────────────────────────────────────────────────────────────────────

    def refs(self, g: int, extent: int) -> int:
        return sum(holder.extents.count((g, extent)) for holder in self.holders)

    def is_idle(self, g: int, key: bytes) -> bool:
        return not self.refs(g, self.sealed[g, key]) and (g, key) not in self.hard

    def used(self, g: int) -> set[int]:
        held = {extent for holder in self.holders for of, extent in holder.extents if of == g}
        return held | {x for (of, _), x in (self.sealed | self.writing).items() if of == g}

    def bits(self, objects: Collection[tuple[int, bytes]], keys: Sequence[bytes]) -> list[int]:
        return [sum(1 << i for i, key in enumerate(keys) if (g, key) in objects) for g in range(len(self.groups))]

    def coming(self) -> set[tuple[int, bytes]]:
        return self.writing.keys() - self.orphans

    def is_anchored(self, key: bytes) -> bool:
        return (0, key) in self.sealed or (0, key) in self.coming()

    def needed(self, g: int, cut: int) -> range:
        return needed_blocks(self.groups[g], BLOCK, cut * BLOCK)

    def gone(self) -> dict[int, list[bytes]]:
        """What was evicted since the last call: only what nobody used, or, of a block whose anchor a quota has evicted,
        what was not pinned."""
        found: dict[int, list[bytes]] = {g: [] for g in range(len(self.groups))}
        for g, key in sorted(self.sealed):  # anchors first
            if not self.store.stores[g].holds(key):
                by_quota = g > 0 and key in found[0] and (g, key) not in self.hard
                assert self.is_idle(g, key) or by_quota, "evicted while in use"
                del self.sealed[g, key]
                self.exempt.discard((g, key))
                found[g].append(key)
        return found

    # ── rules ────────────────────────────────────────────────────────────────────────────────────────────────

    @rule(path=PATHS, data=st.data(), start=st.integers(0, 3), how=st.sampled_from(["any", "wanted", "written"]))
    def begin(self, path: str, data: st.DataObject, start: int, how: str) -> None:
        keys = chain(path)
        start = min(start, len(keys))
        asked = [data.draw(st.integers(0, (1 << len(self.groups)) - 1)) for _ in keys] if how == "any" else []
        if how == "wanted":
            asked = self.store.wanted(keys, len(keys))
        if how == "written":
            asked = [written_mask(self.groups, block) for block in range(len(keys))]
        masks, run = asked[start:], keys[start:]
        end, expected, evicted = len(run), [], []
        for g, of in enumerate(self.groups):
            needed, here, missing = self.needed(g, len(keys)), [], []
            for i in range(end):
                if (g, run[i]) in self.sealed:
                    if start + i in needed and (not self.chained or self.is_anchored(run[i])):
                        here.append(i)
                elif masks[i] >> g & 1 and (g, run[i]) not in self.writing:
                    missing.append(i)
            unheld = self.totals[g] - len(self.used(g))
            spared = {run[i] for i in here}
            room = unheld + sum(of_ == g and key not in spared and self.is_idle(g, key) for of_, key in self.sealed)
            last_first = g > 0 and of.kind is not CacheKind.ALL
            given = set((missing[::-1] if last_first else missing)[:room])
            expected.append(given)
            evicted.append(max(0, len(given) - unheld))
            if g == 0:
                lacks = [i for i in range(end) if masks[i] & 1 and i not in given and not self.is_anchored(run[i])]
                end = min(lacks, default=end)
        busy = [
            self.used(g) - {self.sealed[of, k] for of, k in self.sealed if of == g} for g in range(len(self.groups))
        ]
        got = self.store.begin(keys, masks, start)
        assert [len(one) for one in got] == [len(self.groups)] * len(run)
        for g in range(len(self.groups)):
            assert {i for i, one in enumerate(got) if one[g] is not None} == expected[g], f"group {g}"
        went = self.gone()
        assert [len(went[g]) for g in range(len(self.groups))] == evicted, "more went than had to"
        for i, one in enumerate(got):
            for g, extent in enumerate(one):
                if extent is not None:
                    assert extent not in busy[g] and extent not in self.used(g), "two owners"
                    self.writing[g, run[i]] = extent
        begun = [sum(1 << g for g, extent in enumerate(one) if extent is not None) for one in got]
        if any(begun):
            self.runs.append((run, begun))

    def seals(self, key: bytes, mask: Mask) -> Mask:
        """Notes that objects are sealed; returns those that can be."""
        sealed = 0
        for g in range(len(self.groups)):
            if mask >> g & 1:
                extent = self.writing.pop((g, key))
                if (g, key) not in self.orphans:
                    self.sealed[g, key] = extent
                    sealed |= 1 << g
                self.orphans.discard((g, key))
        return sealed

    def abandons(self, key: bytes, mask: Mask) -> None:
        for g in range(len(self.groups)):
            if mask >> g & 1:
                del self.writing[g, key]
                self.orphans.discard((g, key))

    def after_seals(self) -> None:
        gone = self.gone()
        for key in gone[0] if self.exact else ():  # a quota, and nothing else, has evicted them
            left = {(g, key) for g in range(len(self.groups))} & self.sealed.keys()
            assert left <= self.hard, "a part of what a quota evicted"

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def end_one_by_one(self, data: st.DataObject) -> None:
        keys, masks = run = data.draw(st.sampled_from(self.runs))
        self.runs.remove(run)
        for i in data.draw(st.permutations(range(len(keys)))):
            sealed = masks[i] & data.draw(st.sampled_from([-1, -1, 0, 1, 2]))
            self.store.abandon(keys[i], masks[i] & ~sealed)
            self.abandons(keys[i], masks[i] & ~sealed)
            expected = self.seals(keys[i], sealed)
            assert self.store.seal(keys[i], sealed) == expected
            self.after_seals()

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        keys, masks = run = data.draw(st.sampled_from(self.runs))
        self.runs.remove(run)
        places = st.tuples(st.integers(0, len(self.groups) - 1), st.integers(0, len(keys) - 1))
        bad = data.draw(st.lists(places, max_size=1))
        doubted = min((i for g, i in bad if not self.groups[g].optional), default=len(keys))
        expected = []
        for i in reversed(range(len(keys))):
            lost = sum(1 << g for g in range(len(self.groups)) if (g, i) in bad) if i < doubted else -1
            self.abandons(keys[i], masks[i] & lost)
            expected.append(self.seals(keys[i], masks[i] & ~lost))
        assert self.store.end(keys, masks, bad) == expected[::-1]
        self.after_seals()

    @rule(path=PATHS, cut=st.none() | st.integers(0, 6))
    def hold(self, path: str, cut: int | None) -> None:
        keys = chain(path)
        hit = self.store.peek(keys, len(keys))
        assert hit == model_hit(self.groups, BLOCK, len(keys), self.bits(self.sealed, keys))
        cut = hit.blocks if cut is None else min(cut, len(keys))
        whole = [all((g, keys[b]) in self.sealed for b in self.needed(g, cut)) for g in range(len(self.groups))]
        if not all(yes or of.optional for yes, of in zip(whole, self.groups, strict=True)):
            with pytest.raises(PageInvariantError, match="lacks some"):
                self.store.hold(keys, cut)
            return
        held = self.store.hold(keys, cut)
        wanted = {g: self.needed(g, cut) for g, yes in enumerate(whole) if yes}
        assert held == [
            GroupPages(g, blocks.start, tuple(self.sealed[g, keys[b]] for b in blocks)) for g, blocks in wanted.items()
        ]
        self.holders.append(Holder([(g, extent) for g, _, extents in held for extent in extents]))

    @rule(path=PATHS, data=st.data())
    def read(self, path: str, data: st.DataObject) -> None:
        """Somebody copies objects of one group elsewhere, whatever else is here."""
        g = data.draw(st.integers(0, len(self.groups) - 1))
        keys = [key for key in chain(path) if (g, key) in self.sealed]
        extents = self.store.stores[g].borrow(keys)
        self.exempt.update((g, key) for key in keys)
        self.holders.append(Holder([(g, extent) for extent in extents]))

    @rule(data=st.data(), n=st.integers(1, 4))
    def fill(self, data: st.DataObject, n: int) -> None:
        """Somebody takes extents of one group for something else."""
        g = data.draw(st.integers(0, len(self.groups) - 1))
        extents = self.store.stores[g].allocate(min(n, self.store.stores[g].free))
        self.gone()
        assert self.used(g).isdisjoint(extents), "two owners"
        self.holders.append(Holder([(g, extent) for extent in extents]))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        pages = [GroupPages(g, 0, (-1, *(x for of, x in holder.extents if of == g))) for g in range(len(self.groups))]
        self.store.release(pages)

    @rule(path=PATHS, use=st.booleans())
    def touch(self, path: str, use: bool) -> None:
        self.store.touch(chain(path), use=use)

    @rule(path=PATHS, at=st.integers(0, 5))
    def remove(self, path: str, at: int) -> None:
        keys = chain(path)[at:]
        live = self.sealed.keys() | self.coming()
        here = [any((g, key) in live for g in range(len(self.groups))) for key in keys]
        assert self.store.remove(keys) == here
        self.drop(lambda key: key in keys)

    @rule()
    def drop_all(self) -> None:
        assert self.store.drop_all() == len({key for _, key in self.sealed})
        self.drop(lambda key: True)

    def drop(self, goes: Callable[[bytes], bool]) -> None:
        self.orphans |= {(g, key) for g, key in self.writing if goes(key)}
        for one in [one for one in self.sealed if goes(one[1])]:
            if one in self.hard:
                self.hard.remove(one)
            del self.sealed[one]
            self.exempt.discard(one)

    @rule()
    def trim(self) -> None:
        self.store.trim()
        went = self.gone()
        assert not self.exact or not any(went.values())

    @rule(path=PATHS)
    def pin(self, path: str) -> None:
        keys = chain(path)
        ends = {(g, keys[b]) for g in range(len(self.groups)) for b in self.needed(g, len(keys))} & self.sealed.keys()
        over = [
            sum(of == g for of, _ in ends | self.hard) > total * 60 // 100
            and any(of == g for of, _ in ends - self.hard)
            for g, total in enumerate(self.totals)
        ]
        if any(over):
            with pytest.raises(PinLimit):
                self.store.pin_hard(keys)
            return
        self.hard |= ends
        now = [
            any((g, key) in self.hard and keys.index(key) in self.needed(g, len(keys)) for g in range(len(self.groups)))
            for key in keys
        ]
        assert self.store.pin_hard(keys) == now

    @rule(path=PATHS)
    def pin_softly(self, path: str) -> None:
        keys = chain(path)
        ends = {(g, keys[b]) for g in range(len(self.groups)) for b in self.needed(g, len(keys))} & self.sealed.keys()
        self.exempt |= ends
        assert self.store.pin(keys, 10, now=0) == [
            any((g, key) in ends for g in range(len(self.groups))) for key in keys
        ]

    @rule(path=PATHS)
    def unpin(self, path: str) -> None:
        keys = chain(path)
        self.store.unpin(keys)
        freed = {one for one in self.hard if one[1] in keys}
        self.hard -= freed
        self.exempt |= freed

    @rule(limits=st.dictionaries(st.sampled_from(TAGS), st.integers(0, 5)))
    def quota(self, limits: dict[bytes, int]) -> None:
        self.quotas.limit(limits, [self.store.stores[0]])
        while self.quotas.enforce():
            pass
        self.after_seals()
        for tag, limit in limits.items():
            mine = [key for g, key in self.sealed if g == 0 and key[:4] == tag]
            assert not limit or len(mine) <= limit or not any(self.is_idle(0, key) for key in mine)

    @rule()
    def tell(self) -> None:
        changes = self.store.take_changes()
        assert len(changes.groups) == len(changes.sealed) and 0 not in changes.groups
        assert not set(changes.sealed) & set(changes.removed) and self.told.keys() >= set(changes.removed)
        for key in changes.removed:
            del self.told[key]
        self.told.update(zip(changes.sealed, changes.groups, strict=True))
        mine: dict[bytes, int] = {}
        for g, key in self.sealed:
            mine[key] = mine.get(key, 0) | 1 << g
        assert self.told == mine, "others believe something else"

    # ── always ───────────────────────────────────────────────────────────────────────────────────────────────

    @invariant()
    def it_is_whole(self) -> None:
        if not hasattr(self, "store"):
            return
        self.store.check_integrity()
        self.quotas.check_integrity([self.store.stores[0]])
        keys = sorted({key for _, key in self.sealed | self.writing})
        assert self.store.held(keys) == self.bits(self.sealed, keys)
        assert self.store.coming(keys) == self.bits(self.coming(), keys)
        assert sorted(self.store.keys()) == sorted({key for _, key in self.sealed})
        for g, store in enumerate(self.store.stores):
            assert set(store.keys()) == {key for of, key in self.sealed if of == g}
            assert set(store.written()) == {key for of, key in self.writing if of == g}
            assert store.unheld == self.totals[g] - len(self.used(g))
        mine = {k: sum(1 << g for g in range(len(self.groups)) if (g, k) in self.sealed) for k in keys}
        assert list(self.store.masks(keys)) == list(mine.values())

    @invariant()
    def what_no_hit_reaches_goes_first(self) -> None:
        if not hasattr(self, "store") or not self.chained:
            return
        for g, key in self.sealed:
            if not self.is_anchored(key) and self.is_idle(g, key) and (g, key) not in self.exempt:
                place = self.store.stores[g].place(key)
                assert place is not None and place < 0, f"group {g}: a block without its anchor stays"

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        for keys, masks in self.runs:
            for key, mask in zip(keys, masks, strict=True):
                self.store.abandon(key, mask)
        self.writing.clear()
        for holder in self.holders:
            for g, extent in holder.extents:
                self.store.stores[g].release([extent])
        self.store.unpin([key for _, key in self.hard])
        self.store.check_integrity()
        assert [store.stats.writing for store in self.store.stores] == [0] * len(self.groups)
        assert [store.free for store in self.store.stores] == self.totals, "something is held for ever"


SETTINGS = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_it_does_what_the_model_does() -> None:
    run_state_machine_as_test(GroupedModel, settings=SETTINGS)


class BeginsBeyondTheAnchor(GroupedStore):
    """What was begun of a block whose anchor finds no room is not abandoned."""

    def begin(self, keys: Sequence[bytes], masks: Sequence[Mask], start: int = 0) -> list[tuple[int | None, ...]]:
        begin, chained = super().begin, self._chained
        given = [begin(keys, [mask & 1 for mask in masks], start)]
        self._chained = False
        given += [begin(keys, [mask & 1 << g for mask in masks], start) for g in range(1, len(self.stores))]
        self._chained = chained
        return [tuple(given[g][i][g] for g in range(len(self.stores))) for i in range(len(masks))]


class TellsDifferences(GroupedStore):
    """A mask says what has changed."""

    def take_changes(self) -> Changes:
        masks: dict[bytes, int] = {}
        gone: dict[bytes, None] = {}
        for g, store in enumerate(self.stores):
            changes = store.take_changes()
            for key in changes.sealed:
                masks[key] = masks.get(key, 0) | 1 << g
            gone.update(dict.fromkeys(changes.removed))
        removed = tuple(key for key in gone if not self._mask(key))
        return Changes(tuple(masks), removed, bytes(masks.values()))


class CountsEveryGroup(GroupedStore):
    """A quota counts the objects of every group."""

    def __init__(self, groups: Sequence[CacheGroup], stores: Sequence[NodeStore], block_tokens: int) -> None:
        super().__init__(groups, stores, block_tokens)
        for store in self.stores[1:]:
            store.quotas = self._anchor.quotas


class EvictsTheAnchorAlone(GroupedStore):
    """Whom a quota evicts stays in the other groups."""

    def _evict_rest(self, key: bytes) -> None:
        """Does nothing."""


class RemovesTheAnchorAlone(GroupedStore):
    """A removed block stays in the other groups."""

    def remove(self, keys: Iterable[bytes]) -> list[bool]:
        return self._anchor.remove(keys)


class HoldsAllBlocks(GroupedStore):
    """A hit holds all blocks of every group."""

    def _needed(self, g: int, cut: int) -> range:
        return range(cut)


class HoldsWhatIsThere(GroupedStore):
    """What is no hit is held as far as it goes."""

    def hold(self, keys: Sequence[bytes], cut: int) -> list[GroupPages]:
        needed = [self._needed(g, cut) for g in range(len(self.stores))]
        return [
            GroupPages(g, of.start, tuple(store.hold(keys[of.start : of.stop])))
            for g, (store, of) in enumerate(zip(self.stores, needed, strict=True))
        ]


class WaitsForRemoved(GroupedStore):
    """What was removed while it was written counts as coming."""

    def coming(self, keys: Sequence[bytes]) -> list[int]:
        return [sum(store.writing(key) << i for i, key in enumerate(keys)) for store in self.stores]


class GoesOnOverDoubt(GroupedStore):
    """An object in doubt is abandoned, and what continues it sealed."""

    def end(self, keys: Sequence[bytes], masks: Sequence[Mask], bad: Collection[tuple[int, int]] = ()) -> list[Mask]:
        sealed = []
        for i in reversed(range(len(keys))):
            lost = masks[i] & sum(1 << g for g, at in bad if at == i)
            self.abandon(keys[i], lost)
            sealed.append(self.seal(keys[i], masks[i] & ~lost))
        return sealed[::-1]


class KeepsUseless(GroupedStore):
    """What no hit reaches any more waits for its turn."""

    def _tell_useless(self, key: bytes) -> None:
        """Does nothing."""


class UsesUseless(GroupedStore):
    """The end of a use is one of all blocks, with or without an anchor."""

    def touch(self, keys: Sequence[bytes], *, use: bool = True) -> None:
        for store in self.stores:
            store.touch(keys, use=use)


class NoForks(GroupedStore):
    """Every chain is the only one."""

    def _forks(self, key: bytes) -> bool:
        return False


class PinsByHalves(GroupedStore):
    """What the first store could pin stays pinned when another cannot."""

    def pin_hard(self, keys: Sequence[bytes]) -> list[bool]:
        pinned = [False] * len(keys)
        for store, needed in self._ends(keys):
            for block, yes in zip(needed, store.pin_hard(keys[needed.start :]), strict=True):
                pinned[block] |= yes
        return pinned


class LeavesLinks(GroupedStore):
    """Places in chains are never forgotten."""

    def _tidy(self, key: bytes) -> None:
        """Does nothing."""


class GivesTheFirstRoom(GroupedStore):
    """A window's first blocks get the room that there is."""

    def __init__(self, groups: Sequence[CacheGroup], stores: Sequence[NodeStore], block_tokens: int) -> None:
        super().__init__(groups, stores, block_tokens)
        whole = [CacheGroup(g.name, g.layers, g.layout, optional=g.optional) for g in groups]
        self._real, self._whole = self.groups, tuple(whole)

    def _needed(self, g: int, cut: int) -> range:
        return needed_blocks(self._real[g], self._block_tokens, cut * self._block_tokens)

    def begin(self, keys: Sequence[bytes], masks: Sequence[Mask], start: int = 0) -> list[tuple[int | None, ...]]:
        self.groups = self._whole
        given = super().begin(keys, masks, start)
        self.groups = self._real
        return given


BROKEN = [BeginsBeyondTheAnchor, CountsEveryGroup]


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.slow
def test_a_broken_store_is_found(broken: type[GroupedStore], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GroupedModel, "make", broken)
    found = settings(
        SETTINGS,
        max_examples=2_000,
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
        phases=[Phase.generate],
    )
    with pytest.raises((AssertionError, KeyError, IndexError)):
        run_state_machine_as_test(GroupedModel, settings=found)


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (EvictsTheAnchorAlone, alone.test_a_quota_counts_the_anchor_and_takes_the_whole_block),
        (TellsDifferences, alone.test_changes_tell_what_is_here_from_now_on),
        (RemovesTheAnchorAlone, alone.test_changes_tell_what_is_here_from_now_on),
        (HoldsAllBlocks, lambda: alone.test_a_hit_holds_what_the_next_token_sees(alone.window(6), 6, range(4, 6))),
        (HoldsWhatIsThere, lambda: alone.test_a_hit_holds_what_the_next_token_sees(alone.window(6), 6, range(4, 6))),
        (WaitsForRemoved, alone.test_bits_are_in_the_order_of_keys),
        (GoesOnOverDoubt, alone.test_a_block_in_doubt_ends_the_chain_but_an_optional_one_does_not),
        (KeepsUseless, alone.test_an_anchor_that_goes_makes_its_block_and_what_continues_it_useless),
        (UsesUseless, alone.test_what_lies_behind_the_end_goes_first),
        (NoForks, alone.test_where_chains_fork_a_hit_may_end),
        (PinsByHalves, alone.test_hard_pins_are_of_what_the_last_block_s_hit_needs),
        (LeavesLinks, alone.test_where_the_anchor_finds_no_room_nothing_is_begun),
        (GivesTheFirstRoom, alone.test_another_group_without_room_lacks_a_bit_and_keeps_the_last_blocks),
    ],
)
def test_a_broken_store_is_found_by_a_single_test(
    broken: type[GroupedStore], test: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    test()
    monkeypatch.setattr(alone, "GroupedStore", broken)
    with pytest.raises((AssertionError, KeyError, IndexError, pytest.fail.Exception)):
        test()
