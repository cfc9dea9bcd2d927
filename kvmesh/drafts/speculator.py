"""Decides which drafts a step computes, and learns from what became of them. Pure.

For each row it asks the drafters, believes the one whose drafts of that strength are kept most, and cuts each draft by
`choose_lengths`. Where a row gets no draft, every LOOKS_EVERY tokens one is made for nobody: it is compared with what
the answer goes on with, so that it is seen when a text begins to repeat itself, at no cost for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvmesh.drafts.drafter import NO_DRAFT, Draft, Drafter
from kvmesh.drafts.lengths import AcceptedShare, choose_lengths, hopeful
from kvmesh.drafts.step_share import PER_MILLION
from kvmesh.errors import ConfigError

if TYPE_CHECKING:
    import torch

LOOKS_EVERY = 6
MOST_DRAFT = 7  # with the token before it, what one step computes of a row at most is 8
WORTH = 0.05  # a chance below which no drafter is asked for what would be computed
TIRES = 0.6  # what is left of the hope for a row after a step for which no draft of it was worth computing


class DraftOf(NamedTuple):
    """Is a draft and who made it: the number of the drafter."""

    draft: Draft
    by: int


NOBODYS = DraftOf(NO_DRAFT, 0)


@dataclass(slots=True)
class _Speculated:
    shares: list[AcceptedShare]  # by drafter
    pending: DraftOf = NOBODYS  # made and not computed; `seen` of its tokens have come
    seen: int = 0
    since: int = 0  # tokens since a draft was looked at
    hope: float = 1.0  # chance of the drafts that were made last


@dataclass(slots=True)
class DraftCounts:
    """Counts the tokens that were computed as drafts, and those that were kept, by drafter."""

    drafted: list[int]
    kept: list[int]


class Speculator:
    """Drafts for the rows of one rank. `drafters` are asked in order. `most` is the longest draft, from 1 to
    MOST_DRAFT, else ConfigError is raised. `again` as of `choose_lengths`. With `adapts` False every draft is computed
    whole (tests, and text that is known)."""

    def __init__(self, drafters: Sequence[Drafter], most: int, *, again: bool = False, adapts: bool = True) -> None:
        if not 1 <= most <= MOST_DRAFT:
            raise ConfigError(f"max_draft_tokens={most}: must be from 1 to {MOST_DRAFT}", field="max_draft_tokens")
        self.drafters = tuple(drafters)
        self.most, self._again, self._adapts = most, again, adapts
        self._rows: dict[int, _Speculated] = {}
        self._all = [hopeful() for _ in self.drafters]
        count = len(self.drafters)
        self.counts = DraftCounts([0] * count, [0] * count)

    @property
    def needs_hidden(self) -> bool:
        """Whether some drafter is given the target's hidden rows."""
        return any(drafter.needs_hidden for drafter in self.drafters)

    def begin(self, handle: int, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Takes a row that joins the batch (`Drafter.begin`)."""
        self._rows[handle] = _Speculated([AcceptedShare() for _ in self.drafters])
        for drafter in self.drafters:
            drafter.begin(handle, prompt, answer)

    def end(self, handle: int) -> None:
        """Forgets a row, if it is known."""
        if self._rows.pop(handle, None) is not None:
            for drafter in self.drafters:
                drafter.end(handle)

    def hopes(self, handles: Sequence[int], share_ppm: int) -> bool:
        """Whether a draft for any of these rows may be worth its cost, as far as is known before it is made."""
        if not self._adapts:
            return any(handle in self._rows for handle in handles)
        least = max(WORTH, len(handles) * share_ppm / PER_MILLION)
        return any(row.hope > least for row in map(self._rows.get, handles) if row is not None)

    def propose(self, handles: Sequence[int], room: Sequence[int], share_ppm: int) -> list[DraftOf]:
        """Returns the drafts that the next step computes, of at most `room[i]` tokens; the rows are all of its rows,
        and one that is not known gets none. What is not computed of them is compared with what comes (`extend`)."""
        asked = [at for at, handle in enumerate(handles) if room[at] > 0 and handle in self._rows]
        found, chances = [NOBODYS] * len(handles), [0.0] * len(handles)
        own, most = [handles[at] for at in asked], [min(self.most, room[at]) for at in asked]
        for by, drafter in enumerate(self.drafters):
            for at, draft in zip(asked, drafter.propose(own, most) if own else (), strict=True):
                chance = self._rows[handles[at]].shares[by].chance(draft.strength, self._all[by])
                if len(draft.tokens) and (chance > chances[at] or not found[at].draft.tokens):
                    found[at], chances[at] = DraftOf(draft, by), chance
        lengths = [len(one.draft.tokens) for one in found]
        if self._adapts:
            lengths = choose_lengths(chances, lengths, share_ppm / PER_MILLION, self._again)
        for at in asked:
            row = self._rows[handles[at]]
            row.hope = chances[at] if lengths[at] else row.hope * TIRES
            row.since = 0
            row.pending, row.seen = NOBODYS if lengths[at] else found[at], 0
        return [
            DraftOf(Draft(one.draft.tokens[:length], one.draft.strength), one.by) if length else NOBODYS
            for one, length in zip(found, lengths, strict=True)
        ]

    def verified(self, handle: int, computed: DraftOf, kept: int) -> None:
        """Notes how many tokens of a draft that was computed were kept, the row's answer not having ended there."""
        tokens = len(computed.draft.tokens)
        self.counts.drafted[computed.by] += tokens
        self.counts.kept[computed.by] += kept
        self._learn(handle, computed, tokens, kept)

    def extend(self, handle: int, tokens: Sequence[int], hidden: torch.Tensor | None = None) -> None:
        """Takes the tokens that a step has made for a row; those of a row that is not known are passed over."""
        row = self._rows.get(handle)
        if row is None:
            return
        for drafter in self.drafters:
            drafter.extend(handle, tokens, hidden)
        for token in tokens:
            self._compare(handle, row, token)
        row.since += len(tokens)
        if row.since >= LOOKS_EVERY and not row.pending.draft.tokens and self._adapts:
            self._look(handle, row)

    def _compare(self, handle: int, row: _Speculated, token: int) -> None:
        guessed = row.pending.draft.tokens
        if not guessed:
            return
        right = guessed[row.seen] == token
        row.seen += right
        if not right or row.seen == len(guessed):
            self._learn(handle, row.pending, len(guessed), row.seen)
            row.pending, row.seen = NOBODYS, 0

    def _look(self, handle: int, row: _Speculated) -> None:
        """Makes a draft for nobody, of the drafter in turn."""
        row.since = 0
        for by, drafter in enumerate(self.drafters):
            [draft] = drafter.propose([handle], [self.most])
            if draft.tokens:
                row.pending, row.seen = DraftOf(draft, by), 0
                row.hope = row.shares[by].chance(draft.strength, self._all[by])
                return

    def _learn(self, handle: int, which: DraftOf, drafted: int, kept: int) -> None:
        self._all[which.by].add(which.draft.strength, drafted, kept)
        if (row := self._rows.get(handle)) is not None:
            row.shares[which.by].add(which.draft.strength, drafted, kept)
            row.hope = row.shares[which.by].chance(which.draft.strength, self._all[which.by])
