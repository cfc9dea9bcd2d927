"""Every model family against transformers, whatever way the KV got into the pages: cold, over a shared prefix, in
chunks, in steps that mix chunks and decode rows, and copied to other pages in the middle of an answer.

Prompts are longer than every window and than longrope's original context.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvmesh.engine.batch import DecodeBatch
from kvmesh.engine.checkpoint import open_checkpoint
from kvmesh.engine.runner import DecodeInput, PrefillInput, SampleParams
from kvmesh.testing.local_engine import GenerateParams, LocalEngine
from tests.support.checkpoints import FAMILY_ZOO, make_checkpoint, prompts
from tests.support.engine.stepper import NAN_BYTE, Stepper
from tests.support.reference import assert_as_close_as_reference, assert_matches_reference

Zoo = Callable[[str], Path]
EACH = pytest.mark.parametrize("name", FAMILY_ZOO)
ANSWER = 12


@EACH
def test_tokens_equal_transformers(zoo: Zoo, name: str) -> None:
    path = zoo(name)
    stepper = Stepper(path)
    first, second, third = prompts(3, 300, seed=11, low=83, high=84)
    pages = stepper.take(len(first) + ANSWER)
    cold = stepper.answer(first, ANSWER, pages=pages)
    assert_matches_reference(path, first, cold)
    assert stepper.answer(first, ANSWER, chunks=(1, 7, 33, 2)) == cold

    shared = first[:64] + second[64:]
    warm = stepper.answer(shared, ANSWER, start=64, pages=pages[:4] + stepper.take(len(shared) + ANSWER - 64))
    assert_matches_reference(path, shared, warm)

    mixed(stepper, path, first, cold, third)
    assert resumed(stepper, first, cold[:5]) == cold[5:]


def mixed(stepper: Stepper, path: Path, running: list[int], expected: list[int], arriving: list[int]) -> None:
    """One request decodes while another's chunks are computed in the same steps; then both decode."""
    row_pages, pages = stepper.take(len(running) + ANSWER), stepper.take(len(arriving) + ANSWER)
    row = DecodeInput(stepper.prefill(running, row_pages), len(running), row_pages, SampleParams())
    answers, start = [[row.token_id], []], 0
    for length in (37, 5, len(arriving) - 42):
        last = start + length == len(arriving)
        item = PrefillInput(arriving[start : start + length], start, pages, SampleParams() if last else None)
        [first], chosen = stepper.runner.step([item], DecodeBatch.of([row]))
        [token] = chosen.tokens()
        row.token_id, row.position = token.token_id, row.position + 1
        answers[0].append(token.token_id)
        start += length
    assert first is not None
    answers[1].append(first.token_id)
    rows = [row, DecodeInput(first.token_id, len(arriving), pages, SampleParams())]
    for answer, tokens in zip(answers, stepper.decode(rows, ANSWER - 4), strict=True):
        answer.extend(tokens)
    assert answers[0] == expected
    assert_matches_reference(path, arriving, answers[1])


def resumed(stepper: Stepper, prompt: list[int], answered: list[int]) -> list[int]:
    """Goes on after `answered` from pages that were copied out, overwritten and brought back elsewhere."""
    old = stepper.take(len(prompt) + ANSWER)
    assert stepper.answer(prompt, len(answered), pages=old) == answered
    kept, size = bytes(stepper.memory), stepper.layout.shard_bytes
    new = stepper.take(len(prompt) + ANSWER)
    for source, target in zip(old, new, strict=True):
        stepper.memory[target * size : (target + 1) * size] = kept[source * size : (source + 1) * size]
        stepper.memory[source * size : (source + 1) * size] = bytes([NAN_BYTE]) * size
    row = DecodeInput(answered[-1], len(prompt) + len(answered) - 1, new, SampleParams())
    return stepper.decode([row], ANSWER - len(answered))[0]


def test_longrope_of_short_prompts(zoo: Zoo, tmp_path: Path) -> None:
    """Opened for its original context the model is transformers' for short prompts. Opened for more, short prompts have
    the long factors too: as in transformers where the original context is one token."""
    path, other = zoo("phi3"), tmp_path / "one"
    [prompt] = prompts(1, 300, seed=14, low=40, high=41)

    def answer(limit: int) -> list[int]:
        engine = LocalEngine(open_checkpoint(path, limit), num_pages=4, block_tokens=16)
        return engine.generate([prompt], GenerateParams(max_tokens=ANSWER))[0].token_ids

    assert_matches_reference(path, prompt, answer(64))
    shutil.copytree(path, other)
    raw = json.loads((other / "config.json").read_text())
    raw["rope_scaling"]["attention_factor"] = open_checkpoint(path).config.rope.attention_factor
    (other / "config.json").write_text(json.dumps(raw | {"original_max_position_embeddings": 1}))
    assert_matches_reference(other, prompt, answer(0))
    assert answer(0) != answer(64)


@EACH
def test_a_page_table_off_by_one_shows(zoo: Zoo, name: str) -> None:
    stepper = Stepper(zoo(name))
    stepper.pages.zero_()  # wrong tokens are to show it, not NaN
    [prompt] = prompts(1, 300, seed=12, low=83, high=84)
    pages = stepper.take(len(prompt) + ANSWER)
    first = stepper.prefill(prompt, pages)
    off = pages[1:] + pages[:1]  # as if the table began one entry later
    [rest] = stepper.decode([DecodeInput(first, len(prompt), off, SampleParams())], ANSWER - 1)
    with pytest.raises(AssertionError, match="reference chooses"):
        assert_matches_reference(zoo(name), prompt, [first, *rest])


@EACH
def test_bfloat16_is_as_close_as_transformers(tmp_path: Path, name: str) -> None:
    """Teacher-forced log-probabilities of all tokens, some prefilled and some decoded, in one piece and in chunks."""
    path = make_checkpoint(tmp_path, dtype=torch.bfloat16, seed=len(name), **FAMILY_ZOO[name])
    stepper = Stepper(path, dtype="bfloat16")
    [tokens] = prompts(1, 300, seed=13, low=96, high=97)
    assert_as_close_as_reference(path, [stepper.forced(tokens, 72)])
    assert_as_close_as_reference(path, [stepper.forced(tokens, 72, chunks=(1, 7, 33, 2))])
