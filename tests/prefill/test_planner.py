"""Tables of the planner: chunk borders, the line's order, batches by length, nobody starves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvmesh.chunk_pipeline import ChunkCost
from kvmesh.services.prefill.planner import PlanConfig, Planner, Wait, WaitingPrompts, chunk_end
from kvmesh.services.prefill.state import PrefillLoad, PrefillState
from tests.support.prefill.script import Player, make_state

CONFIG = PlanConfig(
    block_tokens=4, prefill_chunk_tokens=8, max_batch_tokens=16, long_prompt_tokens=8, priority_step_ns=1000
)


@pytest.mark.parametrize(
    ("start", "total", "limit", "end"),
    [
        (0, 5, 8, 5),  # all of it
        (0, 8, 8, 8),
        (0, 9, 8, 8),
        (8, 9, 8, 9),  # the last chunk may end anywhere
        (0, 100, 10, 8),  # on a block border below the limit
        (8, 100, 10, 16),
        (4, 100, 4, 8),
    ],
)
def test_chunk_end(start: int, total: int, limit: int, end: int) -> None:
    assert chunk_end(start, total, 4, limit) == end


@pytest.mark.parametrize(
    ("start", "total", "limit", "end"),
    [
        (0, 11, 100, 11),  # no border on the way
        (0, 12, 100, 12),
        (0, 13, 100, 12),
        (12, 13, 100, 13),
        (0, 100, 10, 8),  # a border of blocks where that of snapshots is too far
        (8, 100, 10, 12),
        (12, 100, 100, 24),
        (4, 30, 10, 12),  # begun between two of them
    ],
)
def test_chunks_end_where_states_are_kept(start: int, total: int, limit: int, end: int) -> None:
    assert chunk_end(start, total, 4, limit, grid=12) == end


class Bench:
    """A planner over requests whose rest is what the test says, with a count of pages."""

    def __init__(self, config: PlanConfig = CONFIG, pages: int = 1000) -> None:
        self.planner = Planner(config)
        self.tokens: dict[int, int] = {}
        self.cached: dict[int, int] = {}
        self.twins: set[int] = set()
        self.pages = pages

    def add(self, *tokens: int, cached: int = 0, priority: int = 0, at: int = 0) -> None:
        for n in tokens:
            handle = len(self.tokens) + 1
            self.tokens[handle], self.cached[handle] = n, cached
            self.planner.waiting.add(handle, priority, at)

    def admit(self, handle: int) -> int | Wait:
        need = -(-self.tokens[handle] // 4)
        if need > self.pages:
            return Wait.PAGES
        self.pages -= need
        return self.cached[handle]

    def rest(self, handle: int) -> int | Wait:
        return Wait.TWIN if handle in self.twins else self.tokens[handle] - self.cached[handle]

    def step(self) -> list[tuple[int, int, int]]:
        chunks = self.planner.next_step(self.rest, self.admit, self.tokens.__getitem__)
        assert sum(c.end - c.start for c in chunks) <= self.planner.config.max_batch_tokens
        for c in chunks:
            assert c.last == (c.end == self.tokens[c.handle])
        return [(c.handle, c.start, c.end) for c in chunks]


def test_priority_then_arrival_and_waiting_wears_priority_off() -> None:
    line = WaitingPrompts(priority_step_ns=1000)
    line.add(1, 0, 0)
    line.add(2, -1, 500)
    line.add(3, 0, 0)
    line.add(4, 1, 0)
    line.add(5, 0, 999)
    line.add(6, 0, 1001)  # 4 has waited longer than a step of priority is worth
    assert list(line) == [2, 1, 3, 5, 4, 6]
    line.remove(3)
    assert 3 not in line
    assert len(line) == 5


def test_short_prompts_are_packed_and_long_ones_run_alone() -> None:
    bench = Bench()
    bench.add(5, 20, 6, 8, 3)
    assert bench.step() == [(1, 0, 5), (3, 0, 6), (5, 0, 3)]  # 8 does not fit into 16 - 11, 3 does
    assert bench.step() == [(2, 0, 8)]
    assert bench.step() == [(4, 0, 8)]
    assert bench.step() == [(2, 8, 16)]
    assert bench.step() == [(2, 16, 20)]
    assert bench.step() == []


def test_what_counts_is_the_uncached_rest() -> None:
    bench = Bench()
    bench.add(100, cached=96)
    bench.add(3)
    assert bench.step() == [(1, 96, 100), (2, 0, 3)]


def test_long_and_short_alternate_so_neither_starves() -> None:
    bench = Bench()
    bench.add(64)
    served = []
    for _ in range(16):
        bench.add(8, 8, 8)  # more short ones than can ever be served
        served.append(bench.step())
    assert [step[0][0] == 1 for step in served] == [False, True] * 8


def test_one_long_prompt_at_a_time_in_order() -> None:
    bench = Bench()
    bench.add(16, 12, 24)
    assert [bench.step() for _ in range(7)] == [
        [(1, 0, 8)], [(1, 8, 16)], [(2, 0, 8)], [(2, 8, 12)], [(3, 0, 8)], [(3, 8, 16)], [(3, 16, 24)],
    ]  # fmt: skip


def test_nobody_overtakes_a_request_that_waits_for_pages() -> None:
    bench = Bench(pages=5)
    bench.add(8, 20, 4, 8)
    assert bench.step() == [(1, 0, 8), (3, 0, 4)]  # the long one was not tried yet
    bench.add(4)
    assert bench.step() == [], "2 waits for 5 pages; 4 and 5 would fit, and stay behind it"
    bench.pages += 3
    assert bench.step() == [(2, 0, 8)]
    assert bench.step() == [(2, 8, 16)], "no page is left for the short ones"


def test_a_blocked_request_that_leaves_lets_the_others_pass() -> None:
    bench = Bench(pages=2)
    bench.add(8, 8)
    bench.add(4)
    bench.step()
    assert bench.step() == []
    bench.planner.drop(2)
    bench.pages = 1
    assert bench.step() == [(3, 0, 4)]


def test_a_twin_is_passed_over_and_keeps_its_place() -> None:
    bench = Bench()
    bench.add(8, 8, 8)
    bench.twins = {1}
    assert bench.step() == [(2, 0, 8), (3, 0, 8)]
    bench.add(8)
    bench.twins = set()
    assert bench.step() == [(1, 0, 8), (4, 0, 8)]


def test_a_short_prompt_longer_than_a_chunk_goes_on_before_new_ones() -> None:
    bench = Bench(replace(CONFIG, long_prompt_tokens=16, max_batch_tokens=12))
    bench.add(16, 16, 4)
    assert bench.step() == [(1, 0, 8), (3, 0, 4)]
    # 1 takes 8 of 12; 2 needs 8 and is the first of the line: nothing smaller may pass it now
    bench.add(4)
    assert bench.step() == [(1, 8, 16)]
    assert bench.step() == [(2, 0, 8), (4, 0, 4)]


def test_drop_forgets_admitted_and_waiting_ones() -> None:
    bench = Bench()
    bench.add(16, 16)
    bench.step()
    assert bench.planner.unsubmitted_tokens == 8
    bench.planner.drop(1)
    bench.planner.drop(2)
    bench.planner.drop(99)
    assert bench.step() == []
    assert bench.planner.unsubmitted_tokens == 0


def test_a_storm_of_refusals_counts_the_line_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting what waits costs its blocks; the callers of a storm are told what the first one was."""
    player = Player(make_state(queued=2, pages=8))
    for handle in range(1, 5):
        list(player.play(f"start {handle} prompt=abcdefg+1"))
    counted: list[int] = []
    load = PrefillState.load

    def counting(self: PrefillState) -> PrefillLoad:
        counted.append(1)
        return load(self)

    monkeypatch.setattr(PrefillState, "load", counting)
    said = [line for n in range(10, 40) for line in player.play(f"start {n} prompt=xy+1")]
    assert sum("overloaded" in line for line in said) >= 30
    assert len(counted) <= 1


def test_with_a_cost_of_chunks_a_long_prompt_is_cut_by_compute() -> None:
    """Chunks get shorter as more tokens lie before them; a step that rows bound is cut again."""
    cost = ChunkCost(token=1e-6, pair=1e-9)
    config = PlanConfig(block_tokens=16, prefill_chunk_tokens=1024, long_prompt_tokens=1024, chunk_cost=cost)
    planner, chunks, total = Planner(config), [], 8200
    planner.waiting.add(1, 0, 0)
    for most in (None, 512, *[None] * 40):
        chunks += planner.next_step(lambda _: total, lambda _: 0, lambda _: total, most)
    assert [chunk.start for chunk in chunks[1:]] == [chunk.end for chunk in chunks[:-1]]
    assert chunks[-1].last and chunks[-1].end == total and chunks[1].end - chunks[1].start <= 512
    lengths = [chunk.end - chunk.start for chunk in chunks]
    assert lengths[0] > 2 * lengths[-2]
    works = [cost.work(chunk.start, chunk.end) for chunk in chunks[3:-1]]
    assert max(works) < 1.2 * min(works)
