"""One machine that all instances share: its cores, the door that requests come in by, and how much steps scatter.

A mesh on one machine (`kvmesh up`) has more that wants to compute than cores. Whatever computes gets an equal share of
them (processor sharing): with n jobs on c cores each runs at min(1, c / n) of its speed alone. A step's time is what
was fitted for it, times a factor that makes it the time alone, times a residual drawn from those that were measured.
Pure: chance comes from a seed."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import inf
from typing import Any

from kvmesh.errors import ConfigError
from kvmesh.quantiles import quantile
from kvmesh.sim.loop import Loop, ScheduledCall

MAX_RESIDUALS = 10_001

Watch = Callable[[str, float, float], None]  # role, seconds as fitted, seconds that it took


@dataclass(frozen=True, kw_only=True)
class HostModel:
    """Fitted to a live mesh (calibrate.py). Seconds; ConfigError names field and value."""

    cores: float  # that all share
    prefill_alone: float = 1.0  # a prefill step alone / the same as instances report it, on average
    decode_alone: float = 1.0  # likewise of a decode step
    door_s: float = 0.0  # of a core, for each request, before it is placed; one request after the other
    rest_s: float = 0.0  # of a core, after each prefill step, before the next one
    between_s: float = 0.0  # of a core, after each decode step: its tokens go out, the next one is made up
    turn_s: float = 0.0  # before a decode step, for each job beyond the cores that is found at work
    handoff_s: float = 0.0  # a prompt is computed → its row may join the batch; exponential, this is the mean
    prefill_residuals: tuple[float, ...] = (1.0,)  # quantiles, from the least to the greatest, evenly spaced in rank
    decode_residuals: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        """Everything that cannot be."""
        for name in ("cores", "prefill_alone", "decode_alone"):
            if not 0 < getattr(self, name) < inf:
                raise _bad(name, getattr(self, name), "a number above 0")
        for name in ("door_s", "rest_s", "between_s", "turn_s", "handoff_s"):
            if not 0 <= getattr(self, name) < inf:
                raise _bad(name, getattr(self, name), "a number, at least 0")
        for name in ("prefill_residuals", "decode_residuals"):
            told = getattr(self, name)
            if not 1 <= len(told) <= MAX_RESIDUALS or not all(0 < one < inf for one in told):
                raise _bad(name, told, f"1 to {MAX_RESIDUALS} numbers above 0")
            if list(told) != sorted(told):
                raise _bad(name, told, "in rising order")

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {name: list(one) if isinstance(one, tuple) else one for name, one in asdict(self).items()}

    @classmethod
    def of_json(cls, told: object) -> HostModel:
        """Reads what `to_json` wrote. ConfigError names field and value."""
        if not isinstance(told, Mapping):
            raise ConfigError(f"host={told!r}: must be an object", field="host")
        names = {one.name for one in fields(cls)}
        if strange := sorted(set(told) - names):
            raise ConfigError(f"host.{strange[0]}: no such field", field=f"host.{strange[0]}")
        if "cores" not in told:
            raise ConfigError("host.cores: is missing", field="host.cores")
        found: dict[str, Any] = {}
        for name, value in told.items():
            many = name.endswith("_residuals")
            numbers = value if many and isinstance(value, list) else [value]
            if not all(isinstance(one, int | float) and not isinstance(one, bool) for one in numbers):
                raise _bad(name, value, "a list of numbers" if many else "a number")
            found[name] = tuple(map(float, numbers)) if many else float(value)
        return cls(**found)


def _bad(name: str, value: object, why: str) -> ConfigError:
    shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."
    return ConfigError(f"host.{name}={shown}: must be {why}", field=f"host.{name}")


class Cores:
    """Processor sharing in virtual time. All jobs run at the same speed, so one clock of work done serves them all: a
    job is over when that clock has moved on by its work."""

    def __init__(self, loop: Loop, cores: float) -> None:
        self._loop, self._cores = loop, cores
        self._jobs: list[tuple[float, int, Callable[[], None]]] = []  # by the clock at which they are over
        self._number = 0
        self._done_s = 0.0  # the clock
        self._at_s = loop.now  # when it was set
        self._timer: ScheduledCall | None = None

    @property
    def busy(self) -> int:
        """Jobs under way."""
        return len(self._jobs)

    @property
    def speed(self) -> float:
        """The speed of each job, as a share of its speed alone."""
        return min(1.0, self._cores / len(self._jobs)) if self._jobs else 1.0

    def run(self, work_s: float, over: Callable[[], None]) -> None:
        """`over` is called when `work_s` seconds of a core were done for it."""
        self._settle()
        self._number += 1
        heapq.heappush(self._jobs, (self._done_s + work_s, self._number, over))
        self._wind()

    def _settle(self) -> None:
        now = self._loop.now
        self._done_s += (now - self._at_s) * self.speed
        self._at_s = now

    def _wind(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        left = max(0.0, self._jobs[0][0] - self._done_s)
        self._timer = self._loop.after(left / self.speed, self._over)

    def _over(self) -> None:
        self._timer = None
        self._settle()
        end, _, over = heapq.heappop(self._jobs)
        self._done_s = max(self._done_s, end)  # but for rounding it is there
        if self._jobs:
            self._wind()
        over()


class Machine:
    """What instances on one host ask for."""

    def __init__(self, loop: Loop, model: HostModel, seed: int) -> None:
        self.model = model
        self.cores = Cores(loop, model.cores)
        self._random = random.Random(f"host:{seed}")
        self._loop = loop
        self._at_door: deque[Callable[[], None]] = deque()
        self.watch: Watch | None = None

    def prefill(self, seconds: float, over: Callable[[], None]) -> None:
        """A step that instances report to take `seconds` on average."""
        residual = quantile(self.model.prefill_residuals, self._random.random())
        self._step("prefill", seconds, seconds * self.model.prefill_alone * residual, over)

    def rest(self, over: Callable[[], None]) -> None:
        """Between two prefill steps of one instance."""
        self.cores.run(self.model.rest_s, over)

    def decode(self, seconds: float, over: Callable[[], None]) -> None:
        """Likewise."""
        residual = quantile(self.model.decode_residuals, self._random.random())
        model = self.model
        turns = max(0.0, self.cores.busy + 1 - model.cores)
        work_s = seconds * model.decode_alone * residual
        after = (lambda: self.cores.run(model.between_s, over)) if model.between_s else over
        if turns and model.turn_s:
            wait_s = turns * model.turn_s * self._random.expovariate(1.0)
            self._loop.after(wait_s, lambda: self._step("decode", seconds, work_s, after))
        else:
            self._step("decode", seconds, work_s, after)

    def _step(self, role: str, usual_s: float, work_s: float, over: Callable[[], None]) -> None:
        began = self._loop.now

        def done() -> None:
            if self.watch is not None:
                self.watch(role, usual_s, self._loop.now - began)
            over()

        self.cores.run(work_s, done)

    def handoff(self, joined: Callable[[], None]) -> None:
        """A prompt was computed. Messages go between five processes, each of which has to be woken: how long that
        takes scatters as much as it lasts."""
        if self.model.handoff_s:
            self._loop.after(self._random.expovariate(1 / self.model.handoff_s), joined)
        else:
            joined()

    def enter(self, inside: Callable[[], None]) -> None:
        """A request comes to the door, which takes them one by one."""
        if not self.model.door_s:
            inside()
            return
        self._at_door.append(inside)
        if len(self._at_door) == 1:
            self._open()

    def _open(self) -> None:
        self.cores.run(self.model.door_s, self._inside)

    def _inside(self) -> None:
        inside = self._at_door.popleft()
        if self._at_door:
            self._open()
        inside()


def scattered(measured: Sequence[float], power: float) -> tuple[float, ...]:
    """Quantiles of the same shape, more or less wide, with mean 1."""
    found = [one**power for one in quantiles_of(measured)]
    mean = sum(found) / len(found)
    return tuple(one / mean for one in found)


def quantiles_of(values: Sequence[float], most: int = 101) -> tuple[float, ...]:
    """Evenly spaced in rank, from the least to the greatest. Not empty."""
    rising = sorted(values)
    if len(rising) <= most:
        return tuple(rising)
    last = len(rising) - 1
    return tuple(quantile(rising, at / (most - 1)) if last else rising[0] for at in range(most))
