"""Chunks of equal compute, and what they take through a pipeline: against arithmetic by hand and by properties."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh import chunk_pipeline
from kvmesh.chunk_pipeline import (
    ChunkCost,
    FittedChunkCost,
    best_chunks,
    bounded_borders,
    equal_compute_borders,
    pipeline_ends,
    pipelined_s,
    predict_pipeline,
    stage_layers,
)
from kvmesh.errors import ConfigError

COSTS = st.builds(
    ChunkCost,
    token=st.floats(1e-7, 1.0),
    pair=st.one_of(st.just(0.0), st.floats(1e-12, 1e-3)),
    step=st.floats(0.0, 1.0),
)


@settings(max_examples=80, deadline=None)
@given(cost=COSTS, tokens=st.integers(1, 200_000), cached=st.integers(0, 200_000), chunks=st.integers(1, 70),
       block=st.sampled_from((1, 16, 256, 512)))  # fmt: skip
def test_borders_are_ascending_on_blocks_and_equal_within_one(
    cost: ChunkCost, tokens: int, cached: int, chunks: int, block: int
) -> None:
    cached -= cached % block
    tokens += cached
    ends = equal_compute_borders(tokens, chunks, cost, cached=cached, block=block)
    assert ends[-1] == tokens and 1 <= len(ends) <= chunks
    starts = [cached, *ends[:-1]]
    assert all(start < end for start, end in zip(starts, ends, strict=True))
    assert all(end % block == 0 for end in ends[:-1])
    works = [cost.work(start, end) for start, end in zip(starts, ends, strict=True)]
    assert sum(works) == pytest.approx(cost.work(cached, tokens))
    if len(ends) == chunks:
        mean = sum(works) / chunks
        last_block = cost.work(max(0, tokens - block), tokens)  # the dearest one
        assert all(abs(work - mean) <= last_block * 1.001 + 1e-9 * mean for work in works)


def test_chunks_grow_shorter_by_the_root_where_pairs_are_all_that_costs() -> None:
    """Pairs up to x are x² / 2: of 4 chunks the first has half of the tokens."""
    assert equal_compute_borders(1 << 20, 4, ChunkCost(0.0, 1.0), block=512) == [
        1 << 19,
        741_376,
        908_288,
        1 << 20,
    ]
    assert equal_compute_borders(1000, 4, ChunkCost(1.0)) == [250, 500, 750, 1000]


@settings(max_examples=60, deadline=None)
@given(cost=COSTS, tokens=st.integers(1, 100_000), cached=st.integers(0, 50_000), blocks=st.integers(1, 40),
       least=st.integers(0, 8))  # fmt: skip
def test_bounded_chunks_have_no_more_tokens_and_late_ones_not_too_few(
    cost: ChunkCost, tokens: int, cached: int, blocks: int, least: int
) -> None:
    most, few = 256 * blocks, 256 * min(least, blocks)
    tokens += cached
    ends = bounded_borders(tokens, most, cost, cached=cached, block=256, least=few)
    lengths = [end - start for start, end in zip([cached, *ends[:-1]], ends, strict=True)]
    assert max(lengths) <= most and min(lengths) > 0 and sum(lengths) == tokens - cached
    assert all(end % 256 == 0 for end in ends[:-1])
    assert not lengths[:-1] or min(lengths[1:-1] or [most]) >= few / 2 - 256


def test_first_chunks_are_cheaper_where_the_last_would_be_too_short() -> None:
    cost = ChunkCost(1e-6, 1e-9)
    equal = bounded_borders(1 << 20, 8192, cost, block=256)
    assert len(equal) > 2000 and equal[0] <= 8192
    bounded = bounded_borders(1 << 20, 8192, cost, block=256, least=1024)
    assert bounded[:10] == [8192 * n for n in range(1, 11)]
    assert len(bounded) < 700 and 1024 <= bounded[-1] - bounded[-2] < 1536


def test_no_more_chunks_than_are_wanted_where_only_the_first_ones_are_bound() -> None:
    """By their pairs, 512 tokens at the end take as long as many times that at the begin: it is these that have 512."""
    cost = ChunkCost(1e-5, 1e-7)
    bound, wanted = (bounded_borders(8192, 512, cost, block=16, wanted=wanted) for wanted in (0, 20))
    assert len(bound) > 60 and len(wanted) <= 24
    works = [cost.work(start, end) for start, end in zip([0, *wanted[:-1]], wanted, strict=True)]
    lengths = [end - start for start, end in zip([0, *wanted[:-1]], wanted, strict=True)]
    first = lengths.count(512)
    assert lengths[:first] == [512] * first and works[:first] == sorted(works[:first])
    assert max(works) < 1.1 * min(works[first:]) and max(works) < 1.1 * cost.work(0, 8192) / 20


@settings(max_examples=40, deadline=None)
@given(
    token=st.floats(1e-7, 1e-4), ratio=st.floats(1e-4, 1e-2), step=st.floats(0, 1e-2), scale=st.floats(1e-3, 1e3),
    lengths=st.lists(st.integers(16, 4096), min_size=40, max_size=40),
)  # fmt: skip
def test_costs_of_chunks_are_learnt_from_what_they_took(
    token: float, ratio: float, step: float, scale: float, lengths: list[int]
) -> None:
    """Whatever unit the prior has; equal chunks, too, tell tokens from pairs."""
    told, start = ChunkCost(token, token * ratio, step), 0
    fitted = FittedChunkCost(ChunkCost(scale, scale * ratio * 4))
    for length in (*lengths, *(256,) * 20):
        end = start + length
        pairs = length * (start + (length + 1) / 2)
        fitted.add(length, pairs, told.of(start, end))
        start = end
    learnt = fitted.cost
    assert learnt.pair / learnt.token == pytest.approx(ratio, rel=1e-3) or len(set(lengths)) < 5
    assert learnt.of(5000, 6000) == pytest.approx(told.of(5000, 6000), rel=1e-2)


def test_a_chunk_is_never_learnt_to_cost_nothing_by_itself() -> None:
    """Else the best number of chunks would be as many as there may be."""
    told, fitted, start = ChunkCost(1e-5, 1e-8), FittedChunkCost(ChunkCost(1.0, 0.001)), 0
    for length in (*range(64, 4096, 64), *(256,) * 20):
        fitted.add(length, length * (start + (length + 1) / 2), told.of(start, start + length))
        start += length
    assert fitted.cost.step == pytest.approx(fitted.cost.token, rel=1e-6)
    assert fitted.cost.of(0, 512) == pytest.approx(told.of(0, 512), rel=1e-2)
    assert best_chunks(fitted.cost.work(0, 8192), 4, fitted.cost.step) < 400


def test_costs_are_the_priors_until_tokens_and_pairs_are_told_apart() -> None:
    prior = ChunkCost(3.0, 0.01)
    fitted = FittedChunkCost(prior)
    for _ in range(100):
        fitted.add(512, 512 * 512 / 2, 0.1)
        fitted.add(512, 512 * 512 / 2, math.inf)
        fitted.add(0, 0.0, 0.1)
    assert fitted.cost == prior
    for start in range(0, 1 << 16, 512):  # pairs that seem to cost nothing still cost an eighth of what the prior says
        fitted.add(512, 512 * (start + 256.5), 0.1)
    assert fitted.cost.pair / fitted.cost.token == pytest.approx(0.01 / 3 / 8)


def test_what_cannot_be_cut_is_refused() -> None:
    cost = ChunkCost(1.0)
    for call, field in (
        (lambda: equal_compute_borders(8, 0, cost), "chunks"),
        (lambda: equal_compute_borders(8, 1, cost, cached=8), "tokens"),
        (lambda: equal_compute_borders(8, 1, cost, block=0), "block"),
        (lambda: bounded_borders(8, 7, cost, block=2), "most"),
        (lambda: ChunkCost(0.0), "token"),
        (lambda: ChunkCost(1.0, -1.0), "pair"),
        (lambda: stage_layers(4, 5), "pp"),
        (lambda: predict_pipeline(8, 2, cost, layers=4, ends=[4]), "ends"),
        (lambda: predict_pipeline(8, [2, 0], cost), "stages"),
    ):
        with pytest.raises(ConfigError) as error:
            call()
        assert error.value.field == field


def test_equal_chunks_through_equal_stages_by_the_formula() -> None:
    """m chunks and p - 1 more; what chunks wait on the way is added once a border of stages."""
    for chunks, stages in ((1, 4), (8, 4), (8, 1), (3, 2)):
        ends = pipeline_ends([[0.5] * stages] * chunks, 0.125)
        assert ends[-1][-1] == pytest.approx((chunks + stages - 1) * 0.5 + (stages - 1) * 0.125)
    assert pipeline_ends([[1.0, 2.0], [1.0, 2.0]]) == [[1.0, 3.0], [2.0, 5.0]]  # the slow stage holds up


def test_a_prompt_through_a_pipeline() -> None:
    """8 layers of 1 ms a token: 1,000 tokens are 8 s on one stage, and over 4 stages 8/4 · (1 + 3/8)."""
    told = predict_pipeline(1000, 4, ChunkCost(1e-3), layers=8, chunks=8)
    assert told.ttft_s == pytest.approx(8 / 4 * (1 + 3 / 8))
    assert told.bubble == pytest.approx(3 / 11)
    assert told.one_stage_s == pytest.approx(8.0) and told.speedup == pytest.approx(8 / 2.75)
    assert pipelined_s(2.0, 8, 4) == pytest.approx(told.ttft_s)
    assert predict_pipeline(1000, 1, ChunkCost(1e-3), layers=8, chunks=8).bubble == pytest.approx(0.0)


def test_equal_compute_beats_equal_tokens() -> None:
    layer = ChunkCost(1e-6, 1e-9)
    equal = predict_pipeline(65_536, 4, layer, layers=32, chunks=16)
    tokens = predict_pipeline(65_536, 4, layer, layers=32, ends=[4096 * n for n in range(1, 17)])
    assert equal.ttft_s < 0.95 * tokens.ttft_s and equal.bubble < tokens.bubble


@settings(max_examples=40, deadline=None)
@given(work=st.floats(0.01, 100.0), stages=st.integers(2, 16), step=st.floats(1e-4, 0.1))
def test_the_best_number_of_chunks_has_no_better_neighbour(work: float, stages: int, step: float) -> None:
    def through(chunks: int) -> float:
        return (chunks + stages - 1) * (work / chunks + step)

    best = best_chunks(work, stages, step)
    assert through(best) <= min(through(best + 1), through(max(1, best - 1))) * (1 + 1e-12)


def test_very_many_chunks_are_found_in_few_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed cost that is measured as next to nothing asks for chunks of one block."""
    tries, found = 0, chunk_pipeline.equal_compute_borders

    def counted(*sizes: Any, **more: Any) -> list[int]:
        nonlocal tries
        tries += 1
        return found(*sizes, **more)

    monkeypatch.setattr(chunk_pipeline, "equal_compute_borders", counted)
    cost = ChunkCost(9e-6, 0.0, 1e-11)
    ends = bounded_borders(105_602, 64, cost, cached=23_877, block=64, least=8, wanted=4096)
    assert ends[-1] == 105_602
    assert max(after - before for before, after in pairwise([23_877, *ends])) <= 64
    assert tries < 60
