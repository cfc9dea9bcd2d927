"""The same runner on a CUDA device: Triton's kernels, CUDA graphs, sampling on the device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from kvmesh.engine.batch import DecodeBatch
from kvmesh.engine.pieces import piece_sizes
from kvmesh.engine.runner import DecodeInput, PrefillInput, SampleParams
from kvmesh.testing.local_engine import GenerateParams, LocalEngine
from tests.gpu import NEEDS_GPU
from tests.support.checkpoints import prompts
from tests.support.engine.stepper import launched_ahead
from tests.support.reference import assert_matches_reference, reference_logits

pytestmark = NEEDS_GPU
Zoo = Callable[[str], Path]
MODELS = (
    "qwen3-gqa4-yarn",
    "qwen2-gqa7-yarn-parameters",
    "llama-gqa7-linear",
    "gemma2",
    "mistral",
    "deepseek_v2",
    "deepseek_v3",
)


def engine(path: Path, **settings: object) -> LocalEngine:
    made = LocalEngine(path, device="cuda", block_tokens=16, num_pages=200, **settings)  # type: ignore[arg-type]
    assert made.runner.attention.capturable, "Triton's kernels are not in use"
    return made


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_equal_the_reference(zoo: Zoo, name: str, graphs: bool) -> None:
    """Chunks that end within tiles; batches that shrink through several buckets as answers end."""
    local = engine(zoo(name), prefill_chunk_tokens=53, cuda_graphs=graphs)
    runner = local.runner
    assert (runner.graphs is not None) == (runner.pieces is not None) == graphs
    if runner.graphs is not None and runner.pieces is not None:
        from kvmesh.engine.graphs import MAX_ROWS, buckets  # imports triton

        assert (runner.graphs.sizes, runner.graphs.failed) == (buckets(MAX_ROWS), "")
        assert (runner.pieces.sizes, runner.pieces.failed) == (piece_sizes(local.config, None), "")
    asked = prompts(16, local.config.vocab_size, seed=3)
    for prompt, answer in zip(asked, local.generate(asked, GenerateParams(max_tokens=20)), strict=True):
        assert_matches_reference(zoo(name), prompt, answer.token_ids)


@pytest.mark.parametrize("graphs", [True, False])
def test_steps_that_are_launched_ahead_make_the_same_tokens(zoo: Zoo, graphs: bool) -> None:
    local = engine(zoo("llama-gqa7-linear"), cuda_graphs=graphs)
    asked = prompts(5, local.config.vocab_size, seed=4)
    answers = local.generate(asked, GenerateParams(max_tokens=16))
    rows, at = [], 0
    for prompt in asked:
        count = -(-(len(prompt) + 16) // 16)
        pages, at = tuple(range(at, at + count)), at + count
        [first] = local.runner.prefill([PrefillInput(prompt, 0, pages, SampleParams())])
        assert first is not None
        rows.append(DecodeInput(first.token_id, len(prompt), pages, SampleParams(token_index=1)))
    ahead = launched_ahead(local.runner, rows, 15)
    assert [[row.token_id, *rest] for row, rest in zip(rows, ahead, strict=True)] == [a.token_ids for a in answers]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", MODELS)
def test_half_precision_stays_near_the_reference(zoo: Zoo, name: str, dtype: str) -> None:
    """What a GPU computes in when nobody names a dtype: each greedy token is nearly the likeliest in float32, too."""
    path = zoo(name)
    local = engine(path, dtype=dtype, prefill_chunk_tokens=53)
    asked = prompts(4, local.config.vocab_size, seed=4)
    for prompt, answer in zip(asked, local.generate(asked, GenerateParams(max_tokens=12)), strict=True):
        logits = reference_logits(path, [*prompt, *answer.token_ids])[len(prompt) - 1 : -1].log_softmax(-1)
        chosen = logits.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert (logits.max(-1).values - chosen).max() < 0.6


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_replayed_steps_equal_launched_ones(zoo: Zoo, dtype: str) -> None:
    """The same kernels over the same rows, whatever the bucket: they agree to rounding."""
    runs = []
    for graphs in (True, False):
        runner = engine(zoo("qwen3-gqa4-yarn"), dtype=dtype, cuda_graphs=graphs).runner
        runner.attention.pages.normal_(generator=torch.Generator("cuda").manual_seed(1), std=0.5)
        told = []
        for rows in (1, 2, 3, 7, 19, 5):
            step = [
                DecodeInput(7 * i + 1, 20 + 3 * i, tuple(range(5 * i, 5 * i + 6)), SampleParams(logprobs=4))
                for i in range(rows)
            ]
            told.append([dict(token.top)[token.token_id] for token in runner.decode(step)])
        runs.append(told)
    for replayed, launched in zip(*runs, strict=True):
        assert replayed == pytest.approx(launched, abs=2e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_mixed_steps_by_pieces_equal_launched_ones(zoo: Zoo, name: str, dtype: str) -> None:
    """Chunks beside rows, of sizes within buckets and on their borders; steps follow each other in the same buffers."""
    runner = engine(zoo(name), dtype=dtype, cuda_graphs=True).runner
    pieces = runner.pieces
    assert pieces is not None and not pieces.failed
    greedy = SampleParams(logprobs=4)
    for step, (rows, *lengths) in enumerate(((3, 20), (0, 32), (7, 1, 23), (1, 60, 3), (2, 94), (0, 97), (19, 5, 8))):
        batch = DecodeBatch.of(
            [DecodeInput(7 * i + step, 20 + i, tuple(range(3 * i, 3 * i + 3)), greedy) for i in range(rows)]
        )
        items = [
            PrefillInput(
                [(11 * at + i) % 300 for at in range(length)], 0, tuple(range(100 + 8 * i, 108 + 8 * i)), greedy
            )
            for i, length in enumerate(lengths)
        ]
        told = []
        for used in (pieces, None):
            runner.pieces = used
            runner.attention.pages.normal_(generator=torch.Generator("cuda").manual_seed(step), std=0.5)
            layers: list[int] = []
            first, chosen = runner.step(items, batch, layers.append)
            assert layers == list(range(runner.config.layers))
            told.append([[p for _, p in token.top] for token in (*chosen.tokens(), *first) if token is not None])
            told.append(runner.attention.pages.float().sum((0, 2, 3, 4, 5)).tolist())
        runner.pieces = pieces
        near = 2e-4 if dtype == "float32" else 6e-2
        for replayed, launched in zip(told[0], told[2], strict=True):
            assert replayed == pytest.approx(launched, abs=near)
        assert told[1] == pytest.approx(told[3], rel=1e-2, abs=1.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_rows_with_drafts_equal_rows_alone(zoo: Zoo, name: str, dtype: str) -> None:
    """Uneven requests, by graphs and launched: each row says what it says where its request's rows have no program in
    common, over the same K and V."""
    runner = engine(zoo(name), dtype=dtype, cuda_graphs=False).runner
    runner.use_pages(runner.attention.pages, True, max_rows=4, max_tokens=0, max_drafts=7)
    graphs = runner.graphs
    assert graphs is not None and not graphs.failed
    assert (graphs.sizes, graphs.drafted_sizes) == ((1, 2, 4), (2, 4, 8, 16, 24, 32))
    for step, lengths in enumerate(((8, 1), (2, 5, 1), (3,), (8, 8, 8, 8), (1, 7, 2, 4))):
        rows = [
            DecodeInput(7 * i + at + 1, 28 + 3 * i + at, tuple(range(6 * i, 6 * i + 6)), SampleParams(logprobs=4))
            for i, length in enumerate(lengths)
            for at in range(length)
        ]
        told = []
        for used, together in ((graphs, True), (None, True), (None, False)):
            runner.graphs = used
            runner.attention.pages.normal_(generator=torch.Generator("cuda").manual_seed(step), std=0.5)
            batch = DecodeBatch.of(rows)
            if together:
                batch = batch._replace(lengths=np.array(lengths, np.int64))
            _, chosen = runner.step((), batch)
            told.append([[p for _, p in token.top] for token in chosen.tokens()])
        near = 2e-4 if dtype == "float32" else 6e-2
        for replayed, launched, apart in zip(*told, strict=True):
            assert replayed == pytest.approx(apart, abs=near)
            assert launched == pytest.approx(apart, abs=near)


def test_seeded_sampling_runs_on_the_device(zoo: Zoo) -> None:
    params = GenerateParams(max_tokens=12, temperature=1.0, top_p=0.9, top_k=20, seed=5, logprobs=2)
    local = engine(zoo("qwen2-gqa4-tied"), dtype="bfloat16")
    first, second = (local.generate([[1, 2, 3]], params)[0] for _ in range(2))
    assert first.token_ids == second.token_ids


def test_the_graphs_bucket_does_not_bound_a_batch(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvmesh.engine import graphs

    monkeypatch.setattr(graphs, "MAX_ROWS", 6)
    local = engine(zoo("llama-gqa7-linear"))
    asked = prompts(11, local.config.vocab_size, seed=8)
    for prompt, answer in zip(asked, local.generate(asked, GenerateParams(max_tokens=8)), strict=True):
        assert_matches_reference(zoo("llama-gqa7-linear"), prompt, answer.token_ids)


@pytest.mark.parametrize(("name", "module"), [("qwen2-gqa4-tied", "triton_backend"), ("deepseek_v3", "triton_latent")])
def test_without_triton_torch_attends(
    name: str, module: str, zoo: Zoo, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, f"kvmesh.engine.attention.{module}", None)
    local = LocalEngine(zoo(name), device="cuda", block_tokens=16, num_pages=64)
    assert local.runner.graphs is None and "kvmesh[cuda]" in caplog.text
    asked = prompts(3, local.config.vocab_size, seed=9)
    for prompt, answer in zip(asked, local.generate(asked, GenerateParams(max_tokens=8)), strict=True):
        assert_matches_reference(zoo(name), prompt, answer.token_ids)
