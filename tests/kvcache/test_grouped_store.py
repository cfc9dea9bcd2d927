"""GroupedStore, rule by rule: what a hit holds, what is begun when room is short, what goes first and what a quota or a
block in doubt takes with it. All rules together against a model: test_grouped_store_model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvmesh.errors import PinLimit
from kvmesh.kvcache.cache_groups import CacheGroup, CacheKind, GroupPages, PrefixHit
from kvmesh.kvcache.grouped_store import GroupedStore, written_mask
from kvmesh.kvcache.node_store import NodeStore, bits_of
from kvmesh.kvcache.page_pool import PageInvariantError
from kvmesh.kvcache.quotas import NoTagQuotas, TagQuotas
from kvmesh.kvcache.store_stats import Changes
from tests.kvcache.test_cache_groups import group
from tests.kvcache.test_node_store import chain

BLOCK = 4
ALL = group(CacheKind.ALL, 0, "all")
EXTRA = group(CacheKind.ALL, 0, "extra", optional=True)
STATE = group(CacheKind.STATE, 3, "state")


def window(tokens: int) -> CacheGroup:
    return group(CacheKind.WINDOW, tokens, f"window{tokens}")


def chunk(tokens: int) -> CacheGroup:
    return group(CacheKind.CHUNK, tokens, f"chunk{tokens}")


def made(*groups: CacheGroup, totals: Sequence[int] = (), quotas: TagQuotas | None = None, **kw: Any) -> GroupedStore:
    totals = totals or [32] * len(groups)
    stores = [
        NodeStore(total, **{"high_percent": 100, **kw}, quotas=NoTagQuotas() if g else quotas or TagQuotas())
        for g, total in enumerate(totals)
    ]
    return GroupedStore(groups, stores, BLOCK)


def fill(store: GroupedStore, path: str, holes: Sequence[tuple[int, int]] = (), every: int = 0) -> None:
    """Seals a chain, but for its `holes` (group, block), and says that its request has ended; `every` -1: a snapshot of
    each block."""
    keys = chain(path)
    masks = [
        sum(1 << g for g in range(len(store.groups)) if (g, block) not in holes)
        & (every or written_mask(store.groups, block))
        for block in range(len(keys))
    ]
    begun = [sum(1 << g for g, x in enumerate(given) if x is not None) for given in store.begin(keys, masks)]
    store.end(keys, begun)
    store.touch(keys)
    store.check_integrity()


def first_to_go(store: GroupedStore, g: int, n: int) -> list[int]:
    """The lengths of the chains at whose ends the blocks lie that group g's store evicts first."""
    return [len(key.rstrip(b".")) for key in store.stores[g].coldest(n)]


PATH = "abcdefgh"


@pytest.mark.parametrize(
    ("of", "cut", "blocks"),
    [
        (window(1), 6, range(6, 6)),
        (window(4), 6, range(5, 6)),
        (window(5), 6, range(5, 6)),
        (window(6), 6, range(4, 6)),  # the token at 24 sees 19: block 4
        (window(100), 6, range(6)),
        (chunk(8), 6, range(6, 6)),  # 24 begins a chunk
        (chunk(8), 5, range(4, 5)),
        (chunk(10), 6, range(5, 6)),  # from 20 on
        (chunk(11), 6, range(5, 6)),  # from 22 on, in block 5
        (chunk(9), 6, range(4, 6)),  # from 18 on, in block 4
        (STATE, 6, range(5, 6)),
        (STATE, 3, range(2, 3)),
        (STATE, 0, range(0)),
    ],
)
def test_a_hit_holds_what_the_next_token_sees(of: CacheGroup, cut: int, blocks: range) -> None:
    store, keys = made(ALL, of), chain(PATH)
    fill(store, PATH, every=-1)
    assert store.peek(keys, cut).blocks == cut
    held = store.hold(keys, cut)
    wanted = store.stores[1].extents_of(keys[blocks.start : blocks.stop])
    assert held == [GroupPages(0, 0, tuple(range(cut))), GroupPages(1, blocks.start, tuple(wanted))]
    assert store.stores[1].stats.idle == store.stores[1].sealed_blocks - len(blocks)
    store.release(held)
    # Without one of them it is none; what lies before them is not asked for.
    for block in range(cut):
        lacking = made(ALL, of)
        fill(lacking, PATH, holes=[(1, block)], every=-1)
        assert lacking.wanted(keys, cut) == [2 if b == block and b in blocks else 0 for b in range(len(keys))]
        assert (lacking.peek(keys, cut).blocks == cut) == (block not in blocks), block
        if block in blocks:
            with pytest.raises(PageInvariantError, match=f"group {of.name} lacks some"):
                lacking.hold(keys, cut)
            assert lacking.stores[0].stats.idle == 8, "nothing is held"


def test_snapshots_lie_where_they_were_written() -> None:
    store, keys = made(ALL, STATE), chain(PATH)
    fill(store, PATH)
    assert store.held(keys) == [0b11111111, 0b100100]
    assert store.peek(keys, 8) == PrefixHit(6, (8, 6), (1,), ())
    (given,) = store.begin(keys[:7], [2], start=6)  # an answer ended after block 6: no multiple of three
    assert given[0] is None and given[1] is not None
    assert store.seal(keys[6], 2) == 2
    assert store.peek(keys, 8).blocks == 7, "whoever wrote it wrote a usable one"
    assert [written_mask((ALL, STATE), block) for block in range(6)] == [1, 1, 3, 1, 1, 3]


def test_an_optional_group_is_held_whole_or_not_at_all() -> None:
    store, keys = made(ALL, window(5), EXTRA), chain(PATH)
    fill(store, PATH, holes=[(2, 3)])
    assert store.peek(keys, 8) == PrefixHit(8, (8, 8, 3), (), (2,))
    assert [pages.group for pages in store.hold(keys, 8)] == [0, 1]
    assert [pages.group for pages in store.hold(keys, 3)] == [0, 1, 2]
    assert store.wanted(keys, 8) == [0, 0, 0, 4, 0, 0, 0, 0]


def test_where_the_anchor_finds_no_room_nothing_is_begun() -> None:
    store, keys = made(ALL, window(5), totals=(3, 8)), chain("abcdef")
    given = store.begin(keys, [3] * 6)
    assert [one.count(None) for one in given] == [0, 0, 0, 2, 2, 2] and store.coming(keys) == [0b111, 0b111]
    for key in keys[:3]:
        store.abandon(key, 3)
    assert store.coming(keys) == [0, 0] and [one.unheld for one in store.stores] == [3, 8]
    store.check_integrity()


def test_another_group_without_room_lacks_a_bit_and_keeps_the_last_blocks() -> None:
    store, keys = made(ALL, window(9), totals=(8, 3)), chain("abcdef")
    given = store.begin(keys, [3] * 6)
    assert [one[1] is not None for one in given] == [False, False, False, True, True, True]
    assert (
        store.end(keys, [sum(1 << g for g, x in enumerate(one) if x is not None) for one in given]) == [1] * 3 + [3] * 3
    )
    assert list(store.masks(keys)) == [1, 1, 1, 3, 3, 3]
    assert store.peek(keys, 6).blocks == 6, "two blocks are all that it needs"


def test_room_never_comes_from_what_the_chain_s_end_needs() -> None:
    store = made(ALL, window(9), totals=(8, 3))
    fill(store, "abcd")
    assert store.held(chain("abcd")) == [0b1111, 0b1110]
    store.begin(chain("abcde"), [0] * 4 + [3])
    assert store.held(chain("abcd"))[1] == 0b1100, "block b, which no hit of five blocks needs"


def test_a_block_in_doubt_ends_the_chain_but_an_optional_one_does_not() -> None:
    store, keys = made(ALL, window(5), EXTRA), chain("abcd")
    store.begin(keys, [7] * 4)
    assert store.end(keys, [7] * 4, bad={(1, 2), (2, 0)}) == [3, 7, 0, 0]
    assert list(store.masks(keys)) == [3, 7, 0, 0] and store.peek(keys, 4).blocks == 2
    assert [one.stats.writing for one in store.stores] == [0, 0, 0]
    store.check_integrity()


def test_what_lies_behind_the_end_goes_first() -> None:
    store = made(ALL, window(6), STATE)
    fill(store, "abcdefg")
    # A hit of six blocks (the last snapshot) needs blocks e and f; g may be of use when its snapshot comes.
    assert first_to_go(store, 1, 4) == [1, 2, 3, 4]
    assert first_to_go(store, 2, 1) == [3], "a later snapshot is here"
    assert first_to_go(store, 0, 7) == [7, 6, 5, 4, 3, 2, 1], "a chain that is kept whole goes from its tail"
    store.touch(chain("abcd"))  # a shorter prompt: c, its snapshot, is what its hit of three blocks needs
    assert first_to_go(store, 2, 2) == [6, 3]


def test_where_chains_fork_a_hit_may_end() -> None:
    store = made(ALL, window(6), STATE)
    fill(store, "abcdefgh")
    assert first_to_go(store, 1, 4) == [1, 2, 3, 4]
    store.release(store.hold(chain("abc"), 3))  # another prompt hits there, and goes on after d
    fill(store, "abcdXYZUVW")
    assert {1, 4, 5, 6, 7} == set(first_to_go(store, 1, 5)), "b and c are what a hit of three blocks needs"
    assert first_to_go(store, 2, 1) == [6], "and the snapshot after c"


def test_an_anchor_that_goes_makes_its_block_and_what_continues_it_useless() -> None:
    store, keys = made(ALL, window(100)), chain("xyz")
    fill(store, "abcd")
    fill(store, "xyz")  # the last that was used
    store.stores[0].on_evicted_one = None  # not for a quota
    assert store.stores[0].evict_one(keys[0], spared=True)
    assert store.stores[1].coldest(3) == keys[::-1], "all of xyz, from its tail"
    assert store.stores[0].coldest(2) == keys[:0:-1]


def test_an_anchor_that_does_not_keep_all_makes_nothing_useless() -> None:
    store, keys = made(window(9), window(5)), chain("abcdef")
    fill(store, "abcdef")
    store.stores[0].on_evicted_one = None
    assert store.stores[0].evict_one(keys[0], spared=True)
    assert store.peek(keys, 6).blocks == 6 and store.peek(keys, 2).blocks == 0


def test_a_quota_counts_the_anchor_and_takes_the_whole_block() -> None:
    quotas = TagQuotas()
    store = made(ALL, window(100), EXTRA, quotas=quotas)
    fill(store, "aaaaaa")  # the tag of the last three
    tag = chain("aaaaaa")[-1][:4]
    assert quotas.count(tag) == 3
    held = store.stores[2].hold(chain("aaaaaa")[5:])
    quotas.limit({tag: 2}, [store.stores[0]])
    assert not quotas.enforce()
    assert list(store.masks(chain("aaaaaa"))) == [7] * 5 + [0] and quotas.count(tag) == 2
    assert store.stores[2].stats.tombstones == 1, "its reader goes on"
    store.stores[2].release(held)
    store.stores[2].pin_hard(chain("aaaaa")[4:])
    quotas.limit({tag: 1}, [store.stores[0]])
    assert not quotas.enforce()
    assert list(store.masks(chain("aaaaaa"))) == [7] * 4 + [4, 0], "what is pinned stays"
    store.check_integrity()
    with pytest.raises(ValueError, match="again"):
        GroupedStore((ALL, EXTRA), [NodeStore(1, quotas=quotas) for _ in range(2)], BLOCK)


def test_hard_pins_are_of_what_the_last_block_s_hit_needs() -> None:
    store, keys = made(ALL, window(6), totals=(10, 3), pinned_percent=80), chain("abcd")
    fill(store, "abcd")
    assert store.pin_hard(keys) == [True] * 4
    assert [one.pinned_hard(keys) for one in store.stores] == [[True] * 4, [False, False, True, True]]
    store.unpin(keys)
    tight = made(ALL, window(9), totals=(10, 2), pinned_percent=60)
    fill(tight, "abcd")
    with pytest.raises(PinLimit):
        tight.pin_hard(keys)
    assert tight.unpin(keys) == [False] * 4, "none is pinned"


def test_changes_tell_what_is_here_from_now_on() -> None:
    store, (a, b, c) = made(ALL, window(100)), chain("abc")
    fill(store, "abc", holes=[(1, 1)])
    changes = store.take_changes()
    assert dict(zip(changes.sealed, changes.groups, strict=True)) == {a: 3, b: 1, c: 3} and changes.removed == ()
    store.stores[1].evict_one(a, spared=True)
    store.begin([a, b, c], [0, 2, 0])
    store.seal(b, 2)
    store.remove([c])
    changes = store.take_changes()
    assert dict(zip(changes.sealed, changes.groups, strict=True)) == {a: 1, b: 3} and changes.removed == (c,)
    assert store.take_changes() == Changes()
    assert (store.drop_all(), set(store.take_changes().removed)) == (2, {a, b})


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="1 stores for 2 groups"):
        GroupedStore((ALL, EXTRA), [NodeStore(1)], BLOCK)
    with pytest.raises(ValueError, match="2 masks for 3 keys from 0 on"):
        made(ALL).begin(chain("abc"), [1, 1])
    with pytest.raises(PageInvariantError, match="never begun"):
        made(ALL).seal(chain("a")[0], 1)


def test_bits_are_in_the_order_of_keys() -> None:
    assert bits_of([]) == 0 and bits_of([True, False, False]) == 4
    store, keys = made(ALL), chain("abc")
    store.begin(keys, [1] * 3)
    store.seal(keys[1], 1)
    store.remove(keys[2:])
    assert (store.held(keys), store.coming(keys)) == ([0b010], [0b001])
