"""The table of masks in native code says what a dict says, whatever is told, dropped and swept."""

import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.kvcache.announce import Announcement, snapshot_parts
from kvmesh.kvcache.block_map import BlockMap
from kvmesh.native import library, mask_table
from kvmesh.services.conductor.prefixes import walks

pytestmark = pytest.mark.skipif(bool(library.why_not()), reason=f"no native code: {library.why_not()}")

KEYS = tuple(bytes([n % 7, *[n] * 15]) for n in range(200))
STORES = ("a", "b", "c", "d")
ranges = st.tuples(st.integers(0, 199), st.integers(1, 120))
word = st.tuples(
    st.sampled_from(STORES), st.sampled_from(("add", "remove", "snapshot", "life", "drop", "sweep")), ranges
)


def table(salt: int = 1) -> mask_table.MaskTable:
    native = mask_table.functions()
    assert native is not None
    return mask_table.MaskTable(native, salt)


class Told:
    """The same words for both maps."""

    def __init__(self) -> None:
        self.maps = BlockMap(), walks.WalkedMap()
        self.lives = dict.fromkeys(STORES, 1)
        self.seqs = dict.fromkeys(STORES, 0)

    def say(self, store: str, kind: str, keys: tuple[bytes, ...]) -> None:
        if kind == "sweep":
            assert len({m.sweep(len(keys) // 2) for m in self.maps}) == 1
            return
        if kind == "drop":
            assert len({m.drop(store) for m in self.maps}) == 1
            self.seqs[store] = 0
            return
        if kind == "life":
            self.lives[store] += 1
            self.seqs[store] = 0
        self.seqs[store] += 1
        about = store, self.lives[store], self.seqs[store]
        if kind == "snapshot":
            words = list(snapshot_parts(*about, keys))
        else:
            words = [Announcement(*about, *((), keys) if kind == "remove" else (keys, keys[:3]))]
        for one in words:
            assert len({m.apply(one) for m in self.maps}) == 1

    def check(self) -> None:
        plain, walked = self.maps
        assert walked._table is not None
        assert walked.masks(KEYS) == plain.masks(KEYS)
        assert [walked._table.get(key) for key in KEYS] == [plain._masks.get(key, 0) for key in KEYS]
        assert sorted(walked._table.values()) == sorted(plain._masks.values())
        assert walked._mask_bytes == plain._mask_bytes
        assert (len(walked), walked.replicas, walked.unswept) == (len(plain), plain.replicas, plain.unswept)
        for store in STORES:
            assert walked.keys_of(store) == plain.keys_of(store)
            assert walked.log_of(store) == plain.log_of(store)
            assert walked.held(store, b"".join(KEYS)) == plain.held(store, b"".join(KEYS))
        walked.check_integrity()


@settings(deadline=None)
@given(st.lists(word, max_size=25))
def test_a_map_says_the_same_with_a_table(words: list[tuple[str, str, tuple[int, int]]]) -> None:
    told = Told()
    for store, kind, (first, count) in words:
        told.say(store, kind, KEYS[first : first + count])
    told.check()


def test_keys_shared_by_few_objects_stay_shared() -> None:
    found = walks.WalkedMap()
    for number in range(12):  # small ints are one object in any case
        found.apply(Announcement(f"other{number}", 1, 1, ()))
    for store in "ab":
        found.apply(Announcement(store, 1, 1, KEYS))
    assert len({id(mask) for mask in found._masks.values()}) == 1
    found.apply(Announcement("b", 1, 2, (), KEYS))
    assert {id(mask) for mask in found._masks.values()} == {id(found._stores["a"].bit)}, "the store's own int"


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1 << 40), st.integers(0, 3))
def test_tables_grow_and_shrink(seed: int, salt: int) -> None:
    """Sizes come and go; keys that differ in their last bits alone collide, and wrap around the end."""
    rng, found, want = random.Random(seed), table(salt), dict[bytes, int]()
    for _ in range(12):
        some = [rng.getrandbits(rng.choice((8, 10, 128))).to_bytes(16, "big") for _ in range(rng.randint(1, 600))]
        if rng.random() < 0.5:
            new, _ = found.add(b"".join(some), 5, lambda mask: mask)
            assert new == b"".join(key for key in dict.fromkeys(some) if key not in want)
            want.update(dict.fromkeys(some, 5))
        else:
            some += rng.sample(sorted(want), len(want) * 9 // 10)
            gone, _ = found.take(b"".join(some), lambda _: 0)
            assert gone == b"".join(key for key in dict.fromkeys(some) if want.pop(key, 0))
        assert len(found) == len(want)
        assert all(map(found.get, want))
        assert found.held(b"".join(some), 4) == b"".join(key for key in some if key in want)
        assert found.memory_bytes <= 24 * max(129, 8 * len(want) + 8) + 64


def test_masks_turn_once_for_neighbours() -> None:
    found, asked = table(), list[int]()
    found.add(b"".join(KEYS), 1 << 70, lambda mask: mask)

    def turned(mask: int) -> int:
        asked.append(mask)
        return mask | 1

    changed, tally = found.add(b"".join(KEYS), 1, turned)
    assert changed == b"".join(KEYS)
    assert asked == [1 << 70]
    assert [(keys, after) for keys, _, after in tally if keys] == [(len(KEYS), 1 << 70 | 1)]


def test_what_a_callback_raises_comes_through() -> None:
    found = table()
    found.add(KEYS[0], 1, lambda mask: mask)
    with pytest.raises(ZeroDivisionError):
        found.take(KEYS[0], lambda mask: mask // 0)
    assert found.get(KEYS[0]) == 1


def test_a_table_lets_its_masks_go() -> None:
    mask, found = 1 << 90, table()
    before = sys.getrefcount(mask)
    found.add(b"".join(KEYS), mask, lambda one: one)
    assert sys.getrefcount(mask) == before + len(KEYS)
    found.take(b"".join(KEYS[:50]), lambda _: 0)
    assert sys.getrefcount(mask) == before + len(KEYS) - 50
    del found
    assert sys.getrefcount(mask) == before
