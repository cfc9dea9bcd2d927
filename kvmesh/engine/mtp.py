"""Drafts by an MTP head: its keys and values, and the steps from what the model answered to the tokens after it.

The head's KV is the drafter's own and lies where the rows are decoded: of a row it begins with the first token that the
drafter is given. What lies before costs acceptance and nothing else, since the model verifies every draft. So positions
here count from that token: rotary embedding tells distances alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvmesh.drafts.drafter import MOST_STRENGTH, NO_DRAFT, Draft
from kvmesh.engine.attention.backend import StepPlan, TokenSpan
from kvmesh.engine.rope import Rotation
from kvmesh.errors import ConfigError

if TYPE_CHECKING:
    from kvmesh.engine.runner import Runner

MOST_WAITING = 512  # tokens that a row for which nobody asks may have waiting: a longer row begins anew
LEAST_CHANCE = 0.1  # of a drafted token behind the first to be kept, by what the head itself thinks
LAYERS_WORTH = 1.5  # what a step of the head costs, in the model's layers: its own, and the output matrix


def least_chance(layers: int) -> float:
    """Returns the chance to be kept below which a token is not drafted: in a model of few layers a step of the head
    is no small part of one of the model."""
    return max(LEAST_CHANCE, LAYERS_WORTH / (layers + 1))


@dataclass(slots=True)
class _Row:
    """Has the pages of one row, in which the first `end` tokens given are, and the tokens that wait behind them, each
    with what the model answered before it."""

    end: int = 0
    pages: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)
    gap: bool = False  # the row's last token is not among them


class MtpDrafter:
    """Drafts for the rows of `runner`, whose head it steps, over `num_pages` pages of its own. Where these run out a
    row begins anew, without what its head has seen. The drafted token is the head's most likely one; how strong a draft
    is follows from how likely its first token is, and it ends before a token whose chance to be kept is less than
    `least` (None: `least_chance`). Raises ConfigError where the runner has no head."""

    name = "mtp"
    needs_hidden = True
    computes = True

    def __init__(self, runner: Runner, num_pages: int, least: float | None = None) -> None:
        if runner.mtp is None:
            raise ConfigError("speculate=mtp: the model was loaded without its MTP head", field="speculate")
        self.head, self.model, self.device = runner.mtp, runner.model, runner.device
        self.block_tokens = runner.layout.block_tokens
        shape = (num_pages, 1, *runner.layout.shape[1:])
        self.backend = self.head.backend(torch.zeros(shape, dtype=runner.dtype, device=self.device))
        self._least = least_chance(runner.config.layers) if least is None else least
        self._free = list(range(num_pages))
        self._rows: dict[int, _Row] = {}

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def begin(self, handle: int, prompt: Sequence[int], answer: Sequence[int]) -> None:
        self.end(handle)
        self._rows[handle] = _Row()

    def extend(self, handle: int, tokens: Sequence[int], hidden: torch.Tensor | None = None) -> None:
        """As of `Drafter`; `hidden` is before the final norm. Tokens of which it is not known are left out of the
        head's sight: for it the ones behind them follow on those before."""
        row = self._rows[handle]
        row.gap = hidden is None
        if hidden is None:
            return
        if len(row.tokens) + len(tokens) > MOST_WAITING:
            self._free += row.pages
            row.end, row.pages, row.tokens, row.hidden = 0, [], [], []
        row.tokens += tokens[-MOST_WAITING:]
        row.hidden.append(hidden[-MOST_WAITING:].clone())  # the step's tensor goes

    def end(self, handle: int) -> None:
        row = self._rows.pop(handle, None)
        if row is not None:
            self._free += row.pages

    @torch.inference_mode()
    def propose(self, handles: Sequence[int], most: Sequence[int]) -> list[Draft]:
        """As of `Drafter`; rows whose last token is not known, or that find no page, get none."""
        drafts, count = [NO_DRAFT] * len(handles), max(most)
        ready = [at for at, handle in enumerate(handles) if self._make_room(self._rows[handle], count)]
        if not ready:
            return drafts
        rows = [self._rows[handles[at]] for at in ready]
        spans = [TokenSpan(row.end, len(row.tokens), row.pages) for row in rows]
        tokens = torch.tensor([token for row in rows for token in row.tokens], device=self.device)
        hidden = self.model.norm(torch.cat([part for row in rows for part in row.hidden]))
        hidden = self._step(tokens, hidden, self.backend.plan_prefill(spans))
        last = np.cumsum([span.length for span in spans]) - 1
        hidden = hidden.index_select(0, torch.from_numpy(last).to(self.device))
        for row in rows:
            row.end += len(row.tokens)
            row.tokens, row.hidden = [], []
        ends = np.array([row.end for row in rows], np.int64)
        pages = [tuple(row.pages) for row in rows]
        token, likely = self._chosen(hidden)
        made, chances = [token], [likely]
        # What comes behind an unlikely token is not likelier to be kept.
        while len(made) < count and bool((chances[-1] >= self._least).any()):
            plan = self.backend.plan_decode(pages, ends + (len(made) - 1))
            hidden = self._step(made[-1], hidden, plan)
            token, likely = self._chosen(hidden)
            made.append(token)
            chances.append(chances[-1] * likely)
        told = zip(ready, torch.stack(made, 1).tolist(), torch.stack(chances, 1).tolist(), strict=True)
        for at, own, chance in told:
            length = 1 + sum(one >= self._least for one in chance[1:])
            drafts[at] = Draft(own[: min(length, most[at])], min(MOST_STRENGTH, int(chance[0] * (MOST_STRENGTH + 1))))
        return drafts

    def _chosen(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the head's most likely tokens, int64 `[rows]`, and how likely they are."""
        best = self.head.logits(hidden).softmax(-1).max(-1)
        return best.indices, best.values

    def _step(self, token_ids: torch.Tensor, hidden: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        def attend(layer: int, qkv: torch.Tensor, rotation: Rotation) -> torch.Tensor:
            plan.rotate_and_write(layer, qkv, rotation)
            return plan.attend(layer, qkv)

        return self.head(token_ids, hidden, plan.positions, attend)

    def _make_room(self, row: _Row, count: int) -> bool:
        """Gives the row pages for the tokens that wait and for those drafted behind them; it loses those that it has
        where these are too few. Says whether it can be stepped."""
        if not row.tokens or row.gap:
            return False
        if not self._reserve(row, row.end + len(row.tokens) + count - 1):
            self._free += row.pages
            row.end, row.pages = 0, []
            return self._reserve(row, len(row.tokens) + count - 1)
        return True

    def _reserve(self, row: _Row, end: int) -> bool:
        missing = -(-end // self.block_tokens) - len(row.pages)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            row.pages.append(self._free.pop())
        return True
