"""Drafts by an MTP head: its keys and values, and the steps from what the model answered to the tokens after it.

The head's KV is the drafter's own and lies where the rows are decoded: of a request it begins with the first token that
the drafter hears of. What lies before costs acceptance and nothing else, since the model verifies every draft. So
positions here count from that token: rotary embedding tells distances alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kvmesh.engine.attention.backend import StepPlan, TokenSpan
from kvmesh.engine.batch import Column
from kvmesh.errors import ConfigError, InternalError

if TYPE_CHECKING:
    from kvmesh.engine.runner import Runner


class MtpRow(NamedTuple):
    """Tells what a request has gone on by: the model's answers at `position` and behind it, `hidden [n, hidden_size]`
    before its last norm, and the n tokens after each of them, the last of which it has just chosen. `key` stays the
    request's own as long as it lives."""

    key: Hashable
    position: int
    hidden: torch.Tensor
    token_ids: Sequence[int]


@dataclass(slots=True)
class _Kept:
    """Has the pages of one request, whose tokens [base, end) are in them."""

    base: int
    end: int
    pages: list[int] = field(default_factory=list)


class MtpDrafter:
    """Drafts for the rows of `runner`, whose head it steps, over `num_pages` pages of its own. Where these run out a
    request begins anew, without what its head has seen. The ranks of a group make the same calls in the same order, and
    get the same drafts. Not thread-safe: it belongs to the thread that steps. Raises ConfigError where the runner has
    no head."""

    def __init__(self, runner: Runner, num_pages: int) -> None:
        if runner.mtp is None:
            raise ConfigError("speculate=mtp: the model was loaded without its MTP head", field="speculate")
        self.head, self.model, self.device = runner.mtp, runner.model, runner.device
        self.block_tokens = runner.layout.block_tokens
        shape = (num_pages, 1, *runner.layout.shape[1:])
        pages = torch.zeros(shape, dtype=runner.dtype, device=self.device)
        self.backend = self.head.backend(pages)
        self._free = list(range(num_pages))
        self._kept: dict[Hashable, _Kept] = {}

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def forget(self, key: Hashable) -> None:
        """Gives back the pages of a request, if it has any."""
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._free += kept.pages

    @torch.inference_mode()
    def draft(self, rows: Sequence[MtpRow], count: int) -> Column:
        """Takes what the rows have gone on by, and returns their next tokens as the head has them, each the most likely
        one: int64 `[rows, count]`. Rows that find no page get -1. Raises InternalError for a row without a token."""
        drafts = np.full((len(rows), count), -1, np.int64)
        taken = [(i, row, kept) for i, row in enumerate(rows) if (kept := self._extend(row, count)) is not None]
        if not taken or not count:
            return drafts
        spans = [TokenSpan(kept.end - kept.base - len(row.token_ids), len(row.token_ids), kept.pages)
                 for _, row, kept in taken]  # fmt: skip
        told = torch.tensor([token for _, row, _ in taken for token in row.token_ids], device=self.device)
        hidden = self.model.norm(torch.cat([row.hidden for _, row, _ in taken]))
        hidden = self._step(told, hidden, self.backend.plan_prefill(spans))
        hidden = hidden[torch.tensor(np.cumsum([span.length for span in spans]) - 1, device=self.device)]
        chosen = [self.head.logits(hidden).argmax(-1)]
        ends = np.array([kept.end - kept.base for _, _, kept in taken], np.int64)
        pages = [tuple(kept.pages) for _, _, kept in taken]
        while len(chosen) < count:
            plan = self.backend.plan_decode(pages, ends + (len(chosen) - 1))
            hidden = self._step(chosen[-1], hidden, plan)
            chosen.append(self.head.logits(hidden).argmax(-1))
        drafts[[i for i, _, _ in taken]] = torch.stack(chosen, 1).cpu().numpy()
        return drafts

    def _step(self, token_ids: torch.Tensor, hidden: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        def attend(layer: int, qkv: torch.Tensor, rotation: object) -> torch.Tensor:
            plan.rotate_and_write(layer, qkv, rotation)  # type: ignore[arg-type]
            return plan.attend(layer, qkv)

        return self.head(token_ids, hidden, plan.positions, attend)

    def _extend(self, row: MtpRow, count: int) -> _Kept | None:
        """Returns what is kept of a request, with pages for the row's tokens and for those that are drafted behind
        them; None where there are none."""
        if not row.token_ids or len(row.token_ids) != len(row.hidden):
            raise InternalError(f"{len(row.token_ids)} tokens are told of {len(row.hidden)} answers of the model")
        end = row.position + len(row.token_ids)
        kept = self._kept.get(row.key)
        if kept is None or kept.end != row.position or not self._reserve(kept, end + count - 1):
            self.forget(row.key)
            kept = _Kept(row.position, end)
            if not self._reserve(kept, end + count - 1):
                return None
            self._kept[row.key] = kept
        kept.end = end
        return kept

    def _reserve(self, kept: _Kept, end: int) -> bool:
        missing = -(-(end - kept.base) // self.block_tokens) - len(kept.pages)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            kept.pages.append(self._free.pop())
        return True
