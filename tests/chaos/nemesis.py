"""What is done to the processes and links, and when: a schedule made of a seed. Pure; `harness.py` carries it out.

Every schedule leaves one node alone (`Schedule.spared`): there is always an undisturbed holder. At most
`MAX_DOWN` nodes and all but one master are away at once, and one node more drains. "leader" stands for whoever leads
when the blow falls.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Blow = Literal["kill", "rot", "drain", "freeze", "restart-redis", "cut", "cut-one-way", "slow", "reads"]
MAX_DOWN = 2
LEADER = "leader"

# What a reader's or a node's one-sided READs may suffer, as rules of the fault transport (docs/transfer.md).
READ_FAULTS = (
    '{"kind": "freeze", "op": "read", "count": 3}',
    '{"kind": "delay", "op": "read", "delay_ms": 50, "jitter_ms": 700, "probability": 0.5}',
    '{"kind": "drop", "op": "read", "probability": 0.3}',
    '{"kind": "down", "op": "read", "probability": 0.3}',
    '{"kind": "duplicate", "op": "read"}',
    '{"kind": "corrupt", "op": "read", "probability": 0.3}',
    '{"kind": "bandwidth", "op": "read", "bandwidth_mbps": 8}',
)

# What READs of nodes suffer as long as they live: of puts out of clients, and of copies from one another. Wrong bytes
# only where the client gives checksums with its puts: no other put promises to notice.
NODE_FAULTS = (
    '{"kind": "corrupt", "peer": "client:client-*", "op": "read", "probability": 0.05}',
    '{"kind": "drop", "peer": "[cn]*", "op": "read", "probability": 0.02}',
    '{"kind": "down", "peer": "[cn]*", "op": "read", "probability": 0.03}',
    '{"kind": "duplicate", "peer": "[cn]*", "op": "read", "probability": 0.1}',
    '{"kind": "delay", "peer": "[cn]*", "op": "read", "delay_ms": 5, "jitter_ms": 400, "probability": 0.1}',
)


@dataclass(frozen=True, slots=True)
class Step:
    """At `at` (seconds from the start) `target` is struck; `seconds` later it is made good (started again, continued,
    linked). `peer`: of a cut, whom `target` cannot reach ("": anybody). `rule`: of "reads". "rot": killed, and some of
    what it left on disk or in shared memory is changed before it comes back. "drain": if it is done within `seconds`,
    the node is killed and comes back at once; else the drain is called off."""

    at: float
    blow: Blow
    target: str
    seconds: float
    peer: str = ""
    rule: str = ""

    @property
    def until(self) -> float:
        return self.at + self.seconds

    def __str__(self) -> str:
        more = f" → {self.peer}" if self.peer else f" {self.rule}" if self.rule else ""
        return f"{self.at:6.2f} {self.blow} {self.target}{more} for {self.seconds:.2f} s"


@dataclass(frozen=True)
class Schedule:
    seed: int
    spared: str
    steps: tuple[Step, ...]

    @property
    def end(self) -> float:
        return max((step.until for step in self.steps), default=0.0)


def make(
    seed: int,
    duration_s: float,
    masters: Sequence[str],
    nodes: Sequence[str],
    *,
    redis: bool = True,
    links: bool = True,
    near: Sequence[str] = (),
) -> Schedule:
    """Blows until `duration_s`, one every second or so. The first ones are of every kind, in an order of the seed's;
    one that cannot be now comes as soon as it can. `near`: nodes that have no link of their own."""
    rng = random.Random(f"chaos {seed}")
    spared = rng.choice(nodes)
    maker = _Maker(rng, list(masters), [n for n in nodes if n != spared], [*near], duration_s)
    kinds = [maker.kill_leader, maker.freeze_leader, maker.kill_node, maker.freeze_node, maker.reads]
    kinds += [maker.rot, maker.drain]
    kinds += [maker.restart_redis] * redis + [maker.cut, maker.cut_master, maker.slow] * links
    rng.shuffle(kinds)
    at = rng.uniform(0.5, 1.5)
    first = list(kinds)
    while at < duration_s:
        for kind in first or [rng.choice(kinds)]:
            steps = len(maker.steps)
            kind(at)
            if len(maker.steps) > steps:
                first = [one for one in first if one != kind]
                break
        at += rng.uniform(0.4, 2.0)
    return Schedule(seed, spared, tuple(maker.steps))


class _Maker:
    def __init__(
        self, rng: random.Random, masters: list[str], nodes: list[str], near: list[str], duration_s: float
    ) -> None:
        self.rng = rng
        self.masters = masters
        self.nodes = nodes
        self.linked = [node for node in nodes if node not in near]
        self.duration_s = duration_s
        self.steps: list[Step] = []
        self._busy: dict[str, float] = {}  # target → until when

    def kill_leader(self, at: float) -> None:
        self._leader(at, "kill", self.rng.uniform(0.2, 2.0))

    def freeze_leader(self, at: float) -> None:
        """Longer than its lease, mostly: it wakes up in another's term."""
        self._leader(at, "freeze", self.rng.uniform(0.5, 6.0))

    def kill_node(self, at: float) -> None:
        self._node(at, "kill", self.rng.uniform(0.1, 2.0))

    def rot(self, at: float) -> None:
        self._node(at, "rot", self.rng.uniform(0.1, 1.0))

    def drain(self, at: float) -> None:
        """Beside what is away: a node that drains is there, until it is done."""
        free = [node for node in self.nodes if self._busy.get(node, 0.0) <= at]
        if free and not any(step.blow == "drain" and step.until > at for step in self.steps):
            self._add(Step(at, "drain", self.rng.choice(free), self.rng.uniform(4.0, 8.0)))

    def freeze_node(self, at: float) -> None:
        self._node(at, "freeze", self.rng.uniform(0.2, 5.0))

    def cut(self, at: float) -> None:
        """A node from everybody, from one other node, or from one master; both ways or one."""
        peer = self.rng.choice(["", *self.masters, *self.linked])
        blow: Blow = "cut-one-way" if peer and self.rng.random() < 0.5 else "cut"
        self._node(at, blow, self.rng.uniform(0.5, 5.0), peer, self.linked)

    def cut_master(self, at: float) -> None:
        """Who leads, from Redis or from everybody."""
        self._leader(at, "cut", self.rng.uniform(1.0, 6.0), self.rng.choice(["", "redis"]))

    def slow(self, at: float) -> None:
        self._node(at, "slow", self.rng.uniform(0.5, 4.0), among=self.linked)

    def reads(self, at: float) -> None:
        rule = self.rng.choice(READ_FAULTS)
        self._add(Step(at, "reads", "clients", self.rng.uniform(0.5, 3.0), rule=rule))

    def restart_redis(self, at: float) -> None:
        self._add(Step(at, "restart-redis", "redis", self.rng.uniform(0.1, 2.0)))

    def _leader(self, at: float, blow: Blow, seconds: float, peer: str = "") -> None:
        """All blows at leaders are at one name: while one lasts, the next leader is struck only if another is left."""
        away = sum(step.until > at for step in self.steps if step.target == LEADER)
        if away < len(self.masters) - 1:
            self.steps.append(self._bounded(Step(at, blow, LEADER, seconds, peer)))

    def _node(self, at: float, blow: Blow, seconds: float, peer: str = "", among: Sequence[str] | None = None) -> None:
        nodes = self.nodes if among is None else among
        free = [node for node in nodes if self._busy.get(node, 0.0) <= at and node != peer]
        away = {step.target for step in self.steps if step.until > at and step.blow != "drain"} & {*self.nodes}
        if free and len(away) < MAX_DOWN:
            self._add(Step(at, blow, self.rng.choice(free), seconds, peer))

    def _add(self, step: Step) -> None:
        if self._busy.get(step.target, 0.0) <= step.at:
            step = self._bounded(step)
            self._busy[step.target] = step.until
            self.steps.append(step)

    def _bounded(self, step: Step) -> Step:
        end = max(self.duration_s, step.at + 0.1)
        return Step(step.at, step.blow, step.target, min(step.until, end) - step.at, step.peer, step.rule)
