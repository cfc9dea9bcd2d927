"""Allowances of tags: the tag's own coldest blocks go, nobody else's, and never what is in use."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvmesh.kvcache import quotas as quotas_module
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.quotas import STEP, TagQuotas
from tests.support.tracing import lines

A, B = b"aaaa", b"bbbb"


def key(tag: bytes, number: int) -> bytes:
    return tag + number.to_bytes(12, "big")


def stores(*totals: int) -> tuple[TagQuotas, list[NodeStore]]:
    quotas = TagQuotas()
    return quotas, [NodeStore(total, high_percent=100, quotas=quotas) for total in totals]


def seal(store: NodeStore, *keys: bytes) -> None:
    for one, extent in zip(keys, store.begin(keys), strict=True):
        if extent is not None:
            store.seal(one)


def test_a_tag_above_its_allowance_loses_its_own_coldest() -> None:
    quotas, (first, second) = stores(16, 16)
    seal(first, *(key(A, n) for n in range(4)), *(key(B, n) for n in range(4)))
    seal(second, key(A, 9))
    first.touch([key(A, 0)])
    quotas.limit({A: 3}, [first, second])
    assert quotas.count(A) == 5, "told, not enforced yet"
    assert not quotas.enforce()
    assert quotas.count(A) == 3 and first.holds(key(A, 0)) and not first.holds(key(A, 1))
    seal(second, key(A, 10))
    assert quotas.count(A) == 3 and second.holds(key(A, 10)) and quotas.count(B) == 4
    quotas.limit({}, [first, second])
    seal(second, *(key(A, n) for n in range(20, 26)))
    assert quotas.count(A) == 9 and first.stats.evicted + second.stats.evicted == 3


def test_used_ones_and_pinned_ones_go_last() -> None:
    quotas, (store,) = stores(16)
    seal(store, *(key(A, n) for n in range(4)))
    quotas.limit({A: 4}, [store])
    assert not quotas.enforce(), "all of it is in order at once"
    held = store.hold([key(A, 0)])
    store.pin([key(A, 1)], 10, now=0)
    store.pin_hard([key(A, 2)])
    seal(store, key(A, 4))
    assert not store.holds(key(A, 3)), "the only one that nobody wants to keep"
    seal(store, key(A, 5))
    assert not store.holds(key(A, 4))
    held += store.hold([key(A, 5)])
    seal(store, key(A, 6))
    assert not store.holds(key(A, 1)), "a soft pin goes when nothing else does"
    held += store.hold([key(A, 6)])
    seal(store, key(A, 7))
    assert quotas.count(A) == 5 and store.holds(key(A, 7)), "all others are in use: above it for a while"
    store.release(held)
    quotas.enforce()
    assert quotas.count(A) == 4 and store.holds(key(A, 2))


class Model(RuleBasedStateMachine):
    """Two stores of one node; tags a and b may be limited, c never is."""

    make: type[TagQuotas] = TagQuotas

    @initialize()
    def begin(self) -> None:
        self.quotas = self.make()
        self.stores = [NodeStore(12, high_percent=100, quotas=self.quotas) for _ in range(2)]
        self.held: list[tuple[NodeStore, list[int]]] = []
        self.limits: dict[bytes, int] = {}

    def sealed(self, tag: bytes) -> int:
        return sum(one[:4] == tag for store in self.stores for one in store.keys())  # noqa: SIM118

    def evictable(self, tag: bytes) -> list[bytes]:
        return [one for store in self.stores for one in store.coldest(99) if one[:4] == tag]

    @rule(which=st.integers(0, 1), tag=st.sampled_from([A, B, b"cccc"]), number=st.integers(0, 5))
    def seal(self, which: int, tag: bytes, number: int) -> None:
        store, new = self.stores[which], key(tag, number)
        if store.free <= len(self.evictable(tag)) + 2 or store.holds(new):
            return
        others = {other: self.sealed(other) for other in (A, B, b"cccc") if other != tag}
        full = store.usage.unheld == 0
        seal(store, new)
        assert store.holds(new), "the new one went"
        if not full:
            assert {other: self.sealed(other) for other in others} == others, "somebody else's went"
        if self.sealed(tag) > self.limits.get(tag, 99):
            assert self.evictable(tag) in ([], [new]), "above the allowance, though some could go"

    @rule(which=st.integers(0, 1), tag=st.sampled_from([A, B]), number=st.integers(0, 5))
    def hold(self, which: int, tag: bytes, number: int) -> None:
        self.held.append((self.stores[which], self.stores[which].hold([key(tag, number)])))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.held:
            store, extents = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            store.release(extents)

    @rule(which=st.integers(0, 1), tag=st.sampled_from([A, B]), numbers=st.lists(st.integers(0, 5), max_size=3))
    def others(self, which: int, tag: bytes, numbers: list[int]) -> None:
        keys = [key(tag, number) for number in numbers]
        self.stores[which].touch(keys)
        self.stores[which].pin(keys[:1], 5, now=0)
        self.stores[which].remove(keys[2:])

    @rule(limits=st.dictionaries(st.sampled_from([A, B]), st.integers(0, 4)))
    def limit(self, limits: dict[bytes, int]) -> None:
        self.limits = {tag: blocks for tag, blocks in limits.items() if blocks}
        self.quotas.limit(limits, self.stores)
        assert self.quotas.limits == self.limits
        self.quotas.enforce()
        for tag, blocks in self.limits.items():
            assert self.sealed(tag) <= blocks or not self.evictable(tag)

    @rule()
    def rank_dies(self) -> None:
        self.stores[0].drop_all()

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "stores"):
            self.quotas.check_integrity(self.stores)
            for store in self.stores:
                store.check_integrity()


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


class Generous(TagQuotas):
    """A single block is no quota."""

    def _enforce(self, tag: bytes, spare: object) -> bool:
        store = next((store for _, store in self._lanes[tag]), None)
        return bool(store) and super()._enforce(tag, spare) if self._limits[tag] > 1 else False  # type: ignore[arg-type]


def test_the_model_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "make", Generous)
    found = settings(
        max_examples=300, stateful_step_count=30, deadline=None, derandomize=True, database=None,
        phases=[Phase.generate], report_multiple_bugs=False,
    )  # fmt: skip
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Model, settings=found)


def test_a_seal_costs_the_same_however_many_blocks_there_are() -> None:
    def cost(blocks: int) -> int:
        quotas, (store,) = stores(blocks + 100)
        seal(store, *(key(A, n) for n in range(blocks)))
        quotas.limit({A: blocks}, [store])
        return lines(lambda: seal(store, *(key(A, blocks + n) for n in range(50))))

    assert cost(10_000) == cost(1_000)


def drained(quotas: TagQuotas) -> int:
    """How many calls it took."""
    calls = 1
    while quotas.enforce():
        calls += 1
    return calls


def test_a_new_limit_costs_the_same_at_once_however_many_blocks_there_are() -> None:
    """What is looked at is bounded in every call, and blocks go in the order of their use once all are looked at."""

    def most(blocks: int) -> int:
        quotas, (store,) = stores(blocks)
        seal(store, *(key(A, n) for n in range(blocks)))
        order = store.coldest(blocks)
        costs = [lines(lambda: quotas.limit({A: blocks - 100}, [store]))]
        while quotas.count(A) > blocks - 100:
            costs.append(lines(quotas.enforce))
        assert store.coldest(blocks) == order[100:], "others than the coldest went"
        return max(costs)

    assert most(16_000) < 1.3 * most(8_000)


class Slow(Model):
    """The same while tags are being put in order, a key or two at a time."""

    @rule(limits=st.dictionaries(st.sampled_from([A, B]), st.integers(0, 4)))
    def limit(self, limits: dict[bytes, int]) -> None:
        self.limits = {}  # nothing has to go before all is in order
        self.quotas.limit(limits, self.stores)

    @rule()
    def enforce(self) -> None:
        self.quotas.enforce()

    @rule()
    def enforce_all(self) -> None:
        drained(self.quotas)
        self.limits = dict(self.quotas.limits)
        for tag, blocks in self.limits.items():
            assert self.sealed(tag) <= blocks or not self.evictable(tag)

    def teardown(self) -> None:
        if hasattr(self, "stores"):
            self.enforce_all()
            self.agrees()


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas_module, "LOOK", 2)


@pytest.mark.usefixtures("slowly")
class TestSlow(Slow.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@pytest.mark.usefixtures("slowly")
def test_what_is_used_while_a_tag_is_put_in_order_goes_last() -> None:
    quotas, (store,) = stores(32)
    seal(store, *(key(A, n) for n in range(8)))
    quotas.limit({A: 5}, [store])
    assert quotas.enforce() and quotas.count(A) == 8, "nothing goes before all are known"
    store.touch([key(A, 0)])
    store.remove([key(A, 5)])
    seal(store, key(A, 8))
    assert quotas.count(A) == 8
    drained(quotas)
    assert {n for n in range(9) if store.holds(key(A, n))} == {0, 4, 6, 7, 8}
    quotas.check_integrity([store])


def test_a_great_excess_goes_in_steps() -> None:
    quotas, (store,) = stores(1000)
    seal(store, *(key(A, n) for n in range(600)))
    quotas.limit({A: 100}, [store])
    calls = drained(quotas)
    assert quotas.count(A) == 100 and calls == -(-500 // STEP)


def test_what_cannot_go_is_not_tried_without_end() -> None:
    quotas, (store,) = stores(100)
    seal(store, *(key(A, n) for n in range(20)))
    held = store.hold([key(A, n) for n in range(20)])
    quotas.limit({A: 3}, [store])
    assert not quotas.enforce() and quotas.count(A) == 20
    store.release(held)
    assert drained(quotas) == 1 and quotas.count(A) == 3
