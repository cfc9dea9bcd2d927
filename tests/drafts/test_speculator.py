"""How long drafts are: where the text repeats itself, where it does not, and where a token costs a whole step."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.drafts.drafter import NO_DRAFT, Draft
from kvmesh.drafts.lengths import ANY, FIXED, LEAST_GAIN, AcceptedShare, choose_lengths, gain
from kvmesh.drafts.ngram import NgramDrafter
from kvmesh.drafts.speculator import LOOK_TOKENS, LOOKS_COST, MOST_DRAFT, Speculator
from kvmesh.drafts.step_share import NO_COSTS, DraftCosts, DraftingTime, StepShare
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
    assert own.chance(ANY, others) > 0.9, "what is known before a draft's strength is"


def test_what_a_draft_gains() -> None:
    assert gain(0.5, 3, 0.0) == pytest.approx(0.5 + 0.25 + 0.125)
    assert gain(0.5, 7, 0.2) == pytest.approx(0.3 + 0.05), "the third token is not worth its time"
    assert gain(0.5, 7, 0.5) == 0


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


def test_what_a_token_takes_of_a_drafter() -> None:
    assert DraftingTime().ppm(1e6) == 0, "nothing is known: it is asked, and measured"
    drafting = DraftingTime()
    drafting.add(0, 10**9)  # a prompt
    for _ in range(50):
        drafting.add(4, 400_000)
    assert drafting.ppm(1e6) == pytest.approx(100_000, abs=1) and drafting.ppm(0) == 0
    drafting.add(4, 10**12)
    assert drafting.ppm(1e6) < 150_000, "one that waited for the machine changes little"
    drafting.add(1, 10**9)
    assert drafting.ppm(1e-3) < 1 << 32, "it is told as 32 bits"


def test_what_a_step_takes_is_known_from_steps_with_drafts_too() -> None:
    steps = StepShare()
    assert steps.plain_ns == 0
    steps.add(2, 1_200_000)
    assert steps.plain_ns == pytest.approx(1e6)
    steps.add(0, 900_000)
    assert steps.plain_ns == 900_000


@pytest.mark.parametrize("most", [0, MOST_DRAFT + 1])
def test_lengths_out_of_bounds_are_refused(most: int) -> None:
    with pytest.raises(ConfigError, match=f"max_draft_tokens={most}: must be from 1 to 7"):
        Speculator([NgramDrafter()], most)


def follow(speculator: Speculator, text: list[int], verified_ppm: int) -> tuple[int, int]:
    """Plays steps of one row whose answer is `text`; returns how many, and how many tokens were computed as drafts."""
    costs = DraftCosts(verified_ppm)
    speculator.begin(1, text[:4], text[4:5])
    at, steps, drafted = 5, 0, 0
    while at < len(text):
        steps += 1
        made = 1
        if speculator.hopes([1], costs):
            [which] = speculator.propose([1], [len(text) - at - 1], costs)
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
    assert not speculator.hopes([1], NO_COSTS)
    speculator.begin(1, [1, 2, 1], [2])
    speculator.begin(2, [1, 2, 1], [2])
    drafts = speculator.propose([1, 2, 3], [0, 2, 5], NO_COSTS)
    assert [list(one.draft.tokens) for one in drafts] == [[], [1, 2], []]
    speculator.extend(3, [1])


# ── drafters that compute ────────────────────────────────────────────────────────────────────────

STEP_NS, VERIFIED_NS = 1_000_000, 20_000


class Computes:
    """Foresees a text, each token with a chance, and takes time for it on a clock that the test has."""

    name = "computes"
    needs_hidden = False
    computes = True

    def __init__(self, text: Sequence[int], takes_ns: int, chance: float) -> None:
        self.text, self.takes_ns, self.chance = text, takes_ns, chance
        self.now = self.asked = self.tokens = 0
        self.known: dict[int, int] = {}
        self.noise = random.Random(3)

    def clock(self) -> int:
        return self.now

    def begin(self, handle: int, prompt: Sequence[int], answer: Sequence[int]) -> None:
        self.known[handle] = len(prompt) + len(answer)

    def extend(self, handle: int, tokens: Sequence[int], hidden: Any = None) -> None:
        self.known[handle] += len(tokens)

    def propose(self, handles: Sequence[int], most: Sequence[int]) -> list[Draft]:
        self.asked += 1
        self.now += self.takes_ns * max(most)  # the rows at once
        self.tokens += sum(most)
        return [self._proposed(handle, count) for handle, count in zip(handles, most, strict=True)]

    def _proposed(self, handle: int, count: int) -> Draft:
        at = self.known[handle]
        comes = self.text[at : at + count]
        return Draft([token if self.noise.random() < self.chance else -1 for token in comes], 3) if comes else NO_DRAFT

    def end(self, handle: int) -> None:
        del self.known[handle]


def timed(speculator: Speculator, drafter: Computes, text: list[int], rows: int = 1) -> int:
    """Plays rows that all say `text` in steps that take STEP_NS and VERIFIED_NS for each token of a draft; returns when
    the last one is done."""
    drafter.now = 0
    at = dict.fromkeys(range(rows), 5)
    for handle in at:
        speculator.begin(handle, text[:4], text[4:5])
    while at:
        costs = DraftCosts(VERIFIED_NS * 1_000_000 // STEP_NS, speculator.drafting.ppm(STEP_NS))
        handles, made = list(at), dict.fromkeys(at, 1)
        if speculator.hopes(handles, costs):
            found = speculator.propose(handles, [len(text) - at[handle] - 1 for handle in handles], costs)
            for handle, which in zip(handles, found, strict=True):
                tokens, kept = list(which.draft.tokens), 0
                while kept < len(tokens) and text[at[handle] + kept] == tokens[kept]:
                    kept += 1
                if tokens:
                    speculator.verified(handle, which, kept)
                    drafter.now += VERIFIED_NS * len(tokens)
                made[handle] += kept
        drafter.now += STEP_NS
        for handle in handles:
            speculator.extend(handle, text[at[handle] : at[handle] + made[handle]])
            at[handle] += made[handle]
            if at[handle] >= len(text):
                del at[handle]
                speculator.end(handle)
    return drafter.now


NOISE = random.Random(4).sample(range(1 << 20), 600)


@pytest.mark.parametrize("rows", [1, 8])
def test_hostile_text_turns_off_what_computes(rows: int) -> None:
    drafter = Computes(NOISE, 300_000, 0.02)
    speculator = Speculator([drafter], 7, clock=drafter.clock)
    alone = STEP_NS * (len(NOISE) - 5)
    assert timed(speculator, drafter, NOISE, rows) < alone * 1.12, "it learns that in the beginning"
    took = timed(speculator, drafter, NOISE, rows)
    assert took < alone * (1.03 + LOOKS_COST), "later rows pay for looks alone"
    assert drafter.asked > 10, "it goes on looking"


def test_what_computes_is_asked_while_it_is_worth_its_time() -> None:
    alone = STEP_NS * (len(NOISE) - 5)
    gains = []
    for takes_ns in (30_000, 300_000, 1_500_000):
        drafter = Computes(NOISE, takes_ns, 0.9)
        speculator = Speculator([drafter], 7, clock=drafter.clock)
        timed(speculator, drafter, NOISE)
        gains.append(alone / timed(speculator, drafter, NOISE))
    assert gains[0] > 3 and gains[1] > 1.5, gains
    assert gains[2] > 0.93, "good drafts that take longer than steps are turned off"


def test_it_is_seen_when_what_computes_becomes_right() -> None:
    drafter = Computes(NOISE, 100_000, 0.0)
    speculator = Speculator([drafter], 7, clock=drafter.clock)
    timed(speculator, drafter, NOISE)
    drafter.chance = 0.95
    timed(speculator, drafter, NOISE)
    assert timed(speculator, drafter, NOISE) < STEP_NS * len(NOISE) / 2


def test_what_computes_is_not_asked_where_copying_does() -> None:
    text = NOISE[:17] * 30
    for chance in (0.3, 0.95):
        drafter = Computes(text, 200_000, chance)
        speculator = Speculator([drafter, NgramDrafter()], 7, clock=drafter.clock)
        timed(speculator, drafter, text)
        asked, looked = drafter.tokens, LOOK_TOKENS * len(text) // 7
        drafter.tokens = 0
        timed(speculator, drafter, text)
        assert drafter.tokens < looked, f"of {asked} in the first text"
    drafter = Computes(NOISE, 200_000, 0.9)
    timed(Speculator([drafter, NgramDrafter()], 7, clock=drafter.clock), drafter, NOISE)
    assert drafter.tokens > len(NOISE) / 2, "of a text that does not repeat it is"


def test_drafts_are_those_that_the_leaders_costs_say() -> None:
    """A follower's own times change nothing."""
    told = []
    for takes_ns in (1, 10**9):
        drafter = Computes(NOISE, takes_ns, 0.9)
        speculator = Speculator([drafter], 7, clock=drafter.clock)
        speculator.begin(1, NOISE[:4], NOISE[4:5])
        found, at = [], 5
        while at < 300:
            costs = DraftCosts(20_000, 50_000)
            hoped = speculator.hopes([1], costs)
            [which] = speculator.propose([1], [7], costs) if hoped else [None]
            tokens = list(which.draft.tokens) if which is not None else []
            found.append(tokens)
            kept = next((j for j, token in enumerate(tokens) if token != NOISE[at + j]), len(tokens))
            if which is not None and tokens:
                speculator.verified(1, which, kept)
            speculator.extend(1, NOISE[at : at + kept + 1])
            at += kept + 1
        told.append(found)
    assert told[0] == told[1] and any(told[0])
