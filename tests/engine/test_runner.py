"""Steps that cannot be run end in one named error and leave the runner usable; the local engine keeps its books."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from kvmesh.engine.batch import DecodeBatch
from kvmesh.engine.checkpoint import open_checkpoint
from kvmesh.engine.runner import DecodeInput, PrefillInput, Runner, SampleParams, pages_over, shard_layout
from kvmesh.errors import ConfigError, ContextTooLong, InternalError, InvalidRequest, NonFiniteLogits
from kvmesh.testing.local_engine import GenerateParams, LocalEngine
from tests.support.checkpoints import SPECIALS, prompts
from tests.support.engine.stepper import Stepper, launched_ahead
from tests.support.reference import assert_matches_reference

Zoo = Callable[[str], Path]


@pytest.fixture
def stepper(zoo: Zoo) -> Stepper:
    return Stepper(zoo("qwen3-gqa1-tied"), num_pages=24)


def test_empty_steps(stepper: Stepper) -> None:
    assert stepper.runner.prefill([]) == []
    assert stepper.runner.decode([]) == []


@pytest.mark.parametrize("tokens", [[], [5, -1], [301, 2], [2**40]])
def test_bad_token_ids(stepper: Stepper, tokens: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="token_ids"):
        stepper.runner.prefill([PrefillInput(tokens, 0, (0,), SampleParams())])
    for token in tokens[:1]:
        if token not in range(301):
            with pytest.raises(InvalidRequest, match="token_ids"):
                stepper.runner.decode([DecodeInput(token, 3, (0,), SampleParams())])


def test_beyond_the_context(stepper: Stepper) -> None:
    with pytest.raises(ContextTooLong, match="2048"):
        stepper.runner.prefill([PrefillInput([1, 2], 2047, (0,), None)])
    with pytest.raises(ContextTooLong, match="2048"):
        stepper.runner.decode([DecodeInput(1, 2048, tuple(range(129)), SampleParams())])


@pytest.mark.parametrize("pages", [(), (0,), (0, 24), (-1, 0)])
def test_too_few_or_unknown_pages(stepper: Stepper, pages: tuple[int, ...]) -> None:
    with pytest.raises(InternalError, match="page"):
        stepper.runner.prefill([PrefillInput([1] * 20, 0, pages, None)])
    with pytest.raises(InternalError, match="page"):
        stepper.runner.decode([DecodeInput(1, 20, pages, SampleParams())])


def test_pages_of_another_shape_or_dtype(zoo: Zoo) -> None:
    checkpoint = open_checkpoint(zoo("qwen3-gqa1-tied"))
    layout = shard_layout(checkpoint.config, "float32", 16)
    buffer = bytearray(layout.shard_bytes * 4)
    good = pages_over(buffer, layout, 4, "float32")
    assert good.shape == (4, 2, 2, 3, 16, 24)
    for block_tokens, dtype in ((32, "float32"), (16, "bfloat16")):
        with pytest.raises(InternalError, match="pages are"):
            Runner(checkpoint, dtype, "cpu", block_tokens, good)
    with pytest.raises(InternalError, match="need"):
        pages_over(buffer, layout, 5, "float32")
    with pytest.raises(ConfigError, match=r"int8.*float32, bfloat16, float16"):
        shard_layout(checkpoint.config, "int8", 16)


def test_poisoned_row_is_named_and_the_others_go_on(stepper: Stepper, zoo: Zoo) -> None:
    asked = prompts(3, 301, seed=1, low=20, high=30)
    pages = [stepper.take(64) for _ in asked]
    answers = [[stepper.prefill(prompt, p)] for prompt, p in zip(asked, pages, strict=True)]
    rows = [DecodeInput(a[0], len(p), pg, SampleParams()) for a, p, pg in zip(answers, asked, pages, strict=True)]
    stepper.pages[pages[1][0], 0, 1, 0, 3] = torch.nan
    with pytest.raises(NonFiniteLogits) as caught:
        stepper.runner.decode(rows)
    assert caught.value.rows == (1,)
    step = [PrefillInput(asked[0], 0, stepper.take(30)), PrefillInput(asked[1][9:], 9, pages[1], SampleParams())]
    with pytest.raises(NonFiniteLogits) as caught:
        stepper.runner.prefill(step)
    assert caught.value.rows == (1,)
    kept = [0, 2]
    for i, rest in zip(kept, stepper.decode([rows[i] for i in kept], 6), strict=True):
        assert_matches_reference(zoo("qwen3-gqa1-tied"), asked[i], answers[i] + rest)


def test_local_engine_refuses_what_can_never_run(zoo: Zoo) -> None:
    engine = LocalEngine(zoo("qwen3-gqa1-tied"), num_pages=4, block_tokens=16)
    for prompt, params, error in (
        ([], GenerateParams(), InvalidRequest),
        ([1], GenerateParams(max_tokens=0), InvalidRequest),
        ([1] * 60, GenerateParams(max_tokens=5), ContextTooLong),
    ):
        with pytest.raises(error):
            engine.submit(prompt, params)
    assert not engine.busy


def test_local_engine_queues_cancels_and_gets_its_pages_back(zoo: Zoo) -> None:
    path = zoo("qwen3-gqa1-tied")
    engine = LocalEngine(path, num_pages=8, block_tokens=16, max_batch=3, prefill_chunk_tokens=25)
    asked = prompts(9, 301, seed=2, low=10, high=40)
    handles = [engine.submit(prompt, GenerateParams(max_tokens=12)) for prompt in asked]
    answers: dict[int, list[int]] = {}
    times: dict[int, list[int]] = {}
    steps = 0
    while engine.busy:
        for token in engine.step():
            assert token.token_index == len(answers.setdefault(token.handle, []))
            answers[token.handle].append(token.sampled.token_id)
            times.setdefault(token.handle, []).append(token.at_ns)
        steps += 1
        if steps == 4:
            for i in (0, 2, 8):  # one that runs, one that fills, one that waits
                engine.cancel(handles[i])
            engine.cancel(12345)
    assert engine.free_pages == 8
    assert len(answers.get(handles[0], [])) < 12 and handles[8] not in answers
    for i in set(range(9)) - {0, 2, 8}:
        assert len(answers[handles[i]]) == 12
        assert times[handles[i]] == sorted(times[handles[i]])
        assert_matches_reference(path, asked[i], answers[handles[i]])


def test_local_engine_stops_at_stop_tokens(zoo: Zoo) -> None:
    path = zoo("qwen3-gqa1-tied")
    prompt = prompts(1, 301, seed=3)[0]
    [free] = LocalEngine(path, num_pages=8).generate([prompt], GenerateParams(max_tokens=20))
    stop = free.token_ids[7]
    cut = free.token_ids.index(stop) + 1
    params = GenerateParams(max_tokens=20, stop_token_ids=frozenset({stop}))
    [answer] = LocalEngine(path, num_pages=8).generate([prompt], params)
    assert (answer.token_ids, answer.finish) == (free.token_ids[:cut], "stop")
    assert free.finish == "length"


def test_the_zoo_can_be_served(zoo: Zoo) -> None:
    """The shared factory's tokenizer covers the whole vocabulary and survives a round trip of any text."""
    for name, size in (("qwen3-gqa1-tied", 301), ("llama-gqa4-llama3", 500)):
        tokenizer = Tokenizer.from_file(str(zoo(name) / "tokenizer.json"))
        assert tokenizer.get_vocab_size() == size
        for text in ("the tea on the table", "Grüße, 世界 🦊\n\t", "".join(map(chr, range(1, 256)))):
            assert tokenizer.decode(tokenizer.encode(text).ids) == text
        assert [tokenizer.token_to_id(special) for special in SPECIALS] == [256, 257, 258]
        assert len(tokenizer.encode("<|im_start|>user").ids) < 10


def test_steps_that_are_launched_ahead_make_the_same_tokens(checkpoint: Path) -> None:
    def rows(stepper: Stepper) -> list[DecodeInput]:
        made = []
        for at, prompt in enumerate(([5, 6, 7], list(range(9, 40)), [8] * 20)):
            pages = stepper.take(len(prompt) + 12)
            sample = SampleParams(temperature=1.0 if at else 0.0, seed=at, token_index=1, top_k=40 * (at == 2))
            made.append(DecodeInput(stepper.prefill(prompt, pages), len(prompt), pages, sample))
        return made

    def in_turn(stepper: Stepper, rows: list[DecodeInput]) -> list[list[int]]:
        answers: list[list[int]] = [[] for _ in rows]
        for _ in range(11):
            for answer, made, row in zip(answers, stepper.decode(rows, 1), rows, strict=True):
                answer += made
                row.sample.token_index += 1
        return answers

    one, other = Stepper(checkpoint), Stepper(checkpoint)
    assert launched_ahead(one.runner, rows(one), 11) == in_turn(other, rows(other))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_step_that_is_launched_tells_which_logits_are_not_finite(checkpoint: Path, temperature: float) -> None:
    stepper = Stepper(checkpoint)
    rows = []
    for prompt in ([5, 6, 7], [8, 9]):
        pages = stepper.take(16)
        sample = SampleParams(temperature=temperature, logprobs=1, token_index=1)
        rows.append(DecodeInput(stepper.prefill(prompt, pages), len(prompt), pages, sample))
    [_, wanted] = [token.token_id for token in stepper.runner.decode(rows)]
    stepper.pages[rows[0].pages[0]] = math.nan
    launched = stepper.runner.launch(DecodeBatch.of(rows))
    assert launched.token_ids.tolist() == [0, wanted], "the next step may look them up"
    chosen = launched.result()
    assert chosen.token_ids.tolist() == [-1, wanted] and list(chosen.scored) == [1]
