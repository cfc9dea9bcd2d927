"""When a batch shrinks, as at the end of a rollout, drafts become longer: as long as is best at that size."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

import pytest

from kvmesh.drafts.drafter import Draft
from kvmesh.drafts.speculator import Speculator
from kvmesh.drafts.step_share import DraftCosts, StepShares

KEPT = 0.6  # the chance that a drafted token is right
WEIGHTS_MS, TOKEN_MS = 20.0, 1.0  # a step reads the weights, and computes each token


class Guessing:
    """Drafts zeros; the answer has zeros with the chance KEPT."""

    name, needs_hidden, computes = "guessing", False, False

    def begin(self, handle: int, prompt: Sequence[int], answer: Sequence[int]) -> None: ...

    def extend(self, handle: int, tokens: Sequence[int], hidden: object = None) -> None: ...

    def end(self, handle: int) -> None: ...

    def propose(self, handles: Sequence[int], most: Sequence[int]) -> list[Draft]:
        return [Draft([0] * count) for count in most]


def step_ms(tokens: int) -> float:
    return WEIGHTS_MS + TOKEN_MS * tokens


class Batch:
    """Steps of a rank, in numbers."""

    def __init__(self) -> None:
        self._speculator = Speculator([Guessing()], 7)
        self._shares = StepShares()
        self._noise = random.Random(7)
        for handle in range(64):
            self._speculator.begin(handle, [], [])

    def run(self, rows: int, steps: int) -> tuple[float, float]:
        """Returns the mean length of drafts and how many tokens a second were made."""
        handles, drafted, made, took = list(range(rows)), 0, 0, 0.0
        for _ in range(steps):
            costs = DraftCosts(self._shares.of(rows).ppm)
            # Now and then nothing is found to copy from.
            found = self._noise.random() < 0.8 and self._speculator.hopes(handles, costs)
            drafts = self._speculator.propose(handles, [7] * rows, costs) if found else [None] * rows
            computed = 0
            for handle, one in zip(handles, drafts, strict=True):
                length = len(one.draft.tokens) if one is not None else 0
                kept = 0
                while kept < length and self._noise.random() < KEPT:
                    kept += 1
                if one is not None and length:
                    self._speculator.verified(handle, one, kept)
                text = [0] * kept + [int(kept < length or self._noise.random() > KEPT)]
                self._speculator.extend(handle, text)
                computed, made = computed + length, made + kept + 1
            self._shares.of(rows).add(computed, int(1e6 * step_ms(rows + computed)))
            took, drafted = took + step_ms(rows + computed), drafted + computed
        return drafted / steps / rows, 1000 * made / took


def best(rows: int) -> float:
    """Tokens a second with drafts of the best length in four of five steps."""

    def speed(length: int) -> float:
        kept = sum(KEPT**j for j in range(length + 1))
        return 1000 * rows * (0.8 * kept + 0.2) / (0.8 * step_ms(rows + rows * length) + 0.2 * step_ms(rows))

    return max(map(speed, range(8)))


def test_drafts_are_as_long_as_the_batch_wants() -> None:
    batch = Batch()
    full, tail = batch.run(64, 300), batch.run(4, 300)
    last, again = batch.run(1, 300), batch.run(64, 100)
    assert full[0] < 0.2 and again[0] < 0.2
    assert 1.5 < tail[0] < 3 < last[0]
    assert tail[1] == pytest.approx(best(4), rel=0.08) and tail[1] > 1.2 * 4000 / step_ms(4)
    assert last[1] == pytest.approx(best(1), rel=0.08)
    assert full[1] > 0.95 * best(64)


@pytest.mark.parametrize(("weights_ms", "worth"), [(600.0, True), (0.0, False)])
def test_many_rows_are_tried_and_what_they_cost_is_learned(
    weights_ms: float, worth: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 64 rows that wait for memory have room for drafts, those that are bound by their computing have none."""
    monkeypatch.setattr(sys.modules[__name__], "WEIGHTS_MS", weights_ms)
    batch = Batch()
    first, _ = batch.run(64, 40)
    assert first > 0, "else nothing would ever be known"
    later, _ = batch.run(64, 100)
    assert later > 1 if worth else later == 0
