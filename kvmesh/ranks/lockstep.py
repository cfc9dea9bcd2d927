"""This module keeps the ranks of one instance in step. It is pure; `kvmesh.ranks.rank` carries it out (ADR 0023).

The front sends every rank the same commands in the same order. When a rank takes them is chance, but what a step is
made of follows from how many of the *shared* ones (those that decide about steps, and which are timed) it has applied,
and from nothing else. So the leader, rank 0, takes commands as they come and says, before each step, how many it has
applied; the followers apply exactly as many and run the same step:

    front   ── Join 1 ── PrefillStep 7 ── Join 2 ── Leave 1 ──▶ every rank
    leader  takes 2, says (2, run) ── takes 2 more, says (4, run) ──▶ every follower

A follower holds back what stands behind a shared command that the leader has not announced, so all that it does is in
the front's order; between two layers of a step only what no step depends on is taken early, at every rank alike.

Stages of a pipeline take the same turns, each when the stage before sends it what it has made: rank 0 may be several
turns ahead of the last stage while none of them has decode rows, whose tokens every stage waits for.

A PrefillStep waits for the loads before it, and each rank copies at a pace of its own. The leader decides which turn
has it, by its own loads; a follower that is told so finishes its loads first.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from kvmesh.drafts.step_share import NO_COSTS, DraftCosts
from kvmesh.errors import InternalError
from kvmesh.ranks import protocol as m

SHARED = (m.PrefillStep, m.Join, m.Grant, m.DropPages, m.Leave, m.Profile)
# Messages that all ranks would send alike: only `Axes.speaker` sends them, which is the leader, or, of a pipeline, the
# first rank of the last stage. When it has ended a step, every rank has entered the last all-reduce of that step, or
# sent on what its stage has made, and so has touched the step's pages for the last time.
SPEAKERS = (m.DecodeStepDone, m.Stalled, m.Left)

WIRE = struct.Struct("<Q??QQII")


class Turn(NamedTuple):
    """What the leader tells its followers before it goes on: how many shared commands it has applied, and whether it
    runs a step. `step_id` is the PrefillStep that it has before it (0: none), which is part of this step if it is
    `due`, and `rows` is the number of rows in its batch: a follower that has something else is not in step. The rest
    are its `DraftCosts`, by its own times: how long drafts are follows from them, at every rank alike."""

    applied: int
    run: bool
    due: bool
    step_id: int
    rows: int
    verified_ppm: int = 0
    drafted_ppm: int = 0

    def encode(self) -> bytes:
        return WIRE.pack(*self)


class LockstepLeader:
    """Queues the commands of rank 0, or of a rank that is alone."""

    def __init__(self) -> None:
        self._queue: deque[m.ToRank] = deque()
        self._applied = 0
        self._told = 0

    def arrived(self, messages: Iterable[m.ToRank]) -> None:
        """Takes commands from the front, in order."""
        self._queue.extend(messages)

    @property
    def waiting(self) -> bool:
        """Whether some command has arrived and is not carried out."""
        return bool(self._queue)

    def next(self) -> m.ToRank | None:
        """Returns the command to carry out now; None if there is none."""
        if not self._queue:
            return None
        message = self._queue.popleft()
        self._applied += isinstance(message, SHARED)
        return message

    def turn(self, run: bool, due: bool, step_id: int, rows: int, costs: DraftCosts = NO_COSTS) -> Turn | None:
        """Returns what the followers must be told before this rank goes on; None if there is nothing new."""
        if not run and self._applied == self._told:
            return None
        self._told = self._applied
        return Turn(self._applied, run, due, step_id, rows, *costs)


class Follower:
    """Queues the commands of a rank that follows the leader."""

    def __init__(self) -> None:
        self._queue: deque[m.ToRank] = deque()
        self._turns: deque[Turn] = deque()
        self._applied = 0

    def arrived(self, messages: Iterable[m.ToRank]) -> None:
        """Takes commands from the front, in order."""
        self._queue.extend(messages)

    def take_turns(self, turns: Iterable[Turn]) -> None:
        """Takes turns from the leader, in order."""
        self._turns.extend(turns)

    @property
    def behind(self) -> bool:
        """Whether the leader has applied commands that this rank has not."""
        return bool(self._turns) and self._applied < self._turns[0].applied

    def next(self) -> m.ToRank | None:
        """Returns the command to carry out now; None if there is none, or a turn must come first."""
        if not self._queue:
            return None
        if isinstance(self._queue[0], SHARED):
            if not self.behind:
                return None
            self._applied += 1
        return self._queue.popleft()

    def turn(self, due: bool) -> Turn | None:
        """Returns the leader's next turn, once this rank has applied as many commands and is `due` as the leader was:
        then what the next PrefillStep reads is loaded here, too. Each turn is returned once."""
        if self._turns and self._applied == self._turns[0].applied and (due or not self._turns[0].due):
            return self._turns.popleft()
        return None


def check(turn: Turn, step_id: int, rows: int) -> None:
    """Raises InternalError unless this rank stands where the leader does."""
    if (turn.step_id, turn.rows) != (step_id, rows):
        raise InternalError(
            f"out of step with rank 0: it has prefill step {turn.step_id} and {turn.rows} rows, this rank has prefill "
            f"step {step_id} and {rows} rows"
        )


class LockstepTurns:
    """Cuts the bytes from the leader into turns."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[Turn]:
        """Returns the turns completed by `data`."""
        data = self._buffer + data
        whole = len(data) - len(data) % WIRE.size
        self._buffer = data[whole:]
        return [Turn(*fields) for fields in WIRE.iter_unpack(data[:whole])]
