"""The last stage knows at once which rows have ended, the first one when it next looks: both run the same steps."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvmesh.engine.batch import Chosen, SampleParams
from kvmesh.ranks import protocol as m
from kvmesh.ranks.worker.micro_batches import MicroBatches
from kvmesh.ranks.worker.rows import RunningRows

BLOCK, STOP = 4, 7
SAMPLING = m.Sampling(0.0, 1.0, 0, 0)


class Stage:
    def __init__(self, stages: int, last: bool) -> None:
        self.batches, self.last = MicroBatches(stages, lambda: RunningRows(BLOCK)), last
        self.stalled: list[int] = []

    def step(self) -> list[int]:
        """The handles of the step's rows, in order."""
        rows = self.batches.take_turn()
        self.stalled += rows.stall()
        batch = rows.batch()
        handles = [rows.handle(row) for row in range(rows.live)]
        if not handles:
            return []
        made = [STOP if hash((h, int(i))) % 11 == 0 else 1 for h, i in zip(handles, batch.indices, strict=True)]
        chosen = Chosen(np.array(made, np.int64), {})

        def advance() -> None:
            rows.advance(chosen)

        if self.last:
            advance()
        else:
            self.batches.postpone(rows, advance)
        return handles


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_all_stages_run_the_same_steps(stages: int, seed: int) -> None:
    draw, both, joined = random.Random(seed), (Stage(stages, False), Stage(stages, True)), 0
    sizes: list[int] = []
    for _ in range(600):
        what = draw.random()
        if what < 0.2:
            joined += 1
            pages, most = tuple(range(draw.randint(1, 4))), draw.randint(2, 30)
            for stage in both:
                join = m.Join(joined, pages, BLOCK - 1, 1, 0, most, 0, (STOP,), SAMPLING)
                stage.batches.for_join(joined).join(join, SampleParams())
        elif what < 0.3 and joined:
            handle = draw.randint(1, joined)
            for stage in both:
                stage.batches.of(handle, leaves=True).leave(handle)
        elif what < 0.5 and both[1].stalled:
            handle = draw.choice(both[1].stalled)
            for stage in both:
                stage.batches.of(handle).grant(handle, (1, 2))
        else:
            steps = [stage.step() for stage in both]
            assert steps[0] == steps[1]
            sizes.append(len(steps[0]))
        assert len(both[0].batches) == len(both[1].batches)
        assert not both[1].batches.has_work or both[0].batches.has_work
        assert both[0].stalled == both[1].stalled
    assert max(sizes) > 1


def test_rows_are_spread_over_the_micro_batches() -> None:
    batches = MicroBatches(3, lambda: RunningRows(BLOCK))
    for handle in range(7):
        join = m.Join(handle, (1, 2, 3), 1, 1, 0, 9, 0, (), SAMPLING)
        batches.for_join(handle).join(join, SampleParams())
    assert [len(rows) for rows in batches.all] == [3, 2, 2]
    assert [len(batches.take_turn()) for _ in range(4)] == [3, 2, 2, 3]


def test_the_time_between_tokens_is_from_turn_to_turn() -> None:
    batches = MicroBatches(2, lambda: RunningRows(BLOCK))
    for handle, most in ((1, 9), (2, 9), (3, 3)):
        join = m.Join(handle, (0, 1, 2), BLOCK - 1, 1, 0, most, 0, (), SAMPLING)
        batches.for_join(handle).join(join, SampleParams())
    told = []
    for at in range(6):  # a step takes 10 ns
        rows = batches.take_turn()
        rows.advance(Chosen(np.ones(rows.live, np.int64), {}))
        told.append(batches.step_ended(rows, 10 * at, 10 * at + 10))
    assert [before for before, _ in told] == [0, 10, 10, 20, 30, 40], told
    assert [others for _, others in told][:2] == [1, 2]
    alone = MicroBatches(1, lambda: RunningRows(BLOCK))
    assert alone.step_ended(alone.all[0], 5, 10) == (0, 0)
