"""Greedy, filters against a simple oracle, distribution, noise that depends on (seed, token_index) alone, logprobs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvmesh.engine.batch import SampledToken, SampleParams
from kvmesh.engine.sampler import Sampler
from kvmesh.engine.sampling import filters
from kvmesh.engine.sampling.noise import Noise, uniform
from kvmesh.errors import NonFiniteLogits
from kvmesh.testing.local_engine import GenerateParams, LocalEngine
from tests.support.engine import oracle


def sample(logits: torch.Tensor, params: Sequence[SampleParams]) -> list[SampledToken]:
    return Sampler().sample(logits, params)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def some_params(rng: random.Random, index: int) -> SampleParams:
    return SampleParams(
        temperature=rng.choice([0.0, 0.3, 1.0, 1.7]),
        top_p=rng.choice([1.0, 0.99, 0.8, 0.3, 1e-6]),
        top_k=rng.choice([0, 0, 1, 3, 40, 10_000]),
        min_p=rng.choice([0.0, 0.0, 0.05, 0.5]),
        seed=rng.getrandbits(64),
        token_index=index,
    )


@pytest.mark.parametrize("candidates", [1, 4, 128])
def test_filters_and_inverse_cdf_against_the_oracle(monkeypatch: pytest.MonkeyPatch, candidates: int) -> None:
    monkeypatch.setattr(filters, "CANDIDATES", candidates)  # few: whatever is beyond them must be counted in full
    rng = random.Random(1)
    for case in range(40):
        logits = noise(8, 97, seed=case) * 3
        params = [some_params(rng, case) for _ in range(8)]
        for row, p, token in zip(logits.double().tolist(), params, sample(logits, params), strict=True):
            assert token.token_id == oracle.token(np.array(row), p), p


@pytest.mark.slow
def test_distribution_chi_square() -> None:
    """20,000 draws with consecutive token indices of one seed, and with one index of consecutive seeds."""
    logits = noise(1, 40, seed=2) * 1.5
    settings = [
        (1.0, 1.0, 0, 0.0), (0.7, 1.0, 0, 0.0), (1.3, 0.9, 0, 0.0), (1.0, 1.0, 12, 0.0), (1.0, 1.0, 0, 0.1),
        (0.9, 0.8, 20, 0.05),
    ]  # fmt: skip
    draws = 20_000
    for temperature, top_p, top_k, min_p in settings:
        wanted = SampleParams(temperature, top_p, top_k, min_p=min_p)
        probabilities = oracle.probabilities(logits[0].double().numpy(), wanted).tolist()
        assert min_p == 0 or 1 < sum(p > 0 for p in probabilities) < 40
        for streams in (False, True):
            params = [replace(wanted, seed=i if streams else 11, token_index=3 if streams else i) for i in range(draws)]
            counts = [0] * 40
            for token in sample(logits.expand(draws, -1), params):
                counts[token.token_id] += 1
            assert all(count == 0 for count, p in zip(counts, probabilities, strict=True) if p == 0)
            bins = [(count, draws * p) for count, p in zip(counts, probabilities, strict=True) if p > 0]
            rare = [b for b in bins if b[1] < 5]
            bins = [b for b in bins if b[1] >= 5] + (
                [(sum(b[0] for b in rare), sum(b[1] for b in rare))] if rare else []
            )
            statistic = sum((count - mean) ** 2 / mean for count, mean in bins)
            freedom = len(bins) - 1
            # Wilson-Hilferty: about N(0, 1); 4 is one false alarm in 30,000, and the seeds are fixed.
            z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
            assert z < 4, (wanted, streams, statistic, freedom)


def test_noise_is_fixed_for_ever() -> None:
    """A request that moves to a newer build must continue its stream: these values may never change."""
    assert [uniform(seed, index) for seed, index in [(0, 0), (0, 1), (1, 0), (2**64 - 1, 7), (12345, 10**6)]] == FIXED
    assert uniform(-1, 7) == uniform(2**64 - 1, 7) == uniform(2**64 * 5 - 1, 7)
    values = [uniform(seed, index) for seed in range(200) for index in range(200)]
    assert Noise([-1, 12345, 0]).at([7, 10**6, 2**63]).tolist() == [FIXED[3], FIXED[4], uniform(0, 2**63)]
    assert [u for seed in range(200) for u in Noise([seed] * 200).at(range(200))] == values
    assert len(set(values)) == len(values)
    assert all(0 <= value < 1 for value in values)
    assert abs(sum(values) / len(values) - 0.5) < 0.005


FIXED = [0.6524484863740322, 0.7012121095215252, 0.36818951565166946, 0.7238582745899125, 0.09202445276124682]


def test_a_row_does_not_depend_on_its_batch() -> None:
    rng = random.Random(3)
    logits = noise(24, 512, seed=4) * 2
    params = [some_params(rng, i) for i in range(24)]
    alone = [sample(logits[i : i + 1], [params[i]])[0] for i in range(24)]
    assert sample(logits, params) == alone
    for _ in range(5):
        chosen = rng.sample(range(24), 9)
        assert sample(logits[chosen], [params[i] for i in chosen]) == [alone[i] for i in chosen]


@pytest.mark.parametrize("top_p", [1.0, 0.999999, 1e-12])
@pytest.mark.parametrize("temperature", [1e-9, 1e-3, 1e9])
def test_extreme_parameters(temperature: float, top_p: float) -> None:
    logits = noise(64, 1000, seed=5) * 5
    params = [SampleParams(temperature, top_p, 0, seed, 0) for seed in range(64)]
    tokens = [token.token_id for token in sample(logits, params)]
    if temperature < 1 or top_p < 1e-9:
        assert tokens == logits.argmax(-1).tolist()
    assert len(set(tokens)) > 30


def test_a_token_of_no_weight_is_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with the greatest and the least noise there is, and when the end of the vocabulary is filtered out."""
    logits = torch.full((1, 50), -torch.inf)
    logits[0, 10], logits[0, 20] = 1.0, 1.1
    for u, token in ((0.0, 10), (1 - 2.0**-53, 20)):
        monkeypatch.setattr(Noise, "at", lambda self, indices, u=u: np.full(len(indices), u))
        for top_p, top_k in ((1.0, 0), (0.99, 0), (1.0, 2)):
            assert sample(logits, [SampleParams(1.0, top_p, top_k)])[0].token_id == token


def test_ties_stay_together() -> None:
    logits = torch.zeros(1, 10)
    logits[0, 5:] = 1.0
    drawn = {sample(logits, [SampleParams(1.0, 1.0, 2, seed)])[0].token_id for seed in range(200)}
    assert drawn == {5, 6, 7, 8, 9}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits_are_named(bad: float, temperature: float) -> None:
    logits = noise(5, 30)
    logits[1, 7] = bad
    logits[4] = -torch.inf
    with pytest.raises(NonFiniteLogits, match=r"\[1, 4\]") as caught:
        sample(logits, [SampleParams(temperature) for _ in range(5)])
    assert caught.value.rows == (1, 4)


def test_logprobs_are_raw() -> None:
    logits = noise(4, 60, seed=6) * 4
    raw = logits.log_softmax(-1)
    params = [
        SampleParams(logprobs=3),
        SampleParams(),
        SampleParams(0.5, 0.5, 5, 8, 0, logprobs=0),
        SampleParams(2.0, logprobs=1000, seed=4),
    ]
    out = sample(logits, params)
    assert out[1].logprob is None and out[1].top == ()
    for i in (0, 2, 3):
        assert out[i].logprob == pytest.approx(float(raw[i, out[i].token_id]), abs=1e-6)
    assert [token for token, _ in out[0].top] == raw[0].topk(3).indices.tolist()
    assert out[2].top == ()
    assert len(out[3].top) == 60
    values = [value for _, value in out[3].top]
    assert values == sorted(values, reverse=True)
    assert sum(math.exp(value) for value in values) == pytest.approx(1, abs=1e-5)


def test_a_seeded_answer_does_not_depend_on_the_others(zoo: Callable[[str], Path]) -> None:
    """Through the engine: the same request alone and among others that come and go."""
    path = zoo("qwen3-gqa1-tied")
    params = GenerateParams(max_tokens=24, temperature=4.0, top_p=0.95, top_k=50, seed=77)
    [alone] = LocalEngine(path, num_pages=8).generate([[4, 5, 6, 7]], params)
    engine = LocalEngine(path, num_pages=64, block_tokens=16, prefill_chunk_tokens=7)
    tokens: dict[int, list[int]] = {}
    engine.submit(list(range(30)), GenerateParams(max_tokens=9))
    for prompt in ([1] * 40, [2, 3]):
        engine.submit(prompt, GenerateParams(max_tokens=12, temperature=1.2, seed=5))
    handle = engine.submit([4, 5, 6, 7], params)
    while engine.busy:
        for token in engine.step():
            tokens.setdefault(token.handle, []).append(token.sampled.token_id)
    assert tokens[handle] == alone.token_ids
    assert len(set(alone.token_ids)) > 8
