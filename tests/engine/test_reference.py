"""Greedy tokens equal transformers', whatever way the KV got into the pages."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvmesh.engine.runner import DecodeInput, PrefillInput, SampleParams
from kvmesh.testing.local_engine import GenerateParams, LocalEngine
from tests.support.checkpoints import ZOO, prompts
from tests.support.engine.stepper import Stepper
from tests.support.reference import assert_matches_reference, reference_greedy, reference_logits

Zoo = Callable[[str], Path]
EACH = pytest.mark.parametrize("name", ZOO)


@pytest.mark.parametrize(
    ("name", "block_tokens"), [*((name, 16) for name in ZOO), ("qwen3-gqa4-yarn", 64), ("llama-gqa7-linear", 64)]
)
def test_cold_then_warm_then_chunked(zoo: Zoo, name: str, block_tokens: int) -> None:
    path = zoo(name)
    stepper = Stepper(path, block_tokens=block_tokens, num_pages=480 // block_tokens * 4)
    [prompt] = prompts(1, stepper.checkpoint.config.vocab_size, seed=1, low=77, high=78)

    cold_pages = stepper.take(len(prompt) + 24)
    cold = stepper.answer(prompt, 24, pages=cold_pages)
    assert_matches_reference(path, prompt, cold)

    # Everything but the last token is in the pages already; then a prefix that ends inside a block, then at one.
    for start in (len(prompt) - 1, 37, 64):
        assert stepper.answer(prompt, 24, start=start, pages=cold_pages) == cold

    # Another request shares the full blocks before `start` and brings its own pages and tokens from there on.
    start = 64
    other = prompt[:start] + prompts(1, 256, seed=2, low=29, high=30)[0]
    shared = cold_pages[: start // block_tokens]
    other_pages = shared + stepper.take(len(other) + 24 - start)
    assert_matches_reference(path, other, stepper.answer(other, 24, start=start, pages=other_pages))
    assert stepper.answer(prompt, 24, start=len(prompt) - 1, pages=cold_pages) == cold

    assert stepper.answer(prompt, 24, chunks=(1, 7, 33, 2)) == cold


@EACH
def test_sixteen_at_once_chunked(zoo: Zoo, name: str) -> None:
    path = zoo(name)
    engine = LocalEngine(path, block_tokens=16, num_pages=160, prefill_chunk_tokens=53)
    asked = prompts(16, engine.config.vocab_size, seed=3)
    answers = engine.generate(asked, GenerateParams(max_tokens=20))
    for prompt, answer in zip(asked, answers, strict=True):
        assert len(answer.token_ids) == 20
        assert_matches_reference(path, prompt, answer.token_ids)
    assert engine.free_pages == 160


def test_long_context_in_yarn_and_llama3(zoo: Zoo) -> None:
    """Far past the original positions, where the scalings differ most."""
    for name in ("qwen3-gqa4-yarn", "llama-gqa4-llama3"):
        stepper = Stepper(zoo(name), block_tokens=64, num_pages=16)
        [prompt] = prompts(1, 300, seed=4, low=450, high=451)
        assert_matches_reference(zoo(name), prompt, stepper.answer(prompt, 16, chunks=(111, 200)))


def test_mixed_prefill_step(zoo: Zoo) -> None:
    """Cold, warm, chunk without sample and one-token items share a step; each answers for itself."""
    path = zoo("qwen3-gqa4-yarn")
    stepper = Stepper(path)
    a, b, c, d = prompts(4, 331, seed=5, low=40, high=60)
    pages = [stepper.take(len(p)) for p in (a, b, c, d)]
    stepper.prefill(b, pages[1])
    stepper.runner.prefill([PrefillInput(d[:-1], 0, pages[3])])
    greedy = SampleParams()
    out = stepper.runner.prefill(
        [
            PrefillInput(a, 0, pages[0], greedy),
            PrefillInput(b[21:], 21, pages[1], greedy),
            PrefillInput(c[:19], 0, pages[2]),
            PrefillInput(d[-1:], len(d) - 1, pages[3], greedy),
        ]
    )
    assert out[2] is None
    for prompt, token in ((a, out[0]), (b, out[1]), (d, out[3])):
        assert token is not None
        assert_matches_reference(path, prompt, [token.token_id])
    assert_matches_reference(path, c, [stepper.prefill(c, pages[2], start=19)])


def test_rows_join_leave_and_change_places(zoo: Zoo) -> None:
    """The decode batch keeps tables from step to step: shuffles, leaves and growing page lists must not confuse it."""
    path = zoo("llama-gqa7-linear")
    stepper = Stepper(path, num_pages=128)
    rng = random.Random(6)
    asked = prompts(9, 331, seed=6)
    rows, answers = [], []
    for prompt in asked:
        pages = stepper.take(len(prompt) + 50)
        first = stepper.prefill(prompt, pages)
        held = len(prompt) // 16 + 1
        rows.append((DecodeInput(first, len(prompt), list(pages[:held]), SampleParams()), pages))
        answers.append([first])
    for _ in range(60):
        chosen = rng.sample(range(9), rng.randint(1, 9))
        chosen = [i for i in chosen if len(answers[i]) < 45]
        for i in chosen:
            row, pages = rows[i]
            if row.position == len(row.pages) * 16:
                row.pages.append(pages[len(row.pages)])  # type: ignore[attr-defined]
        for i, token in zip(chosen, stepper.runner.decode([rows[i][0] for i in chosen]), strict=True):
            answers[i].append(token.token_id)
            rows[i][0].token_id = token.token_id
            rows[i][0].position += 1
    for prompt, answer in zip(asked, answers, strict=True):
        assert_matches_reference(path, prompt, answer)


def test_reused_pages_with_nan_patterns(zoo: Zoo) -> None:
    """The same page list, the same length, but memory that others filled with NaN between two requests."""
    path = zoo("qwen3-gqa1-tied")
    stepper = Stepper(path)
    first, second = prompts(2, 301, seed=7, low=21, high=22)
    pages = stepper.take(40)
    other = stepper.take(70)
    for prompt in (first, second, first):
        stepper.memory[: 5 * stepper.layout.shard_bytes] = b"\xff" * (5 * stepper.layout.shard_bytes)
        token = stepper.prefill(prompt, pages)
        # KV "arrives" whole, with garbage after the prompt: what a landing or a swap-in may bring.
        stepper.pages[pages[1], :, :, :, len(prompt) % 16 :] = torch.nan
        long = stepper.prefill(first * 3, other)
        rows = [DecodeInput(token, 21, pages, SampleParams()), DecodeInput(long, 63, other, SampleParams())]
        answers = stepper.decode(rows, 5)
        assert_matches_reference(path, prompt, [token, *answers[0]])
        assert_matches_reference(path, first * 3, [long, *answers[1]])


def test_a_step_writes_only_its_own_pages(zoo: Zoo) -> None:
    stepper = Stepper(zoo("qwen2-gqa4-tied"))
    prompt = prompts(1, 331, seed=8, low=40, high=41)[0]
    pages = stepper.take(60)
    stepper.answer(prompt, 20, pages=pages)
    shard = stepper.layout.shard_bytes
    for page in set(range(len(stepper.pages))) - set(pages):
        assert stepper.memory[page * shard : (page + 1) * shard].count(0xFF) == shard


def test_on_layer_comes_when_the_layer_is_written_and_not_before(zoo: Zoo) -> None:
    stepper = Stepper(zoo("qwen3-gqa4-yarn"))
    prompt = prompts(1, 331, seed=9, low=40, high=41)[0]
    pages = list(stepper.take(40))
    seen: list[tuple[int, torch.Tensor]] = []

    def on_layer(layer: int) -> None:
        seen.append((layer, stepper.pages[pages].clone()))

    stepper.runner.prefill([PrefillInput(prompt, 0, pages)], on_layer)
    final = stepper.pages[pages]
    assert final.isfinite().all()  # also the slots after the prompt: a block leaves this machine whole
    assert [layer for layer, _ in seen] == [0, 1, 2]
    for layer, pages_then in seen:
        assert torch.equal(pages_then[:, : layer + 1], final[:, : layer + 1])
        assert pages_then[:, layer + 1 :, :, :, :8].isnan().all()


def test_wrong_kv_shows_in_the_tokens(zoo: Zoo) -> None:
    """The checkpoints can tell right KV from wrong: otherwise no comparison here means anything."""
    path = zoo("qwen3-gqa4-yarn")
    stepper = Stepper(path)
    prompt = prompts(1, 331, seed=10, low=70, high=71)[0]
    pages = stepper.take(100)
    right = stepper.answer(prompt, 24, pages=pages)
    stepper.pages[pages[1]] = 0
    assert stepper.answer(prompt, 24, start=69, pages=pages) != right


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_the_reference(zoo: Zoo, dtype: str) -> None:
    path = zoo("qwen3-gqa1-tied")
    stepper = Stepper(path, dtype=dtype)
    prompt = prompts(1, 301, seed=11, low=50, high=51)[0]
    pages = stepper.take(60)
    params = SampleParams(logprobs=5)
    [token] = stepper.runner.prefill([PrefillInput(prompt, 0, pages, params)])
    assert token is not None and token.logprob is not None
    expected = reference_logits(path, prompt)[-1].log_softmax(-1)
    assert expected.max() - expected[token.token_id] < 0.6
    assert abs(expected[token.token_id] - token.logprob) < 0.6
    rows = [DecodeInput(token.token_id, 50, pages, SampleParams())]
    assert len(stepper.decode(rows, 8)[0]) == 8


def test_reference_helper_can_fail(zoo: Zoo) -> None:
    path = zoo("qwen2-gqa4-tied")
    prompt = prompts(1, 331, seed=12)[0]
    right = reference_greedy(path, prompt, 6)
    assert_matches_reference(path, prompt, right)
    for at in (0, 5):
        wrong = list(right)
        wrong[at] = (wrong[at] + 1) % 331
        with pytest.raises(AssertionError, match=f"token {at} of 6"):
            assert_matches_reference(path, prompt, wrong)
