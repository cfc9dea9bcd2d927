"""The checker finds what it is for, in histories made for it, and nothing in histories of a store that is right."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.chaos.checker import Rules, check, explain
from tests.chaos.history import INF, Aftermath, Disturbance, History, NodeAfter, Op, digest_of

RULES = Rules(recovery_s=2.0, grace_s=1.0)
NODES = ("a", "b", "c")
KEYS = ("k0", "k1", "k2")


def value(key: str) -> str:
    return digest_of(key.encode())


class World:
    """A store that is right, one step at a time; step i happens at time i, within its operation's time."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.history = History(clock=lambda: 0.0)
        self.now = 0.0
        self.held: dict[str, set[str]] = {node: set() for node in NODES}
        self.pinned: set[tuple[str, str]] = set()
        self.due: list[tuple[str, str]] = []  # removals that a node has still to hear of
        self.away: dict[str, float] = {}  # until when

    def step(self) -> None:
        self.now += 1.0
        choices = (self.put, self.put, self.get, self.get, self.get, self.remove, self.evict, self.copy, self.harm)
        self.rng.choice(choices)(self.rng.choice(KEYS), self.rng.choice(NODES))

    def op(self, kind: str, key: str, **fields: object) -> Op:
        op = Op(
            len(self.history.ops),
            f"client-{self.rng.randrange(3)}",
            kind,  # type: ignore[arg-type]
            key,
            self.now - self.rng.uniform(0, 3),
            self.now + 5,
            self.now + self.rng.uniform(0, 3),
        )
        op = replace(op, outcome="ok", **fields)  # type: ignore[arg-type]
        self.history.ops.append(op)
        return op

    def there(self, node: str) -> bool:
        return self.away.get(node, 0.0) < self.now

    def put(self, key: str, node: str) -> None:
        pinned = self.rng.random() < 0.5
        op = self.op("put", key, digest=value(key), holder=node, pinned=pinned)
        if not self.there(node) or self.rng.random() < 0.2:
            op.outcome, op.error = "error", "unavailable: no answer"
        if self.rng.random() < 0.5 or op.outcome == "ok":
            self.held[node].add(key)
            if pinned and op.outcome == "ok":
                self.pinned.add((node, key))

    def get(self, key: str, node: str) -> None:
        holders = [n for n in NODES if key in self.held[n] and self.there(n)]
        if holders:
            self.op("get", key, digest=value(key), holder=self.rng.choice(holders))
        else:
            op = self.op("get", key)
            op.outcome = "miss"

    def remove(self, key: str, node: str) -> None:
        asked = [n for n in NODES if self.there(n) and self.rng.random() < 0.8]
        self.op("remove", key, acknowledged=tuple(asked), pending=tuple(set(NODES) - set(asked)))
        for one in NODES:
            if one in asked:
                self.drop(one, key)
            else:
                self.due.append((one, key))

    def drop(self, node: str, key: str) -> None:
        self.held[node].discard(key)
        self.pinned.discard((node, key))

    def evict(self, key: str, node: str) -> None:
        if (node, key) not in self.pinned:
            self.drop(node, key)
        if self.due:  # a tombstone reaches its node
            self.drop(*self.due.pop(self.rng.randrange(len(self.due))))

    def copy(self, key: str, node: str) -> None:
        sources = [n for n in NODES if key in self.held[n]]
        if sources and all(due_key != key for _, due_key in self.due):
            self.held[node].add(key)

    def harm(self, key: str, node: str) -> None:
        if self.rng.random() < 0.5:
            self.held[node].clear()
            self.pinned = {(n, k) for n, k in self.pinned if n != node}
            self.history.disturbances.append(Disturbance(node, "memory", self.now - 0.1, self.now + 1))
        else:
            self.away[node] = self.now + self.rng.uniform(1, 4)
            end = self.away[node] - RULES.recovery_s
            self.history.disturbances.append(Disturbance(node, "reach", self.now, max(self.now, end)))

    def after(self) -> Aftermath:
        nodes = {node: NodeAfter({key: value(key) for key in held}) for node, held in self.held.items()}
        return aftermath(nodes, when=self.now + 10)


def aftermath(nodes: dict[str, NodeAfter], when: float = 100.0) -> Aftermath:
    nodes = {name: replace(node, listed=frozenset(node.blocks)) for name, node in nodes.items()}
    return Aftermath(when, nodes, ("m0",), {name: frozenset(node.blocks) for name, node in nodes.items()})


def world(seed: int, steps: int) -> World:
    made = World(random.Random(seed))
    for _ in range(steps):
        made.step()
    return made


@given(st.integers(0, 2**32), st.integers(0, 60))
@settings(max_examples=300, deadline=None)
def test_a_store_that_is_right_passes(seed: int, steps: int) -> None:
    made = world(seed, steps)
    found = check(made.history, made.after(), RULES)
    assert not found, explain(found, made.history, seed)


@given(st.integers(0, 2**32), st.sampled_from(["other", "nobody", "late"]))
@settings(max_examples=100, deadline=None)
def test_a_wrong_byte_is_found_among_many_operations(seed: int, how: str) -> None:
    made = world(seed, 40)
    gets = [op for op in made.history.ops if op.kind == "get" and op.outcome == "ok"]
    assume(gets)
    get = random.Random(seed).choice(gets)
    if how == "late":
        assume(any(op.kind == "put" and op.key == get.key for op in made.history.ops))
        made.history.ops = [op for op in made.history.ops if op.kind != "put" or op.key != get.key]
    else:
        get.digest = value(next(k for k in KEYS if k != get.key)) if how == "other" else digest_of(b"nothing")
    found = [v for v in check(made.history, None, RULES) if v.rule == "bytes" and v.key == get.key]
    assert found
    assert get in found[0].ops or how == "late"


@given(st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_a_pinned_block_that_is_gone_at_the_end_is_found(seed: int) -> None:
    made = world(seed, 40)
    puts = [op for op in made.history.ops if op.kind == "put" and op.pinned and op.outcome == "ok"]
    robbed = {(d.target, d.start) for d in made.history.disturbances if d.harm == "memory"}
    safe = [p for p in puts if not any(t == p.holder and start >= p.invoked - 1.5 for t, start in robbed)]
    safe = [p for p in safe if not any(op.kind == "remove" and op.key == p.key for op in made.history.ops)]
    assume(safe)
    put, after = safe[0], made.after()
    del after.nodes[put.holder].blocks[put.key]
    assert "last" in {v.rule for v in check(made.history, after, RULES)}


# ── each rule, by hand ────────────────────────────────────────────────────────────────────────────


class Script:
    """Operations at given times."""

    def __init__(self) -> None:
        self.history = History(clock=lambda: 0.0)

    def add(self, kind: str, start: float, end: float, key: str = "k0", outcome: str = "ok", **fields: object) -> Op:
        op = Op(len(self.history.ops), "client", kind, key, start, start + 5, end)  # type: ignore[arg-type]
        if kind == "put" or (kind == "get" and outcome == "ok"):
            fields.setdefault("digest", value(key))
        op = replace(op, outcome=outcome, **fields)  # type: ignore[arg-type]
        self.history.ops.append(op)
        return op

    def harm(self, target: str, harm: str, start: float, end: float) -> None:
        self.history.disturbances.append(Disturbance(target, harm, start, end))  # type: ignore[arg-type]

    def rules(self, after: Aftermath | None = None) -> list[str]:
        return [v.rule for v in check(self.history, after, RULES)]


def test_served_after_an_acknowledged_removal() -> None:
    s = Script()
    s.add("put", 0, 1, holder="a")
    s.add("remove", 2, 3, acknowledged=("a",))
    s.add("get", 2.5, 4, holder="a")  # began before the answer
    s.add("get", 3.5, 4, holder="b")  # b acknowledged nothing
    assert s.rules() == []
    s.add("get", 3.5, 4, holder="a")
    assert s.rules() == ["remove"]


def test_bytes_of_a_put_that_began_later() -> None:
    s = Script()
    s.add("get", 0, 1)
    s.add("put", 0.9, 2)
    assert s.rules() == []
    s.history.ops[1].invoked = 1.1
    assert s.rules() == ["bytes"]


def test_two_owners_of_one_key() -> None:
    s = Script()
    s.add("put", 0, 1, holder="a")
    s.add("put", 0, 1, holder="b", digest=value("k1"))
    assert s.rules(aftermath({"a": NodeAfter({"k0": value("k0")})})) == []
    both = {"a": NodeAfter({"k0": value("k0")}), "b": NodeAfter({"k0": value("k1")})}
    assert s.rules(aftermath(both)) == ["owners"]


@pytest.mark.parametrize(
    ("start", "end", "outcome", "excuse"),
    [(4, 5, "ok", True), (1.5, 2.5, "ok", True), (0.5, 1.5, "ok", False), (0.5, 1.5, "error", True)],
)
def test_a_put_beside_or_after_the_removal_excuses(start: float, end: float, outcome: str, excuse: bool) -> None:
    s = Script()
    s.add("put", 0, 1, holder="a")
    s.add("remove", 2, 3, acknowledged=("a",))
    s.add("put", start, end, outcome=outcome, holder="a" if outcome == "ok" else "", error="unavailable")
    s.add("get", 6, 7, holder="a")
    assert s.rules() == ([] if excuse else ["remove"])


def test_a_miss_of_a_hard_pin() -> None:
    s = Script()
    s.add("put", 0, 1, holder="a", pinned=True)
    s.add("get", 0.5, 2, outcome="miss")  # began before the put was acknowledged
    s.add("get", 2, 3, outcome="error", error="unavailable: no master")
    assert s.rules() == []
    s.add("get", 2.9, 3.1, outcome="miss")  # the master may not have heard of it
    assert s.rules() == []
    s.add("get", 3.1, 3.5, outcome="miss")
    assert s.rules() == ["miss"]


@pytest.mark.parametrize(
    ("harm", "start", "end", "excuse"),
    [
        ("memory", 5, 6, True),  # robbed since: forever
        ("reach", 5, 6, False),  # back for long
        ("reach", 18.5, 19, True),  # back for less than recovery_s
        ("reach", 20, 30, True),
        ("reach", 22, 30, False),  # later
    ],
)
def test_a_disturbed_holder_excuses_a_miss(harm: str, start: float, end: float, excuse: bool) -> None:
    s = Script()
    s.add("put", 0, 1, holder="a", pinned=True)
    s.harm("a", harm, start, end)
    s.harm("b", "memory", 0, 100)
    s.harm("m0", "master", 0, 100)
    s.add("get", 20, 21, outcome="miss")
    assert s.rules() == ([] if excuse else ["miss"])


@pytest.mark.parametrize(
    ("start", "end", "outcome", "heard", "excuse"),
    [
        (2, 3, "ok", ("a",), True),
        (-2, -1, "ok", ("a",), False),  # over before the put began
        (-2, -1, "ok", ("b",), True),  # a has still to hear of it
        (-2, -1, "error", (), True),
        (30, 31, "ok", ("a",), False),
    ],
)
def test_a_removal_excuses_a_miss(start: float, end: float, outcome: str, heard: tuple[str, ...], excuse: bool) -> None:
    s = Script()
    s.add("put", 0, 1, holder="a", pinned=True)
    s.add("remove", start, end, outcome=outcome, acknowledged=heard, error="unavailable")
    s.add("get", 20, 21, outcome="miss")
    assert s.rules() == ([] if excuse else ["miss"])


def test_the_end() -> None:
    s = Script()
    s.add("put", 0, 1, holder="a", pinned=True)
    s.add("put", 0, 1, key="k1", holder="a")
    s.add("remove", 2, 3, key="k1", acknowledged=("a",))
    right = {"a": NodeAfter({"k0": value("k0")}), "b": NodeAfter({"k0": value("k0")})}
    assert s.rules(aftermath(right)) == []
    assert s.rules(aftermath({"a": NodeAfter({}), "b": right["b"]})) == ["last"]
    assert s.rules(aftermath({"a": NodeAfter({"k0": value("k0"), "k1": value("k1")})})) == ["removed"]
    assert s.rules(aftermath({"a": right["a"], "b": NodeAfter({"k0": value("k1")})})) == ["owners"]
    assert s.rules(aftermath({"a": right["a"], "b": NodeAfter({"k2": value("k2")})})) == ["owners"]
    assert s.rules(aftermath({"a": replace(right["a"], leaks=("leases 1",))})) == ["after"]
    assert s.rules(aftermath({"a": replace(right["a"], unusable="a put took 10 s")})) == ["after"]
    assert s.rules(replace(aftermath(right), leaders=())) == ["after"]
    assert s.rules(replace(aftermath(right), leaders=("m0", "m1"))) == ["after"]
    for mapped in ({"a": {"k0"}}, {"a": {"k0"}, "b": {"k0", "k2"}}, {"a": {"k0"}, "b": {"k0"}, "d": set()}):
        after = replace(aftermath(right), mapped={name: frozenset(keys) for name, keys in mapped.items()})
        assert s.rules(after) == ["after"]


def test_frozen_is_not_robbed() -> None:
    s = Script()
    s.add("put", 0, 1, holder="a", pinned=True)
    s.harm("a", "reach", 2, 100)
    assert s.rules(aftermath({"a": NodeAfter({})})) == ["last"]
    s.harm("a", "memory", 2, 3)
    assert s.rules(aftermath({"a": NodeAfter({})})) == []


def test_every_operation_ends_in_time_and_by_name() -> None:
    s = Script()
    s.add("get", 0, 5.5, outcome="miss")
    s.add("grant", 0, 1, key="1/7")
    s.add("grant", 0, 1, key="1/8")
    s.add("grant", 0, INF, key="1/8", outcome="error", error="unavailable: no master")
    s.history.ops[-1].completed = 2
    assert s.rules() == []
    s.add("grant", 3, 4, key="1/7")
    assert s.rules() == ["granted"]
    s.history.ops.pop()
    s.add("get", 0, INF, outcome="pending")
    s.add("get", 0, 6.5, outcome="miss")
    s.add("get", 0, 1, outcome="error")
    assert s.rules() == ["answered"] * 3


def test_what_is_told_of_a_violation() -> None:
    s = Script()
    s.add("put", 0, 1, holder="a", pinned=True)
    s.add("get", 4, 5, outcome="miss")
    s.add("get", 4, 5, key="elsewhere", outcome="miss")
    s.history.disturbances.append(Disturbance("b", "reach", 0.5, 0.7, "freeze"))
    told = explain(check(s.history, None, RULES), s.history, 42)
    assert "KVMESH_CHAOS_SEED=42" in told
    assert "freeze b" in told
    assert "[miss] k0" in told
    assert "elsewhere" not in told
