from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.conductor.prefix import PrefixIndex


def chain(name: str, blocks: int) -> list[bytes]:
    return [f"{name}-{i}".encode().ljust(16, b".") for i in range(blocks)]


def test_the_longest_prefix_of_each_slot() -> None:
    index = PrefixIndex()
    a, b, c = (index.open(100) for _ in range(3))
    keys = chain("x", 10)
    index.confirm(a, keys[:4])
    index.confirm(b, keys)
    index.confirm(c, keys[3:])  # without the head it is worth nothing
    everyone = 1 << a | 1 << b | 1 << c
    assert index.match(keys, everyone) == {a: 4, b: 10, c: 0}
    assert index.match(keys[:2], 1 << b) == {b: 2}
    assert index.match([], everyone) == {a: 0, b: 0, c: 0}
    assert index.match(keys, 0) == {}


def test_a_pending_block_counts_and_goes_when_its_request_does() -> None:
    index = PrefixIndex()
    slot = index.open(100)
    keys = chain("x", 6)
    index.place(slot, keys[:4], "first")
    index.place(slot, keys, "second")
    assert index.match(keys, 1 << slot) == {slot: 6}
    index.withdraw(slot, keys, "second")
    assert index.match(keys, 1 << slot) == {slot: 4}
    index.confirm(slot, keys[:4])
    index.withdraw(slot, keys[:4], "first")
    assert index.match(keys, 1 << slot) == {slot: 4}


def test_capacity_bounds_a_slot_and_evicts_tails_before_heads() -> None:
    index = PrefixIndex()
    slot = index.open(8)
    old, new = chain("old", 6), chain("new", 4)
    index.confirm(slot, old)
    index.confirm(slot, new)
    assert index.blocks(slot) == 8
    assert index.match(new, 1 << slot) == {slot: 4}
    assert index.match(old, 1 << slot) == {slot: 4}
    index.confirm(slot, chain("long", 50))
    assert index.match(chain("long", 50), 1 << slot) == {slot: 8}


def test_closing_forgets_everything_and_frees_the_slot() -> None:
    index = PrefixIndex()
    a, b = index.open(10), index.open(10)
    keys = chain("x", 5)
    index.confirm(a, keys)
    index.confirm(b, keys[:2])
    index.close(a)
    assert index.match(keys, 1 << a | 1 << b) == {a: 0, b: 2}
    assert len(index) == 2
    assert index.open(10) == a
    assert index.match(keys, 1 << a) == {a: 0}


class Model:
    """The same, slowly: one ordered dict an instance."""

    def __init__(self, capacity: int) -> None:
        self.held: OrderedDict[bytes, str | None] = OrderedDict()
        self.capacity = capacity

    def put(self, keys: list[bytes], owner: str | None) -> None:
        for key in reversed(keys[: self.capacity]):
            known = self.held.pop(key, "absent")
            self.held[key] = owner if known == "absent" or owner is None else known
        while len(self.held) > self.capacity:
            self.held.popitem(last=False)

    def depth(self, keys: list[bytes]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.held), len(keys))


prefixes = st.builds(lambda name, n: chain(name, n), st.sampled_from("xyz"), st.integers(0, 6))
moves = st.tuples(st.sampled_from(["place", "confirm", "withdraw"]), st.integers(0, 2), prefixes, st.sampled_from("pq"))


@given(st.lists(moves, max_size=40), st.lists(st.integers(1, 8), min_size=3, max_size=3))
def test_it_agrees_with_a_plain_model(steps: list[tuple[str, int, list[bytes], str]], capacities: list[int]) -> None:
    index = PrefixIndex()
    slots = [index.open(c) for c in capacities]
    models = [Model(c) for c in capacities]
    for move, which, keys, request in steps:
        slot, model = slots[which], models[which]
        if move == "place":
            index.place(slot, keys, request)
            model.put(keys, request)
        elif move == "confirm":
            index.confirm(slot, keys)
            model.put(keys, None)
        else:
            index.withdraw(slot, keys, request)
            for key in keys:
                if model.held.get(key) == request:
                    del model.held[key]
        for name in "xyz":
            keys = chain(name, 6)
            expected = {s: m.depth(keys) for s, m in zip(slots, models, strict=True)}
            assert index.match(keys, sum(1 << s for s in slots)) == expected
        assert [index.blocks(s) for s in slots] == [len(m.held) for m in models]
        assert len(index) == len(set().union(*(m.held for m in models)))
    for slot in slots:
        index.close(slot)
    assert len(index) == 0


@pytest.mark.parametrize("count", [1, 100])
def test_slots_are_small_numbers(count: int) -> None:
    index = PrefixIndex()
    assert [index.open(1) for _ in range(count)] == list(range(count))
