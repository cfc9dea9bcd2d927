"""What clients did and what befell the processes, as it was seen: the checker's only source.

Times are seconds of one monotonic clock (everything is recorded by one process). An operation that has not completed
has `completed == INF`: whatever it asked for may have happened, or may still happen.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

INF = float("inf")

Kind = Literal["put", "get", "remove", "grant", "bind", "unbind", "resolve", "limit", "copy"]
Outcome = Literal["pending", "ok", "miss", "taken", "error"]
Harm = Literal["memory", "reach", "master", "drained"]  # see Disturbance


def digest_of(data: bytes | bytearray | memoryview) -> str:
    """Names bytes, and how many they are."""
    return f"{len(data)}:{hashlib.sha256(data).hexdigest()[:24]}"


@dataclass(slots=True)
class Op:
    """One operation of one client.

    `holder`, `tier`: of a get, who served it; of a put, who sealed it. `digest`: of what was put or got.
    `acknowledged`, `pending`: of a remove, the stores' names as the master answered. A grant's `key` is its number.

    Of names: `key` is the name, `digest` the block's key that it was bound to, was found to stand for, or stood for
    when it was unbound ("": none). "taken": it stood for another block, and was not to be `replace`d.
    Of a limit: `key` is the tenant's tag, `digest` the number of blocks."""

    number: int
    client: str
    kind: Kind
    key: str
    invoked: float
    deadline: float
    completed: float = INF
    outcome: Outcome = "pending"
    error: str = ""
    digest: str = ""
    holder: str = ""
    tier: str = ""
    pinned: bool = False  # hard
    replace: bool = False
    acknowledged: tuple[str, ...] = ()
    pending: tuple[str, ...] = ()

    def effect_ends(self, at: str = "") -> float:
        """After this it changes nothing any more (a removal: at store `at`). Whatever failed or has no answer may be
        carried out by somebody at any later time; a store that has not acknowledged a removal has still to hear of it,
        also when it was no member, and named nowhere."""
        if self.outcome not in ("ok", "taken") or (self.kind == "remove" and at not in self.acknowledged):
            return INF
        return self.completed

    def __str__(self) -> str:
        end = f"{self.completed:9.3f}" if self.completed < INF else "        …"
        where = f" at {self.holder}/{self.tier}" if self.holder else ""
        extra = f" acknowledged={list(self.acknowledged)} pending={list(self.pending)}" if self.kind == "remove" else ""
        pin = " hard" if self.pinned else " replacing" if self.replace else ""
        return (
            f"{self.invoked:9.3f}–{end} {self.client:>9} {self.kind:<6} {self.key[:16]}{pin} → {self.outcome}{where}"
            f"{' ' + self.digest if self.digest else ''}{extra}{' ' + self.error if self.error else ''}"
        )


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What the nemesis did to one process between two times.

    "memory": what it held is gone, or may be. "reach": it could not be asked, or not by all. "master": no node's, but
    who leads was (or had to be) changed: `target` is a master or Redis. "drained": what it alone held was moved to
    others between `start` and `end`, when "memory" began."""

    target: str
    harm: Harm
    start: float
    end: float
    what: str = ""

    def __str__(self) -> str:
        return f"{self.start:9.3f}–{self.end:9.3f} {self.what or self.harm} {self.target}"


@dataclass
class History:
    """Append-only. `clock` gives seconds."""

    clock: Callable[[], float] = time.monotonic
    ops: list[Op] = field(default_factory=list)
    disturbances: list[Disturbance] = field(default_factory=list)

    def begin(
        self,
        client: str,
        kind: Kind,
        key: str,
        timeout_s: float,
        *,
        digest: str = "",
        pinned: bool = False,
        replace: bool = False,
    ) -> Op:
        now = self.clock()
        op = Op(len(self.ops), client, kind, key, now, now + timeout_s, digest=digest, pinned=pinned, replace=replace)
        self.ops.append(op)
        return op

    def end(
        self,
        op: Op,
        outcome: Outcome,
        *,
        error: str = "",
        digest: str = "",
        holder: str = "",
        tier: str = "",
        acknowledged: Iterable[str] = (),
        pending: Iterable[str] = (),
    ) -> None:
        assert op.outcome == "pending", f"ended twice: {op}"
        op.completed, op.outcome, op.error = self.clock(), outcome, error
        op.digest, op.holder, op.tier = digest or op.digest, holder, tier
        op.acknowledged, op.pending = tuple(acknowledged), tuple(pending)

    def of(self, key: str) -> list[Op]:
        return [op for op in self.ops if op.key == key]


@dataclass(frozen=True)
class NodeAfter:
    """One node when the storm is over and all has been given time to settle. `unusable`: why not ("": it works).
    `blocks`: keys with the digest of the bytes that it hands out. `listed`: keys that it said it has when the
    master was asked too; some may have gone when they were read. `leaks`: in words."""

    blocks: dict[str, str]
    listed: frozenset[str] = frozenset()
    leaks: tuple[str, ...] = ()
    unusable: str = ""


@dataclass(frozen=True)
class LimitAfter:
    """Of the tenant `tag` (hex). `blocks`: allowed last; `told`: what the master says is allowed. `held`: node →
    blocks in its memory. `lifted`: blocks in memory when the limit had been lifted and more were put."""

    tag: str
    blocks: int
    told: int
    held: dict[str, int]
    lifted: int


@dataclass(frozen=True)
class Aftermath:
    """`when`: the blocks were read after this. `mapped`: node → the keys that the master believes it holds."""

    when: float
    nodes: dict[str, NodeAfter]
    leaders: tuple[str, ...]
    mapped: dict[str, frozenset[str]]
    limit: LimitAfter | None = None
