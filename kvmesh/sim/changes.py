"""What conductors are not told: slow and frozen phases of instances, deaths, newcomers, and how step times scatter.

Pure. Whatever looks random follows from a seed and a number (of an instance, of a step), never from the order of calls:
the same step of the same instance has the same factor in every run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmesh.errors import ConfigError

_Array = npt.NDArray[np.float64]
BLOCK = 256  # factors that are drawn at once


def _span(from_s: float, until_s: float) -> str:
    return f"{from_s:g}-" + (f"{until_s:g}" if until_s < inf else "")


@dataclass(frozen=True)
class SlowPhase:
    """From `from_s` to `until_s` (virtual seconds; inf: to the end) the steps of `node` take `times` as long. Phases
    that overlap multiply."""

    node: str
    from_s: float
    until_s: float
    times: float

    def __str__(self) -> str:
        return f"{self.node}:{_span(self.from_s, self.until_s)}:{self.times:g}"


@dataclass(frozen=True)
class FreezePhase:
    """From `from_s` to `until_s` `node` stands still as under SIGSTOP: no step goes on, no byte leaves or arrives, no
    heartbeat is sent."""

    node: str
    from_s: float
    until_s: float

    def __str__(self) -> str:
        return f"{self.node}:{_span(self.from_s, self.until_s)}"


@dataclass(frozen=True)
class KillEvent:
    """At `at_s` the process of `node` dies, and what it held is lost. `back_s` later a newcomer takes its name: a new
    incarnation with an empty store; inf: nobody does."""

    node: str
    at_s: float
    back_s: float = inf

    def __str__(self) -> str:
        return f"{self.node}:{self.at_s:g}" + (f"+{self.back_s:g}" if self.back_s < inf else "")


@dataclass(frozen=True)
class JoinEvent:
    """`node`, one of those that the configuration names, is not there before `at_s`."""

    node: str
    at_s: float

    def __str__(self) -> str:
        return f"{self.node}:{self.at_s:g}"


@dataclass(frozen=True)
class LeaveEvent:
    """From `at_s` on `node` takes nothing new; it goes when it has ended what it has."""

    node: str
    at_s: float

    def __str__(self) -> str:
        return f"{self.node}:{self.at_s:g}"


class StepClock:
    """How long steps of one instance really take: the usual time, times a factor of the instance, times a factor of
    each step, in a time that goes slower in slow phases and stands still in frozen ones."""

    def __init__(
        self,
        name: str,
        seed: int,
        *,
        noise: float = 0.0,
        spread: float = 0.0,
        slow: Sequence[SlowPhase] = (),
        freeze: Sequence[FreezePhase] = (),
    ) -> None:
        """`noise`, `spread`: standard deviations of the logarithms of a step's and of the instance's factor. Phases of
        other instances are passed over."""
        self._noise = noise
        self._name, self._seed = name, seed
        self._blocks: dict[tuple[str, int], _Array] = {}
        self.factor = math.exp(spread * _normals(seed, name, "instance", 0)[0] - spread**2 / 2) if spread else 1.0
        self._frozen = sorted((one.from_s, one.until_s) for one in freeze if one.node == name)
        own = [one for one in slow if one.node == name]
        ends = {0.0, *(t for one in own for t in (one.from_s, one.until_s)), *(t for one in self._frozen for t in one)}
        self._from = np.array(sorted(end for end in ends if end < inf))
        self._slowness = np.array([self._slowness_at(float(at), own) for at in self._from])
        gone = np.diff(self._from) / self._slowness[:-1]
        self._done = np.concatenate([[0.0], np.cumsum(gone)])  # seconds of usual work before each of `_from`

    def _slowness_at(self, at_s: float, slow: Sequence[SlowPhase]) -> float:
        if any(begin <= at_s < end for begin, end in self._frozen):
            return inf
        return math.prod(one.times for one in slow if one.from_s <= at_s < one.until_s)

    def step_s(self, now: float, usual_s: float, kind: str, number: int) -> float:
        """How long the step of that number takes, of those of this `kind`, when it begins now."""
        return float(self.ends_s(now, np.array([usual_s]), kind, number)[0]) - now

    def ends_s(self, now: float, usual_s: npt.NDArray[np.floating[Any]], kind: str, number: int) -> _Array:
        """When each of some steps ends that follow one another from now on; `number`: that of the first one."""
        work = usual_s * self.factor
        if self._noise:
            work = work * self._factors(kind, number, len(usual_s))
        if len(self._from) == 1:
            return now + np.cumsum(work * float(self._slowness[0]))
        done = self._work_at(now) + np.cumsum(work)
        # A step that ends exactly where a phase begins does not wait for its end.
        at = np.maximum(np.searchsorted(self._done, done, side="left") - 1, 0)
        ends: _Array = self._from[at] + (done - self._done[at]) * self._slowness[at]
        return ends

    def _work_at(self, now: float) -> float:
        at = int(np.searchsorted(self._from, now, side="right")) - 1
        return float(self._done[at] + (now - self._from[at]) / self._slowness[at])

    def _factors(self, kind: str, first: int, count: int) -> _Array:
        numbers = range(first // BLOCK, (first + count - 1) // BLOCK + 1)
        blocks = [self._block(kind, number) for number in numbers]
        found = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
        begin = first - numbers[0] * BLOCK
        return found[begin : begin + count]

    def _block(self, kind: str, number: int) -> _Array:
        block = self._blocks.get((kind, number))
        if block is None:
            normals = _normals(self._seed, self._name, kind, number)
            block = np.exp(self._noise * normals - self._noise**2 / 2)  # the mean stays
            self._blocks = {key: one for key, one in self._blocks.items() if key[1] >= number - 1 or key[0] != kind}
            self._blocks[kind, number] = block
        return block

    def times(self, now: float) -> float:
        """How many times as long as usual steps take now, but for their noise; inf: none goes on."""
        return self.factor * float(self._slowness[int(np.searchsorted(self._from, now, side="right")) - 1])

    def thaws_s(self, now: float) -> float:
        """When it goes on, if it stands still; else now."""
        for begin, end in self._frozen:
            if begin <= now < end:
                return end
        return now


# ── as text: what `__str__` of each says ─────────────────────────────────────────────────────────

_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"
_NODE = r"([pd]\d+)"
_FORMS = {
    "slow": ("NODE:FROM-UNTIL:TIMES", rf"{_NODE}:{_NUMBER}-{_NUMBER}?:{_NUMBER}"),
    "freeze": ("NODE:FROM-UNTIL", rf"{_NODE}:{_NUMBER}-{_NUMBER}"),
    "kill": ("NODE:AT or NODE:AT+BACK", rf"{_NODE}:{_NUMBER}(?:\+{_NUMBER})?"),
    "join": ("NODE:AT", rf"{_NODE}:{_NUMBER}"),
    "leave": ("NODE:AT", rf"{_NODE}:{_NUMBER}"),
}
_KINDS: Mapping[str, Callable[..., Any]] = {
    "slow": SlowPhase, "freeze": FreezePhase, "kill": KillEvent, "join": JoinEvent, "leave": LeaveEvent,
}  # fmt: skip


def changes_of(name: str, text: str) -> tuple[Any, ...]:
    """`text`: one or several, with commas between them, for the field of that name of `SimConfig`. Raises ConfigError
    that names field and value."""
    form, pattern = _FORMS[name]
    found = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        match = re.fullmatch(pattern, word)
        if match is None:
            raise ConfigError(f"{name}={word!r}: must be {form}, as p1 or d0, in seconds", field=name)
        node, *numbers = match.groups()
        found.append(_KINDS[name](node, *(inf if one is None else float(one) for one in numbers)))
    return tuple(found)


def _normals(seed: int, name: str, kind: str, number: int) -> _Array:
    """BLOCK standard normal numbers: a counter-based generator (Philox), so that any of them can be had first."""
    digest = blake2b(f"{seed}:{name}:{kind}".encode(), digest_size=16).digest()
    key = np.frombuffer(digest, dtype=np.uint64)
    found: _Array = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, number])).standard_normal(BLOCK)
    return found


@dataclass(frozen=True)
class ChangeNoticed:
    """How placements followed one change. Seconds from its beginning, or its end; nan: they never did."""

    what: str  # "slow", "frozen", "killed", "left", "joined"
    node: str
    from_s: float
    until_s: float
    able: float  # the share of its pool's requests that it could take meanwhile, served as fast as by the others
    share: float  # that it got meanwhile
    noticed_s: float  # from the beginning until its share stayed at most `OVER` times `able`
    back_s: float  # from the end until its share was at least `BACK` of an equal one, over `BACK_WINDOW_S`
    run_s: float  # how long the run took

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain JSON."""
        return {
            "what": self.what,
            "node": self.node,
            **{
                name: round(value, 4) if math.isfinite(value) else None
                for name, value in vars(self).items()
                if isinstance(value, float)
            },
        }


OVER, STRAY = 1.25, 4.0
BACK, BACK_WINDOW_S = 0.8, 15.0
Placements = Sequence[tuple[float, str]]  # when a request of one pool was placed, and where


def noticed(
    what: str, node: str, from_s: float, until_s: float, able: float, fair: float, placed: Placements, run_s: float
) -> ChangeNoticed:
    """`placed`: of the node's pool, in order of time, over the whole run of `run_s`; `fair`: an equal share."""
    meanwhile = [(at, name == node) for at, name in placed if from_s <= at < until_s]
    after = [(at, name == node) for at, name in placed if at >= until_s]
    hits = sum(own for _, own in meanwhile)
    return ChangeNoticed(
        what,
        node,
        from_s,
        until_s,
        able,
        hits / len(meanwhile) if meanwhile else math.nan,
        _settled_s(meanwhile, from_s, able),
        _back_s(after, until_s, fair),
        run_s,
    )


def _settled_s(meanwhile: Sequence[tuple[float, bool]], from_s: float, able: float) -> float:
    """The least time from which on no more than `OVER * able` of the requests, and `STRAY` of them, went there, however
    many are looked at (none at all where it was able to take none)."""
    if not meanwhile:
        return math.nan
    # Hits minus what is allowed, summed up from the end: the greatest sum of any stretch that begins here.
    worst, last = 0.0, 0.0
    for begin in range(len(meanwhile) - 1, -1, -1):
        at, own = meanwhile[begin]
        worst = max(0.0, worst) + own - OVER * able
        if worst > (STRAY if able else 0):
            return last - from_s if begin + 1 < len(meanwhile) else math.nan
        last = at
    return 0.0


def _back_s(after: Sequence[tuple[float, bool]], until_s: float, fair: float) -> float:
    """The least time after which at least `BACK * fair` of what comes in the next `BACK_WINDOW_S` went there."""
    if not after:
        return math.nan
    last = after[-1][0]
    end = hits = 0
    for begin, (at, own) in enumerate(after):
        if begin and at + BACK_WINDOW_S > last:
            break
        while end < len(after) and after[end][0] < at + BACK_WINDOW_S:
            hits += after[end][1]
            end += 1
        if hits >= BACK * fair * (end - begin):
            return max(0.0, at - until_s) if begin else 0.0
        hits -= own
    return math.nan
