"""Rows of a batch in virtual time: many steps at once.

Between two borders at which rows come or go, a step of n rows makes n tokens, so its context grows by n: where step
time is linear in the context, step i of such a run takes `first + i * slope`; with a `StepClock` each takes a time of
its own. The duration of every step is kept as long as a row lives that saw it; a row's token intervals are a slice of
those.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from math import inf

import numpy as np
import numpy.typing as npt

from kvmesh.services.decode.step_times import WINDOW, StepTimes
from kvmesh.sim.changes import StepClock
from kvmesh.sim.loop import Loop, ScheduledCall

SLOWEST = 0.1  # of a request's token intervals: their mean is its TBT
LINEAR = 1e-9  # relative: how far the middle of a run may lie from the line
TRIM_STEPS = 65_536
KEPT_STEPS = 1024
SCATTERED_STEPS = 256  # of a run whose steps are timed one by one

_Array = npt.NDArray[np.float64]


class Row:
    """One request that answers. `context`: tokens of its KV when it (last) joined; `left`: tokens it has to make."""

    __slots__ = ("_gaps", "_slices", "context", "heir", "joined", "last_s", "left", "number", "until")

    def __init__(self, context: int, left: int, last_s: float) -> None:
        self.context = context
        self.left = left
        self.last_s = last_s  # when its last token came, before it joined
        self.joined = -1  # the step that is its first; -1: not in a batch
        self.until = 0  # the step before which it is over
        self.number = 0
        self._gaps: list[float] = []  # intervals that are no single step: before a first one
        self._slices: list[_Array] = []  # of earlier times in the batch

    def tbt(self) -> tuple[float, float]:
        """Mean of the longest 10% of its intervals (at least one), and of all; nan: there are none."""
        found = np.concatenate([np.array(self._gaps), *self._slices]) if self._slices else np.array(self._gaps)
        if not len(found):
            return math.nan, math.nan
        count = math.ceil(SLOWEST * len(found))
        slowest = np.partition(found, -count)[-count:]
        return float(np.add.reduce(slowest)) / count, float(np.add.reduce(found)) / len(found)

    def take(self, now: float, tokens: int) -> None:
        """Notes so many tokens of one step that has ended now (drafted_rows.py)."""
        self._gaps += [now - self.last_s, *[0.0] * (tokens - 1)]
        self.last_s = now
        self.context += tokens
        self.left -= tokens

    def leave(self, gap: float, steps: _Array) -> None:
        """It saw these: the first token came after `gap`, the others as `steps` took."""
        self._gaps.append(gap)
        self._slices.append(steps)


class Rows:
    """The batch of one instance. `ended` is called at the end of each run, with the rows that are over then and the
    pages that all took during the run."""

    def __init__(
        self,
        loop: Loop,
        step_s: Callable[[int, float], float],
        ended: Callable[[list[Row], int], None],
        block_tokens: int,
        clock: StepClock | None = None,
        times: StepTimes | None = None,
    ) -> None:
        """`times` hears how long steps took; the path of every step does nothing for that (see `learn`)."""
        self._loop, self._step_s, self._ended = loop, step_s, ended
        self._block = block_tokens
        self._clock = clock
        self._times = times
        self.step = 0  # steps done since the start
        self.context = 0  # tokens of KV of all rows, at the last border
        self.rows: dict[Row, None] = {}
        self._leaving: list[tuple[int, int, Row]] = []
        self._number = 0
        self._phases = np.zeros(block_tokens, dtype=np.int64)  # rows that take a page before steps of that remainder
        self._log = np.zeros(1024)  # durations of the last steps, up to `step`
        self._ended_s = np.zeros(1024)  # when each of them ended
        self._base = 0  # the step that `_log` begins with
        self._stalled_s = 0.0
        # Steps that have ended, each as `sample`: of `run_shared`, and those that a clock timed.
        self.measured: deque[tuple[int, int, float]] = deque(maxlen=KEPT_STEPS)
        # the run under way
        self._timer: ScheduledCall | None = None
        self._start_s = 0.0
        self._first = self._slope = 0.0
        self._steps = 0
        self._cut = False
        self._ends: _Array | None = None  # when each step ends, where a clock times them
        self._told = 0  # steps of it that are among `measured`
        self._learnt = 0  # ... that `times` has heard of

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def running(self) -> bool:
        """Whether a run is under way: rows may come and go only when none is."""
        return self._timer is not None

    # ── at a border ──────────────────────────────────────────────────────────────────────────────

    def add(self, row: Row) -> None:
        """Adds a row, which makes its next token in the next step."""
        assert row.joined < 0 < row.left and not self.running
        row.joined, row.until = self.step, self.step + row.left
        self._number += 1
        row.number = self._number
        self.rows[row] = None
        self.context += row.context
        self._phases[self._phase(row)] += 1
        heapq.heappush(self._leaving, (row.until, row.number, row))

    def remove(self, row: Row) -> None:
        """Removes a row before its end; its `left` and `context` are as they are now."""
        assert not self.running and row in self.rows
        self._leave(row)
        row.number = 0  # its entry among the ends counts no more

    def now_of(self, row: Row) -> int:
        """Tokens of its KV, at this border."""
        return row.context + self.step - row.joined

    def pages_of(self, row: Row) -> int:
        """That it needs, at this border, for what it has written, and at least for its first step here."""
        return -(-max(self.now_of(row), row.context + 1) // self._block)

    @property
    def until_end(self) -> int:
        """Steps until the first row is over."""
        while self._leaving[0][1] != self._leaving[0][2].number:
            heapq.heappop(self._leaving)
        return self._leaving[0][0] - self.step

    def growth(self, steps: int) -> int:
        """Pages that rows will take in the next `steps` steps, each before the step that needs it. Rows that join have
        the page of their first step already."""
        if steps <= 0 or not self.rows:
            return 0
        cycles, rest = divmod(steps, self._block)
        at = self.step % self._block
        taken = cycles * len(self.rows) + int(np.add.reduce(self._phases[at : at + rest]))
        if at + rest > self._block:
            taken += int(np.add.reduce(self._phases[: at + rest - self._block]))
        return taken - self._at_border()

    def _at_border(self) -> int:
        """Rows that join now, at the very border of a page."""
        border = self.step % self._block
        if not self._phases[border]:
            return 0
        return sum(row.joined == self.step and self._phase(row) == border for row in self.rows)

    def run(self, most: int) -> None:
        """Steps begin, until the first row is over or `most` are done."""
        steps = min(most, self.until_end)
        assert steps > 0 and self.rows
        size, context = len(self.rows), self.context
        if self._clock is not None:
            steps = min(steps, SCATTERED_STEPS)
        first, slope, steps = linear(lambda i: self._step_s(size, context + i * size), steps)
        if self._clock is None:
            self._begin(first, slope, steps)
            return
        now = self._loop.now
        self._ends = self._clock.ends_s(now, first + slope * np.arange(steps), "decode", self.step)
        self._start_s, self._steps, self._cut, self._told = now, steps, False, 0
        self._timer = self._loop.at(float(self._ends[-1]), self._over)

    def run_one(self, seconds: float) -> None:
        """One step that takes so long."""
        self._begin(seconds, 0.0, 1)

    def run_shared(self, compute: Callable[[float, Callable[[], None]], None]) -> None:
        """One step, on something that others use, too: `compute` hears what it takes on average and whom to call when
        it is over."""
        self._start_s, self._steps, self._cut = self._loop.now, 1, True
        self._first, self._slope = self._step_s(len(self.rows), self.context), 0.0
        if self._clock is not None:
            self._first = self._clock.step_s(self._loop.now, self._first, "decode", self.step)
        self._timer = ScheduledCall(inf, self._over)  # only tells that a step is under way
        compute(self._first, self._shared_over)

    def _shared_over(self) -> None:
        self._first = self._loop.now - self._start_s
        self.measured.append((len(self.rows), self.context, self._first))
        self._over()

    def stall(self, seconds: float) -> None:
        """Tells that the rows have stood still for so long."""
        if self.rows:
            self._stalled_s += seconds

    # ── while a run is under way ─────────────────────────────────────────────────────────────────

    def sample(self) -> tuple[int, int, float] | None:
        """Rows, tokens of their KV and seconds of the step that is being done; None: none is."""
        if self._timer is None:
            return None
        done = min(max(0, self._passed() - 1), self._steps - 1)
        if self._ends is not None:
            return len(self.rows), self.context + done * len(self.rows), self._took(done)
        return len(self.rows), self.context + done * len(self.rows), self._first + done * self._slope

    def cut(self) -> None:
        """Somebody waits: the run ends with the step that is being done."""
        if self._timer is None or self._cut:
            return
        steps = self._passed()
        if steps < self._steps:
            self._steps = steps
            self._timer.cancel()
            if self._ends is not None:
                over_s = float(self._ends[steps - 1]) if steps else self._start_s
            else:
                over_s = self._start_s + elapsed(self._first, self._slope, steps)
            self._timer = self._loop.at(over_s, self._over)
        self._cut = True

    def context_of(self, row: Row) -> int:
        """Tokens of its KV that whole steps have written by now."""
        if row.joined < 0:
            return row.context
        done = min(max(0, self._passed() - 1), self._steps - 1) if self._timer is not None else 0
        return self.now_of(row) + done

    def made_since(self, row: Row, left: int) -> list[tuple[int, float]]:
        """Returns the tokens of its answer that were made since it had `left` to make: how many at once, and when. Of
        steps of one run the first is told alone, since the row may have stood still before it."""
        if row.joined < 0:
            return [(left - row.left, row.last_s)] if left > row.left else []
        done = min(max(0, self._passed() - 1), self._steps - 1) if self._timer is not None else 0
        first, end = row.until - left, self.step + done  # steps: that of its next token, and the one under way
        told = [(row.joined - first, row.last_s)] if first < row.joined else []
        first = max(first, row.joined)
        if first < end:
            told.append((1, self._end_of(first)))
        if first + 1 < end:
            told.append((end - first - 1, self._end_of(end - 1)))
        return told

    def _end_of(self, step: int) -> float:
        """When a step ended, or will."""
        if step < self.step:
            return float(self._ended_s[step - self._base])
        at = step - self.step
        return (
            self._start_s + elapsed(self._first, self._slope, at + 1) if self._ends is None else float(self._ends[at])
        )

    def tell(self) -> None:
        """Steps of the run under way that have ended are among `measured` from now on."""
        if self._timer is not None and self._ends is not None:
            self._measure(int(np.searchsorted(self._ends[: self._steps], self._loop.now, side="right")))

    def learn(self) -> None:
        """Has `times` hear of the steps of the run under way that have ended."""
        if self._timer is not None:
            self._learn(min(max(0, self._passed() - 1), self._steps))

    def stop(self) -> None:
        """No step ends any more."""
        if self._timer is not None:
            self._timer.cancel()

    # ── inner ────────────────────────────────────────────────────────────────────────────────────

    def _phase(self, row: Row) -> int:
        # The step from `context` tokens on needs another page when they fill theirs.
        return (row.joined - row.context) % self._block

    def _passed(self) -> int:
        """The fewest steps of the run under way that take as long as it has taken."""
        now = self._loop.now
        if self._ends is None:
            return steps_until(self._first, self._slope, now - self._start_s)
        return int(np.searchsorted(self._ends[: self._steps], now, side="left")) + 1 if now > self._start_s else 0

    def _took(self, step: int) -> float:
        assert self._ends is not None
        return float(self._ends[step] - (self._ends[step - 1] if step else self._start_s))

    def _learn(self, steps: int) -> None:
        """`times` has heard of the first `steps` of the run under way, or of as many as it keeps."""
        times, size = self._times, len(self.rows)
        if times is None:
            return
        for step in range(max(self._learnt, steps - WINDOW), steps):
            seconds = self._took(step) if self._ends is not None else self._first + step * self._slope
            times.add(size, self.context + step * size, round(seconds * 1e9))
        self._learnt = steps

    def _measure(self, steps: int) -> None:
        """The first `steps` of the run under way are among `measured`."""
        size = len(self.rows)
        for step in range(self._told, steps):
            self.measured.append((size, self.context + step * size, self._took(step)))
        self._told = max(self._told, steps)

    def _begin(self, first: float, slope: float, steps: int) -> None:
        assert self._timer is None
        self._start_s, self._first, self._slope, self._steps, self._cut = self._loop.now, first, slope, steps, False
        self._timer = self._loop.after(elapsed(first, slope, steps), self._over)

    def _over(self) -> None:
        self._timer = None
        grown = self.growth(self._steps)
        if self._ends is not None:
            self._measure(self._steps)
        self._learn(self._steps)
        self._learnt = 0
        self._write(self._steps)
        self._ends = None
        self.step += self._steps
        self.context += self._steps * len(self.rows)
        over = []
        while self._leaving and self._leaving[0][0] <= self.step:
            _, number, row = heapq.heappop(self._leaving)
            if number == row.number:
                self._leave(row)
                over.append(row)
        self._ended(over, grown)

    def _write(self, steps: int) -> None:
        if not steps:
            return
        at = self.step - self._base
        if at + steps > len(self._log):
            at = self._make_room(steps)
        took, ends = self._log[at : at + steps], self._ended_s[at : at + steps]
        if self._ends is not None:
            ends[:] = self._ends[:steps]
            took[1:] = ends[1:] - ends[:-1]
            took[0] = ends[0] - self._start_s
        else:
            np.multiply(np.arange(steps), self._slope, out=took)
            took += self._first
            np.cumsum(took, out=ends)
            ends += self._start_s
        took[0] += self._stalled_s
        self._stalled_s = 0.0

    def _make_room(self, steps: int) -> int:
        """Drop what no row saw, then grow if that is not enough; returns where the next step goes."""
        oldest = min((row.joined for row in self.rows), default=self.step)
        at, dropped = self.step - oldest, oldest - self._base
        size = max(len(self._log), 1 << (at + steps).bit_length() + 1)
        for name in ("_log", "_ended_s"):
            old = getattr(self, name)
            new = np.zeros(size)
            new[:at] = old[dropped : dropped + at]
            setattr(self, name, new)
        self._base = oldest
        return at

    def _leave(self, row: Row) -> None:
        del self.rows[row]
        made = self.step - row.joined
        self._phases[self._phase(row)] -= 1
        self.context -= row.context + made
        if made:
            first, end = row.joined - self._base, self.step - self._base
            row.leave(self._ended_s[first] - row.last_s, self._log[first + 1 : end].copy())
            row.last_s = float(self._ended_s[end - 1])
        row.context += made
        row.left -= made
        row.joined = -1


def elapsed(first: float, slope: float, steps: int) -> float:
    """Seconds of so many steps."""
    return steps * first + slope * (steps * (steps - 1) / 2)


def steps_until(first: float, slope: float, seconds: float) -> int:
    """The fewest steps that take `seconds` or longer."""
    if seconds <= 0:
        return 0
    if slope > 0:
        half = first - slope / 2
        root = math.sqrt(half * half + 2 * slope * seconds)
        # The same number twice: one form cancels at tiny slopes, the other one where `half` is negative.
        guess = 2 * seconds / (half + root) if half > 0 else (root - half) / slope
    else:
        guess = seconds / first
    steps = max(0, math.floor(guess) - 1)
    while elapsed(first, slope, steps) < seconds:
        steps += 1
    while steps and elapsed(first, slope, steps - 1) >= seconds:
        steps -= 1
    return steps


def linear(step_s: Callable[[int], float], most: int) -> tuple[float, float, int]:
    """Duration of step 0, what each later one takes longer, and for how many steps (at most `most`) that is so.
    `step_s(i)`: of step i; convex, so that it is a line wherever its middle lies on one."""
    first, steps = step_s(0), most
    while steps > 1:
        slope = (step_s(steps - 1) - first) / (steps - 1)
        middle = (steps - 1) // 2
        if steps == 2 or abs(step_s(middle) - first - slope * middle) <= LINEAR * first:
            return first, slope, steps
        steps = (steps + 1) // 2
    return first, 0.0, 1
