"""What goes into and comes out of one engine step.

A step takes and answers decode rows as columns (`DecodeBatch`, `Chosen`): arrays that whoever keeps the batch advances
as a whole, so that rows which merely go on cost a step no Python. `DecodeInput` is one row as a record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvmesh.engine.sampling.history import History

if TYPE_CHECKING:
    from kvmesh.engine.sampling.grammar import AnswerGrammar

Column = npt.NDArray[np.int64]
Integers = Sequence[int] | Column


@dataclass(slots=True, eq=False)
class SampleParams:
    """Says how to choose one token (docs/reference/sampling.md). With temperature 0 it is the most likely one.
    `token_index` counts the answer's tokens from 0, after `answered` ones that an earlier attempt of the request made;
    (seed, answered + token_index) alone decides the noise. `logprobs` is None for none, n ≥ 0 for the chosen token's
    and the n best. An object is equal only to itself: one object is one row."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    seed: int = 0
    token_index: int = 0
    logprobs: int | None = None
    min_p: float = 0.0  # tokens less likely than this share of the best one's probability go; 0: none
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Sequence[tuple[int, float]] = ()  # (token id, added to its logit), each id once
    answered: int = 0
    history: History | None = None  # needed where a penalty asks; the sampler adds what it samples
    grammar: AnswerGrammar | None = None  # None: every token is allowed; the sampler adds what it samples

    @property
    def penalised(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def filtered(self) -> bool:
        """Whether a draw leaves some tokens out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(slots=True)
class PrefillInput:
    """Asks to compute tokens [start, start + len(token_ids)) of one request. `pages[i]` holds tokens [i * block_tokens,
    (i + 1) * block_tokens) and covers the end of this chunk; the KV before `start` is already there. `sample` asks for
    the token after the last one.

    Of a runner that has memory for each cache group, `groups[g]` are the pages of group g, in place of `pages`:
    negative where the block's page was given back, which no token of the chunk may see any more. Of a STATE group it is
    the slot of the request's state, which is that after token `start` - 1 and is changed in place."""

    token_ids: Sequence[int]
    start: int
    pages: Sequence[int] = ()
    sample: SampleParams | None = None
    groups: Sequence[Sequence[int]] = ()
    targets: Sequence[int] = ()  # to be scored: targets[i] follows token_ids[i] in the prompt; at most as many
    top: int = 0  # how many of the best tokens are told beside each target


@dataclass(slots=True)
class DecodeInput:
    """Asks to compute `token_id` at `position` (KV of all earlier positions lies in `pages`, which has room for this
    one) and to sample the next token. A tuple for `pages` that stays the same object is recognised without looking
    inside. `groups` as of PrefillInput."""

    token_id: int
    position: int
    pages: Sequence[int]
    sample: SampleParams
    groups: Sequence[Sequence[int]] = ()


class SampledToken(NamedTuple):
    """Is one sampled token. `logprob` and `top` (most likely first) come from the raw log-softmax: before bias,
    penalties, temperature and filters. `token_id` -1 is none; where the row's grammar is why, `fault` says so."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    fault: str = ""


class DecodeBatch(NamedTuple):
    """Asks for one token of each row: row i computes `token_ids[i]` at `positions[i]` over `pages[i]`, as a DecodeInput
    does; the token that it samples is the `indices[i]`-th of the answer, counted from 0 and including what an earlier
    attempt made: `answered + token_index`. Columns are int64 `[rows]`, which nobody changes before the step has
    ended. Of a runner that has memory for each cache group, `groups[g][i]` is what a DecodeInput's `groups[g]` is of
    row i, and `pages` is not read.

    A request whose draft is verified has a row for its last token and one for each token of the draft, at the positions
    behind it and over the same pages: `lengths`, int64 `[requests]`, says how many rows in order are of each request;
    None: one each. A row sees those of its request before it."""

    token_ids: Column
    positions: Column
    indices: Column
    pages: Sequence[Sequence[int]]
    params: Sequence[SampleParams]
    groups: Sequence[Sequence[Sequence[int]]] = ()
    lengths: Column | None = None

    @classmethod
    def of(cls, rows: Sequence[DecodeInput]) -> DecodeBatch:
        """Makes a batch of rows that are given one by one."""
        columns = np.array([(r.token_id, r.position, r.sample.answered + r.sample.token_index) for r in rows], np.int64)
        tokens, positions, indices = columns.reshape(-1, 3).T.copy()
        groups = list(zip(*(r.groups for r in rows), strict=True))
        return cls(tokens, positions, indices, [r.pages for r in rows], [r.sample for r in rows], groups)


class Chosen(NamedTuple):
    """Holds the tokens of some rows, int64 `[rows]`; `scored` has those that asked for log-probabilities, by row,
    and the faults of rows whose grammar failed."""

    token_ids: Column
    scored: dict[int, SampledToken]

    def tokens(self) -> list[SampledToken]:
        """Returns the tokens one by one."""
        return [self.scored.get(row) or SampledToken(token) for row, token in enumerate(self.token_ids.tolist())]
