"""How long drafts are: where the text repeats itself, where it does not, and where a token costs a whole step."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.drafts.lengths import FIXED, LEAST_GAIN, AcceptedShare, choose_lengths
from kvmesh.drafts.ngram import NgramDrafter
from kvmesh.drafts.speculator import MOST_DRAFT, Speculator
from kvmesh.drafts.step_share import StepShare
from kvmesh.errors import ConfigError


def rate(chances: list[float], lengths: tuple[int, ...], share: float) -> float:
    made = sum(1 + sum(a**j for j in range(1, n + 1)) for a, n in zip(chances, lengths, strict=True))
    return made / (1 + share * sum(lengths) + (FIXED if any(lengths) else 0))


@given(
    st.lists(st.floats(0.01, 0.98), min_size=1, max_size=3),
    st.integers(0, 4),
    st.floats(0.001, 1.0),
)
def test_no_other_lengths_make_more_tokens_a_second(chances: list[float], most: int, share: float) -> None:
    lengths = choose_lengths(chances, [most] * len(chances), share)
    best = max(rate(chances, other, share) for other in itertools.product(range(most + 1), repeat=len(chances)))
    assert rate(chances, tuple(lengths), share) * LEAST_GAIN >= best * (1 - 1e-9)


def test_a_batch_that_is_bound_by_computing_gets_none() -> None:
    assert choose_lengths([0.9] * 16, [7] * 16, 1 / 16) == [0] * 16
    assert choose_lengths([0.9], [7], 0.02) == [7]
    [once], [twice] = choose_lengths([0.6], [7], 0.02), choose_lengths([0.6], [7], 0.02, again=True)
    assert twice < once, "a draft that is cut costs a step"


def test_a_share_is_learned_by_strength() -> None:
    own, others = AcceptedShare(), AcceptedShare(10, 5)
    assert own.chance(3) == 0 and own.chance(3, others) == 0.5
    for _ in range(20):
        own.add(3, 4, 4)
    assert own.chance(3, others) > 0.9 and own.chance(2, others) == 0.5


def test_what_a_token_adds_to_a_step() -> None:
    steps = StepShare()
    assert steps.ppm == 100_000
    noise = random.Random(1)
    for at in range(400):
        drafted = at % 8
        steps.add(drafted, int((1_000_000 + 60_000 * drafted + 100_000 * (drafted > 0)) * noise.uniform(0.95, 1.05)))
    assert steps.ppm == pytest.approx(60_000 + 100_000 / 4, rel=0.15)
    steps.add(4, 10**12)
    assert steps.ppm == pytest.approx(60_000 + 100_000 / 4, rel=0.3), "one step that waited changes little"
    for _ in range(200):
        steps.add(4, 100_000)
    assert 0 < steps.ppm < 20_000


@pytest.mark.parametrize("most", [0, MOST_DRAFT + 1])
def test_lengths_out_of_bounds_are_refused(most: int) -> None:
    with pytest.raises(ConfigError, match=f"max_draft_tokens={most}: must be from 1 to 7"):
        Speculator([NgramDrafter()], most)


def follow(speculator: Speculator, text: list[int], share_ppm: int) -> tuple[int, int]:
    """Plays steps of one row whose answer is `text`; returns how many, and how many tokens were computed as drafts."""
    speculator.begin(1, text[:4], text[4:5])
    at, steps, drafted = 5, 0, 0
    while at < len(text):
        steps += 1
        made = 1
        if speculator.hopes([1], share_ppm):
            [which] = speculator.propose([1], [len(text) - at - 1], share_ppm)
            tokens = list(which.draft.tokens)
            kept = 0
            while kept < len(tokens) and text[at + kept] == tokens[kept]:
                kept += 1
            if tokens:
                speculator.verified(1, which, kept)
                drafted += len(tokens)
            made += kept
        speculator.extend(1, text[at : at + made])
        at += made
    speculator.end(1)
    assert not speculator._rows
    return steps, drafted


def test_repetition_is_seen_and_noise_costs_nothing() -> None:
    noise = random.Random(2)
    phrase = [noise.randrange(1000) for _ in range(17)]
    steps, _ = follow(Speculator([NgramDrafter()], 7), phrase * 20, 40_000)
    assert steps < 340 / 4
    hostile = [noise.randrange(12) for _ in range(800)]
    speculator = Speculator([NgramDrafter()], 7)
    steps, drafted = follow(speculator, hostile, 80_000)
    assert drafted < 80, "few drafts are computed of a text that has none"
    turned = Speculator([NgramDrafter()], 7)
    steps, _ = follow(turned, hostile[:300] + phrase * 20, 40_000)
    assert steps < 300 + 340 / 2, "it notices that the text repeats itself by now"


def test_a_row_without_room_or_unknown_gets_none() -> None:
    speculator = Speculator([NgramDrafter()], 7, adapts=False)
    assert not speculator.hopes([1], 0)
    speculator.begin(1, [1, 2, 1], [2])
    speculator.begin(2, [1, 2, 1], [2])
    drafts = speculator.propose([1, 2, 3], [0, 2, 5], 0)
    assert [list(one.draft.tokens) for one in drafts] == [[], [1, 2], []]
    speculator.extend(3, [1])
