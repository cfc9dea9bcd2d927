"""The decision log: all that the brain heard and what it answered, as JSON lines, so that every decision can be made
again bit for bit (`kvmesh sim --decisions FILE`).

    {"kind": "log", "version": 1, "seed": .., "started_at": .., "settings": {..}}      the first line
    {"kind": "event", "at": .., "type": "Heartbeat", "event": {..}}                    what it heard
    {"kind": "decision", "at": .., "event": {Schedule}, "answer": {..}, "weighed": [..], "kinds": [..]}
    {"kind": "outcome", "at": .., ..}                       how a request ended, once more, for readers of the log
    {"kind": "end", "why": ".."}                            the log is full: what follows is not in it

Times are the brain's seconds; bytes are base64. The brain is a function of the first line and of the events in their
order: same code, same answers. `weighed` and `kinds` are for people, as `kvmesh explain` shows them. Pure: lines go to
a callable.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from kvmesh.clock import CaughtUp, Tick
from kvmesh.errors import ConfigError, KvmeshError
from kvmesh.kvcache.keys import Keys
from kvmesh.services.conductor import domain
from kvmesh.services.conductor.domain import Action, Event, Heartbeat, Placed, Refuse, Schedule
from kvmesh.services.conductor.policies import registry
from kvmesh.services.conductor.records.explain import Decision
from kvmesh.services.conductor.settings import Settings
from kvmesh.services.conductor.state import ConductorState

VERSION = 1
MAX_WEIGHED = 32  # candidates of each role in one line

_EVENTS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        domain.Register,
        domain.Heartbeat,
        domain.Schedule,
        domain.RequestReleased,
        domain.MembersReset,
        domain.MemberJoined,
        domain.MemberGone,
        domain.Blocks,
        domain.StoreLost,
        domain.Cordon,
        domain.Lead,
        domain.OrderEnded,
        domain.RequestsHeld,
        CaughtUp,
        Tick,
    )
}


@dataclass(frozen=True, slots=True)
class Header:
    """How the brain was made. `seed` is that of its random numbers."""

    seed: int
    started_at: float
    settings: Settings

    def brain(self) -> ConductorState:
        """Returns a brain in its first state."""
        return ConductorState(self.settings, random.Random(self.seed), self.started_at)


class Recorder:
    """A brain whose every step is logged. `write` takes whole lines and returns how many bytes it has taken so far;
    beyond `limit_bytes` the log ends and the brain goes on."""

    def __init__(self, header: Header, write: Callable[[bytes], int], limit_bytes: int) -> None:
        self.state = header.brain()
        self._write = write
        self._limit = limit_bytes
        self._full = False
        first = {"kind": "log", "version": VERSION} | _plain(header)
        self._line(first)

    def step(self, event: Event, now: float) -> Sequence[Action]:
        """Does what ConductorState's `step` does, and logs it."""
        if self._full:
            return self.state.step(event, now)
        if isinstance(event, Schedule):
            actions = self.state.step(event, now)
            self._line(self._decision(event, now, actions))
            return actions
        # First, since a step that raises has changed the brain, too.
        self._line({"kind": "event", "at": now, "type": type(event).__name__, "event": event})
        if isinstance(event, Heartbeat):
            for outcome in event.outcomes:
                self._line({"kind": "outcome", "at": now, **_plain(outcome)})
        return self.state.step(event, now)

    def _decision(self, event: Schedule, now: float, actions: Sequence[Action]) -> dict[str, Any]:
        line: dict[str, Any] = {"kind": "decision", "at": now, "event": event, "answer": answer_of(actions)}
        why = self.state.explain(event.request_id)
        return line if why is None else line | _why(why)

    def _line(self, told: dict[str, Any]) -> None:
        if self._full:
            return
        taken = self._write(msgspec.json.encode(told, enc_hook=_unpacked) + b"\n")
        if taken > self._limit:
            self._full = True
            why = f"the log has reached {self._limit:,} bytes"
            self._write(msgspec.json.encode({"kind": "end", "why": why}) + b"\n")


def _unpacked(value: Any) -> list[bytes]:
    if isinstance(value, Keys):
        return list(value)
    raise NotImplementedError(f"{type(value).__name__} is no part of an event")


def _plain(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(value)
    return found


def _why(why: Decision) -> dict[str, Any]:
    return {
        "best_prefix_blocks": why.best_prefix_blocks,
        "slo": {"ttft_s": why.ttft_slo_s, "tbt_s": why.tbt_slo_s},
        "weighed": [
            {
                "instance": c.ref.instance_id,
                "role": c.role.value,
                "score_s": c.score_s,
                "terms": c.named_terms(),
                "verdict": why.verdict(c),
            }
            for c in why.candidates[:MAX_WEIGHED]
        ],
        "kinds": [
            {
                "kind": k.kind.value,
                "prefill": k.prefill.instance_id,
                "decode": k.decode.instance_id,
                "cost_s": k.cost_s,
                "terms": k.named_terms(),
                "verdict": why.kind_verdict(k),
            }
            for k in why.kinds[:MAX_WEIGHED]
        ],
    }


def answer_of(actions: Sequence[Action]) -> dict[str, Any]:
    """Returns the answer to a Schedule as plain data: what must be equal when the decision is made again."""
    for action in actions:
        match action:
            case Placed():
                return {"placed": msgspec.json.decode(msgspec.json.encode(action))}
            case Refuse(error, reason):
                return {"refused": _error(error) | {"reason": reason}}
    raise AssertionError("a Schedule is answered by a placement or a refusal")


def _error(error: KvmeshError) -> dict[str, Any]:
    return {"code": error.code, "message": error.message, "retry_after_ms": error.retry_after_ms}


# ── reading ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class JournalLine:
    """One event of the log. `answer` is set for a Schedule, as `answer_of` returns it."""

    number: int
    at: float
    event: Event
    answer: dict[str, Any] | None = None


def header_of(raw: bytes) -> Header:
    """Parses the first line. Raises ConfigError, which says what is wrong with it."""
    told = _decode(raw, 1)
    if told.get("kind") != "log" or told.get("version") != VERSION:
        shown = f"kind={told.get('kind')!r}, version={told.get('version')!r}"
        raise ConfigError(f"decision log line 1: {shown}: must be kind='log', version={VERSION}", field="decisions")
    try:
        header = msgspec.convert(told, Header)
        registry.checked(header.settings.policy)
        return header
    except (msgspec.ValidationError, ConfigError) as err:
        raise ConfigError(f"decision log line 1: {err}", field="decisions") from None


def line_of(raw: bytes, number: int) -> JournalLine | None:
    """Parses a further line; None for a line that is only for people. Raises ConfigError, which names line and
    field."""
    told = _decode(raw, number)
    kind = told.get("kind")
    if kind not in ("event", "decision"):
        return None
    name = "Schedule" if kind == "decision" else told.get("type")
    if name not in _EVENTS:
        raise ConfigError(f"decision log line {number}: type={name!r}: is no event", field="decisions")
    try:
        event: Event = msgspec.convert(told["event"], _EVENTS[name])
        if isinstance(event, Schedule):
            event = replace(event, keys=Keys.of(event.keys))
        return JournalLine(number, float(told["at"]), event, told.get("answer"))
    except (msgspec.ValidationError, KeyError, TypeError, ValueError) as err:
        raise ConfigError(f"decision log line {number}: {err}", field="decisions") from None


def _decode(raw: bytes, number: int) -> dict[str, Any]:
    try:
        told = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        raise ConfigError(f"decision log line {number}: is not JSON", field="decisions") from None
    if not isinstance(told, dict):
        raise ConfigError(f"decision log line {number}: must be an object", field="decisions")
    return told
