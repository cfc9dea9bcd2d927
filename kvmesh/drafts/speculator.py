"""Decides which drafts a step computes, and learns from what became of them. Pure: its clock is given.

For each row it asks the drafters that copy. One that computes (`Drafter.computes`) is asked for rows whose text copying
does not go on with as well as its own drafts are kept of late, and where these are worth its time, as measured. Of a
row's drafts it believes the one whose strength is kept most, and cuts each draft by `choose_lengths`.

Where a row gets no draft, every LOOKS_EVERY tokens one is copied for nobody: it is compared with what the answer goes
on with, so that it is seen when a text begins to repeat itself, at no cost for the device. A drafter that computes
looks at one row in turn, for LOOK_TOKENS tokens and as seldom as keeps its looks to LOOKS_COST of the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvmesh.drafts.drafter import NO_DRAFT, Draft, Drafter
from kvmesh.drafts.lengths import ANY, AcceptedShare, choose_lengths, gain, hopeful
from kvmesh.drafts.step_share import PER_MILLION, DraftCosts, DraftingTime
from kvmesh.errors import ConfigError

if TYPE_CHECKING:
    import torch

LOOKS_EVERY = 6
LOOK_TOKENS = 2
LOOKS_COST = 0.02
MOST_DRAFT = 7  # with the token before it, what one step computes of a row at most is 8
WORTH = 0.05  # a chance below which no drafter is asked for what would be computed
TIRES = 0.6  # what is left of the hope for a row after a step for which no copy was worth computing


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
    hope: float = 1.0  # chance of the copies that were made last


@dataclass(slots=True)
class DraftCounts:
    """Counts the tokens that were computed as drafts, and those that were kept, by drafter."""

    drafted: list[int]
    kept: list[int]


class Speculator:
    """Drafts for the rows of one rank. `drafters` that copy are asked in order, then those that compute. `most` is the
    longest draft, from 1 to MOST_DRAFT, else ConfigError is raised. `again` as of `choose_lengths`. With `adapts` False
    every draft is computed whole (tests, and text that is known), and what computes is asked where nothing was copied.
    `clock` tells nanoseconds."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        most: int,
        *,
        again: bool = False,
        adapts: bool = True,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        if not 1 <= most <= MOST_DRAFT:
            raise ConfigError(f"max_draft_tokens={most}: must be from 1 to {MOST_DRAFT}", field="max_draft_tokens")
        self.drafters = tuple(drafters)
        self.most, self._again, self._adapts, self._clock = most, again, adapts, clock
        self._copying = [by for by, drafter in enumerate(drafters) if not drafter.computes]
        self._computing = [by for by, drafter in enumerate(drafters) if drafter.computes]
        self.drafting = DraftingTime()  # of drafters that compute
        self.drafting_ns = 0  # what they took in the last `propose`
        self._unlooked, self._turn = 0, 0  # steps since a look of what computes, and whose row it was
        self._looks, self._beside = -1, 1  # the row of which it looks in this step, and the rows of the step
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

    def hopes(self, handles: Sequence[int], costs: DraftCosts) -> bool:
        """Whether a draft for any of these rows may be worth its cost, as far as is known before it is made, or is to
        be looked at. It is asked before each step of these rows."""
        if not self._adapts:
            return any(handle in self._rows for handle in handles)
        looks = self._choose_look(handles, costs)
        least = max(WORTH, len(handles) * costs.verified_ppm / PER_MILLION)
        if self._copying and any(row.hope > least for row in map(self._rows.get, handles) if row is not None):
            return True
        nothing = [NOBODYS] * len(handles), [0.0] * len(handles)
        most = [self.most if handle in self._rows else 0 for handle in handles]
        return looks or any(any(self._wanted(by, handles, most, *nothing, costs)) for by in self._computing)

    def _choose_look(self, handles: Sequence[int], costs: DraftCosts) -> bool:
        """Chooses a row of which drafters that compute look behind this step, if it is time for that: its tokens must
        be waited for, so that what they are made of is known."""
        self._looks, self._beside = -1, max(1, len(handles))
        known = [handle for handle in handles if handle in self._rows]
        if not self._computing or not known:
            return False
        self._unlooked += 1
        # A look at one row takes no longer than one at all of them, of which the time of a token is known.
        takes = LOOK_TOKENS * self._beside * costs.drafted_ppm / PER_MILLION
        if self._unlooked < max(LOOKS_EVERY, takes / LOOKS_COST):
            return False
        self._unlooked, self._turn = 0, self._turn + 1
        self._looks = known[self._turn % len(known)]
        return True

    def propose(self, handles: Sequence[int], room: Sequence[int], costs: DraftCosts) -> list[DraftOf]:
        """Returns the drafts that the next step computes, of at most `room[i]` tokens; the rows are all of its rows,
        and one that is not known gets none. What is not computed of them is compared with what comes (`extend`)."""
        most = [
            min(self.most, space) if handle in self._rows else 0 for handle, space in zip(handles, room, strict=True)
        ]
        found, chances = [NOBODYS] * len(handles), [0.0] * len(handles)
        for by in self._copying:
            self._ask(by, handles, most, found, chances)
        copies, copied = list(found), list(chances)
        self.drafting_ns = 0
        for by in self._computing:
            self._ask(by, handles, self._wanted(by, handles, most, found, chances, costs), found, chances)
        lengths = [_length(one) for one in found]
        if self._adapts:
            lengths = choose_lengths(chances, lengths, costs.verified_ppm / PER_MILLION, self._again)
        for at, handle in enumerate(handles):
            if most[at] <= 0:
                continue
            row = self._rows[handle]
            computed = found[at] if lengths[at] else NOBODYS
            row.hope = copied[at] if computed.draft.tokens and copies[at].draft.tokens else row.hope * TIRES
            row.since = 0
            # What was copied and is not computed shows beside what is: else it would never be believed again.
            row.pending, row.seen = NOBODYS if computed is copies[at] else copies[at], 0
            if not (computed.draft.tokens or row.pending.draft.tokens):
                row.pending = found[at]
        return [
            DraftOf(Draft(one.draft.tokens[:length], one.draft.strength), one.by) if length else NOBODYS
            for one, length in zip(found, lengths, strict=True)
        ]

    def _ask(
        self, by: int, handles: Sequence[int], most: Sequence[int], found: list[DraftOf], chances: list[float]
    ) -> None:
        """Asks a drafter for drafts of at most `most[i]` tokens, and puts those into `found` that are kept with a
        better chance than what is there."""
        asked = [at for at, count in enumerate(most) if count > 0]
        if not asked:
            return
        drafts = self._drafts(by, [handles[at] for at in asked], [most[at] for at in asked])
        for at, draft in zip(asked, drafts, strict=True):
            chance = self._rows[handles[at]].shares[by].chance(draft.strength, self._all[by])
            if len(draft.tokens) and (chance > chances[at] or not found[at].draft.tokens):
                found[at], chances[at] = DraftOf(draft, by), chance

    def _drafts(self, by: int, handles: Sequence[int], most: Sequence[int], shared_by: int = 1) -> list[Draft]:
        """Asks a drafter. The time of one that computes is noted as if it had been for `shared_by` times as many."""
        drafter = self.drafters[by]
        if not drafter.computes:
            return drafter.propose(handles, most)
        began = self._clock()
        drafts = drafter.propose(handles, most)
        took = self._clock() - began
        self.drafting.add(sum(len(draft.tokens) for draft in drafts), took // shared_by)
        self.drafting_ns += took
        return drafts

    def _wanted(
        self,
        by: int,
        handles: Sequence[int],
        most: Sequence[int],
        found: Sequence[DraftOf],
        chances: Sequence[float],
        costs: DraftCosts,
    ) -> list[int]:
        """Returns for how many tokens of each row, `most[i]` at most, a drafter that computes is asked, `found` being
        what was copied. Nothing is asked of it where its drafts, as they are kept of late, are not worth more than the
        copies, beyond its time."""
        if not self._adapts:
            return [0 if one.draft.tokens else count for one, count in zip(found, most, strict=True)]
        verified, drafted = costs.verified_ppm / PER_MILLION, sum(costs) / PER_MILLION
        hopes = [0.0] * len(handles)
        for at, handle in enumerate(handles):
            if most[at] <= 0:
                continue
            chance = self._rows[handle].shares[by].chance(ANY, self._all[by])
            copied = gain(chances[at], _length(found[at]), len(handles) * verified)
            if chance > WORTH and gain(chance, most[at], len(handles) * drafted) > copied:
                hopes[at] = chance
        return choose_lengths(hopes, most, drafted, self._again)

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
        if handle == self._looks:
            self._looks = -1
            self._look(handle, row, self._computing, LOOK_TOKENS)
        elif row.since >= LOOKS_EVERY and not row.pending.draft.tokens and self._adapts:
            row.since = 0
            self._look(handle, row, self._copying, self.most)

    def _compare(self, handle: int, row: _Speculated, token: int) -> None:
        guessed = row.pending.draft.tokens
        if not guessed:
            return
        right = guessed[row.seen] == token
        row.seen += right
        if not right or row.seen == len(guessed):
            self._learn(handle, row.pending, len(guessed), row.seen)
            row.pending, row.seen = NOBODYS, 0

    def _look(self, handle: int, row: _Speculated, drafters: Sequence[int], most: int) -> None:
        """Makes a draft for nobody, by the first of these drafters that has one."""
        for by in drafters:
            [draft] = self._drafts(by, [handle], [most], shared_by=self._beside)
            if draft.tokens:
                row.pending, row.seen = DraftOf(draft, by), 0
                self._set_hope(row, row.pending)
                return

    def _learn(self, handle: int, which: DraftOf, drafted: int, kept: int) -> None:
        self._all[which.by].add(which.draft.strength, drafted, kept)
        if (row := self._rows.get(handle)) is not None:
            row.shares[which.by].add(which.draft.strength, drafted, kept)
            self._set_hope(row, which)

    def _set_hope(self, row: _Speculated, which: DraftOf) -> None:
        if not self.drafters[which.by].computes:
            row.hope = row.shares[which.by].chance(which.draft.strength, self._all[which.by])


def _length(one: DraftOf) -> int:
    return len(one.draft.tokens)
