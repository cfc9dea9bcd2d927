"""A step that verifies drafts: its batch, what it accepts, and what sampling at a draft's positions takes.

Row i's last token and its draft d₁ ... dₖ are k + 1 rows of one request (`DecodeBatch.lengths`). What is sampled behind
each is what would be sampled there without drafts, from the same logits, seed and index, and with penalties and grammar
as they are once the draft's tokens before it are the answer's. So s₀ is the next token in any case; s₁ is the one after
it if s₀ = d₁; and so on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvmesh.engine.batch import Chosen, DecodeBatch, SampleParams


class DraftedBatch(NamedTuple):
    """Is the batch of a step, and which of its rows is the first of each request."""

    batch: DecodeBatch
    firsts: list[int]


def expand(
    batch: DecodeBatch, drafts: Sequence[Sequence[int]], variants: Sequence[Sequence[SampleParams]]
) -> DraftedBatch:
    """Returns the batch in which each row of `batch` is followed by its draft, whose j-th token is sampled behind by
    `variants[row][j]`."""
    lengths = np.array([1 + len(draft) for draft in drafts], np.int64)
    firsts = np.cumsum(lengths) - lengths
    of = np.repeat(np.arange(len(lengths)), lengths)
    offsets = np.arange(len(of)) - firsts[of]
    token_ids = batch.token_ids[of]
    params: list[SampleParams] = []
    for row, (first, draft) in enumerate(zip(firsts.tolist(), drafts, strict=True)):
        token_ids[first + 1 : first + 1 + len(draft)] = draft
        params += [batch.params[row], *variants[row][: len(draft)]]
    rows = of.tolist()
    groups = [[table[row] for row in rows] for table in batch.groups]
    pages = [batch.pages[row] for row in rows]
    wide = DecodeBatch(
        token_ids, batch.positions[of] + offsets, batch.indices[of] + offsets, pages, params, groups, lengths
    )
    return DraftedBatch(wide, firsts.tolist())


def accepted(sampled: Sequence[int], draft: Sequence[int]) -> int:
    """Returns how many tokens of a draft are kept, of which `sampled[j]` was sampled before the j-th, and the last one
    behind all of them."""
    kept = 0
    while kept < len(draft) and sampled[kept] == draft[kept]:
        kept += 1
    return kept


def sampled_at(chosen: Chosen, firsts: Sequence[int], drafts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns the tokens by which each request goes on: those that its draft foresaw, and one more. The list ends
    before a token that is none (-1); it is empty where that is the first."""
    tokens: list[int] = chosen.token_ids.tolist()
    made = []
    for first, draft in zip(firsts, drafts, strict=True):
        own = tokens[first : first + 1 + len(draft)]
        own = own[: 1 + accepted(own, draft)]
        made.append(own[: own.index(-1)] if -1 in own else own)
    return made


def until_stop(draft: Sequence[int], stops: Collection[int]) -> Sequence[int]:
    """Returns a draft up to its first stop token. That token would be computed for nobody: it is sampled, if at all, in
    the same step."""
    return next((draft[:at] for at, token in enumerate(draft) if token in stops), draft)


class RowVariants:
    """Keeps for each row what its draft's tokens are sampled behind with: the row's own parameters as other objects,
    since one object is one row of a step. They stay the same from step to step, but for rows with a history or a
    grammar, where these are as they will be behind each of the draft's tokens."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: dict[int, list[SampleParams]] = {}  # by handle

    def of(self, handle: int, params: SampleParams, draft: Sequence[int]) -> list[SampleParams]:
        """Returns the parameters behind each token of a draft: fewer where the grammar forbids one of them."""
        if params.history is None and params.grammar is None:
            kept = self._kept.get(handle)
            if kept is None:
                kept = self._kept[handle] = [replace(params) for _ in range(self._most)]
            return kept[: len(draft)]
        histories = params.history.ahead(draft) if params.history is not None else [None] * len(draft)
        grammars = params.grammar.ahead(draft) if params.grammar is not None else [None] * len(draft)
        return [
            replace(params, history=history, grammar=grammar)
            for history, grammar in zip(histories, grammars, strict=False)
        ]

    def end(self, handle: int) -> None:
        """Forgets a row."""
        self._kept.pop(handle, None)


def note_accepted(params: SampleParams, made: Sequence[int]) -> None:
    """Adds to a row's history and grammar what it has made behind the first token, which the sampler has added."""
    for token in made[1:]:
        if params.history is not None:
            params.history.add(token)
        if params.grammar is not None:
            params.grammar.add(token)
