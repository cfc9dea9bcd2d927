import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.kvcache.tiers import Tier
from kvmesh.services.conductor.costs.fit import WINDOW, FittedModel, Sample, fit
from kvmesh.services.conductor.costs.models import (
    ENOUGH_SAMPLES,
    HALF_LIFE_S,
    PREFILL_ANCHORS,
    PREFILL_PRIOR,
    Coefficients,
    CostModel,
    DecayedRatio,
    DecodeModel,
    PrefillModel,
    PullModel,
    TierModel,
    TransferModel,
    attention_pairs,
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


def test_a_model_that_has_heard_much_fits_its_last_window_alone() -> None:
    rng, model = random.Random(3), FittedModel(PREFILL_PRIOR, PREFILL_ANCHORS)
    heard: list[Sample] = []
    for at in range(8 * WINDOW):
        x1, x2 = float(rng.randint(1, 9000)), float(rng.randint(1, 10**8))
        heard.append(Sample(x1, x2, (1 + at / WINDOW) * (0.01 + x1 * 1e-5 + x2 * 1e-9) * rng.uniform(0.9, 1.1)))
        model.add(x1, x2, heard[-1].seconds, now=1000.0 * at)  # so seldom that every eighth one is fitted
        if at % WINDOW == WINDOW - 1:
            assert model.coefficients == fit(heard[-WINDOW:], PREFILL_PRIOR, PREFILL_ANCHORS)
            assert len(model) == WINDOW


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


# ── batches, knees, congestion ────────────────────────────────────────────────────────────────────


def test_prompts_of_one_step_share_its_constant() -> None:
    """Every sample tells the time of a step with several prompts in it; one alone is foretold all the same."""
    rng, model = random.Random(3), PrefillModel()
    for _ in range(256):
        prompts = [(rng.randint(16, 200), rng.choice([0, 400])) for _ in range(rng.randint(1, 8))]
        seconds = sum(prefill_time(n, m) - TRUTH.a for n, m in prompts) + TRUTH.a
        (computed, cached), others = prompts[0], prompts[1:]
        model.add(
            computed,
            cached,
            seconds,
            0.0,
            beside_tokens=sum(n for n, _ in others),
            beside_pairs=sum(attention_pairs(n, m) for n, m in others),
        )
    assert model.predict(100, 0) == pytest.approx(prefill_time(100, 0), rel=0.03)
    together = model.together([(100, 0)] * 5)
    assert together == pytest.approx(5 * prefill_time(100, 0) - 4 * TRUTH.a, rel=0.03)
    assert model.step_tokens > 1000


def test_a_long_prompt_pays_the_constant_once_a_chunk() -> None:
    rng, model = random.Random(4), PrefillModel()
    for _ in range(256):
        computed = rng.randint(100, 8000)
        chunks = -(-computed // 512)
        seconds = prefill_time(computed, 0) + (chunks - 1) * TRUTH.a
        model.add(computed, 0, seconds, 0.0, steps=chunks, chunks=chunks)
    assert model.chunk_tokens == pytest.approx(512, rel=0.05)
    assert model.predict(5120, 0) == pytest.approx(prefill_time(5120, 0) + 9 * TRUTH.a, rel=0.05)
    assert model.predict(200, 0) == pytest.approx(prefill_time(200, 0), rel=0.05)


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_a_step_has_a_floor_and_then_a_slope(noise: float) -> None:
    """Up to 48 rows the weights' way from memory is all that counts; from there each row is computed for."""

    def step_s(rows: int, context: int) -> float:
        return 0.020 + 1e-7 * context + 1e-3 * max(0, rows - 48)

    rng, model = random.Random(5), DecodeModel()
    for i in range(256):
        rows = rng.randint(1, 128)
        context = rows * rng.randint(100, 2000)
        model.add(rows, context, step_s(rows, context) * rng.gauss(1, noise), now=0.1 * i)
    found = model.coefficients
    assert 36 <= found.knee <= 60
    for rows, context in ((4, 4000), (40, 40_000), (64, 64_000), (120, 120_000)):
        assert model.predict(rows, context) == pytest.approx(step_s(rows, context), rel=0.05)
    below, above = (found.at(found.knee + by, 1000) for by in (-1e-6, 1e-6))
    assert above == pytest.approx(below, rel=1e-6), "continuous"


def test_a_straight_line_is_given_no_knee() -> None:
    rng, model = random.Random(6), DecodeModel()
    for i in range(256):
        rows = rng.randint(1, 64)
        model.add(rows, rows * 500, (0.01 + 2e-4 * rows) * rng.gauss(1, 0.05), now=0.1 * i)
    assert (model.coefficients.d, model.coefficients.knee) == (0.0, 0.0)


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 10**6), st.floats(1e-4, 10)), min_size=60, max_size=90))
@settings(max_examples=60, deadline=None)
def test_a_step_never_gets_cheaper_with_rows_or_context(samples: list[tuple[int, int, float]]) -> None:
    model = DecodeModel()
    for i, (rows, context, seconds) in enumerate(samples):
        model.add(rows, context, seconds, now=float(i))
    times = [model.predict(rows, 1000) for rows in range(1, 300, 7)]
    assert times == sorted(times)
    assert model.predict(8, 1000) <= model.predict(8, 9000)


def test_what_goes_before_makes_a_transfer_longer_and_is_learnt() -> None:
    """At 1 GB/s, half of all transfers beside as many bytes again: the bandwidth is seen through the crowd."""
    model = TransferModel()
    for i in range(60):
        ahead = 50_000_000 * (i % 2)
        model.add(50_000_000, ahead, (50_000_000 + ahead) / 1e9, now=0.0)
    assert model.bytes_per_s == pytest.approx(1e9, rel=0.02)
    assert model.predict(1e8, 1e8) == pytest.approx(2 * model.predict(1e8, 0))
    assert model.tail_s(1e8, 0.05, ahead=1e8) == pytest.approx(0.15, rel=0.02)


def test_one_stuck_transfer_does_not_make_the_wires_slow() -> None:
    model = TransferModel()
    for _ in range(40):
        model.add(10_000_000, 0, 0.01, now=0.0)
    model.add(10_000_000, 0, 60.0, now=0.0)
    assert model.bytes_per_s > 0.5e9


def test_a_push_that_computing_hides_does_not_make_the_wires_slow() -> None:
    """10 GB/s; every push lasts as long as its prompt is computed, five times longer than the wires need."""
    model = TransferModel(bytes_per_s=10e9)
    for _ in range(60):
        model.add(1e9, 0, 0.5, now=0.0, prefill_s=0.5)
    assert model.bytes_per_s == pytest.approx(10e9)
    for _ in range(60):  # the wires become slower: now computing waits for them
        model.add(1e9, 0, 0.8, now=0.0, prefill_s=0.5)
    assert model.tail_s(1e9, 0.5) == pytest.approx(0.3, rel=0.05)


def test_a_hidden_push_tells_that_the_wires_are_no_slower() -> None:
    model = TransferModel(bytes_per_s=1e9)
    for _ in range(60):
        model.add(1e9, 0, 0.25, now=0.0, prefill_s=0.25)
    assert model.bytes_per_s == pytest.approx(4e9, rel=0.05)


def test_a_fit_that_foretells_is_left_alone_and_a_changed_machine_is_not() -> None:
    rng, model = random.Random(7), DecodeModel()
    fits, last, at = [], model.coefficients, 0.0
    for i in range(6000):
        at += 0.02
        slower = 2.0 if i >= 4000 else 1.0
        rows = rng.randint(1, 32)
        model.add(rows, rows * 500, slower * (0.01 + 2e-4 * rows) * rng.gauss(1, 0.03), now=at)
        if model.coefficients is not last:
            fits.append(at)
            last = model.coefficients
    calm = [at for at in fits if 20.0 < at <= 80.0]
    assert len(calm) <= 8, "once in ten seconds"
    assert any(80.0 < at <= 83.0 for at in fits), "a machine that became slow is noticed at once"
    assert model.predict(16, 8000) == pytest.approx(2 * (0.01 + 2e-4 * 16), rel=0.05)


# ── one interface ─────────────────────────────────────────────────────────────────────────────────

MODELS: dict[str, Callable[[], CostModel]] = {
    "prefill": PrefillModel,
    "decode": DecodeModel,
    "transfer": TransferModel,
    "pull": PullModel,
    "tier": lambda: TierModel(Tier.SSD),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_model_learns_saves_and_takes_the_same_way(name: str) -> None:
    model, other = MODELS[name](), MODELS[name]()
    before = model.predict(1000, 2)
    for i in range(300):
        model.add(1000 + i, 2, 7 * before, now=0.1 * i)
    assert model.predict(1000, 2) == pytest.approx(7 * before, rel=0.5)
    assert model.admission_s(1000, 2, now=30.0) <= model.predict(1000, 2) * 1.0001
    other.take(Coefficients.of_json(model.coefficients.to_json(), name))
    assert other.predict(1000, 2) == pytest.approx(model.predict(1000, 2))
    assert other.coefficients.at(5.0, 0.0) == pytest.approx(model.coefficients.at(5.0, 0.0))
