"""Orders of eviction: each policy against lists sorted afresh; broken ones are found; what an operation costs."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvmesh.errors import ConfigError
from kvmesh.kvcache.eviction import MOST_USES, POLICIES, EvictionOrder, LengthOrder, LfuOrder, LruOrder, make_order
from tests.support.naive_order import NaiveOrder
from tests.support.tracing import lines

SETTINGS = settings(max_examples=50, stateful_step_count=60, deadline=None)
KEYS = st.integers(0, 5)
LENGTHS = st.sampled_from([1, 2, 5, 40])
BLOCK_TOKENS = 8192  # so that few blocks are a long prompt
Order = EvictionOrder[int]


class Machine(RuleBasedStateMachine):
    """Six keys. `made` makes the real order of a policy."""

    made: Callable[[str, int], Order] = staticmethod(make_order)
    policies: tuple[str, ...] = POLICIES

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.policy = data.draw(st.sampled_from(self.policies))
        self.real, self.naive = self.made(self.policy, BLOCK_TOKENS), NaiveOrder(self.policy, BLOCK_TOKENS)

    @rule(key=KEYS, length=LENGTHS, uses=st.integers(0, 2))
    def used(self, key: int, length: int, uses: int) -> None:
        """As a store does it: admitted at first, then used and idle."""
        for order in (self.real, self.naive):
            if key not in self.naive.entries:
                self.real.admit(key, length)
                self.naive.admit(key, length)
            for _ in range(uses):
                order.use(key, length)
            order.mark_idle(key)

    @rule(key=KEYS)
    def taken(self, key: int) -> None:
        for order in (self.real, self.naive):
            order.mark_busy(key)

    @rule(keys=st.lists(KEYS, max_size=6), use=st.booleans())
    def touched(self, keys: list[int], use: bool) -> None:
        for order in (self.real, self.naive):
            order.touch(keys, use=use)

    @rule(key=KEYS)
    def forgotten(self, key: int) -> None:
        for order in (self.real, self.naive):
            order.forget(key)

    @rule(keys=st.lists(KEYS, max_size=3))
    def preferred(self, keys: list[int]) -> None:
        for key in keys:
            for order in (self.real, self.naive):
                order.evict_first(key)

    @rule(keys=st.lists(KEYS, max_size=4), elsewhere=st.booleans())
    def set_replicated(self, keys: list[int], elsewhere: bool) -> None:
        for key in [key for key in keys if key in self.naive.entries]:
            for order in (self.real, self.naive):
                order.set_replicated(key, elsewhere)

    @rule(keys=st.lists(KEYS, max_size=4), protected=st.sampled_from([True, True, False]))
    def protected(self, keys: list[int], protected: bool) -> None:
        for key in [key for key in keys if key in self.naive.entries]:
            for order in (self.real, self.naive):
                order.protect(key, protected)

    @rule(n=st.sampled_from([0, 1, 1, 2, 9]), protected=st.booleans())
    def evicted(self, n: int, protected: bool) -> None:
        assert self.real.evict(n, protected=protected) == self.naive.evict(n, protected)

    @invariant()
    def agrees(self) -> None:
        self.real.check_integrity()
        order = self.naive.order()
        assert list(self.real) == order
        assert len(self.real) == len(order)
        assert self.real.protected == len(order) - len(self.naive.order(protected=False))
        assert [key in self.real for key in range(6)] == [key in order for key in range(6)]

    def teardown(self) -> None:
        if hasattr(self, "real"):
            assert self.real.evict(99) == self.naive.evict(99)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.slow
def test_it_does_what_the_words_say(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "policies", (policy,))
    run_state_machine_as_test(Machine, settings=SETTINGS)


# ── broken ones ──────────────────────────────────────────────────────────────────────────────────────


class FirstIn(LruOrder[int]):
    """A use leaves a block where it is."""

    def mark_idle(self, key: int) -> None:
        if key not in self:
            super().mark_idle(key)


class Undying(LengthOrder[int]):
    """What was dear once stays: no age."""

    ages = False


class Remembers(LfuOrder[int]):
    """Counts outlive eviction."""

    def admit(self, key: int, length: int = 1) -> None:
        self._uses.setdefault(key, 0)

    def forget(self, key: int) -> None:
        EvictionOrder.forget(self, key)


class TrustsItsHeap(LengthOrder[int]):
    """The queue whose head was lowest once is taken to be lowest still."""

    def _first(self, protected: bool) -> int | None:
        for heads in self._heads:
            for _, number in heads:
                if self._queues[number] and not self._preferred:
                    return next(iter(self._queues[number]))
        return super()._first(protected)


class ForgetsLengths(LengthOrder[int]):
    """The last prompt's length counts, not the longest one's."""

    def use(self, key: int, length: int = 1) -> None:
        if key in self._known:
            uses = self._known[key] % (MOST_USES + 1)
            self._known[key] = length * (MOST_USES + 1) + min(uses + 1, MOST_USES)


class DeafToCopies(LruOrder[int]):
    """A copy elsewhere changes nothing until the next use."""

    def set_replicated(self, key: int, elsewhere: bool) -> None:
        (self._replicated.add if elsewhere else self._replicated.discard)(key)


class LiftsCopies(LengthOrder[int]):
    """What has a copy is placed as if used now, even where that is higher."""

    def set_replicated(self, key: int, elsewhere: bool) -> None:
        super().set_replicated(key, elsewhere)
        if key in self and key not in self._preferred:
            self.mark_idle(key)


class SparesNobody(LruOrder[int]):
    """Without others at hand it takes protected ones, asked or not."""

    def evict(self, n: int, *, protected: bool = True) -> list[int]:
        return super().evict(n, protected=True)


BROKEN = [FirstIn, Remembers, ForgetsLengths, DeafToCopies, SparesNobody]


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.slow
def test_a_broken_order_is_found(broken: type[Order], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "made", staticmethod(lambda policy, block_tokens: broken(block_tokens)))
    policy = {LruOrder: "lru", LfuOrder: "lfu", LengthOrder: "length"}[broken.__mro__[1]]
    monkeypatch.setattr(Machine, "policies", (policy,))
    found = settings(
        SETTINGS,
        max_examples=3_000,
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
        phases=[Phase.generate],
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Machine, settings=found)


# ── one rule each ────────────────────────────────────────────────────────────────────────────────────


def filled(policy: str, keys: str, uses: str = "") -> EvictionOrder[str]:
    order: EvictionOrder[str] = make_order(policy)
    for key in keys:
        order.admit(key)
        order.use(key)
        order.mark_idle(key)
    for key in uses:
        order.use(key)
        order.mark_idle(key)
    return order


def test_lru_and_lfu_differ_where_they_should() -> None:
    assert list(filled("lru", "abc", "aab")) == ["c", "a", "b"]
    assert list(filled("lfu", "abcd", "aabd")) == ["c", "b", "d", "a"]


def test_a_long_prompt_outlives_a_short_one_but_not_for_ever() -> None:
    order: EvictionOrder[str] = make_order("length")
    for key, length in (("long", 1024), ("short", 1), ("short too", 1)):
        order.admit(key, length)
        order.mark_idle(key)
    assert list(order) == ["short", "short too", "long"]
    for turn in range(9):  # each goes as soon as it has come, until the long one's turn comes
        order.admit(str(turn), 1)
        order.mark_idle(str(turn))
        if order.evict(1) == ["long"]:
            break
    else:
        pytest.fail("the long prompt's block is still there")


def test_what_was_cooled_goes_without_ageing_the_others() -> None:
    order: EvictionOrder[str] = make_order("length")
    for key, length in (("long", 1024), *((str(turn), 1) for turn in range(99))):
        order.admit(key, length)
        order.mark_idle(key)
    for turn in range(99):
        order.evict_first(str(turn))
        assert order.evict(1) == [str(turn)]
    order.admit("short")
    order.mark_idle("short")
    assert list(order) == ["short", "long"]


def test_a_copy_elsewhere_lets_a_block_go_earlier_and_not_at_any_price() -> None:
    order = filled("lru", "abcd")
    order.set_replicated("d", True)
    assert list(order) == ["d", "a", "b", "c"]
    assert order.evict(1) == ["d"]
    for turn in "efghij":  # a turnover later, a copied block that is used again and again still stays
        order.set_replicated("c", True)
        order.use("c")
        order.mark_idle("c")
        order.admit(turn)
        order.mark_idle(turn)
        assert order.evict(1) != ["c"]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_was_told_outlasts_a_use(policy: str) -> None:
    order = filled(policy, "abcd")
    order.set_replicated("d", True)
    order.protect("a", True)
    for key in "ad":
        order.mark_busy(key)
        order.mark_idle(key)
    assert list(order) == ["d", "b", "c", "a"]
    order.touch("da")
    assert list(order)[-1] == "a"


def test_a_copied_block_that_stayed_in_its_place_has_half_the_price_after_its_next_use() -> None:
    order = filled("lru", "abc")
    assert order.evict(1) == ["a"]
    order.admit("d")
    order.mark_idle("d")
    order.set_replicated("b", True)  # b would go first anyway, and stays where it is
    assert list(order) == ["b", "c", "d"]
    order.touch("b")
    assert list(order) == ["c", "b", "d"]


def test_a_copy_never_lets_a_block_stay_longer() -> None:
    """The cost is halved, but the age has grown since."""
    order: EvictionOrder[str] = make_order("length")
    for key, length in (("long", 1024), ("shorter", 512)):
        order.admit(key, length)
        order.mark_idle(key)
    assert order.evict(1) == ["shorter"]
    order.admit("new")
    order.mark_idle("new")
    assert list(order) == ["long", "new"]
    order.set_replicated("long", True)
    assert list(order) == ["long", "new"]


def test_a_block_that_is_used_lets_those_of_other_lengths_go_first() -> None:
    order: EvictionOrder[str] = make_order("length")
    for key, length in (("first", 1), ("used", 1), ("longer", 512)):
        order.admit(key, length)
        order.mark_idle(key)
    assert order.evict(1) == ["first"]
    order.touch(["used"])
    assert list(order) == ["longer", "used"] and order.evict(1) == ["longer"]


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (Undying, test_a_long_prompt_outlives_a_short_one_but_not_for_ever),
        (TrustsItsHeap, test_a_block_that_is_used_lets_those_of_other_lengths_go_first),
        (LiftsCopies, test_a_copy_never_lets_a_block_stay_longer),
    ],
)
def test_what_chance_finds_late_is_found_by_a_single_test(
    broken: type[LengthOrder[str]], test: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "make_order", lambda policy: broken())
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test()


def test_unknown_policies_are_named() -> None:
    with pytest.raises(ConfigError, match="eviction='fifo': choose one of lru, lfu, length"):
        make_order("fifo")
    with pytest.raises(ConfigError, match="block_tokens=0"):
        make_order("length", 0)


# ── cost ─────────────────────────────────────────────────────────────────────────────────────────────


def churn(order: Order, blocks: int, rounds: int) -> None:
    """Uses, news of copies, evictions and new blocks, in a full cache of `blocks`."""
    rng = random.Random(1)
    for new in range(blocks, blocks + rounds):
        used = rng.randrange(blocks)
        order.touch((used,))
        if used in order:
            order.set_replicated(used, new % 3 == 0)
        order.evict(1)
        order.admit(new, 1 + new % 200)
        order.mark_idle(new)


def cost(make: Callable[[], Order], blocks: int) -> float:
    """Lines of one round."""
    order = make()
    for key in range(blocks):
        order.admit(key, 1 + key % 200)
        order.mark_idle(key)
    return lines(lambda: churn(order, blocks, 2_000)) / 2_000


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.slow
def test_an_operation_costs_the_same_at_any_size(policy: str) -> None:
    costs = [cost(lambda: make_order(policy), blocks) for blocks in (10_000, 100_000)]
    assert max(costs) < 1.2 * min(costs), f"lines for one round at 10^4, 10^5 blocks: {costs}"


class Sorts(LruOrder[int]):
    """Looks at every block to find the first one."""

    def _first(self, protected: bool) -> int | None:
        first = None
        for queue in self._queues.values():
            for key, priority in queue.items():
                if first is None or priority < first[0]:
                    first = (priority, key)
        return first and first[1]


def test_an_order_that_grows_dearer_is_found() -> None:
    small, big = (cost(Sorts, blocks) for blocks in (20, 200))
    assert big > 1.2 * small
