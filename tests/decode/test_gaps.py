"""Times between tokens, kept in bounded memory."""

import math
import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.services.decode.timeline import RECENT, TbtHistogram

MS = 1_000_000


def filled(gaps: list[int], every: int = 64) -> TbtHistogram:
    """As the path of every token does it: `fold` is called now and then."""
    found = TbtHistogram()
    for number, gap in enumerate(gaps):
        found.recent.append(gap)
        if number % every == 0:
            found.fold()
    return found


def slowest(gaps: list[int]) -> float:
    """By the book: the mean of the longest tenth, of one at least."""
    worst = sorted((max(0, g) for g in gaps), reverse=True)[: math.ceil(len(gaps) * 0.1)]
    return sum(worst) / len(worst)


def test_nothing_is_nothing() -> None:
    assert (len(TbtHistogram()), TbtHistogram().mean_ns, TbtHistogram().slowest_ns) == (0, 0.0, 0.0)


@given(st.lists(st.integers(-5, 10**10), min_size=1, max_size=200))
def test_short_answers_are_exact(gaps: list[int]) -> None:
    found = filled(gaps)
    assert found.slowest_ns == pytest.approx(slowest(gaps))
    assert found.mean_ns == pytest.approx(sum(max(0, g) for g in gaps) / len(gaps))


@given(
    st.integers(RECENT, 4 * RECENT),
    st.floats(0.0, 2.0),
    st.integers(0, 1 << 30),
)
def test_long_answers_are_off_by_a_bucket_at_most(count: int, spread: float, seed: int) -> None:
    rng = random.Random(seed)
    gaps = [round(20 * MS * math.exp(rng.gauss(0, spread))) for _ in range(count)]
    found = filled(gaps)
    assert len(found) == count
    assert found.mean_ns == pytest.approx(sum(gaps) / count, rel=1e-9)
    assert found.slowest_ns == pytest.approx(slowest(gaps), rel=2 ** (1 / 8) - 1)


def test_one_long_pause_in_a_long_answer_is_not_lost() -> None:
    gaps = [10 * MS] * 5000 + [60_000 * MS]
    found = filled(gaps)
    assert found.slowest_ns == pytest.approx(slowest(gaps), rel=0.01)


def test_memory_does_not_grow_with_the_answer() -> None:
    found = filled([10 * MS] * 100_000)
    assert len(found.recent) <= RECENT + 64
    held = sum(sys.getsizeof(part) for part in (found.recent, found._counts, found._sums))
    assert held < 16_384
