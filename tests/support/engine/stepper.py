"""Drives a Runner by hand, so that a test decides which tokens go into which step and which pages they use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from kvmesh.engine.batch import DecodeBatch
from kvmesh.engine.checkpoint import open_checkpoint
from kvmesh.engine.parallel import ALONE, ExpertsCut, RankMesh
from kvmesh.engine.runner import DecodeInput, PrefillInput, Runner, SampledToken, SampleParams, pages_over, shard_layout
from tests.support.reference import Forced

NAN_BYTE = 0xFF  # four of them are a float32 NaN, two a bfloat16 one


def sampled_id(token: SampledToken | None, mesh: RankMesh) -> int:
    """A prompt's token at every rank: of stages only the last one's have it."""
    if mesh.axes.pp == 1:
        assert token is not None
        return token.token_id
    return int(mesh.world.all_max(torch.tensor([-1 if token is None else token.token_id])))


class Stepper:
    """A runner over pages that begin as NaN patterns: whatever reads a slot that was never written shows it."""

    def __init__(
        self,
        path: Path,
        *,
        block_tokens: int = 16,
        num_pages: int = 96,
        dtype: str = "float32",
        mesh: RankMesh = ALONE,
        experts_cut: ExpertsCut = "auto",
    ) -> None:
        self.checkpoint = open_checkpoint(path)
        config, self.mesh = self.checkpoint.config, mesh
        self.layout = shard_layout(config, dtype, block_tokens, mesh.axes, mesh.rank)
        self.memory = bytearray([NAN_BYTE]) * (self.layout.shard_bytes * num_pages)
        self.pages = pages_over(self.memory, self.layout, num_pages, dtype)
        self.runner = Runner(self.checkpoint, dtype, "cpu", block_tokens, self.pages, mesh, experts_cut=experts_cut)
        self.block_tokens = block_tokens
        self._next = 0

    def take(self, tokens: int) -> tuple[int, ...]:
        """Fresh pages for that many tokens, in an order that is not ascending."""
        count = -(-tokens // self.block_tokens)
        taken = tuple(range(self._next, self._next + count))
        assert taken[-1] < len(self.pages)
        self._next += count
        return taken[::-1]

    def prefill(self, prompt: Sequence[int], pages: Sequence[int], chunks: Sequence[int] = (), start: int = 0) -> int:
        """Compute prompt[start:], cut into `chunks` and the rest; the first token of the answer."""
        for length in chunks:
            assert self.runner.prefill([PrefillInput(prompt[start : start + length], start, pages)]) == [None]
            start += length
        [token] = self.runner.prefill([PrefillInput(prompt[start:], start, pages, SampleParams())])
        return sampled_id(token, self.mesh)

    def decode(self, rows: Sequence[DecodeInput], count: int) -> list[list[int]]:
        """`count` further tokens of every row."""
        answers: list[list[int]] = [[] for _ in rows]
        for _ in range(count):
            for row, answer, token in zip(rows, answers, self.runner.decode(rows), strict=True):
                answer.append(token.token_id)
                row.token_id = token.token_id
                row.position += 1
        return answers

    def answer(
        self,
        prompt: Sequence[int],
        count: int,
        *,
        chunks: Sequence[int] = (),
        start: int = 0,
        pages: Sequence[int] = (),
    ) -> list[int]:
        """Greedy answer of one request alone."""
        pages = pages or self.take(len(prompt) + count)
        first = self.prefill(prompt, pages, chunks, start)
        [rest] = self.decode([DecodeInput(first, len(prompt), pages, SampleParams())], count - 1)
        return [first, *rest]

    def forced(self, token_ids: Sequence[int], start: int, chunks: Sequence[int] = ()) -> Forced:
        """Log-probabilities of all tokens after token_ids[:start], which are prefilled in `chunks` and the rest, and
        after each token from there on, which are decoded whatever the model would have said."""
        pages = self.take(len(token_ids))
        wanted = SampleParams(logprobs=self.checkpoint.config.vocab_size)
        at = 0
        for length in chunks:
            self.runner.prefill([PrefillInput(token_ids[at : at + length], at, pages)])
            at += length
        [token] = self.runner.prefill([PrefillInput(token_ids[at:start], at, pages, wanted)])
        told = [dict(token.top) if token is not None else {}]  # a stage before the last is not told
        for position in range(start, len(token_ids)):
            [token] = self.runner.decode([DecodeInput(token_ids[position], position, pages, wanted)])
            told.append(dict(token.top))
        return token_ids, start, told


def launched_ahead(runner: Runner, rows: Sequence[DecodeInput], count: int) -> list[list[int]]:
    """`count` further tokens of every row, each step launched before the tokens of the one before are read. Rows change
    places from step to step; in the middle one of them comes from the host."""
    answers: list[list[int]] = [[] for _ in rows]
    places, before = list(range(len(rows))), None
    for step in range(count):
        order = places[1:] + places[:1]
        source = np.array([places.index(row) for row in order], np.int64)
        if before is not None and step == count // 2:
            _take(answers, places, before.result().token_ids.tolist())
            source[0] = -1
        tokens = [answers[row][-1] if answers[row] else rows[row].token_id for row in order]
        ahead = DecodeBatch(
            np.array(tokens, np.int64),  # of which only those count that are not on the device
            np.array([rows[row].position + step for row in order], np.int64),
            np.array([rows[row].sample.token_index + step for row in order], np.int64),
            [rows[row].pages for row in order],
            [rows[row].sample for row in order],
        )
        launched = runner.launch(ahead) if before is None else runner.launch(ahead, before, source)
        if before is not None and step != count // 2:
            _take(answers, places, before.result().token_ids.tolist())
        places, before = order, launched
    assert before is not None
    _take(answers, places, before.result().token_ids.tolist())
    return answers


def _take(answers: list[list[int]], places: Sequence[int], tokens: Sequence[int]) -> None:
    for row, token in zip(places, tokens, strict=True):
        answers[row].append(token)
