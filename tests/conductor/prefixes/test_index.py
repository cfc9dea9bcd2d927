"""The index against models that are as plain as can be."""

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.kvcache.announce import Announcement
from kvmesh.services.conductor.prefixes.index import Index, PrefixPlace, bits
from kvmesh.services.conductor.prefixes.pending import Pending
from tests.support.conductor.brain import chain

NOW, UNTIL = 50.0, 100.0


def coming(pending: Pending, slot: int, keys: tuple[bytes, ...]) -> int:
    return next((i for i, key in enumerate(keys) if not pending.mask(key) >> slot & 1), len(keys))


def test_a_pending_block_counts_and_goes_when_its_request_does() -> None:
    pending = Pending()
    slot, keys = pending.open(100), chain("x", 6)
    pending.place(slot, keys[:4], "first")
    pending.place(slot, keys, "second")
    assert coming(pending, slot, keys) == 6
    pending.withdraw(slot, keys, "second")
    assert coming(pending, slot, keys) == 4
    pending.confirm(slot, keys[:4], UNTIL)
    pending.withdraw(slot, keys[:4], "first")
    assert coming(pending, slot, keys) == 4


def test_confirmed_blocks_leave_when_announced_or_after_a_while() -> None:
    pending = Pending()
    slot, keys = pending.open(100), chain("x", 6)
    pending.place(slot, keys, "r")
    pending.confirm(slot, keys, UNTIL)
    pending.arrived(slot, keys[4:])
    assert coming(pending, slot, keys) == 4
    pending.confirm(slot, keys[:2], UNTIL + 10)
    pending.expire(UNTIL - 1)
    assert coming(pending, slot, keys) == 4
    pending.expire(UNTIL)
    assert coming(pending, slot, keys) == 2
    pending.expire(UNTIL + 10)
    assert len(pending) == 0
    pending.place(slot, keys, "r2")
    pending.expire(1e9)  # what was not confirmed waits for its request
    assert coming(pending, slot, keys) == 6


def test_capacity_bounds_a_slot_and_drops_tails_before_heads() -> None:
    pending = Pending()
    slot = pending.open(8)
    old, new = chain("old", 6), chain("new", 4)
    pending.confirm(slot, old, UNTIL)
    pending.confirm(slot, new, UNTIL)
    assert pending.blocks(slot) == 8
    assert coming(pending, slot, new) == 4
    assert coming(pending, slot, old) == 4
    pending.place(slot, chain("long", 50), "r")
    assert coming(pending, slot, chain("long", 50)) == 8
    pending.expire(UNTIL)
    assert pending.blocks(slot) == 8


def test_closing_forgets_everything_and_frees_the_slot() -> None:
    pending = Pending()
    a, b = pending.open(10), pending.open(10)
    keys = chain("x", 5)
    pending.place(a, keys, "r")
    pending.place(b, keys[:2], "r")
    pending.close(a)
    assert (coming(pending, b, keys), len(pending)) == (2, 2)
    assert pending.open(10) == a
    assert coming(pending, a, keys) == 0


@pytest.mark.parametrize("count", [1, 100])
def test_slots_are_small_numbers(count: int) -> None:
    pending = Pending()
    assert [pending.open(1) for _ in range(count)] == list(range(count))


class Slow:
    """One slot of `Pending`: an ordered dict of (request or None, until)."""

    def __init__(self, capacity: int) -> None:
        self.held: OrderedDict[bytes, tuple[str | None, float]] = OrderedDict()
        self.capacity = capacity

    def put(self, keys: tuple[bytes, ...], owner: str | None, until: float) -> None:
        for key in reversed(keys[: self.capacity]):
            before = self.held.pop(key, None)
            self.held[key] = (owner, until) if before is None or owner is None else before
        while len(self.held) > self.capacity:
            self.held.popitem(last=False)

    def keep(self, good: object) -> None:
        self.held = OrderedDict((k, v) for k, v in self.held.items() if good(k, *v))  # type: ignore[operator]


prefixes = st.builds(chain, st.sampled_from("xyz"), st.integers(0, 6))
moves = st.tuples(
    st.sampled_from(["place", "confirm", "withdraw", "arrived", "expire"]),
    st.integers(0, 2),
    prefixes,
    st.sampled_from("pq"),
    st.integers(0, 3),
)


@given(st.lists(moves, max_size=40), st.lists(st.integers(1, 8), min_size=3, max_size=3))
def test_pending_agrees_with_a_plain_model(
    steps: list[tuple[str, int, tuple[bytes, ...], str, int]], capacities: list[int]
) -> None:
    pending, now = Pending(), 0.0
    slots = [pending.open(c) for c in capacities]
    models = [Slow(c) for c in capacities]
    for move, which, keys, request, pause in steps:
        now += pause
        slot, model = slots[which], models[which]
        if move == "place":
            pending.place(slot, keys, request)
            model.put(keys, request, 0)
        elif move == "confirm":
            pending.confirm(slot, keys, now + 4)
            model.put(keys, None, now + 4)
        elif move == "withdraw":
            pending.withdraw(slot, keys, request)
            model.keep(lambda k, o, u, keys=keys, r=request: not (k in keys and o == r))
        elif move == "arrived":
            pending.arrived(slot, keys)
            model.keep(lambda k, o, u, keys=keys: k not in keys)
        else:
            pending.expire(now)
            for one in models:
                one.keep(lambda k, o, u, now=now: o is not None or u > now)
        for s, m in zip(slots, models, strict=True):
            expected = {k for name in "xyz" for k in chain(name, 6) if k in m.held}
            assert {k for name in "xyz" for k in chain(name, 6) if pending.mask(k) >> s & 1} == expected
            assert pending.blocks(s) == len(m.held)
        assert len(pending) == len(set().union(*(m.held for m in models)))
    for slot in slots:
        pending.close(slot)
    assert len(pending) == 0


# ── announced and pending together ────────────────────────────────────────────────────────────────


def test_a_survey_ends_at_the_first_block_that_nobody_holds() -> None:
    index = Index()
    slot = index.pending.open(10)
    keys = chain("x", 10)
    index.hear(Announcement("a", 1, 1, keys[:4]), None, None)
    index.hear(Announcement("b", 1, 1, keys[2:6] + keys[8:]), None, None)
    index.place(("c", 1), slot, keys[:7], "r")
    survey = index.survey(keys)
    assert [(r.first, r.end) for r in survey.runs] == [(0, 2), (2, 4), (4, 6), (6, 7)]
    a, b, c = (index.place_of(("a", 1)), index.place_of(("b", 1)), index.place_of(("c", 1), slot))
    assert [survey.depth(p) for p in (a, b, c)] == [4, 0, 7]
    assert survey.reach(a.sealed) == 4
    assert survey.reach(b.sealed) == 0
    assert survey.reach(a.sealed | b.sealed) == 6
    assert survey.reach(b.sealed, 3) == 6
    assert survey.reach(b.sealed, 7) == 7
    assert survey.everyone == a.sealed | b.sealed
    assert index.survey(()).runs == ()
    assert index.survey(chain("y", 3)).runs == ()


def test_blocks_count_in_whatever_order_they_are_told() -> None:
    """A conductor that begins anew may hear of the later blocks of a chain before it hears of the earlier ones."""
    index, keys = Index(), chain("x", 8)
    index.hear(Announcement("a", 1, 1, keys[4:]), None, None)
    place = index.place_of(("a", 1))
    assert index.survey(keys).depth(place) == 0, "nothing reaches what lies behind a gap"
    assert index.survey(keys[4:]).depth(place) == 4
    index.hear(Announcement("a", 1, 2, keys[2:4]), None, None)
    index.hear(Announcement("a", 1, 3, keys[:2]), None, None)
    assert index.survey(keys).depth(place) == 8


def test_only_that_very_life_counts() -> None:
    index = Index()
    index.hear(Announcement("a", 5, 1, chain("x", 4)), None, None)
    assert index.count(("a", 5)) == 4
    for other in (4, 6):
        assert index.count(("a", other)) == 0
        assert index.place_of(("a", other)) == PrefixPlace(0)
    index.drop(("a", 4))
    assert index.count(("a", 5)) == 4
    index.drop(("a", 5))
    assert index.count(("a", 5)) == 0


def test_the_truth_takes_the_place_of_promises() -> None:
    index = Index()
    slot, life, keys = index.pending.open(10), ("a", 1), chain("x", 6)
    index.place(life, slot, keys, "r")
    assert index.hear(Announcement("a", 1, 1, keys[:2]), life, slot)
    assert index.pending.blocks(slot) == 4
    for part in (0, 1):  # in two parts: what the first one held is known only with the last
        cut = keys[:3] if part == 0 else keys[3:5]
        assert index.hear(Announcement("a", 1, 2, cut, snapshot=True, part=part, more=part == 0), life, slot)
    assert index.pending.blocks(slot) == 1
    index.confirm(life, slot, keys, UNTIL)
    assert index.pending.blocks(slot) == 1
    assert not index.hear(Announcement("a", 1, 9, keys), life, slot)


class World:
    """Node stores that change and announce; every state that an announcement leads to is remembered."""

    def __init__(self) -> None:
        self.state: dict[tuple[str, int], set[bytes]] = {}
        self.seq: dict[tuple[str, int], int] = {}
        self.history: dict[tuple[str, int, int], set[bytes]] = {}
        self.said: list[Announcement] = []

    def change(self, life: tuple[str, int], keys: tuple[bytes, ...], kind: str) -> None:
        state = self.state.setdefault(life, set())
        sealed = set(keys) - state if kind == "seal" else set()
        removed = set(keys) & state if kind == "remove" else set()
        state |= sealed
        state -= removed
        if kind == "snapshot":
            sealed = set(state)
        elif not sealed | removed:
            return
        self.seq[life] = seq = self.seq.get(life, 0) + 1
        self.history[(*life, seq)] = set(state)
        self.said.append(Announcement(*life, seq, tuple(sealed), tuple(removed), kind == "snapshot"))


lives = st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(1, 3))
told = st.one_of(
    st.tuples(st.sampled_from(["seal", "seal", "seal", "remove", "snapshot"]), lives, prefixes),
    st.tuples(st.sampled_from(["seal", "seal", "seal", "remove", "snapshot"]), lives, prefixes),
    st.tuples(st.just("repeat"), st.integers(0, 50), st.just(())),
    st.tuples(st.sampled_from(["die", "lose"]), lives, st.just(())),
    st.tuples(st.sampled_from(["place", "confirm", "withdraw"]), lives, prefixes),
)


def _hear(index: Index, announcement: Announcement, slots: dict[str, int]) -> None:
    index.hear(announcement, (announcement.store_id, announcement.incarnation), slots[announcement.store_id])


def _act(index: Index, world: World, slots: dict[str, int], move: str, who: object, keys: tuple[bytes, ...]) -> None:
    match move, who:
        case "repeat", int():  # also of an earlier life, also long ago
            if world.said:
                _hear(index, world.said[who % len(world.said)], slots)
        case "die", (str(), int()):
            index.drop(who)  # type: ignore[arg-type]
        case "lose", (str(), int()):  # nobody hears of this change
            world.change(who, chain("x", 3), "seal")  # type: ignore[arg-type]
        case "place" | "confirm" | "withdraw", (str() as name, int()):
            if move == "place":
                index.place(who, slots[name], keys, "r")  # type: ignore[arg-type]
            elif move == "confirm":
                index.confirm(who, slots[name], keys, UNTIL)  # type: ignore[arg-type]
            else:
                index.pending.withdraw(slots[name], keys, "r")
        case _, (str(), int()):
            before = len(world.said)
            world.change(who, keys, move)  # type: ignore[arg-type]
            for announcement in world.said[before:]:
                _hear(index, announcement, slots)


@given(st.lists(told, max_size=40))
def test_the_index_equals_brute_force(steps: list[tuple[str, object, tuple[bytes, ...]]]) -> None:
    """Whatever is lost, repeated, reordered or dies: it shows one state of one life of each store, and no other's."""
    index, world = Index(), World()
    slots = {name: index.pending.open(1000) for name in "abc"}
    for move, who, keys in steps:
        _act(index, world, slots, move, who, keys)
        index.truth.check_integrity()
        for name in "abc":
            shown = index.truth.incarnation(name)
            held = world.history.get((name, shown, index.truth.seq(name)), set())
            for life in ((name, i) for i in (1, 2, 3)):
                mine = held if life[1] == shown else set()
                assert index.count(life) == len(mine)
                place = index.place_of(life, slots[name])
                for prompt in (chain(p, 6) for p in "xyz"):
                    soon = {key for key in prompt if index.pending.mask(key) & place.coming}
                    depth = next((i for i, key in enumerate(prompt) if key not in mine | soon), len(prompt))
                    assert index.survey(prompt).depth(place) == depth
    for life, state in world.state.items():
        if life[1] >= index.truth.incarnation(life[0]):  # a snapshot repairs everything
            world.change(life, (), "snapshot")
            _hear(index, world.said[-1], slots)
            if index.truth.incarnation(life[0]) == life[1]:
                assert set(index.truth.keys_of(life[0])) == state


@given(st.integers(0, 2**70))
def test_bits(mask: int) -> None:
    assert sum(1 << b for b in bits(mask)) == mask
    assert bits(mask) == sorted(bits(mask))
