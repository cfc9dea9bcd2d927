"""What names may stand for: nothing is found in histories of a master that is right, and each fault is."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chaos.checker import check
from tests.chaos.history import INF, History, Op
from tests.chaos.name_rules import check_names

GRACE_S = 30.0
KEYS = ("k0", "k1", "k2")


class Master:
    """One name. Step i takes effect at time i, within its operation; what failed, perhaps, or some steps later."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now = 0.0
        self.ops: list[Op] = []
        self.removes: list[Op] = []
        self.bound = ""
        self.late: list[Callable[[], None]] = []

    def step(self) -> None:
        self.now += 1.0
        if self.late and self.rng.random() < 0.5:
            self.late.pop(self.rng.randrange(len(self.late)))()
            return
        key, dice = self.rng.choice(KEYS), self.rng.random()
        if dice < 0.5:
            self.op("resolve", digest=self.bound)
        elif dice < 0.6:
            self.act(lambda: self.to(""), self.op("unbind", digest=self.bound))
        elif dice < 0.7:
            remove = self.op("remove", key)
            self.ops.remove(remove)
            self.removes.append(remove)
            self.act(lambda: self.to("" if self.bound == key else self.bound), remove)
        elif dice < 0.8:
            self.act(lambda: self.to(key), self.op("bind", digest=key, replace=True))
        else:
            bind = self.op("bind", digest=key)
            bind.outcome = "ok" if self.bound in ("", key) else "taken"
            self.act(lambda: self.to(self.bound or key), bind)

    def op(self, kind: str, key: str = "name", *, digest: str = "", replace: bool = False) -> Op:
        start, end = self.now - self.rng.uniform(0, 3), self.now + self.rng.uniform(0, 3)
        made = Op(len(self.ops), "c", kind, key, start, INF, end, "ok", digest=digest, replace=replace)  # type: ignore[arg-type]
        self.ops.append(made)
        return made

    def act(self, effect: Callable[[], None], op: Op) -> None:
        if self.rng.random() < 0.8:
            effect()
            return
        op.outcome, op.error = "error", "unavailable: no answer"
        if self.rng.random() < 0.7:
            self.late.append(effect)

    def to(self, key: str) -> None:
        self.bound = key


@given(st.integers(0, 2**32), st.integers(0, 60))
@settings(max_examples=400, deadline=None)
def test_a_master_that_is_right_passes(seed: int, steps: int) -> None:
    made = Master(random.Random(seed))
    for _ in range(steps):
        made.step()
    found = list(check_names(made.ops, made.removes, GRACE_S))
    assert not found, "\n".join(map(str, [*found, *sorted([*made.ops, *made.removes], key=lambda op: op.invoked)]))


class Script:
    def __init__(self) -> None:
        self.history = History(clock=lambda: 0.0)

    def add(
        self, kind: str, start: float, end: float, digest: str = "", *, key: str = "name", **fields: object
    ) -> None:
        outcome = fields.pop("outcome", "ok")
        made = Op(0, "c", kind, key, start, INF, end, outcome, digest=digest, **fields)  # type: ignore[arg-type]
        made.error = "unavailable: no answer" if outcome == "error" else ""
        self.history.ops.append(made)

    def rules(self) -> list[str]:
        return [one.rule for one in check(self.history, None)]


def test_a_binding_that_is_lost() -> None:
    s = Script()
    s.add("bind", 0, 1, "k0")
    s.add("resolve", 0.5, 2)  # beside it
    s.add("resolve", 2, 3, "k0")
    assert s.rules() == []
    s.add("resolve", 4, 5)
    assert s.rules() == ["lost"]


def test_two_blocks_that_were_both_the_first() -> None:
    s = Script()
    s.add("bind", 0, 1, "k0")
    s.add("bind", 2, 3, "k1", outcome="taken")
    assert s.rules() == []
    s.add("bind", 4, 5, "k1")
    assert s.rules() == ["lost"]


def test_a_block_that_nobody_bound() -> None:
    s = Script()
    s.add("bind", 0, 1, "k0", outcome="error")
    s.add("resolve", 2, 3, "k0")
    assert s.rules() == []
    s.add("resolve", 2, 3, "k1")
    s.add("bind", 4, 5, "k1")  # too late
    assert s.rules() == ["unbound"]


@pytest.mark.parametrize(
    ("kind", "key", "digest"), [("unbind", "name", ""), ("remove", "k0", ""), ("resolve", "name", "")]
)
def test_what_is_over_does_not_come_back(kind: str, key: str, digest: str) -> None:
    s = Script()
    s.add("bind", 0, 1, "k0")
    s.add("unbind", 1.5, 1.6, outcome="error")  # may be carried out at any time
    s.add(kind, 2, 3, digest, key=key)
    s.add("resolve", 2.5, 3.5, "k0")
    s.add("resolve", 4, 5)
    assert s.rules() == []
    s.add("resolve", 6, 7, "k0")
    assert s.rules() == ["unbound"]
    s.add("bind", 5, 6.5, "k0")
    assert s.rules() == []


def test_a_replaced_block_does_not_come_back() -> None:
    s = Script()
    s.add("bind", 0, 1, "k0")
    s.add("bind", 2, 3, "k1", replace=True)
    s.add("resolve", 4, 5, "k1")
    assert s.rules() == []
    s.add("resolve", 6, 7, "k0")
    assert set(s.rules()) == {"unbound", "lost"}


@pytest.mark.parametrize(("start", "excuse"), [(20, False), (40, True)])
def test_only_a_block_that_is_nowhere_for_long_gives_its_name_away(start: float, excuse: bool) -> None:
    s = Script()
    s.add("bind", 0, 1, "k0")
    s.add("bind", start, start + 1, "k1")
    s.add("resolve", start + 2, start + 3, "k1")
    assert s.rules() == ([] if excuse else ["lost", "lost"])


def test_a_removal_of_another_block_excuses_nothing() -> None:
    s = Script()
    s.add("bind", 0, 1, "k0")
    s.add("remove", 2, 3, key="k1")
    s.add("resolve", 4, 5)
    assert s.rules() == ["lost"]


def test_a_name_that_is_replaced_stands_for_something_all_the_time() -> None:
    s = Script()
    s.add("bind", 0, 1, "k0")
    s.add("bind", 2, 4, "k1", replace=True)
    s.add("resolve", 2.5, 3, "k0")
    s.add("resolve", 2.5, 3.5, "k1")
    assert s.rules() == []
    s.add("resolve", 2.6, 3)
    assert s.rules() == ["lost"]
    s.add("remove", 2.2, 5, key="k1")
    assert s.rules() == [], "what it was replaced by may have been removed at once"


def test_who_replaces_is_not_told_that_the_name_is_taken() -> None:
    s = Script()
    s.add("bind", 0, 1, "k0")
    s.add("bind", 2, 3, "k1", replace=True, outcome="taken")
    assert s.rules() == ["refused"]
