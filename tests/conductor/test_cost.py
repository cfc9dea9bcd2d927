import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.conductor.cost import (
    ENOUGH_SAMPLES,
    HALF_LIFE_S,
    Coefficients,
    DecayedRatio,
    DecodeModel,
    PrefillModel,
    TransferModel,
)

TRUTH = Coefficients(a=0.02, b=2e-4, c=3e-8)


def prefill_time(computed: int, cached: int) -> float:
    return TRUTH.at(computed, computed * (computed + 2 * cached) / 2)


def learnt(
    samples: int, *, noise: float = 0.0, outliers: float = 0.0, factor: float = 20.0, seed: int = 0
) -> PrefillModel:
    rng, model = random.Random(seed), PrefillModel()
    for _ in range(samples):
        computed, cached = rng.randint(16, 6000), rng.choice([0, rng.randint(0, 6000)])
        seconds = prefill_time(computed, cached) * rng.gauss(1, noise)
        model.add(computed, cached, seconds * (factor if rng.random() < outliers else 1), now=0.0)
    return model


def worst_error(model: PrefillModel) -> float:
    points = [(64, 0), (500, 0), (500, 4000), (3000, 0), (3000, 3000), (6000, 0)]
    return max(abs(model.predict(n, m) / prefill_time(n, m) - 1) for n, m in points)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("noise", "outliers", "factor", "allowed"),
    [(0.0, 0.0, 1.0, 0.01), (0.05, 0.0, 1.0, 0.06), (0.05, 0.15, 20.0, 0.12), (0.05, 0.15, 0.02, 0.12)],
    ids=["exact", "noise", "slow outliers", "fast outliers"],
)
def test_known_coefficients_come_back(noise: float, outliers: float, factor: float, allowed: float, seed: int) -> None:
    model = learnt(256, noise=noise, outliers=outliers, factor=factor, seed=seed)
    assert worst_error(model) < allowed
    assert model.fit.coefficients.b == pytest.approx(TRUTH.b, rel=max(0.1, 2 * allowed))


def test_cached_tokens_are_cheaper_than_computed_ones() -> None:
    model = learnt(256)
    assert model.predict(1000, 3000) < 0.5 * model.predict(4000, 0)
    assert model.predict(1000, 3000) > model.predict(1000, 0)


def test_the_prior_speaks_until_there_are_samples_and_scales_with_the_first() -> None:
    model = PrefillModel()
    before = model.predict(1000, 0)
    model.add(500, 0, 10 * model.predict(500, 0), now=0.0)
    assert model.predict(1000, 0) == pytest.approx(10 * before)


def test_a_window_of_equal_sizes_still_extrapolates() -> None:
    model = PrefillModel()
    for _ in range(300):
        model.add(512, 0, 0.2, now=0.0)
    assert model.predict(512, 0) == pytest.approx(0.2, rel=0.05)
    assert model.predict(2048, 0) > 2 * 0.2
    assert model.predict(64, 0) < 0.2


def test_the_window_follows_a_change() -> None:
    model = learnt(256)
    for i in range(256):
        model.add(200 + 10 * i, 0, 3 * prefill_time(200 + 10 * i, 0), now=0.05 * i)
    assert model.predict(1000, 0) == pytest.approx(3 * prefill_time(1000, 0), rel=0.05)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_nonsense_is_not_learnt(seconds: float) -> None:
    model = PrefillModel()
    model.add(100, 0, seconds, now=0.0)
    model.add(0, 100, 1.0, now=0.0)
    assert len(model.fit) == 0


sample = st.tuples(st.integers(1, 100_000), st.integers(0, 100_000), st.floats(1e-6, 1e4))


@given(st.lists(sample, max_size=60))
def test_coefficients_are_finite_and_never_negative(samples: list[tuple[int, int, float]]) -> None:
    model = PrefillModel()
    for computed, cached, seconds in samples:
        model.add(computed, cached, seconds, now=0.0)
        c = model.fit.coefficients
        assert all(math.isfinite(v) and v >= 0 for v in (c.a, c.b, c.c))
        assert c.a + c.b + c.c > 0


def test_few_slow_samples_never_refuse_what_the_prior_would_take() -> None:
    model, prior = PrefillModel(), PrefillModel()
    for _ in range(ENOUGH_SAMPLES - 1):
        model.add(100, 0, 60.0, now=0.0)  # the first calls of a cold machine
    assert model.predict(100, 0) > 50
    assert model.admission_s(100, 0, now=0.0) == prior.predict(100, 0)


def test_an_old_slow_fit_fades_so_that_refusal_is_not_for_ever() -> None:
    model, prior = PrefillModel(), PrefillModel()
    for _ in range(64):
        model.add(100, 0, 60.0, now=100.0)
    assert model.admission_s(100, 0, now=100.0) == pytest.approx(60, rel=0.05)
    assert model.admission_s(100, 0, now=100.0 + HALF_LIFE_S) == pytest.approx(30, rel=0.05)
    assert model.admission_s(100, 0, now=1e6) == pytest.approx(prior.predict(100, 0))


def test_decode_step_grows_with_batch_and_context() -> None:
    rng, model = random.Random(1), DecodeModel()
    for _ in range(256):
        batch = rng.randint(1, 64)
        context = batch * rng.randint(10, 4000)
        model.add(batch, context, (0.008 + 2e-4 * batch + 1e-6 * context) * rng.gauss(1, 0.03), now=0.0)
    for batch, context in ((1, 100), (16, 20_000), (64, 200_000)):
        assert model.predict(batch, context) == pytest.approx(0.008 + 2e-4 * batch + 1e-6 * context, rel=0.08)


def test_bandwidth_is_weighted_by_size_and_forgets() -> None:
    model = TransferModel(bytes_per_s=1e9)
    for _ in range(60):
        model.add(100_000_000, 0, 0.05, now=0.0)
        model.add(10, 0, 0.001, now=0.0)
    assert model.bytes_per_s == pytest.approx(2e9, rel=0.05)
    model.add(0, 0, 1.0, now=0.0)
    assert model.bytes_per_s == pytest.approx(2e9, rel=0.05)


def test_transfer_hides_behind_prefill_except_for_its_tail() -> None:
    model = TransferModel(bytes_per_s=1e9)
    hidden = model.tail_s(100_000_000, prefill_s=10.0)
    assert 0 < hidden < 0.1
    assert model.tail_s(100_000_000, prefill_s=0.02) == pytest.approx(0.08)


def test_a_decayed_ratio_starts_where_it_is_told() -> None:
    assert DecayedRatio(10.0, 2.0, keep=0.5).rate == 5.0
