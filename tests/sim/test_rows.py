"""Many steps at once are what they are one by one."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvmesh.sim.loop import Loop
from kvmesh.sim.rows import Row, Rows, elapsed, linear, steps_until

BLOCK = 8


def kinked(batch: int, context: float) -> float:
    """Two lines: bound by compute, then by memory."""
    return 0.01 + max(0.002 * batch, 0.00007 * context)


class Naive:
    """One step after another: (join time, context, tokens) of each row → when it ended, its intervals, pages taken."""

    def __init__(self, jobs: list[tuple[float, int, int]]) -> None:
        self.ends: dict[int, float] = {}
        self.gaps: dict[int, list[float]] = {n: [] for n in range(len(jobs))}
        self.pages = 0
        now, waiting, rows = 0.0, sorted(range(len(jobs)), key=lambda n: jobs[n][0]), dict[int, int]()
        last = {n: job[0] for n, job in enumerate(jobs)}
        while waiting or rows:
            if not rows:
                now = max(now, jobs[waiting[0]][0])
            while waiting and jobs[waiting[0]][0] <= now:
                rows[waiting.pop(0)] = 0
            for n, made in rows.items():
                self.pages += made > 0 and (jobs[n][1] + made) % BLOCK == 0
            now += kinked(len(rows), sum(jobs[n][1] + made for n, made in rows.items()))
            for n in list(rows):
                rows[n] += 1
                self.gaps[n].append(now - last[n])
                last[n] = now
                if rows[n] == jobs[n][2]:
                    self.ends[n] = now
                    del rows[n]

    def tbt(self, n: int) -> tuple[float, float]:
        longest = sorted(self.gaps[n], reverse=True)[: max(1, math.ceil(0.1 * len(self.gaps[n])))]
        return sum(longest) / len(longest), sum(self.gaps[n]) / len(self.gaps[n])


class Fast:
    """The same with `Rows`."""

    def __init__(self, jobs: list[tuple[float, int, int]]) -> None:
        self.loop = Loop()
        self.rows = Rows(self.loop, kinked, self.border, BLOCK)
        self.waiting: list[tuple[int, Row]] = []
        self.number: dict[Row, int] = {}
        self.ends: dict[int, float] = {}
        self.tbts: dict[int, tuple[float, float]] = {}
        self.pages = 0
        self.runs = 0
        for n, (at, context, tokens) in enumerate(jobs):
            self.loop.at(at, lambda n=n, row=Row(context, tokens, at): self.come(n, row))  # type: ignore[misc]
        self.loop.run()

    def come(self, n: int, row: Row) -> None:
        self.number[row] = n
        self.waiting.append((n, row))
        self.rows.cut()
        if not self.rows.running:
            self.loop.after(0.0, lambda: None if self.rows.running else self.border([], 0))

    def border(self, over: list[Row], grown: int) -> None:
        self.pages += grown
        for row in over:
            self.ends[self.number[row]], self.tbts[self.number[row]] = row.last_s, row.tbt()
        for _, row in self.waiting:
            self.rows.add(row)
        self.waiting = []
        if len(self.rows):
            self.runs += 1
            self.rows.run(self.rows.until_end)


jobs = st.lists(st.tuples(st.floats(0, 3), st.integers(1, 400), st.integers(1, 80)), min_size=1, max_size=10)


@settings(max_examples=150, deadline=None)
@given(jobs)
def test_runs_equal_single_steps(asked: list[tuple[float, int, int]]) -> None:
    naive, fast = Naive(asked), Fast(asked)
    assert fast.ends == pytest.approx(naive.ends, abs=1e-9)
    assert fast.pages == naive.pages
    for n, told in fast.tbts.items():
        assert told == pytest.approx(naive.tbt(n), abs=1e-9)
    assert not fast.rows.rows
    assert fast.rows.context == 0


def test_a_run_is_one_event_however_many_steps_it_has() -> None:
    fast = Fast([(0.0, 10, 100_000)])
    assert fast.runs <= 40  # but for the kink, one
    assert fast.ends[0] == pytest.approx(Naive([(0.0, 10, 100_000)]).ends[0])


@given(st.floats(1e-4, 1), st.floats(0, 1e-2), st.integers(0, 5_000), st.floats(0, 1))
@example(first=0.875, slope=9.14e-20, steps=347, part=1.0)
def test_steps_until_is_the_first_border_not_before(first: float, slope: float, steps: int, part: float) -> None:
    seconds = elapsed(first, slope, steps) + part * (first + slope * steps) * 0.999
    found = steps_until(first, slope, seconds)
    assert elapsed(first, slope, found) >= seconds
    assert not found or elapsed(first, slope, found - 1) < seconds


@given(st.integers(1, 3_000), st.integers(0, 3_000))
def test_a_run_ends_before_the_line_bends(most: int, kink: int) -> None:
    def step_s(i: int) -> float:
        return 1.0 + 0.01 * i + 0.05 * max(0, i - kink)

    first, slope, steps = linear(step_s, most)
    assert 1 <= steps <= most
    for i in range(steps):
        assert first + slope * i == pytest.approx(step_s(i), rel=1e-8)


def test_rows_that_leave_and_come_back_keep_their_intervals() -> None:
    loop = Loop()
    borders: list[tuple[list[Row], int]] = []
    rows = Rows(loop, lambda batch, context: 1.0, lambda over, grown: borders.append((over, grown)), BLOCK)
    row = Row(4, 10, 0.0)
    rows.add(row)
    rows.run(3)
    loop.run()
    rows.remove(row)
    assert (row.context, row.left, row.last_s) == (7, 7, 3.0)
    loop.at(9.0, lambda: None)
    loop.run()
    rows.add(row)
    rows.run(7)
    loop.run()
    assert borders[-1] == ([row], 1)  # 7 → 14 tokens: the page of the first step came with the row, 8 → a new block
    assert row.last_s == 16.0
    assert row.tbt() == (7.0, pytest.approx(16 / 10))  # nine steps of a second, and one that waited six
