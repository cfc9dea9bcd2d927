"""Cache groups in a block map: after every announcement, whatever was lost, doubled, reordered or cut, it says what a
plain set of (store, tier, key, group) says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvmesh.kvcache.announce import Announcement, Announcer
from kvmesh.kvcache.block_map import BlockMap, Verdict
from kvmesh.kvcache.store_stats import Changes
from kvmesh.services.conductor.prefixes.walks import WalkedMap
from kvmesh.services.store.block_map import BlockDirectory, MasterMap
from tests.support.plain_block_map import PlainBlockMap

KEYS = [bytes([9, 9, 9, 9, i]).ljust(16, b"k") for i in range(6)]
NAMES = ["a", "b", "a#ssd"]
TAG = KEYS[0][:4]
GROUPS = range(8)
PAIRS = {key: [key + bytes([group]) for group in GROUPS] for key in KEYS}

key_sets = st.lists(st.sampled_from(KEYS), max_size=5, unique=True).map(tuple)


@st.composite
def announcements(draw: st.DrawFn) -> Announcement:
    sealed, snapshot = draw(key_sets), draw(st.booleans())
    masks = bytes(draw(st.sampled_from([1, 2, 3, 5, 7])) for _ in sealed) if draw(st.booleans()) else b""
    return Announcement(
        draw(st.sampled_from(NAMES)),
        draw(st.integers(1, 2)),
        draw(st.integers(0, 6)),
        sealed,
        () if snapshot else draw(key_sets),
        snapshot,
        draw(st.integers(0, 2)) if snapshot else 0,
        draw(st.booleans()) if snapshot else False,
        masks,
    )


def in_pairs(said: Announcement) -> Announcement:
    """Returns the same about (key, group) as keys of their own: a mask is what is held from now on."""
    masks = said.groups or b"\1" * len(said.sealed)
    sealed = tuple(PAIRS[key][g] for key, mask in zip(said.sealed, masks, strict=True) for g in GROUPS if mask >> g & 1)
    removed = tuple(pair for key in said.removed + said.sealed for pair in PAIRS[key])
    return replace(said, sealed=sealed, removed=removed if said.sealed or said.removed else (), groups=b"")


def same(plain: PlainBlockMap, tested: BlockMap) -> None:
    tested.check_integrity()
    assert sorted(tested.stores()) == sorted(plain.shown)
    for name, store in plain.shown.items():
        masks = {key: sum(1 << g for g in GROUPS if PAIRS[key][g] in store.keys) for key in KEYS}
        held = {key for key, mask in masks.items() if mask}
        assert set(tested.keys_of(name)) == set(tested.held(name, tested.log_of(name))) == held
        assert (tested.groups(name, KEYS) or bytes(mask & 1 for mask in masks.values())) == bytes(masks.values())
        for group, slot in tested.slots(name).items():
            assert tested.store_of(slot) == name
            assert {key for key in KEYS if tested.mask(key) >> slot & 1} == {k for k in KEYS if masks[k] >> group & 1}
        assert tested.count(name) == sum(mask & 1 for mask in masks.values())
        assert (tested.seq(name), tested.incarnation(name)) == (store.seq, store.incarnation)
    for key in KEYS:
        assert sorted(tested.holders(key)) == sorted(n for n, s in plain.shown.items() if s.keys & {*PAIRS[key]})
    assert len(tested) >= len({pair[:16] for store in plain.shown.values() for pair in store.keys})


def forget(plain: PlainBlockMap, keys: Sequence[bytes]) -> None:
    pairs = {pair for key in keys for pair in PAIRS[key]}
    for store in plain.shown.values():
        store.keys -= pairs
        store.staged -= pairs


steps = st.lists(
    announcements()
    | st.tuples(st.sampled_from(NAMES), st.sampled_from([None, 1, 2]))
    | st.integers(0, 5)
    | st.lists(st.sampled_from(KEYS), max_size=2)
    | st.sampled_from([TAG, KEYS[1]]),
    max_size=30,
)


# A store of two groups that was dropped and is not swept has lost a forgotten key once.
DROPPED: list[object] = [
    Announcement("a", 1, 1, tuple(KEYS[:5]), snapshot=True, groups=b"\3\1\1\1\1"), ("a", None), [KEYS[0]]
]  # fmt: skip


@pytest.mark.parametrize("made", [BlockMap, WalkedMap, MasterMap])
@settings(max_examples=100)
@example(steps=DROPPED)
@given(steps=steps)
def test_equals_a_set_of_store_key_and_group_after_every_step(made: type[BlockMap], steps: list[object]) -> None:
    plain, tested = PlainBlockMap(), made()
    if isinstance(tested, MasterMap):
        tested.first_keys = 0
        tested.watch(TAG)
    for step in steps:
        match step:
            case Announcement():
                assert tested.apply(step) is plain.apply(in_pairs(step))
            case (str() as name, incarnation):
                tested.drop(name, incarnation)
                plain.drop(name, incarnation)
            case int():
                tested.sweep(step)
            case list() if isinstance(tested, MasterMap):
                gone = tested.forget(step)
                assert all(len(set(lost)) == len(lost) for lost in gone.values())
                forget(plain, step)
            case bytes() if isinstance(tested, MasterMap):
                tested.forget_prefix(step)
                forget(plain, [key for key in KEYS if key.startswith(step)])
        if isinstance(tested, MasterMap):
            anchors = [len({p for p in s.keys if p[-1] == 0}) for n, s in plain.shown.items() if "#" not in n]
            assert tested.tagged(TAG) >= sum(anchors)
            if not tested.sweeping:
                same(plain, tested)
                assert tested.tagged(TAG) == sum(anchors)
        else:
            same(plain, tested)
    while tested.sweep(7):
        pass
    same(plain, tested)
    for name in NAMES:
        tested.drop(name)
    while tested.sweep(100):
        pass
    assert (len(tested), tested.unswept, len(tested._masks)) == (0, 0, 0)
    tested.check_integrity()


class Truth:
    """A node's blocks with their masks, as an announcer's source."""

    def __init__(self) -> None:
        self.held: dict[bytes, int] = {}
        self._told: dict[bytes, int] = {}

    def take_changes(self) -> Changes:
        told, self._told = self._told, dict(self.held)
        news = {key: mask for key, mask in self.held.items() if told.get(key) != mask}
        return Changes(tuple(news), tuple(key for key in told if key not in self.held), bytes(news.values()))

    def keys(self) -> Sequence[bytes]:
        return list(self.held)

    def masks(self, keys: Sequence[bytes]) -> bytes:
        return bytes(self.held[key] for key in keys)


events = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from(KEYS), st.integers(0, 7))
    | st.sampled_from(["send", "lose", "unheard", "twice", "late", "watch"]),
    min_size=1,
    max_size=60,
)


@settings(max_examples=100)
@given(events=events, cut=st.integers(1, 4))
def test_what_is_lost_doubled_late_or_cut_leaves_the_map_behind_and_never_wrong(events: list[object], cut: int) -> None:
    """Two stores announce to a master, which relays to a map as the conductor has it. In the end both are right."""
    truths = [Truth(), Truth()]
    says = [Announcer(name, 1, truth, max_keys=cut) for name, truth in zip("ab", truths, strict=True)]
    master, watcher, late = BlockDirectory(max_store_blocks=100), WalkedMap(), list[Announcement]()

    def deliver(said: Announcement) -> Verdict:
        verdict, relays = master.apply(said)
        for relayed in relays:
            watcher.apply(relayed)
        return verdict

    for event in [*events, *["send"] * 40]:
        if isinstance(event, tuple):
            which, key, mask = event
            truths[which].held.pop(key, None)
            if mask:
                truths[which].held[key] = mask
            continue
        if event == "late":
            for said in reversed(late):
                deliver(said)
        if event == "watch":  # a watcher that begins now
            watcher = WalkedMap()
            for name in "ab":
                for part in master.read(name, 1, lambda: True):
                    watcher.apply(part)
        for announcer in says:
            said = announcer.next(force=True)
            if said is None:
                continue
            late.append(said)
            if event == "lose":
                announcer.failed()
                continue
            verdict = deliver(said)
            if event == "twice":
                verdict = deliver(said) and verdict
            if event == "unheard":
                announcer.failed()
            else:
                announcer.acked(verdict is Verdict.GAP)
    for name, truth in zip("ab", truths, strict=True):
        for told in (master.map, watcher):
            assert {k: m for k, m in zip(KEYS, told.groups(name, KEYS) or _anchors(told, name), strict=True) if m} == (
                truth.held
            )
    for key in KEYS:
        ids = master.store_ids(key)
        masks = master.groups(key, ids) or b"\1" * len(ids)
        assert dict(zip(ids, masks, strict=True)) == {
            name: truth.held[key] for name, truth in zip("ab", truths, strict=True) if key in truth.held
        }


def _anchors(told: BlockMap, name: str) -> bytes:
    return bytes(key in told.held(name, key) for key in KEYS)


def test_masks_that_are_not_one_a_key_are_refused_before_anything_changes() -> None:
    blocks = BlockMap()
    with pytest.raises(ValueError, match="2 masks for 1 sealed"):
        blocks.apply(Announcement("a", 1, 1, (KEYS[0],), groups=b"\1\1"))
    assert blocks.stores() == []


def test_a_directory_cuts_masks_with_their_keys() -> None:
    directory = BlockDirectory(max_store_blocks=2)
    said = directory.bounded(Announcement("a", 1, 1, tuple(KEYS[:3]), groups=bytes([3, 2, 1])))
    assert (said.sealed, said.groups, said.removed) == (tuple(KEYS[:2]), bytes([3, 2]), (KEYS[2],))
    said = directory.bounded(Announcement("a", 1, 1, tuple(KEYS[:3]), snapshot=True, groups=bytes([3, 2, 1])))
    assert (said.sealed, said.groups) == (tuple(KEYS[:2]), bytes([3, 2]))


def test_a_store_without_groups_beside_one_with_them_is_as_it_was() -> None:
    blocks = BlockMap()
    blocks.apply(Announcement("plain", 1, 1, (KEYS[0],)))
    blocks.apply(Announcement("grouped", 1, 1, (KEYS[0], KEYS[1]), groups=bytes([2, 3])))
    assert blocks.groups("plain", KEYS[:2]) == b"" and blocks.groups("grouped", KEYS[:3]) == bytes([2, 3, 0])
    assert blocks.slots("plain").keys() == {0} and blocks.slots("grouped").keys() == {0, 1}
    assert blocks.holders(KEYS[0]) == ["plain", "grouped"] and blocks.holders(KEYS[1]) == ["grouped"]
    assert len(blocks) == 2 and blocks.slots("nobody") == {}


def test_parts_of_an_earlier_life_are_no_part_of_a_group_that_is_first_heard_of_in_a_later_part() -> None:
    """The earlier life has told a part of group 1 and ended, and nothing was swept since."""
    blocks = BlockMap()
    blocks.apply(Announcement("a", 1, 1, (KEYS[0],), (), True, 0, True, groups=b"\2"))
    blocks.apply(Announcement("a", 2, 1, (KEYS[1],), (), True, 0, True, groups=b"\1"))
    last = Announcement("a", 2, 1, (KEYS[2],), (), True, 1, False, groups=b"\3")
    assert blocks.apply(last) is Verdict.APPLIED
    assert blocks.groups("a", KEYS[:3]) == bytes([0, 1, 3])
    blocks.check_integrity()
