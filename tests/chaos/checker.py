"""Whether a history is one that the store may have. Pure.

Rules, per key (a content key's bytes follow from it; a granted key has one owner):

bytes      a get returns what a put of that key carried, invoked before the get ended.
remove     after a remove that store h acknowledged, no get that was invoked after the answer is served by h (in any of
           its lives), until a put of that key may have sealed it there: one that had not ended before the remove began.
miss       "not there" is claimed of no block that was put with a hard pin at h (acknowledged before the get began) and
           was not being removed, while h was neither robbed of its memory since, nor out of reach during the get or
           `recovery_s` before it. It makes no difference who leads: a reader that cannot know says so by an error. A
           put that ended less than `announced_s` before the get need not be known yet.
last       such a block is at h at the end, if h kept its memory.
removed    a block whose removal h acknowledged, and that was not put again, is not at h at the end.
owners     all nodes that hold a key at the end hold the same bytes, and somebody put them.
granted    no number is granted twice.
answered   every operation ends within its deadline (and `grace_s`), with what was asked for, a miss, or a named error.
after      every node is usable and has no leaks, one master leads, its map equals what the nodes list.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.chaos.history import INF, Aftermath, Disturbance, History, NodeAfter, Op

MAX_SHOWN = 40
NOBODY = NodeAfter({})


@dataclass(frozen=True)
class Rules:
    """`recovery_s`: how long after the end of a disturbance a node may still be unknown to whoever is asked."""

    recovery_s: float = 10.0
    announced_s: float = 2.0
    grace_s: float = 5.0


@dataclass(frozen=True)
class Violation:
    rule: str
    key: str
    text: str
    ops: tuple[Op, ...] = ()

    def __str__(self) -> str:
        return f"[{self.rule}] {self.key[:16] or '-'}: {self.text}"


def check(history: History, aftermath: Aftermath | None, rules: Rules | None = None) -> list[Violation]:
    """Everything that is wrong; empty: nothing."""
    rules = rules or Rules()
    by_key: dict[str, list[Op]] = defaultdict(list)
    for op in history.ops:
        by_key[op.key].append(op)
    nodes = _Nodes(history.disturbances, rules.recovery_s)
    owners: dict[str, set[str]] = defaultdict(set)  # digest → keys it was put under
    for op in history.ops:
        if op.kind == "put":
            owners[op.digest].add(op.key)
    found = list(_answered(history.ops, rules))
    found += _granted([op for op in history.ops if op.kind == "grant"])
    for key, ops in by_key.items():
        puts = [op for op in ops if op.kind == "put"]
        gets = [op for op in ops if op.kind == "get"]
        removes = [op for op in ops if op.kind == "remove"]
        for get in gets:
            if get.outcome == "ok":
                found += _bytes(get, puts, owners)
                found += _after_remove(get, removes, puts)
            elif get.outcome == "miss":
                known = [put for put in puts if put.completed + rules.announced_s < get.invoked]
                found += _missed(get, known, removes, nodes)
        if aftermath is not None:
            found += _last(key, puts, removes, nodes, aftermath)
    if aftermath is not None:
        found += _owners(by_key, aftermath)
        found += _after(aftermath)
    return found


class _Nodes:
    """When each node was disturbed."""

    def __init__(self, disturbances: Sequence[Disturbance], recovery_s: float) -> None:
        self._of: dict[str, list[Disturbance]] = defaultdict(list)
        for one in disturbances:
            self._of[one.target].append(one)
        self._recovery_s = recovery_s

    def robbed(self, node: str, start: float, end: float) -> bool:
        return any(d.harm == "memory" and d.start <= end and d.end >= start for d in self._of[node])

    def unreachable(self, node: str, start: float, end: float) -> bool:
        """At some time of it, or until shortly before."""
        return any(d.start <= end and d.end + self._recovery_s >= start for d in self._of[node] if d.harm != "master")


# ── one get ───────────────────────────────────────────────────────────────────────────────────────


def _bytes(get: Op, puts: Sequence[Op], owners: dict[str, set[str]]) -> Iterator[Violation]:
    before = [put for put in puts if put.invoked <= get.completed]
    if get.digest in {put.digest for put in before}:
        return
    others = owners.get(get.digest, set()) - {get.key}
    if others:
        text = f"bytes of another key ({min(others)[:16]})"
    elif not before:
        text = "bytes of a key that nobody had put"
    else:
        text = f"bytes that nobody put ({get.digest}, not {before[0].digest})"
    yield Violation("bytes", get.key, f"{text}: {get}", (get, *before))


def _after_remove(get: Op, removes: Sequence[Op], puts: Sequence[Op]) -> Iterator[Violation]:
    for remove in removes:
        if get.holder in remove.acknowledged and get.invoked > remove.completed:
            again = [put for put in puts if put.invoked <= get.completed and put.effect_ends() >= remove.invoked]
            if not again:
                text = f"{get.holder} acknowledged its removal and served it: {get}"
                yield Violation("remove", get.key, text, (remove, get))
                return


def _missed(get: Op, puts: Sequence[Op], removes: Sequence[Op], nodes: _Nodes) -> Iterator[Violation]:
    for put in _kept(puts, removes, get.invoked, get.completed):
        here = put.holder
        if nodes.robbed(here, put.invoked, get.completed):
            continue
        if not nodes.unreachable(here, get.invoked, get.completed):
            text = f"pinned hard at {here}, which nobody disturbed, and a get says it is nowhere: {get}"
            yield Violation("miss", get.key, text, (put, get))
            return


def _kept(puts: Sequence[Op], removes: Sequence[Op], by: float, until: float) -> Iterator[Op]:
    """Hard pins acknowledged before `by` that nobody was removing until `until`."""
    for put in puts:
        if not put.pinned or put.outcome != "ok" or put.completed >= by:
            continue
        if not any(r.invoked <= until and r.effect_ends(put.holder) >= put.invoked for r in removes):
            yield put


# ── the end ───────────────────────────────────────────────────────────────────────────────────────


def _last(
    key: str, puts: Sequence[Op], removes: Sequence[Op], nodes: _Nodes, aftermath: Aftermath
) -> Iterator[Violation]:
    for put in _kept(puts, removes, aftermath.when, INF):
        after = aftermath.nodes.get(put.holder)
        if not nodes.robbed(put.holder, put.invoked, INF) and (after is None or key not in after.blocks):
            yield Violation("last", key, f"pinned hard at {put.holder}, and it is not there: {put}", (put,))
    for remove in removes:
        if remove.completed >= aftermath.when:
            continue
        again = [put for put in puts if put.effect_ends() >= remove.invoked]
        for store in remove.acknowledged:
            if not again and key in aftermath.nodes.get(store, NOBODY).blocks:
                yield Violation("removed", key, f"{store} acknowledged its removal and holds it: {remove}", (remove,))


def _owners(by_key: dict[str, list[Op]], aftermath: Aftermath) -> Iterator[Violation]:
    held: dict[str, dict[str, str]] = defaultdict(dict)
    for name, node in aftermath.nodes.items():
        for key, digest in node.blocks.items():
            held[key][name] = digest
    for key, copies in held.items():
        if len(set(copies.values())) > 1:
            yield Violation("owners", key, f"different bytes under one key: {copies}", tuple(by_key.get(key, ())))
            continue
        put = {op.digest for op in by_key.get(key, ()) if op.kind == "put"}
        for name, digest in copies.items():
            if digest not in put:
                yield Violation("owners", key, f"{name} holds bytes that nobody put: {digest}")


def _after(aftermath: Aftermath) -> Iterator[Violation]:
    if len(aftermath.leaders) != 1:
        yield Violation("after", "", f"{len(aftermath.leaders)} masters lead: {list(aftermath.leaders)}")
    for name, node in aftermath.nodes.items():
        if node.unusable:
            yield Violation("after", "", f"{name} is not usable: {node.unusable}")
        for leak in node.leaks:
            yield Violation("after", "", f"{name}: {leak}")
        mapped = aftermath.mapped.get(name, frozenset())
        for key in sorted(mapped - node.listed)[:3]:
            yield Violation("after", key, f"the master believes that {name} holds it")
        for key in sorted(node.listed - mapped)[:3]:
            yield Violation("after", key, f"{name} holds it, and the master does not know")
    for name in sorted(aftermath.mapped.keys() - aftermath.nodes.keys()):
        yield Violation("after", "", f"the master names {name}, which is no node")


# ── all operations ────────────────────────────────────────────────────────────────────────────────


def _answered(ops: Sequence[Op], rules: Rules) -> Iterator[Violation]:
    for op in ops:
        if op.outcome == "pending":
            yield Violation("answered", op.key, f"no answer: {op}", (op,))
        elif op.completed > op.deadline + rules.grace_s:
            late = op.completed - op.deadline
            yield Violation("answered", op.key, f"{late:.1f} s after its deadline: {op}", (op,))
        elif op.outcome == "error" and not op.error:
            yield Violation("answered", op.key, f"an error without a name: {op}", (op,))


def _granted(grants: Sequence[Op]) -> Iterator[Violation]:
    seen: dict[str, Op] = {}
    for op in grants:
        if op.outcome == "ok" and seen.setdefault(op.key, op) is not op:
            yield Violation("granted", op.key, f"granted twice: {op}", (seen[op.key], op))


# ── telling of it ─────────────────────────────────────────────────────────────────────────────────


def explain(violations: Sequence[Violation], history: History, seed: int) -> str:
    """The seed, each violation with its key's history, and the nemesis' log."""
    lines = [f"{len(violations)} violations; seed {seed} (KVMESH_CHAOS_SEED={seed})"]
    for violation in violations[:5]:
        lines += ["", str(violation)]
        ops = history.of(violation.key) if violation.key else []
        lines += [f"  {op}" for op in ops[-MAX_SHOWN:]]
    if len(violations) > 5:
        lines += ["", *map(str, violations[5:MAX_SHOWN])]
    lines += ["", "what the nemesis did:", *(f"  {one}" for one in sorted(history.disturbances, key=lambda d: d.start))]
    return "\n".join(lines)
