"""Names at the master: what one operation costs, however many there are, and names that are bound anew."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from typing import Any

import pytest

from kvmesh.kvcache.announce import Announcement
from kvmesh.services.store.domain import Announce, NodeJoined, NodeRole, RegisteredNode
from kvmesh.services.store.policy.names import Names
from kvmesh.services.store.policy.reconciliation import NODE_S, Unannounced
from kvmesh.services.store.policy.store_policy import PolicyLimits
from kvmesh.services.store.servicer import found
from kvmesh.services.store.state import MasterState

SIZES = (1_000, 100_000)


def key(i: int) -> bytes:
    return b"tag1" + i.to_bytes(12, "big")


class _View(KeysView[Any]):
    """A dict's own view takes all of its keys out of a set that it is subtracted from."""

    def __rsub__(self, other: Any) -> set[Any]:
        left = set(other)
        for name in self:
            left.discard(name)
        return left


class Counted(OrderedDict[Any, Any]):
    """Counts every entry that somebody looks at."""

    looks = 0

    def __getitem__(self, name: Any) -> Any:
        self.looks += 1
        return super().__getitem__(name)

    def get(self, name: Any, default: Any = None) -> Any:
        self.looks += 1
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self.looks += 1
        return super().__contains__(name)

    def __setitem__(self, name: Any, value: Any) -> None:
        self.looks += 1
        super().__setitem__(name, value)

    def __iter__(self) -> Iterator[Any]:
        for name in super().__iter__():
            self.looks += 1
            yield name

    def keys(self) -> Any:
        return _View(self)

    def items(self) -> Any:
        return ItemsView(self)

    def values(self) -> Any:
        return ValuesView(self)


def full(count: int, most: int) -> tuple[Names, Counted]:
    """So many names whose blocks nobody holds, of at most `most`."""
    names = Names(lambda key: False, lambda key, seq: False, grace_s=30.0, most=most)
    names.load(((("n", f"old-{i}"), key(i), 0) for i in range(count)), 0.0)
    counted = names._bound = Counted(names._bound)
    counted.looks = 0
    return names, counted


def looks(work: Callable[[Names], None], room: int = 10) -> list[int]:
    """At how many entries `work` looks with few names and with many."""
    found = []
    for count in SIZES:
        names, counted = full(count, count + room)
        work(names)
        found.append(counted.looks)
    return found


def bind_new(names: Names) -> None:
    new = names.bind("n", [("new", key(7))], 0, 1.0)[1]
    names.bound(new, 0, 1.0)


def bind_again(names: Names) -> None:
    assert names.bind("n", [("old-5", key(7))], 0, 1.0)[0] == [key(5)]


def resolve(names: Names) -> None:
    assert names.resolve("n", ["old-5", "none"]) == [key(5), None]


def unbind(names: Names) -> None:
    names.unbound(names.ends("n", ["old-5"], [key(5)]))


@pytest.mark.parametrize("work", [bind_new, bind_again, resolve, unbind])
def test_an_operation_on_a_name_looks_at_few_entries_however_many_there_are(work: Callable[[Names], None]) -> None:
    few, many = looks(work)
    assert few == many <= 12, f"{work.__name__}: {few} entries of 10^3, {many} of 10^5"


def test_room_for_a_name_costs_no_look_at_all_of_them() -> None:
    few, many = looks(lambda names: names.bind("n", [("new", key(7))], 0, 60.0) and None, room=0)
    assert few == many <= 40, f"{few} entries of 10^3, {many} of 10^5"


def test_a_bind_keeps_one_record_however_many_names_there_are() -> None:
    for count in SIZES:
        policy = MasterState(lease_s=60, stall_s=60, limits=PolicyLimits(max_names=count + 10)).policy
        policy.names.load(((("n", f"old-{i}"), key(i), 0) for i in range(count)), 0.0)
        for replace in (False, True):
            (write,) = policy.bind("n", [("new", key(7))], 1.0, replace=replace)[1]
            assert len(write.puts) == 1 and not write.drops


# ── replaced ──────────────────────────────────────────────────────────────────────────────────────


def test_a_name_that_is_replaced_stands_for_the_old_key_until_the_new_one_is_kept() -> None:
    policy = MasterState(lease_s=60, stall_s=60).policy
    policy.bind("n", [("x", key(1))], 0.0)[2]()
    keys, (write,), bound = policy.bind("n", [("x", key(2)), ("y", key(3))], 1.0, replace=True)
    assert keys == [key(2), key(3)] and len(write.puts) == 2 and not write.drops, "one write, nothing in between"
    assert policy.names.resolve("n", ["x", "y"]) == [key(1), None]
    bound()
    assert policy.names.resolve("n", ["x", "y"]) == [key(2), key(3)]
    assert policy.bind("n", [("x", key(2))], 2.0, replace=True)[1] == [], "it stands for that already"


def test_the_last_of_equal_names_counts_when_they_are_replaced() -> None:
    policy = MasterState(lease_s=60, stall_s=60).policy
    policy.bind("n", [("x", key(1))], 0.0)[2]()
    for last in (1, 3):
        keys, _, bound = policy.bind("n", [("x", key(2)), ("x", key(last))], 1.0, replace=True)
        bound()
        assert keys == [key(last)] * 2 and policy.names.resolve("n", ["x"]) == [key(last)]


# ── put a moment ago ──────────────────────────────────────────────────────────────────────────────


def master() -> MasterState:
    """Of which "a" is a member."""
    state = MasterState(lease_s=1000.0, stall_s=1e9)
    list(state.step(NodeJoined(RegisteredNode("a", "h:1", 7, NodeRole.POOL, "m", "a")), 0.0))
    return state


def holders(state: MasterState, *keys: bytes, now: float = 1.0) -> list[list[str]]:
    told = found(state, keys, now=now)
    return [[told.holders[at].member.store_id for at in one.holder] for one in told.replicas]


def test_a_block_that_was_just_put_is_found_before_its_node_has_announced_it() -> None:
    state = master()
    state.policy.sealed([key(1), key(2)], "a", 7, 1.0)
    state.policy.sealed([key(4)], "a", 6, 1.0)  # an earlier life's
    assert holders(state, key(1), key(3), key(2), key(4)) == [["a"], [], ["a"], []]
    list(state.step(Announce(Announcement("a", 7, 1, (key(1),), (), True, 0, False)), 2.0))
    assert holders(state, key(1), key(2), now=2.0) == [["a"], ["a"]]
    assert holders(state, key(1), key(2), now=1.0 + NODE_S) == [["a"], []], "it has had time to announce it"


def test_what_was_removed_is_found_no_more_though_it_was_just_put() -> None:
    state = master()
    state.policy.sealed([key(1), key(2)], "a", 7, 1.0)
    state.policy.remove([key(1)], b"", 2.0)
    assert holders(state, key(1), key(2), now=2.0) == [[], ["a"]]
    state.policy.sealed([key(1)], "a", 7, 2.0)
    assert holders(state, key(1), now=2.0) == [[]], "the node has yet to hear of the removal"
    state.policy.remove([], b"tag1", 3.0)
    assert holders(state, key(2), now=3.0) == [[]]


def test_what_was_just_put_is_remembered_within_a_bound() -> None:
    books = Unannounced(lambda key, seq: False, most=3)
    for i in range(10):
        books.sealed([key(i)], "a", 1, 0, float(i))
    assert len(books) == 3 and books.holder(key(9), 9.0) == ("a", 1) and books.holder(key(0), 9.0) is None
    books.sealed([key(10)], "a", 1, 0, 9.0 + NODE_S)
    assert len(books) == 1, "what is old goes as new ones come"
