"""The frequency sketch: never below the truth, seldom above it, and it forgets."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.tiers.ssd.sketch import CAP, FrequencySketch
from tests.support.ssd_blocks import key


@given(st.lists(st.integers(0, 30), max_size=300))
def test_an_estimate_is_never_below_the_count(used: list[int]) -> None:
    sketch = FrequencySketch(64)
    for n in used:
        sketch.add(key(n))
    for n, count in Counter(used).items():
        assert sketch.estimate(key(n)) >= min(count, CAP)


def test_few_keys_are_counted_exactly_and_strangers_are_not_known() -> None:
    sketch = FrequencySketch(1024)
    for n in range(64):
        for _ in range(n % 5 + 1):
            sketch.add(key(n))
    assert [sketch.estimate(key(n)) for n in range(64)] == [n % 5 + 1 for n in range(64)]
    assert sum(sketch.estimate(key(n)) > 0 for n in range(1000, 2000)) < 5


def test_counts_end_at_the_cap() -> None:
    sketch = FrequencySketch(64)
    for _ in range(100):
        sketch.add(key(1))
    assert sketch.estimate(key(1)) == CAP


def test_what_is_used_no_more_fades_and_what_is_used_stays() -> None:
    sketch = FrequencySketch(16)
    for _ in range(CAP):
        sketch.add(key(1))
    estimates = []
    for _ in range(320):
        sketch.add(key(2))
        estimates.append(sketch.estimate(key(1)))
    assert estimates == sorted(estimates, reverse=True)
    assert estimates[-1] <= 3
    assert sketch.estimate(key(2)) > 7
    assert sketch.prefers(key(2), key(1)) and not sketch.prefers(key(1), key(2))
    assert not sketch.prefers(key(2), key(2))


def test_aging_comes_every_ten_uses_a_key_of_capacity() -> None:
    sketch = FrequencySketch(10)
    for _ in range(8):
        sketch.add(key(1))
    for n in range(91):
        sketch.add(key(100 + n % 3))
    before = sketch.estimate(key(1))
    sketch.add(key(100))
    assert before >= 8 and sketch.estimate(key(1)) == before // 2


def test_bad_capacity() -> None:
    with pytest.raises(ValueError, match="capacity=0"):
        FrequencySketch(0)
