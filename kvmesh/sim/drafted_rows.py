"""Rows of a batch whose steps verify drafts, in virtual time: one step at a time, each row with tokens of its own.

The live policy decides (`kvmesh.drafts.speculator`, `step_share`); what is not here is text. Tokens of a simulated
answer are all RIGHT, and a draft that is right for so many tokens has so many RIGHT ones and then WRONG ones: what is
kept, learned and compared follows from that alone. How far a draft is right is drawn by `SpeculationModel.accept`, from
the seed, the instance and the row's number.

Tokens of one step come together: the first of them has the whole time since the step before, the others none. What is
told to conductors of such a step is the time that one token of a row took in it, as live instances tell it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

from kvmesh.drafts.drafter import MOST_STRENGTH, NO_DRAFT, Draft
from kvmesh.drafts.speculator import NOBODYS, DraftOf, Speculator
from kvmesh.drafts.step_share import DraftCosts, StepShares
from kvmesh.services.decode.step_times import StepTimes
from kvmesh.sim.changes import StepClock
from kvmesh.sim.hardware.speculation import Speculation, SpeculationModel
from kvmesh.sim.loop import Loop, ScheduledCall
from kvmesh.sim.rows import KEPT_STEPS, Row

RIGHT, WRONG = 1, 0
QueriesS = Callable[[int, float, float], float]  # seconds of (rows, tokens of their KV, queries of a row)
TakesS = Callable[[int, int], float]  # seconds of (rows, tokens of the longest draft)


class SimulatedDrafter:
    """A drafter (`kvmesh.drafts.drafter`) whose drafts are right as often as a model of them says."""

    needs_hidden = False

    def __init__(self, model: SpeculationModel, seed: str, takes_s: TakesS | None) -> None:
        """`takes_s` is what it computes for, None where it computes nothing."""
        self.name, self.computes = model.drafter, takes_s is not None
        self.spent_s = 0.0  # computing, so far
        self._accept, self._seed, self._takes_s = model.accept, seed, takes_s
        self._chances: dict[int, random.Random] = {}

    def begin(self, handle: int, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """As of `Drafter`."""
        self._chances[handle] = random.Random(f"{self._seed}:{handle}")

    def extend(self, handle: int, tokens: Sequence[int], hidden: object = None) -> None:
        """As of `Drafter`; learns nothing."""

    def end(self, handle: int) -> None:
        """As of `Drafter`."""
        self._chances.pop(handle, None)

    def propose(self, handles: Sequence[int], most: Sequence[int]) -> list[Draft]:
        """As of `Drafter`; drafts are as long as they may be."""
        lengths = [min(one, len(self._accept)) for one in most]
        if any(lengths) and self._takes_s is not None:
            self.spent_s += self._takes_s(sum(length > 0 for length in lengths), max(lengths))
        return [self._draft(handle, length) for handle, length in zip(handles, lengths, strict=True)]

    def _draft(self, handle: int, length: int) -> Draft:
        if not length:
            return NO_DRAFT
        source, right = self._chances[handle], 0
        for chance in self._accept[:length]:
            if source.random() >= chance:
                break
            right += 1
        return Draft((RIGHT,) * right + (WRONG,) * (length - right), MOST_STRENGTH)


class SpeculatingRows:
    """The batch of one instance, with the methods of `rows.Rows`: `ended` is called at the end of each step, with the
    rows that are over then and the pages that all took in it. A draft does not go beyond the pages that its row has for
    its next token."""

    def __init__(
        self,
        loop: Loop,
        step_s: QueriesS,
        ended: Callable[[list[Row], int], None],
        block_tokens: int,
        speculation: Speculation,
        seed: str,
        clock: StepClock | None = None,
        times: StepTimes | None = None,
    ) -> None:
        """`step_s` leaves out what an MTP head takes; `times` hears how long a token took in each step."""
        self._loop, self._step_s, self._ended, self._block = loop, step_s, ended, block_tokens
        model = speculation.model
        self._head_s = speculation.times.head_s if model.drafter == "mtp" else None
        self._beside_chunks = model.beside_chunks
        drafter = self._drafter = SimulatedDrafter(model, seed, self._drafting_s if self._head_s else None)
        self._charged_s = 0.0  # of what the drafter has spent: it is part of steps
        self.speculator = Speculator(
            [drafter], model.most, adapts=model.adapts, clock=lambda: round(1e9 * drafter.spent_s)
        )
        self._shares = StepShares()
        self._clock, self._times = clock, times
        self.step = 0  # steps done since the start
        self.context = 0  # tokens of KV of all rows, at the last border
        self.rows: dict[Row, None] = {}
        self.measured: deque[tuple[int, int, float]] = deque(maxlen=KEPT_STEPS)
        self._number = 0
        self._waiting = 1.0  # tokens a row that the head has not seen
        # the step under way
        self._timer: ScheduledCall | None = None
        self._found: list[DraftOf] = []
        self._grown = 0
        self._token_s = 0.0

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def running(self) -> bool:
        """Whether a step is under way: rows may come and go only when none is."""
        return self._timer is not None

    # ── at a border ──────────────────────────────────────────────────────────────────────────────

    def add(self, row: Row) -> None:
        """Adds a row, which makes its next token in the next step."""
        assert row.joined < 0 < row.left and not self.running
        self._number += 1
        row.joined, row.number = row.context, self._number
        self.rows[row] = None
        self.context += row.context
        self.speculator.begin(row.number, (), ())

    def remove(self, row: Row) -> None:
        """Removes a row before its end; its `left` and `context` are as they are now."""
        assert not self.running and row in self.rows
        del self.rows[row]
        self.context -= row.context
        self.speculator.end(row.number)
        row.joined, row.number = -1, 0

    def now_of(self, row: Row) -> int:
        """Returns the tokens of its KV."""
        return row.context

    def pages_of(self, row: Row) -> int:
        """Returns the pages that it has: for what it has written, and at least for its first step here."""
        return -(-max(row.context, row.joined + 1) // self._block)

    @property
    def until_end(self) -> int:
        """Steps that can be run together: how many tokens they make is not known before."""
        return 1

    def growth(self, steps: int) -> int:
        """Returns the pages that rows take in the next step."""
        if steps <= 0:
            return 0
        block = self._block
        return sum(-(-(row.context + 1) // block) - self.pages_of(row) for row in self._at_borders())

    def _at_borders(self) -> list[Row]:
        return [row for row in self.rows if not row.context % self._block and row.context > row.joined]

    def run(self, most: int) -> None:
        """One step begins."""
        assert most > 0 and self.rows
        drafted = self._draft()
        plain_s = self._step_s(len(self.rows), self.context, 1 + drafted / len(self.rows))
        self._begin(plain_s, self._heads_s(), learn=True)

    def run_one(self, seconds: float) -> None:
        """One step without drafts that takes so long."""
        self._found = []
        self._begin(seconds, self._heads_s(), learn=False)

    def run_beside(self, seconds: Callable[[float], float]) -> float:
        """One step beside a prompt's chunk, which takes `seconds(queries of a row)`; returns what it takes."""
        self._found = []
        drafted = self._draft() if self._beside_chunks else 0
        taken_s, heads_s = seconds(1 + drafted / len(self.rows)), self._heads_s()
        self._begin(taken_s, heads_s, learn=False)
        return taken_s + heads_s

    def stall(self, seconds: float) -> None:
        """The rows have stood still; their next tokens are as much later."""

    # ── while a step is under way ────────────────────────────────────────────────────────────────

    def sample(self) -> tuple[int, int, float] | None:
        """Rows, tokens of their KV and what a token of a row takes in the step that is being done; None: none is."""
        return (len(self.rows), self.context, self._token_s) if self._timer is not None else None

    def cut(self) -> None:
        """Somebody waits for the end of the step."""

    def made_since(self, row: Row, left: int) -> list[tuple[int, float]]:
        """As of `rows.Rows`; tokens of one step come together."""
        return [(left - row.left, row.last_s)] if left > row.left else []

    def context_of(self, row: Row) -> int:
        """Returns the tokens of its KV that whole steps have written by now."""
        return row.context

    def tell(self) -> None:
        """All steps that have ended are among `measured`."""

    def learn(self) -> None:
        """`times` has heard of all steps that have ended."""

    def stop(self) -> None:
        """No step ends any more."""
        if self._timer is not None:
            self._timer.cancel()

    # ── inner ────────────────────────────────────────────────────────────────────────────────────

    def _draft(self) -> int:
        """Asks for drafts where they may be worth it; returns how many tokens of them are computed."""
        rows, block = list(self.rows), self._block
        handles, share = [row.number for row in rows], self._shares.of(len(rows))
        costs = DraftCosts(share.ppm, self.speculator.drafting.ppm(share.plain_ns))
        self._found = []
        if not self.speculator.hopes(handles, costs):
            return 0
        ends = [max(self.pages_of(row), -(-(row.context + 1) // block)) * block for row in rows]
        room = [min(end - row.context, row.left) - 1 for end, row in zip(ends, rows, strict=True)]
        self._found = self.speculator.propose(handles, room, costs)
        return sum(len(one.draft.tokens) for one in self._found)

    def _drafting_s(self, rows: int, longest: int) -> float:
        """Returns what the MTP head takes for drafts of so many rows: one step for each token of the longest, the first
        of which computes what the head has not seen of the answers, too."""
        assert self._head_s is not None
        tokens = rows * sum(row.context - row.joined for row in self.rows) / max(1, len(self.rows))
        return self._head_s(rows, tokens, self._waiting) + (longest - 1) * self._head_s(rows, tokens)

    def _heads_s(self) -> float:
        """Returns what the MTP head took for all drafts that were asked for since the last step."""
        spent_s, self._charged_s = self._drafter.spent_s - self._charged_s, self._drafter.spent_s
        return spent_s

    def _begin(self, step_s: float, heads_s: float, *, learn: bool) -> None:
        assert self._timer is None
        size, seconds = len(self.rows), step_s + heads_s
        if self._clock is not None:
            seconds = self._clock.step_s(self._loop.now, seconds, "decode", self.step)
        drafted = sum(len(one.draft.tokens) for one in self._found)
        if learn:  # what the head takes is counted apart, by the speculator
            self._shares.of(size).add(drafted, round(1e9 * (seconds - heads_s)))
        made = size + sum(sum(one.draft.tokens) for one in self._found)
        self._token_s, self._waiting = seconds * size / made, made / size
        self._grown = self.growth(1)
        self._timer = self._loop.after(seconds, self._over)

    def _over(self) -> None:
        self._timer = None
        now, found, over = self._loop.now, self._found or [NOBODYS] * len(self.rows), list[Row]()
        if self._times is not None:
            self._times.add(len(self.rows), self.context, round(self._token_s * 1e9))
        self.measured.append((len(self.rows), self.context, self._token_s))
        for row, computed in zip(list(self.rows), found, strict=True):
            kept = sum(computed.draft.tokens)  # the RIGHT ones, which stand first
            if computed.draft.tokens:
                self.speculator.verified(row.number, computed, kept)
            row.take(now, 1 + kept)
            self.context += 1 + kept
            if row.left:
                self.speculator.extend(row.number, (RIGHT,) * (1 + kept))
            else:
                self.remove(row)
                over.append(row)
        self.step += 1
        self._ended(over, self._grown)
