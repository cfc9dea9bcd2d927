"""How long answers get: learnt by tenant and endpoint, guesses corrected, limits kept, memory bounded."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.services.conductor.costs import lengths as module
from kvmesh.services.conductor.costs.lengths import ENOUGH, UNTOLD_TOKENS, LearntLengths, Lengths
from kvmesh.services.conductor.domain import Outcome, RequestOutcome, Schedule


def request(name: str = "r", **more: Any) -> Schedule:
    values: dict[str, Any] = {"tenant": "t", "endpoint": "chat", "max_tokens": 4096}
    return Schedule(name, more.pop("attempt", 0), more.pop("model", "demo"), 100, **(values | more))


def teach(known: LearntLengths, tokens: int, *, outcome: Outcome = Outcome.DONE, **more: Any) -> None:
    known.placed(request("r", **more))
    known.ended(RequestOutcome("r", 0, outcome, tokens))


def test_nothing_known_is_the_limit() -> None:
    known = LearntLengths()
    assert known.predict(request(max_tokens=16)) == Lengths(16, 16, 16)
    assert known.predict(request(max_tokens=0)).mean == UNTOLD_TOKENS
    assert len(known) == 0  # asking keeps nothing


def test_quantiles_follow_the_answers_of_the_key() -> None:
    known, rng = LearntLengths(), random.Random(1)
    for _ in range(400):
        teach(known, round(100 * 2 ** rng.gauss(0, 1)))
    found = known.predict(request())
    assert found.p50 == pytest.approx(100, rel=0.25)
    assert found.p90 == pytest.approx(100 * 2**1.28, rel=0.35)
    assert found.mean == pytest.approx(100 * 1.27, rel=0.3)
    assert known.predict(request(max_tokens=50)).p90 == 50
    assert known.predict(request(max_tokens=50)).mean < 50


def test_the_unknown_key_speaks_for_its_model_then_for_everybody() -> None:
    known = LearntLengths()
    for _ in range(ENOUGH * 2):
        teach(known, 32, tenant="a")
        teach(known, 1000, tenant="b", model="other")
    assert known.predict(request(tenant="a")).p50 == pytest.approx(32, rel=0.1)
    assert known.predict(request(tenant="stranger")).p50 == pytest.approx(32, rel=0.1)  # its model's
    assert known.predict(request(tenant="b")).p50 == pytest.approx(32, rel=0.1)  # not that of another model
    assert 32 < known.predict(request(model="new")).mean < 1000  # of everybody


def test_what_was_long_ago_fades() -> None:
    known = LearntLengths()
    for _ in range(300):
        teach(known, 1000)
    for _ in range(300):
        teach(known, 20)
    assert known.predict(request()).p90 == pytest.approx(20, rel=0.1)


def test_an_answer_cut_short_does_not_teach_that_answers_are_short() -> None:
    known = LearntLengths()
    for index in range(200):
        if index % 2:
            teach(known, 512)
        else:
            teach(known, 16, max_tokens=16)  # cut by its limit
    assert known.predict(request()).p50 == pytest.approx(512, rel=0.1)
    for _ in range(30):
        teach(known, 4, outcome=Outcome.CANCELLED)  # the client left
    assert known.predict(request()).p50 == pytest.approx(512, rel=0.1)


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.REFUSED])
def test_what_never_ran_teaches_nothing(outcome: Outcome) -> None:
    known = LearntLengths()
    for _ in range(50):
        teach(known, 5, outcome=outcome)
    assert known.predict(request()).mean == UNTOLD_TOKENS


def test_a_word_said_twice_or_on_another_attempt_counts_nothing() -> None:
    known = LearntLengths()
    for index in range(ENOUGH):
        known.placed(request(f"r{index}"))
        for _ in range(2):  # an unacknowledged heartbeat is sent again
            known.ended(RequestOutcome(f"r{index}", 1, Outcome.DONE, 7))  # another attempt's
            known.ended(RequestOutcome("stranger", 0, Outcome.DONE, 7))
    assert len(known) == 0
    for index in range(ENOUGH):
        for _ in range(5):
            known.ended(RequestOutcome(f"r{index}", 0, Outcome.DONE, 7))
    assert known.predict(request()).mean == UNTOLD_TOKENS  # eight answers, faded a little: not enough yet
    teach(known, 7)
    assert known.predict(request()).mean == pytest.approx(7, rel=0.15)


def test_a_guess_counts_as_much_as_the_guesses_of_its_key_were_worth() -> None:
    honest, wild, rng = LearntLengths(), LearntLengths(), random.Random(3)
    for _ in range(300):
        tokens = round(100 * 4 ** rng.gauss(0, 1))
        teach(honest, tokens, expected_output_tokens=max(1, tokens // 2))  # always half of what it gets
        teach(wild, tokens, expected_output_tokens=rng.randint(1, 4000))
    asked = request(expected_output_tokens=800, max_tokens=100_000)
    assert honest.predict(asked).p50 == pytest.approx(1600, rel=0.15)
    assert honest.predict(asked).p90 < 2400
    assert wild.predict(asked).p50 < 400  # mostly what answers were like


def test_a_guess_is_all_there_is_at_first() -> None:
    assert LearntLengths().predict(request(expected_output_tokens=50)).p50 == pytest.approx(50)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEYS", 10)
    monkeypatch.setattr(module, "MAX_AWAITED", 5)
    known = LearntLengths()
    for index in range(100):
        teach(known, 10, tenant=f"t{index}")
        known.placed(request(f"never-ends-{index}"))
    assert len(known) == 10
    assert len(known._awaited) == 5


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.sampled_from(list(Outcome)), st.integers(0, 3000)), max_size=60),
    st.integers(0, 5000),
    st.integers(0, 10**6),
)
def test_predictions_are_ordered_and_within_the_limit(
    history: list[tuple[int, Outcome, int]], limit: int, hint: int
) -> None:
    known = LearntLengths()
    for tokens, outcome, told in history:
        teach(known, tokens, outcome=outcome, expected_output_tokens=told, max_tokens=0)
    found = known.predict(request(max_tokens=limit, expected_output_tokens=hint))
    assert 1 <= found.p50 <= found.p90
    assert found.mean >= 1
    if limit:
        assert max(found.mean, found.p90) <= limit
