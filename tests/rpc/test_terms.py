"""Which terms a process believes, and when it takes one back."""

from __future__ import annotations

import pytest

from kvmesh.errors import InvalidRequest, StaleTerm
from kvmesh.rpc.terms import (
    EARLIEST,
    EPOCH_S,
    FORGIVE_S,
    LATEST,
    MAX_JUMP,
    MAX_TERM,
    LeaderTerms,
    first_term,
    most_credible,
)


@pytest.mark.parametrize("now", [float("-inf"), -1e18, 0.0, 1.9e9, 3.7e9, 1e18])
def test_whatever_the_clock_says_terms_begin_far_below_the_maximum(now: float) -> None:
    assert EARLIEST <= first_term(now) <= LATEST
    assert most_credible(now) <= LATEST + MAX_JUMP < MAX_TERM * 3 // 4


def test_a_right_clock_is_what_terms_begin_with() -> None:
    assert first_term(EPOCH_S + 220_000_000) == 220_000_000


def test_no_master_is_believed_at_the_maximum_and_no_order_is_learnt_from() -> None:
    terms = LeaderTerms()
    for term in (MAX_TERM, MAX_TERM + 1, 1 << 63):
        with pytest.raises(StaleTerm):
            terms.hear(term)
        with pytest.raises(InvalidRequest, match="term="):
            terms.check(term)
    terms.hear(5)
    terms.check(MAX_TERM - 1)
    assert terms.highest == 5
    with pytest.raises(StaleTerm):
        terms.check(4)


def test_a_lower_term_is_believed_when_masters_go_on_answering_under_it() -> None:
    now = [0.0]
    terms = LeaderTerms(lambda: now[0])
    terms.hear(MAX_TERM - 1)

    def refused(term: int) -> bool:
        try:
            terms.hear(term)
        except StaleTerm:
            return True
        return False

    assert refused(7)
    now[0] = FORGIVE_S
    assert refused(7), "two late answers are not enough"
    terms.hear(MAX_TERM - 1)
    now[0] = 10 * FORGIVE_S
    assert all(refused(7) for _ in range(5)), "the higher one was heard meanwhile: it counts from here"
    now[0] = 11 * FORGIVE_S
    assert not refused(7)
    assert terms.highest == 7
