"""Whether what names stood for is what they may have stood for. Pure.

unbound    a name stands for a block only if somebody bound it to that, in time: after any answer by which it stood for
           another block or for none, after the block was removed, and after the name was unbound.
lost       what a bind was told stands, whoever leads, until somebody unbinds the name, removes the block, or binds the
           name to another one when the block has been nowhere for `names_grace_s`. Whoever replaces it leaves no moment
           in which it stands for nothing: that is so only after it was unbound, or the block that it stood for removed.
refused    a bind that may replace is never told that the name is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.chaos.history import INF, Op
from tests.chaos.violation import Violation


@dataclass(frozen=True, slots=True)
class _Seen:
    """At some time from `since` to `until` the name did not stand for `but`'s block ("": it stood for none)."""

    op: Op
    stood_for: str


def check_names(ops: Sequence[Op], removes: Sequence[Op], grace_s: float) -> Iterator[Violation]:
    """`ops`: of one name. `removes`: of any key."""
    binds = [op for op in ops if op.kind == "bind"]
    answers = [_Seen(op, op.digest) for op in ops if op.kind in ("bind", "resolve") and op.outcome == "ok"]
    for answer in answers:
        if answer.stood_for:
            yield from _unbound(answer, answers, ops, binds, removes)
    for answer in answers:
        yield from _lost(answer, ops, binds, removes, grace_s)
    for bind in binds:
        if bind.replace and bind.outcome == "taken":
            yield Violation("refused", bind.key, f"it was to be replaced: {bind}", (bind,))


def _unbound(
    answer: _Seen, answers: Sequence[_Seen], ops: Sequence[Op], binds: Sequence[Op], removes: Sequence[Op]
) -> Iterator[Violation]:
    """An answer that names a block."""
    op, key = answer.op, answer.stood_for
    binding = [bind for bind in binds if bind.digest == key and bind.invoked <= op.completed]
    if not binding:
        yield Violation("unbound", op.key, f"nobody had bound it to that: {op}", (op,))
        return
    others = [seen.op for seen in answers if seen.stood_for != key]
    others += [one for one in ops if one.kind == "unbind" and one.outcome == "ok"]
    others += [one for one in removes if one.key == key and one.outcome == "ok"]
    for other in others:
        if other.completed < op.invoked and not any(bind.effect_ends() >= other.invoked for bind in binding):
            yield Violation("unbound", op.key, f"it does not stand for that any more: {op}", (other, op))
            return


def _lost(
    answer: _Seen, ops: Sequence[Op], binds: Sequence[Op], removes: Sequence[Op], grace_s: float
) -> Iterator[Violation]:
    op = answer.op
    for bind in binds:
        if bind.outcome != "ok" or bind.completed >= op.invoked or bind.digest == answer.stood_for:
            continue
        key = bind.digest
        ends = [one for one in ops if one.kind == "unbind" or (one.kind == "bind" and one.replace)]
        ends = [one for one in ends if one.digest != key or one.kind == "unbind"]
        stood_for = {key}
        if not answer.stood_for:
            ends = [one for one in ends if one.kind == "unbind"]
            since = [one for one in binds if one.invoked <= op.completed and one.effect_ends() >= bind.invoked]
            stood_for.update(one.digest for one in since)
        ended = any(one.invoked <= op.completed and one.effect_ends() >= bind.invoked for one in ends)
        ended |= any(
            one.key in stood_for and one.invoked <= op.completed and _removing_until(one) >= bind.invoked
            for one in removes
        )
        first = min(one.invoked for one in binds if one.digest == key)
        others = [one for one in binds if one.digest != key and one.invoked <= op.completed]
        rebound = (
            bool(answer.stood_for)
            and op.completed - first > grace_s
            and any(one.effect_ends() >= bind.invoked for one in others)
        )
        if not ended and not rebound:
            yield Violation("lost", op.key, f"it was bound, and nobody has ended that: {op}", (bind, op))
            return


def _removing_until(remove: Op) -> float:
    return remove.completed if remove.outcome == "ok" else INF
