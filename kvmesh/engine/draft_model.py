"""Drafts by a small model with KV of its own: what it would say next, greedily.

Of each row it keeps the text and how much of it has KV in its pages. When it is asked it computes what is missing, the
tokens that were accepted since, and goes on from there. What it drafted has KV, too: where that was accepted nothing is
computed again, and where it was not, the next tokens are written over it.

It reads prompts itself, no more than MOST_CATCH_UP tokens of them each time that it is asked, so that a decode step
never waits for a long one: a row whose prompt it has not read gets no draft yet.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvmesh.drafts.drafter import MOST_STRENGTH, NO_DRAFT, Draft, Drafter
from kvmesh.drafts.token_log import TokenLog
from kvmesh.engine.attention.backend import AttentionBackend, StepPlan, TokenSpan
from kvmesh.engine.checkpoint import Checkpoint
from kvmesh.engine.parallel import Group
from kvmesh.engine.rope import Rotation
from kvmesh.engine.runner import Runner
from kvmesh.errors import ConfigError
from kvmesh.kvcache.cache_groups import CacheKind

MOST_CATCH_UP = 256  # tokens of texts that it reads when it is asked, of all rows that have more than FEW to read
FEW = 8  # tokens by which one step can make a row longer: they are read whatever else there is
LEAST_CHANCE = 0.1  # of a drafted token behind the first to be kept, by what the model itself thinks


def check_draft_model(draft: Checkpoint, target: Checkpoint) -> None:
    """Raises ConfigError naming what is unlike unless `draft` can draft for `target`: it keeps no states, and both read
    and say the same tokens. Vocabularies may be filled up to unlike sizes."""
    where = f"draft_model={str(draft.path)!r}"
    if states := [group.name for group in draft.config.cache_groups if group.kind is CacheKind.STATE]:
        why = f"{draft.config.architecture} keeps recurrent states ({', '.join(states)}), which no draft goes back on"
        raise ConfigError(f"{where}: {why}", field="draft_model")
    own, others = _tokens(draft.path), _tokens(target.path)
    if own is None or others is None:
        if draft.config.vocab_size == target.config.vocab_size:
            return
        why = f"has {draft.config.vocab_size} tokens and {target.path} {target.config.vocab_size}"
        raise ConfigError(f"{where}: {why}, and not both have a tokenizer.json", field="draft_model")
    if own != others:
        at = min(token for token in own.keys() | others.keys() if own.get(token) != others.get(token))
        why = f"its token {at} is {own.get(at)!r}, that of {target.path} is {others.get(at)!r}"
        raise ConfigError(f"{where}: {why}: both must have the same tokenizer", field="draft_model")


def _tokens(folder: Path) -> dict[int, str] | None:
    """Returns the tokens of a tokenizer.json by id; None where there is none that can be read."""
    try:
        told: Any = json.loads((folder / "tokenizer.json").read_bytes())
        vocab, added = told["model"]["vocab"], told.get("added_tokens", [])
        pairs = vocab.items() if isinstance(vocab, dict) else ((piece, at) for at, (piece, *_) in enumerate(vocab))
        return {int(at): piece for piece, at in pairs} | {int(one["id"]): one["content"] for one in added}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


@dataclass(slots=True)
class _Row:
    """Has a row's text, of which the first `end` tokens have KV in `pages`, and the tokens of the last draft that have
    KV behind these."""

    text: TokenLog
    end: int = 0
    pages: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)


class ModelDrafter:
    """Drafts by the model of `runner`, over the pages that this has, for a target of `vocab_size` tokens. A row has
    pages for all of its text or none: where they run out it gives its own back and drafts nothing until there are as
    many. The drafted token is the model's most likely one; how strong a draft is follows from how likely its first
    token is, and it ends before a token whose chance to be kept is less than `least`."""

    name = "draft"
    needs_hidden = False
    computes = True

    def __init__(self, runner: Runner, vocab_size: int, least: float = LEAST_CHANCE) -> None:
        assert isinstance(runner.attention, AttentionBackend), "it is alone, and has one tensor of pages"
        self.runner, self.backend = runner, runner.attention
        self._vocab = min(vocab_size, runner.config.vocab_size)
        self._most_tokens = runner.config.max_context_tokens
        self._least = least
        self._free = list(range(self.backend.num_pages))
        self._rows: dict[int, _Row] = {}

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def begin(self, handle: int, prompt: Sequence[int], answer: Sequence[int]) -> None:
        self.end(handle)
        self._rows[handle] = _Row(TokenLog(prompt, answer))

    def extend(self, handle: int, tokens: Sequence[int], hidden: torch.Tensor | None = None) -> None:
        row = self._rows[handle]
        for token, own in zip(row.drafted, tokens, strict=False):
            if token != own:
                break
            row.end += 1
        row.drafted = []
        row.text.extend(tokens)

    def end(self, handle: int) -> None:
        row = self._rows.pop(handle, None)
        if row is not None:
            self._free += row.pages

    @torch.inference_mode()
    def propose(self, handles: Sequence[int], most: Sequence[int]) -> list[Draft]:
        """As of `Drafter`; rows whose text is not read to its end yet, or that find no page, get none."""
        drafts = [NO_DRAFT] * len(handles)
        spans, ready = self._catch_up(handles, most)
        if not spans:
            return drafts
        last = np.cumsum([span.length for _, span in spans]) - 1
        hidden = self._read(spans)
        for row, span in spans:
            row.end, row.drafted = span.start + span.length, []
        if not ready:
            return drafts
        rows = [self._rows[handles[at]] for at in ready]
        ends, pages = np.array([row.end for row in rows], np.int64), [tuple(row.pages) for row in rows]
        behind = torch.from_numpy(last[: len(ready)]).to(self.backend.device)
        token, likely = self._chosen(self.runner.model.logits(hidden.index_select(0, behind)))
        made, chances, count = [token], [likely], max(most[at] for at in ready)
        # What comes behind an unlikely token is not likelier to be kept.
        while len(made) < count and bool((chances[-1] >= self._least).any()):
            token, likely = self._chosen(self._next(made[-1], pages, ends + (len(made) - 1)))
            made.append(token)
            chances.append(chances[-1] * likely)
        told = zip(ready, rows, torch.stack(made, 1).tolist(), torch.stack(chances, 1).tolist(), strict=True)
        for at, row, own, chance in told:
            row.drafted = own[:-1]
            length = 1 + sum(one >= self._least for one in chance[1:])
            drafts[at] = Draft(own[: min(length, most[at])], min(MOST_STRENGTH, int(chance[0] * (MOST_STRENGTH + 1))))
        return drafts

    def _catch_up(self, handles: Sequence[int], most: Sequence[int]) -> tuple[list[tuple[_Row, TokenSpan]], list[int]]:
        """Returns what is read now: spans of rows, first those of rows that are read to their end, which are the
        indices beside. All of them have pages, also for drafts."""
        count, left = max(most), MOST_CATCH_UP
        whole: list[tuple[_Row, TokenSpan]] = []
        parts: list[tuple[_Row, TokenSpan]] = []
        ready: list[int] = []
        for at, handle in enumerate(handles):
            row = self._rows[handle]
            if not self._reserve(row, len(row.text) + count - 1):
                continue
            start = min(row.end, len(row.text) - 1)  # what comes behind the last token is asked for once more
            missing = len(row.text) - start
            take = missing if missing <= FEW else min(missing, left)
            if not take:
                continue
            left -= take if missing > FEW else 0
            span = TokenSpan(start, take, row.pages)
            if take < missing:
                parts.append((row, span))
            else:
                whole.append((row, span))
                ready.append(at)
        return whole + parts, ready

    def _reserve(self, row: _Row, end: int) -> bool:
        """Gives a row the pages that so many tokens need, or takes those that it has."""
        missing = -(-end // self.backend.block_tokens) - len(row.pages)
        if missing > len(self._free) or end > self._most_tokens:
            self._free += row.pages
            row.end, row.pages, row.drafted = 0, [], []
            return False
        for _ in range(missing):
            row.pages.append(self._free.pop())
        return True

    def _read(self, spans: Sequence[tuple[_Row, TokenSpan]]) -> torch.Tensor:
        """Computes spans of texts; returns what the last layer has made of their tokens."""
        ids = [row.text.ids[span.start : span.start + span.length] for row, span in spans]
        tokens = torch.from_numpy(np.concatenate(ids).astype(np.int64)).to(self.backend.device)
        return self._hidden(tokens, self.backend.plan_prefill([span for _, span in spans]))

    def _next(self, tokens: torch.Tensor, pages: Sequence[Sequence[int]], positions: np.ndarray) -> torch.Tensor:
        """Computes one token of each row; returns the logits behind it."""
        if self.runner.graphs is not None:
            logits = self.runner.graphs.logits(np.zeros(len(pages), np.int64), pages, positions, tokens)
            if logits is not None:
                return logits
        return self.runner.model.logits(self._hidden(tokens, self.backend.plan_decode(pages, positions)))

    def _hidden(self, tokens: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        def attend(
            layer: int, qkv: torch.Tensor, rotation: Rotation | None, out: torch.Tensor | None = None
        ) -> torch.Tensor:
            assert rotation is not None, "no layer has a state"
            plan.rotate_and_write(layer, qkv, rotation)
            return plan.attend(layer, qkv, out)

        return self.runner.model.hidden(tokens, plan.positions, attend)

    def _chosen(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the most likely tokens of those that the target knows, int64 `[rows]`, and how likely they are."""
        best = logits[:, : self._vocab].softmax(-1).max(-1)
        return best.indices, best.values


class FirstRanksDrafter:
    """Has the first rank of a group draft and tell the others, so that all have the same drafts, whatever a rank would
    compute by itself. `drafter` is None at the others, which keep nothing of rows. Every rank asks for the drafts of
    the same rows."""

    needs_hidden = False
    computes = True

    def __init__(self, name: str, drafter: Drafter | None, group: Group, device: torch.device) -> None:
        self.name = name
        self._drafter, self._group, self._device = drafter, group, device

    def begin(self, handle: int, prompt: Sequence[int], answer: Sequence[int]) -> None:
        if self._drafter is not None:
            self._drafter.begin(handle, prompt, answer)

    def extend(self, handle: int, tokens: Sequence[int], hidden: torch.Tensor | None = None) -> None:
        if self._drafter is not None:
            self._drafter.extend(handle, tokens)

    def propose(self, handles: Sequence[int], most: Sequence[int]) -> list[Draft]:
        told = torch.zeros((len(handles), 2 + max(most)), dtype=torch.int64)
        for at, draft in enumerate(self._drafter.propose(handles, most) if self._drafter is not None else ()):
            said = torch.tensor([len(draft.tokens), draft.strength, *draft.tokens])
            told[at, : len(said)] = said
        summed = self._group.all_reduce(told.to(self._device)).tolist()  # the others add zeros
        return [Draft(row[2 : 2 + row[0]], row[1]) if row[0] else NO_DRAFT for row in summed]

    def end(self, handle: int) -> None:
        if self._drafter is not None:
            self._drafter.end(handle)
