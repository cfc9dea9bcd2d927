"""When those who were refused may come again. Pure.

Each refusal knows after what time its request would pass if nobody else came. But those who were refused before it come
too, and what they bring lies before it then: a turn is

    t = now + what it would wait for alone + the work of all who have a turn before t and have not come yet

Work is told in seconds of the whole pool: how long all its instances together compute such a prompt, or how long it
takes until one row more has left their batches. So turns are as far apart as the pool can take them, whatever has been
placed lately, and the last of a burst is told when the pool will really be through with those before it.

Who comes again has a new request id. He is recognised by what he asks for, within reason: his turn counts no more then,
whether he is placed or refused again. Refused again he goes before those who wait for their first turn. A turn that
nobody came for is forgotten after GRACE_S, and what share of the last ones was come for says how much of those that are
still to come counts: clients that give up push nobody back for long.

For a moment (EARLY_S before a turn, LATE_S after it) others make room for its owner: who comes without a turn is judged
as if he were before him. Else, under a flood, every place would go to whoever happens to come just then, and no turn
could be right. It binds nobody who would find his instance idle, nor who is more urgent (priority below 0), and nobody
is bound by the less urgent (above 0).
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvmesh.services.conductor.domain import Schedule
from kvmesh.services.conductor.loads.decayed_sum import DecayedSum

MOST_S = 60.0  # until a turn
GRACE_S = 3.0  # an owner may be so late: some read whole seconds only
EARLY_S = 0.05  # or so early
LATE_S = 0.1  # and for so long others make room for him
SLOT_S = 0.05  # turns are added up by the piece of time that they lie in: some 1,300 at most
MAX_HELD = 4096  # owners that would be recognised
# Of turns that end, whether somebody came for them: the last so many count, after FIRST that did.
REMEMBERED, FIRST = 64.0, 4.0
LEAST_COME = 1 / 8  # of those to come, that counts in any case
SPREAD = (math.sqrt(5) - 1) / 2  # of who would be later than MOST_S: steps of the golden ratio leave no gaps
PLACED_HALF_LIFE_S = 3.5  # as long as what others place is remembered (others.py)
LEAST_PART = 1 / 8  # of the pool that one conductor of several is thought to fill

_NEW, _AGAIN = 0, 1  # waits for his first turn, was refused at one
_AT_ONCE_S = 1e-6


class PoolWork(NamedTuple):
    """What one request takes of a pool, in seconds of all its instances together."""

    prefill_s: float
    decode_s: float


class DueBefore(NamedTuple):
    """The requests whose turn is now and that are not here yet, weighted by how likely they are to come."""

    prefill_s: float
    requests: float


NOBODY = DueBefore(0.0, 0.0)


class RetryTurn(NamedTuple):
    """One turn that was given, ordered by its time. `slot` counts from time 0 of the clock; `claims` says that others
    leave room for it."""

    slot: int
    kind: int
    claims: bool
    work: PoolWork


@dataclass(slots=True)
class _Slot:
    """All turns within SLOT_S seconds. `owned` counts those whose owners would be recognised."""

    work: tuple[list[float], list[float]] = field(default_factory=lambda: ([0.0, 0.0], [0.0, 0.0]))  # by kind, by pool
    claimed_s: float = 0.0
    claimed: int = 0
    owned: int = 0

    def add(self, turn: RetryTurn, sign: int) -> None:
        mine, work = self.work[turn.kind], turn.work
        mine[0] = max(0.0, mine[0] + sign * work.prefill_s)
        mine[1] = max(0.0, mine[1] + sign * work.decode_s)
        if turn.claims:
            self.claimed_s = max(0.0, self.claimed_s + sign * work.prefill_s)
            self.claimed += sign


@dataclass(slots=True)
class _Come:
    """How many of the last turns were used."""

    come: float = FIRST
    ended: float = FIRST

    def add(self, come: int, missed: int) -> None:
        self.come, self.ended = self.come + come, self.ended + come + missed
        if self.ended > REMEMBERED:
            self.come, self.ended = self.come * REMEMBERED / self.ended, REMEMBERED

    @property
    def share(self) -> float:
        return self.come / self.ended


def content(request: Schedule) -> Hashable:
    """Returns what stays the same when a client repeats its request."""
    last = bytes(request.keys[-1]) if request.keys else b""
    return request.tenant, request.prompt_tokens, request.max_tokens, last


class RetryTurns:
    """The turns of one model's refused requests, at one conductor."""

    def __init__(self) -> None:
        self._slots: dict[int, _Slot] = {}
        self._order: list[int] = []  # of those, sorted
        self._held: dict[Hashable, list[RetryTurn]] = {}  # heaps
        self._count = 0
        self._swept = -1  # the first slot when owners were last forgotten
        self._come = _Come()
        self._beyond = 0.0
        self._placed = DecayedSum(PLACED_HALF_LIFE_S)  # seconds of prompts

    def __len__(self) -> int:
        """Returns how many owners would be recognised."""
        return self._count

    def placed(self, prefill_s: float, now: float) -> None:
        """Notes that such a prompt was placed by this conductor."""
        self._placed.add(prefill_s, now)

    def part(self, others_rate: float, now: float) -> float:
        """Returns the share of the pool's prompts that this conductor places. `others_rate` is
        `OtherConductors.rate`."""
        if others_rate <= 0:
            return 1.0
        rate = self._placed.at(now) * math.log(2) / PLACED_HALF_LIFE_S
        return max(LEAST_PART, rate / (rate + others_rate))

    def came(self, request: Schedule, now: float) -> RetryTurn | None:
        """Ends the turn of a request that has come in time, and returns it; None when the request had none."""
        if not self._held:
            return None
        self._pass(now)
        key = content(request)
        if not self._due(key, now):
            return None
        turn = heapq.heappop(self._held[key])
        if not self._held[key]:
            del self._held[key]
        self._count -= 1
        slot = self._slots[turn.slot]
        slot.owned -= 1
        slot.add(turn, -1)
        self._come.add(1, 0)
        return turn

    def before(self, request: Schedule, now: float) -> DueBefore:
        """Returns the work that is due before this request; none when its own turn is now."""
        if not self._held or request.priority < 0:
            return NOBODY
        self._pass(now)
        if self._due(content(request), now):
            return NOBODY
        seconds, requests = 0.0, 0
        for at in range(math.floor((now - LATE_S) / SLOT_S), math.floor((now + EARLY_S) / SLOT_S) + 1):
            if (slot := self._slots.get(at)) is not None:
                seconds, requests = seconds + slot.claimed_s, requests + slot.claimed
        return DueBefore(self._come.share * seconds, self._come.share * requests)

    def wait_s(
        self, request: Schedule, alone_s: float, work: PoolWork, pool: int, now: float, had: RetryTurn | None = None
    ) -> float:
        """Returns the seconds until the turn of a request that is refused now. `alone_s` is when it would pass if no
        other came, `pool` is the index in PoolWork of the pool that it waits for, `had` is its turn if it came at one.
        """
        self._pass(now)
        wait_s = self._earliest_s(alone_s, pool, now, again=had is not None)
        if wait_s > MOST_S:
            self._beyond = (self._beyond + SPREAD) % 1.0
            wait_s = MOST_S * (1 + self._beyond) / 2
        at, kind = math.floor((now + wait_s) / SLOT_S), _NEW if had is None else _AGAIN
        self._give(content(request), RetryTurn(at, kind, request.priority <= 0, work))
        return wait_s

    def _earliest_s(self, alone_s: float, pool: int, now: float, *, again: bool) -> float:
        wait_s = alone_s
        late, early = self._come.share, max(LEAST_COME, self._come.share)  # who is late may have given up
        for at in self._order:
            starts_s = at * SLOT_S - now
            if starts_s > wait_s + _AT_ONCE_S:
                break
            new, others = self._slots[at].work
            if starts_s <= 0:
                wait_s += late * (new[pool] + others[pool])
            else:
                wait_s += early * (others[pool] if again else new[pool] + others[pool])
        return wait_s

    def _due(self, key: Hashable, now: float) -> bool:
        turns = self._held.get(key)
        if turns is None:
            return False
        while turns and turns[0].slot not in self._slots:
            heapq.heappop(turns)
            self._count -= 1
        if not turns:
            del self._held[key]
            return False
        return turns[0].slot * SLOT_S <= now + EARLY_S

    def _give(self, key: Hashable, turn: RetryTurn) -> None:
        slot = self._slots.get(turn.slot)
        if slot is None:
            slot = self._slots[turn.slot] = _Slot()
            insort(self._order, turn.slot)
        slot.add(turn, 1)
        if self._count >= MAX_HELD and self._order[0] != self._swept:
            self._sweep()
        if self._count < MAX_HELD:
            heapq.heappush(self._held.setdefault(key, []), turn)
            slot.owned += 1
            self._count += 1

    def _pass(self, now: float) -> None:
        """Forgets turns of long ago."""
        first = math.floor((now - GRACE_S) / SLOT_S)
        gone = 0
        while gone < len(self._order) and self._order[gone] < first:
            self._come.add(0, self._slots.pop(self._order[gone]).owned)
            gone += 1
        if gone:
            del self._order[:gone]
        if not self._order and self._held:
            self._held.clear()
            self._count = 0

    def _sweep(self) -> None:
        """Forgets the owners of forgotten turns."""
        self._swept = self._order[0]
        for key in list(self._held):
            left = [turn for turn in self._held[key] if turn.slot in self._slots]
            heapq.heapify(left)
            self._count -= len(self._held[key]) - len(left)
            if left:
                self._held[key] = left
            else:
                del self._held[key]
