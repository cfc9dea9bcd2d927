"""Queue accounting: what was placed, corrected by what instances report, so that load neither lags nor leaks.

A placement counts at once. It is *flying* until a heartbeat that came at least IN_FLIGHT_S later: by then the
instance's own figures include it. It ends when the instance reports it, or when its time is over.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from kvmesh.services.conductor import score
from kvmesh.services.conductor.costs.models import DecayedRatio
from kvmesh.services.conductor.domain import Load
from kvmesh.services.conductor.loads.batch_forecast import BatchAt, BatchForecast, DecodeWork
from kvmesh.services.conductor.loads.decayed_sum import DecayedSum
from kvmesh.services.conductor.loads.turn_forecast import QueuedWork, TurnForecast
from kvmesh.work_class import work_class

IN_FLIGHT_S = 0.05
# Short prompts are computed together, so a queue drains faster than the sum of its parts; within these bounds.
MIN_SPEEDUP, MAX_SPEEDUP = 0.5, 16.0
FIRST_RESIDENCE_S = 1.0
RESIDENCE_SHARE = 0.1  # of a new stay in what others are expected to stay
LATELY_S = 10.0  # half-life of what an instance was given, which breaks ties
REQUEST_TOKENS = 16.0  # that a request counts as, besides its tokens, in what a decode instance was given
PRIORITY_STEP_S = 30.0  # of waiting outweigh one step of priority: `priority_step_ms` of the prefill service


def passing_s(ahead_s: float, long_share: float, chunk_s: float) -> float:
    """What a short prompt waits for of `ahead_s`, where prefill takes turns (services/prefill/planner.py): for the
    short ones before it, for as much of the long ones as steps of those let in, and for the rest of the chunk that is
    being computed, half of one on the average. bounds.py reckons the same for many."""
    long_s = ahead_s * long_share
    short_s = ahead_s - long_s
    return short_s + min(long_s, short_s + chunk_s / 2)


@dataclass(slots=True)
class PrefillWork:
    """One placement as the prefill instance will meet it."""

    request_id: str
    computed_tokens: int
    seconds: float
    keys: tuple[bytes, ...]
    placed_at: float
    expires_at: float
    priority: int = 0  # smaller goes first
    yields: bool = False  # of the batch lane: nobody is refused for it
    chunks: int = 1  # more than one: it is long, and its chunks take turns with short prompts
    masks: bytes = b""  # which cache groups of `keys` will be there; b"": the model has one
    tenant: str = ""
    tenant_weight: float = 1.0
    step_share: float = 1.0  # of the seconds that a whole chunk takes: one of its steps
    class_s: float = field(init=False)  # of `seconds`: what it counts as in a queue that goes by size

    def __post_init__(self) -> None:
        self.class_s = work_class(self.seconds)

    @property
    def long(self) -> bool:
        """Whether short prompts that come later pass it."""
        return self.chunks > 1

    @property
    def ranked(self) -> bool:
        """Whether it counts otherwise than by its arrival."""
        return self.yields or self.priority != 0


@dataclass(slots=True)
class TenantWork:
    """What one tenant has in a queue."""

    works: int = 0
    seconds: float = 0.0  # predicted, as if each were computed alone
    weight: float = 1.0


class PrefillQueue:
    """Predicted work before a new request at one prefill instance."""

    def __init__(self, now: float) -> None:
        self.works: dict[str, PrefillWork] = {}
        self.size_weight = 0.0  # by which it goes (see shortest_first.py); 0: long and short ones take turns
        self.fair = False  # between tenants (services/prefill/tenant_shares.py)
        self._tenants: dict[str, TenantWork] = {}  # of `works`
        self._backlog_s = 0.0  # at `_as_of`; drains one second per second
        self._as_of = now
        self._speed = DecayedRatio(1.0, 1.0, keep=0.9)
        self.speedup = 1.0  # predicted seconds of work done in one second while busy
        # As of the last report: a work that it had yet to finish, and what all that was there had yet to take; since
        # then: what came and went uncomputed. Predicted seconds, as if each were computed alone.
        self._unfinished: PrefillWork | None = None
        self._left_s = self._come_s = 0.0
        self._busy_s = 0.0  # without a break, and nothing was computed in it yet
        self._ranked = 0  # of `works`
        self.coming_tokens = 0  # that `works` are to compute
        # Predicted seconds of `works`, of the long ones among them, and chunks of these.
        self._works_s = self._long_s = 0.0
        self._chunks = 0
        self._expected_s = 0.0  # of the backlog: others', that no report has told of
        self._told_at = now
        self._given = DecayedSum(LATELY_S)  # seconds of work
        self._whole = DecayedSum(LATELY_S)  # the same, by how much of a chunk its steps are
        self._turns = TurnForecast(self.works, now)  # of a queue that goes by size
        # Of its time, that it was given work for lately, as of the last placement or report. Steps shorter than a whole
        # chunk count for as much less, since they hold up rows for as much less.
        self.coming_share = 0.0

    @property
    def backlog(self) -> tuple[float, float]:
        """Seconds of work, and when there were so many: they drain one second a second."""
        return self._backlog_s, self._as_of

    @property
    def has_ranked(self) -> bool:
        """Whether any work counts otherwise than by its arrival."""
        return self._ranked > 0

    def rank(self, work: PrefillWork) -> float:
        """Smaller goes first, as in the queue of the prefill service."""
        return work.placed_at + work.priority * PRIORITY_STEP_S + work.class_s * self.size_weight

    def wait_s(self, now: float) -> float:
        """Seconds until a request placed now would begin; never negative."""
        passed_s = now - self._as_of
        left_s = self._backlog_s - passed_s if passed_s > 0 else self._backlog_s
        return left_s if left_s > 0 else 0.0

    @property
    def long_share(self) -> float:
        """Of the backlog: long prompts. What others placed is taken to be as what we did."""
        return self._long_s / self._works_s if self._chunks else 0.0

    @property
    def chunk_s(self) -> float:
        """Of one chunk of those, on the average; 0 without any."""
        return self._long_s / self._chunks / self.speedup if self._chunks else 0.0

    def figures(self) -> tuple[float, float, int, bool, float, float]:
        """`backlog`, how many works, `has_ranked`, `long_share`, `chunk_s` in one go."""
        long_share = chunk_s = 0.0
        if self._chunks:
            long_share, chunk_s = self.long_share, self.chunk_s
        return self._backlog_s, self._as_of, len(self.works), self._ranked > 0, long_share, chunk_s

    def ahead_s(self, now: float, priority: int, *, short: bool = False) -> tuple[float, float]:
        """Seconds until a request of that priority, of one chunk if `short`, would begin, and how many of them are
        work that yields. As in the queue of the prefill service waiting outweighs priority in time; the oldest work has
        begun, and what has begun is not overtaken."""
        ahead_s, yielding_s = self._ranked_s(now, priority)
        if short and self._chunks:
            ahead_s = passing_s(ahead_s, self.long_share, self.chunk_s)
        return ahead_s, min(ahead_s, yielding_s)

    def _ranked_s(self, now: float, priority: int) -> tuple[float, float]:
        """As if all prompts were alike."""
        wait_s = self.wait_s(now)
        if wait_s <= 0 or not (self._ranked or priority):
            return wait_s, 0.0
        rank = now + priority * PRIORITY_STEP_S
        works = iter(self.works.values())
        oldest = next(works, None)
        others_s = behind_s = yielding_s = 0.0
        for work in works:
            seconds = work.seconds / self.speedup
            others_s += seconds
            if work.placed_at + work.priority * PRIORITY_STEP_S > rank:
                behind_s += seconds
            elif work.yields:
                yielding_s += seconds
        begun_s = max(0.0, wait_s - others_s)
        ahead_s = max(begun_s, wait_s - behind_s)
        if oldest is not None and oldest.yields:
            yielding_s += begun_s
        return ahead_s, min(ahead_s, yielding_s)

    def passes(self, tenant: str) -> bool:
        """Whether others than this tenant wait there, and their prompts do not all go before its next one."""
        return self.fair and bool(self._tenants.keys() - {tenant})

    def turn_s(self, tenant: str, weight: float, now: float, *, short: bool) -> float:
        """Seconds until the next prompt of this tenant has its turn, where `passes`: its own work that waits there
        takes as long as its share of the instance lets it; and what is being computed ends before, a long prompt as a
        whole unless this one is `short`. What other conductors placed is taken to be of the same tenants."""
        own_s = 0.0
        if (own := self._tenants.get(tenant)) is not None and self._works_s > 0:
            others = sum(one.weight for name, one in self._tenants.items() if name != tenant)
            own_s = self.wait_s(now) * own.seconds / self._works_s * (weight + others) / weight
        return own_s + self._step_s(now, short=short)

    def _step_s(self, now: float, *, short: bool) -> float:
        first: PrefillWork | QueuedWork | None = next(iter(self.works.values()), None)
        left_s = self.chunk_s if first is not None and first.chunks > 1 else 0.0
        if self.size_weight:
            first, left_s = self.begun(now)
        if first is None or (short and left_s):
            return left_s
        return max(left_s, first.seconds / self.speedup)

    def begun(self, now: float) -> tuple[QueuedWork | None, float]:
        """Returns the work that is being computed, of a queue that goes by size, and the seconds until another one may
        be taken; None and 0 where nothing is known to be there."""
        return self._turns.advance(now)

    def crowd(self, now: float) -> tuple[float, float]:
        """Requests that are there, and seconds of work that it was given lately: what ties go by."""
        return len(self.works), max(0.0, self._given.at(now))

    def _give(self, seconds: float, step_share: float, now: float) -> None:
        self._given.add(seconds, now)
        self._whole.add(seconds * step_share, now)
        self._look(now)

    def _look(self, now: float) -> None:
        given_s = max(0.0, self._whole.at(now))
        self.coming_share = min(1.0, given_s * math.log(2) / LATELY_S / self.speedup)

    def add(self, work: PrefillWork) -> None:
        """A placement; one of the same request replaces it."""
        self._give(work.seconds, work.step_share, work.placed_at)
        self._backlog_s = self.wait_s(work.placed_at) + work.seconds / self.speedup
        self._as_of = work.placed_at
        self._come_s += work.seconds
        if (replaced := self._leave(work.request_id, work.placed_at)) is not None:
            self._come_s -= replaced.seconds
        self.works[work.request_id] = work
        self._ranked += work.ranked
        self._count(work, 1)
        if self.size_weight:
            self._turns.add(work, self.rank(work), work.placed_at)

    def _leave(self, request_id: str, now: float) -> PrefillWork | None:
        """Removes a work; where turns are forecast, they are those of now before and after it."""
        if not self.size_weight or request_id not in self.works:
            return self._pop(request_id)
        self._turns.advance(now)
        work = self._pop(request_id)
        self._turns.advance(now)
        return work

    def _pop(self, request_id: str) -> PrefillWork | None:
        work = self.works.pop(request_id, None)
        if work is not None:
            self._ranked -= work.ranked
            self._count(work, -1)
        return work

    def _count(self, work: PrefillWork, sign: int) -> None:
        self.coming_tokens += sign * work.computed_tokens
        self._works_s = self._works_s + sign * work.seconds if self.works else 0.0
        tenant = self._tenants.setdefault(work.tenant, TenantWork())
        tenant.works += sign
        tenant.seconds += sign * work.seconds
        if sign > 0:
            tenant.weight = work.tenant_weight
        if not tenant.works:
            del self._tenants[work.tenant]
        if work.long:
            self._chunks += sign * work.chunks
            self._long_s = self._long_s + sign * work.seconds if self._chunks else 0.0

    def finish(self, request_id: str, now: float, *, done: bool) -> PrefillWork | None:
        """The instance is through with it; `done`: it was computed, else it went away uncomputed.
        The backlog follows with the load that comes in the same heartbeat."""
        work = self._leave(request_id, now)
        if work is not None and not done:
            self._come_s -= work.seconds
        return work

    def withdraw(self, request_id: str, now: float) -> PrefillWork | None:
        """It will not come (another attempt was placed, or its time is over): its work counts no more."""
        work = self._leave(request_id, now)
        if work is not None:
            self._give(-work.seconds, work.step_share, now)
            self._come_s -= work.seconds
            self._backlog_s = max(0.0, self.wait_s(now) - work.seconds / self.speedup)
            self._as_of = now
        return work

    def expired(self, now: float) -> list[str]:
        """Placements whose time is over."""
        return [work.request_id for work in self.works.values() if work.expires_at <= now]

    def clear(self) -> list[PrefillWork]:
        """Everything is lost with the instance."""
        lost = list(self.works.values())
        self.works.clear()
        self._tenants.clear()
        self._ranked = self._chunks = self.coming_tokens = 0
        self._works_s = self._long_s = 0.0
        self._backlog_s = self._left_s = self._come_s = self._busy_s = 0.0
        self._unfinished = None
        return lost

    def report(self, queued_tokens: int, seconds_per_token: float, now: float) -> None:
        """The instance's own figure: uncached tokens it has still to compute, all requests together."""
        self._look(now)
        settled_tokens, settled_s, flying_tokens, flying_s = 0, 0.0, 0, 0.0
        newest = None
        for work in self.works.values():
            if work.placed_at <= now - IN_FLIGHT_S:
                newest = work
                settled_tokens += work.computed_tokens
                settled_s += work.seconds
            else:
                flying_tokens += work.computed_tokens
                flying_s += work.seconds
        share = min(1.0, queued_tokens / settled_tokens) if settled_tokens else 0.0
        # Tokens that no placement of ours explains: another conductor's, or placed before we were restarted.
        foreign = max(0, queued_tokens - settled_tokens - flying_tokens)
        left_s = settled_s * share + flying_s
        self._learn_speed(left_s, None if foreign else newest, now)
        self._backlog_s = (left_s + foreign * seconds_per_token) / self.speedup
        if self.size_weight:
            self._turns.correct(self.speedup, now)
        self._as_of = self._told_at = now
        self._expected_s = 0.0

    def silent_s(self, now: float) -> float:
        """Since the last report."""
        return max(0.0, now - self._told_at)

    def told_s(self, now: float) -> float:
        """`wait_s` without what was expected of others."""
        return max(0.0, self.wait_s(now) - self._expected_s)

    def expect(self, seconds: float, now: float) -> bool:
        """Others have placed so much here since the last report, it seems (others.py), whatever was thought before.
        Whether that changes anything."""
        if seconds == self._expected_s == 0.0:
            return False
        self._backlog_s, self._expected_s = self.told_s(now) + seconds, seconds
        self._as_of = now
        return True

    def _learn_speed(self, left_s: float, unfinished: PrefillWork | None, now: float) -> None:
        """Only from spans between reports in which it was never idle: a work that the one before had named as
        unfinished still is. `unfinished`: one that this report names so; None: there is none, or others' work is there,
        too."""
        before = self._unfinished
        if before is not None and unfinished is not None and self.works.get(before.request_id) is before:
            done_s = self._left_s + self._come_s - left_s
            self._busy_s += now - self._told_at
            if done_s > 0:  # a chunk may take longer than from one report to the next
                self._speed.add(done_s, self._busy_s)
                self.speedup = min(MAX_SPEEDUP, max(MIN_SPEEDUP, self._speed.rate))
                self._busy_s = 0.0
        else:
            self._busy_s = 0.0
        self._unfinished, self._left_s, self._come_s = unfinished, left_s, 0.0


class RunningBatch:
    """Predicted batch, context and room at one decode instance."""

    def __init__(self) -> None:
        self.works: dict[str, DecodeWork] = {}
        self._flying: dict[str, DecodeWork] = {}
        self._flying_tokens = 0
        self._flying_blocks = 0
        self._prompt_tokens = 0
        self._blocks = 0
        self._load = Load()
        self.stays = BatchForecast()
        self.residence_s = FIRST_RESIDENCE_S
        self._stays_learnt = False
        self._given = DecayedSum(LATELY_S)  # tokens

    def crowd(self, now: float) -> tuple[float, float]:
        """Requests that are there, and tokens that it was given lately: what ties go by."""
        return self.requests, max(0.0, self._given.at(now))

    @property
    def requests(self) -> int:
        """Running, waiting and on their way."""
        return self._load.running_requests + self._load.waiting_requests + len(self._flying)

    def figures(self) -> tuple[float, float, float, float, float]:
        """`requests`, `context_tokens`, `free_blocks`, `free_pages`, `mean_blocks` in one go."""
        load, flying = self._load, self._flying_blocks
        waiting, pages, extents = load.waiting_requests, load.free_pages, load.free_extents
        context = self.context_tokens if waiting else load.context_tokens + self._flying_tokens
        most = pages if pages > extents else extents
        return (
            load.running_requests + waiting + len(self._flying),
            context,
            most - flying if most > flying else 0,
            pages - flying if pages > flying else 0,
            self._blocks / len(self.works) if self.works else 0.0,
        )

    @property
    def running(self) -> BatchAt:
        """As last told."""
        return BatchAt(self._load.running_requests, self._load.context_tokens)

    def forecast(self, now: float, at: float, until: float) -> BatchAt:
        """See `BatchForecast.forecast`."""
        present = BatchAt(self.requests, self.context_tokens)
        usual_s = self.residence_s if self._stays_learnt else math.inf
        return self.stays.forecast(now, at, until, present, self._load.running_requests, usual_s)

    @property
    def context_tokens(self) -> float:
        """Tokens of KV that one step reads once everybody present has joined."""
        waiting = self._load.waiting_requests * self._mean_prompt()
        return self._load.context_tokens + waiting + self._flying_tokens

    @property
    def free_blocks(self) -> int:
        """Where a landing could go: host extents or device pages; never negative."""
        return max(0, max(self._load.free_pages, self._load.free_extents) - self._flying_blocks)

    def drain_s(self, requests: float) -> float:
        """Seconds until so many of those present have finished, at the usual length of stay."""
        seconds: float = score.drain_s(requests, self.requests, self.residence_s)
        return seconds

    @property
    def free_pages(self) -> int:
        """Where a prompt can be computed; never negative."""
        return max(0, self._load.free_pages - self._flying_blocks)

    @property
    def mean_blocks(self) -> float:
        """Of what was placed there; 0 when nothing is."""
        return self._blocks / len(self.works) if self.works else 0.0

    def landing_wait_s(self, blocks: int, *, pages: bool = False) -> float:
        """Seconds until that many blocks are free (`pages`: on the device); 0 when they are."""
        short = blocks - (self.free_pages if pages else self.free_blocks)
        if short <= 0:
            return 0.0
        seconds: float = score.room_s(short, self.mean_blocks or blocks, self.requests, self.residence_s)
        return seconds

    def page_wait_s(self, blocks: int) -> float:
        """Seconds that KV which has landed in host memory would wait for pages of the device, behind all that wait and
        come; 0 when there are enough."""
        waiting = self._load.waiting_requests * (self.mean_blocks or blocks)
        short = blocks + waiting - self.free_pages
        if short <= 0:
            return 0.0
        seconds: float = score.room_s(short, self.mean_blocks or blocks, self.requests, self.residence_s)
        return seconds

    def add(self, work: DecodeWork) -> None:
        """A placement; one of the same request replaces it."""
        self._given.add(REQUEST_TOKENS + work.answer_tokens, work.placed_at)
        self.drop(work.request_id)
        self.works[work.request_id] = self._flying[work.request_id] = work
        self._flying_tokens += work.prompt_tokens
        self._flying_blocks += work.blocks
        self._prompt_tokens += work.prompt_tokens
        self._blocks += work.blocks
        self.stays.add(work)

    def finish(self, request_id: str, now: float) -> None:
        """The instance is through with it; where nothing else tells, its stay is the time since it was placed."""
        if (work := self.works.get(request_id)) is not None:
            self.left(request_id, max(0.0, now - work.placed_at))

    def left(self, request_id: str, stay_s: float) -> None:
        """It was there so long: that teaches how long others will stay. 0: it was not served, and teaches nothing."""
        if self.drop(request_id) is not None and stay_s > 0:
            self.residence_s += RESIDENCE_SHARE * (stay_s - self.residence_s)
            self._stays_learnt = True

    def drop(self, request_id: str) -> DecodeWork | None:
        """It counts no more."""
        work = self.works.pop(request_id, None)
        if work is None:
            return None
        self._prompt_tokens -= work.prompt_tokens
        self._blocks -= work.blocks
        self.stays.drop(work)
        self._land(work)
        return work

    def withdraw(self, request_id: str, now: float) -> None:
        """It will not come: another attempt was placed."""
        if (work := self.drop(request_id)) is not None:
            self._given.add(-(REQUEST_TOKENS + work.answer_tokens), now)

    def _land(self, work: DecodeWork) -> None:
        if self._flying.pop(work.request_id, None) is not None:
            self._flying_tokens -= work.prompt_tokens
            self._flying_blocks -= work.blocks

    def expired(self, now: float) -> list[str]:
        """Placements whose time is over."""
        return [work.request_id for work in self.works.values() if work.expires_at <= now]

    def report(self, load: Load, now: float, computing: Collection[str] = ()) -> None:
        """The instance's own figures; they include whatever has stopped flying. `computing`: requests whose prompts the
        same instance has still to compute; they fly until then."""
        self._load = load
        for work in [w for w in self._flying.values() if w.placed_at <= now - IN_FLIGHT_S]:
            if work.request_id not in computing:
                self._land(work)

    def clear(self) -> None:
        """Everything is lost with the instance."""
        for request_id in list(self.works):
            self.drop(request_id)
        self._load = Load()

    def _mean_prompt(self) -> float:
        if self.works:
            return self._prompt_tokens / len(self.works)
        return self._load.context_tokens / max(1, self._load.running_requests)
