"""In bfloat16 a token may differ in its last bit with the shape of the batch, so answers are compared as distributions:
each token of sampled answers, with drafts of the suffix drafter and without, over other seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.speculation import Bench
from kvmesh.drafts.speculator import Speculator
from kvmesh.drafts.suffix import SuffixDrafter
from kvmesh.ranks.worker import verification

pytestmark = pytest.mark.long

MODEL = Path(__file__).parents[2] / "examples/demo-model"
PROMPT = [300, 301, 302, 303, 300, 301, 302]
TOKENS, ROWS, ROUNDS = 6, 48, 8
RARE = 10  # tokens that both said fewer times together are one bin


def answers(drafts: bool, seed: int) -> tuple[list[list[int]], int]:
    """Returns 384 answers to one prompt, and how many tokens of drafts were kept."""
    bench = Bench(MODEL, "bfloat16", TOKENS, ROWS, prompts=[PROMPT], temperature=0.25, seed=seed)
    speculator = Speculator([SuffixDrafter()], 4, adapts=False) if drafts else None
    way = "suffix" if drafts else "off"
    said: list[list[int]] = []
    for _ in range(ROUNDS):
        bench.seed += 1
        bench.run(way, {way: speculator})
        said += bench.said[way]
    return said, bench.counts[way][3]


def statistic(one: list[tuple[int, ...]], other: list[tuple[int, ...]]) -> float:
    """Returns the chi-square statistic of two samples of as many, as a deviation of about N(0, 1) (Wilson and Hilferty
    1931)."""
    a, b = Counter(one), Counter(other)
    bins = [(a[key], b[key]) for key in a | b if a[key] + b[key] >= RARE]
    bins.append((len(one) - sum(x for x, _ in bins), len(other) - sum(y for _, y in bins)))
    chi = sum((x - y) ** 2 / (x + y) for x, y in bins if x + y)
    freedom = max(1, len(bins) - 1)
    return float(((chi / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / (2 / (9 * freedom)) ** 0.5)


def deviations(drafted: list[list[int]], plain: list[list[int]]) -> list[float]:
    """Of each token of an answer together with the one before it."""
    pairs = range(1, TOKENS - 1)
    return [
        statistic([tuple(said[at - 1 : at + 1]) for said in drafted], [tuple(said[at - 1 : at + 1]) for said in plain])
        for at in pairs
    ]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    torch.set_num_threads(1)
    return answers(False, 0)[0]


def test_drafts_change_no_distribution(plain: list[list[int]]) -> None:
    drafted, kept = answers(True, 1_000)
    assert kept > ROWS * ROUNDS / 4, "otherwise nothing is compared"
    assert max(deviations(drafted, plain)) < 4, deviations(drafted, plain)


def test_a_draft_that_is_kept_unasked_shows(plain: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    def keeps_the_first(sampled: Sequence[int], draft: Sequence[int]) -> int:
        return min(1, len(draft))

    monkeypatch.setattr(verification, "accepted", keeps_the_first)
    drafted, _ = answers(True, 2_000)
    assert max(deviations(drafted, plain)) > 4
