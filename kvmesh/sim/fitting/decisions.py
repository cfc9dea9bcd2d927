"""Every decision of a decision log made again by the same brain, and compared with what was answered then."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kvmesh.errors import ConfigError
from kvmesh.services.conductor.domain import Schedule
from kvmesh.services.conductor.records import journal
from kvmesh.services.conductor.state import ConductorState

MAX_KEPT = 20  # differences that are kept in full
TELL_EVERY = 1_000  # lines


@dataclass(frozen=True, slots=True)
class Difference:
    """A decision that came out otherwise."""

    line: int
    request_id: str
    logged: dict[str, Any]
    made: dict[str, Any]

    def fields(self) -> dict[str, tuple[Any, Any]]:
        """What differs: name → (logged, made)."""
        then, now = _flat(self.logged), _flat(self.made)
        return {name: (then.get(name), now.get(name)) for name in {**then, **now} if then.get(name) != now.get(name)}


@dataclass(slots=True)
class Replayed:
    """`differences`: the first ones; `different`: of all."""

    events: int = 0
    decisions: int = 0
    placed: int = 0
    refused: int = 0
    different: int = 0
    differences: list[Difference] = field(default_factory=list)


def replay(lines: Iterable[bytes], progress: Callable[[int], None] = lambda lines: None) -> Replayed:
    """`progress` hears, now and then, how many lines are done. ConfigError: it is no decision log, or a line of it is
    broken (but for the last one: a conductor that was killed may have left half of it)."""
    found = Replayed()
    rest = iter(lines)
    first = next(rest, None)
    if first is None:
        raise ConfigError("decision log: is empty", field="decisions")
    brain = journal.header_of(first).brain()
    for number, raw in enumerate(rest, 2):
        if not raw.endswith(b"\n"):
            break
        line = journal.line_of(raw, number)
        if line is not None:
            _again(found, brain, line)
        if number % TELL_EVERY == 0:
            progress(number)
    return found


def _again(found: Replayed, brain: ConductorState, line: journal.JournalLine) -> None:
    found.events += 1
    try:
        actions = brain.step(line.event, line.at)
    except ValueError:
        return  # a broken announcement: the brain that wrote the log raised, too
    if not isinstance(line.event, Schedule) or line.answer is None:
        return
    made = journal.answer_of(actions)
    found.decisions += 1
    found.placed += "placed" in made
    found.refused += "refused" in made
    if made != line.answer:
        found.different += 1
        if len(found.differences) < MAX_KEPT:
            found.differences.append(Difference(line.number, line.event.request_id, line.answer, made))


def _flat(told: dict[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in told.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{before}{name}.")
        else:
            flat[f"{before}{name}"] = value
    return flat
