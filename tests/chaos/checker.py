"""Whether a history is one that the store may have. Pure.

Rules, per key (a content key's bytes follow from it; a granted key has one owner):

bytes      a get returns what a put of that key carried, invoked before the get ended.
remove     after a remove that store h acknowledged, no get that was invoked after the answer is served by h (in any of
           its lives), until a put of that key may have sealed it there: one that had not ended before the remove began.
miss       "not there" is claimed of no block that was put with a hard pin at h (acknowledged before the get began) and
           was not being removed, while h was neither robbed of its memory since, nor out of reach during the get or
           `recovery_s` before it. It makes no difference who leads: a reader that cannot know says so by an error. A
           put that ended less than `announced_s` before the get need not be known yet. A node that was drained is
           robbed of nothing: what it alone had is elsewhere, as long as no other node has been robbed since the drain
           began.
last       such a block is at h at the end, if h kept its memory; at somebody, if h was drained.
removed    a block whose removal h acknowledged, and that was not put again, is not at h at the end.
unbound, lost: of names, see name_rules.
owners     all nodes that hold a key at the end hold the same bytes, and somebody put them.
granted    no number is granted twice.
answered   every operation ends within its deadline (and `grace_s`), with what was asked for, a miss, or a named error.
limit      at the end the nodes hold no more blocks of a tenant than were allowed last, and one a node; the master tells
           that limit; when it is lifted, more are kept again.
after      every node is usable and has no leaks, one master leads, its map equals what the nodes list.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.chaos.history import INF, Aftermath, Disturbance, History, NodeAfter, Op
from tests.chaos.name_rules import check_names
from tests.chaos.violation import Violation

MAX_SHOWN = 40
_AWAY = ("memory", "reach")
NOBODY = NodeAfter({})


@dataclass(frozen=True)
class Rules:
    """`recovery_s`: how long after the end of a disturbance a node may still be unknown to whoever is asked.
    `names_grace_s`: so long a name stands for a block that is nowhere."""

    recovery_s: float = 10.0
    announced_s: float = 2.0
    grace_s: float = 5.0
    names_grace_s: float = 30.0


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
    removed = [op for op in history.ops if op.kind == "remove"]
    for key, ops in by_key.items():
        found += check_names(ops, removed, rules.names_grace_s)
        puts = [op for op in ops if op.kind == "put"]
        gets = [op for op in ops if op.kind == "get"]
        removes = [op for op in ops if op.kind == "remove"]
        for get in gets:
            if get.outcome == "ok":
                found += _bytes(get, puts, owners)
                found += _after_remove(get, removes, puts)
            elif get.outcome == "miss":
                known = [put for put in puts if put.completed + rules.announced_s < get.invoked]
                found += _missed(get, known, removes, ops, nodes)
        if aftermath is not None:
            found += _last(key, puts, removes, ops, nodes, aftermath)
    if aftermath is not None:
        found += _owners(by_key, aftermath)
        found += _limit([op for op in history.ops if op.kind == "limit"], aftermath)
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

    def lost(self, node: str, since: float, until: float) -> bool:
        """Whether a block that lay there alone may be nowhere: the node was robbed, and it was not moved before."""
        robbed = [d.start for d in self._of[node] if d.harm == "memory" and d.start <= until and d.end >= since]
        if not robbed:
            return False
        drains = [d for d in self._of[node] if d.harm == "drained" and d.start >= since and d.end == min(robbed)]
        return not drains or any(self.robbed(other, drains[0].start, until) for other in self._of if other != node)

    def away(self, node: str, since: float, start: float, end: float) -> bool:
        """Whether who has what lay there alone at `since` may not be reached at some time of start..end."""
        here = [node] if not self.robbed(node, since, end) else [name for name in self._of if name != node]
        return any(self.unreachable(name, start, end) for name in here)

    def unreachable(self, node: str, start: float, end: float) -> bool:
        """At some time of it, or until shortly before."""
        return any(d.start <= end and d.end + self._recovery_s >= start for d in self._of[node] if d.harm in _AWAY)


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


def _missed(
    get: Op, puts: Sequence[Op], removes: Sequence[Op], ops: Sequence[Op], nodes: _Nodes
) -> Iterator[Violation]:
    for put in _kept(puts, removes, get.invoked, get.completed):
        here = put.holder
        moved = nodes.robbed(here, put.invoked, get.completed)
        if nodes.lost(here, put.invoked, get.completed) or (moved and _unsure(put, ops, get.completed)):
            continue
        if not nodes.away(here, put.invoked, get.invoked, get.completed):
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
    key: str, puts: Sequence[Op], removes: Sequence[Op], ops: Sequence[Op], nodes: _Nodes, aftermath: Aftermath
) -> Iterator[Violation]:
    for put in _kept(puts, removes, aftermath.when, INF):
        moved = nodes.robbed(put.holder, put.invoked, INF)
        if nodes.lost(put.holder, put.invoked, INF) or (moved and _unsure(put, ops, INF)):
            continue
        here = [aftermath.nodes.get(put.holder)] if not moved else list(aftermath.nodes.values())
        if not any(after is not None and key in after.blocks for after in here):
            text = f"pinned hard at {put.holder}{', which was drained' if moved else ''}, and it is not there: {put}"
            yield Violation("last", key, text, (put,))
    for remove in removes:
        if remove.completed >= aftermath.when:
            continue
        again = [put for put in puts if put.effect_ends() >= remove.invoked]
        for store in remove.acknowledged:
            if not again and key in aftermath.nodes.get(store, NOBODY).blocks:
                yield Violation("removed", key, f"{store} acknowledged its removal and holds it: {remove}", (remove,))


def _unsure(put: Op, ops: Sequence[Op], until: float) -> bool:
    """Whether its pin may have gone with its node although that was drained: a node that it was moved to may still hear
    of a removal that came before the put, or another node had a copy of its own, which nobody need pin."""
    for op in ops:
        if op.invoked <= until and (
            op.kind == "copy"
            or (op.kind == "remove" and (op.pending or op.outcome != "ok"))
            or (op.kind == "put" and (op.outcome != "ok" or op.holder != put.holder))
        ):
            return True
    return False


def _limit(limits: Sequence[Op], aftermath: Aftermath) -> Iterator[Violation]:
    after = aftermath.limit
    if after is None:
        return
    allowed, last = after.blocks, limits[-1:]
    if not last or last[0].outcome != "ok" or last[0].digest != str(allowed):
        yield Violation("limit", after.tag, f"{allowed} blocks are not what was set last", tuple(last))
    if after.told != allowed:
        yield Violation("limit", after.tag, f"{allowed} blocks were allowed last, and the master says {after.told}")
    if sum(after.held.values()) > allowed + len(after.held):
        yield Violation("limit", after.tag, f"{after.held}: more than {allowed} blocks")
    if after.lifted <= allowed + len(after.held):
        yield Violation("limit", after.tag, f"{after.lifted} blocks are kept without a limit, as with {allowed}")


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
    """The seed, each violation with what it rests on (*) and its key's history, and the nemesis' log."""
    lines = [f"{len(violations)} violations; seed {seed} (KVMESH_CHAOS_SEED={seed})"]
    for violation in violations[:5]:
        lines += ["", str(violation), *(f"* {op}" for op in violation.ops)]
        ops = history.of(violation.key) if violation.key else []
        lines += [f"  {op}" for op in ops[-MAX_SHOWN:]]
    if len(violations) > 5:
        lines += ["", *map(str, violations[5:MAX_SHOWN])]
    lines += ["", "what the nemesis did:", *(f"  {one}" for one in sorted(history.disturbances, key=lambda d: d.start))]
    return "\n".join(lines)
