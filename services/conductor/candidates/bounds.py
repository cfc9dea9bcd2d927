"""What a request would cost at every instance at once: the formulas of score.py over columns. A *bound*: never more
than weighing the instance says (but for rounding), and just as much for all instances but the few *odd* ones, which
hold blocks in ways that only a plan of their own tells. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from kvmesh.kvcache.tiers import Tier
from kvmesh.services.conductor import score
from kvmesh.services.conductor.candidates.columns import View
from kvmesh.services.conductor.candidates.fields import BENDS, ColumnField, Floats, Mask, RareField
from kvmesh.services.conductor.candidates.instance_row import node
from kvmesh.services.conductor.candidates.prefix_holders import HeldBlocks
from kvmesh.services.conductor.candidates.selection import Selection
from kvmesh.services.conductor.costs.fit import HALF_LIFE_S
from kvmesh.services.conductor.domain import Fetch, Schedule
from kvmesh.services.conductor.loads.queues import PRIORITY_STEP_S
from kvmesh.services.conductor.loads.shortest_first import LASTS, MARKS, ahead
from kvmesh.services.conductor.placing.prefills import worth_weighing
from kvmesh.services.conductor.placing.scoring_context import ScoringContext
from kvmesh.services.conductor.prefixes.fetch_plan import FetchPlanner, FetchSegment, blocks_of
from kvmesh.services.conductor.prefixes.index import PrefixPlace
from kvmesh.work_class import work_classes

ROUNDING_S = 1e-9
HIDDEN_STEPS = 4  # parts of a leg in which the end that hides behind a queue is looked for
_NOBODY = PrefixPlace(0)


@dataclass(slots=True)
class Fetching:
    """One way to fetch, for all instances that have the same blocks: up to block `until`, of which `blocks` come over
    the network."""

    until: int
    blocks: int
    ahead: int  # bytes
    holders: int
    read_s: float  # at the holders, before they send
    memory: bool  # all of it out of memory


@dataclass(slots=True)
class PromptBound:
    """One way to compute the prompt, with a value for each instance. All but `computed`, `pairs` and `steps` are in
    seconds. A plain 0 stands for 0 at each instance."""

    ttft: Floats
    cost: Floats
    queue_s: Floats
    fetch_s: Floats | float
    computed: Floats | float
    pairs: Floats | float
    steps: Floats | float
    alone: Floats
    slower_s: Floats | float
    tail_s: Floats | float


class PromptBounds:
    """The best of each instance's options: the least cost among those that may pass (infinity if none does), the least
    TTFT by which they are judged, and the same among options whose queue can drain for long enough."""

    def __init__(self, count: int) -> None:
        self.kept = np.full((3, count), np.inf)
        self.cost, self.least, self.draining = self.kept

    def offer(self, cost: Floats, least: Floats, drains: Mask | None, here: Mask, *, instead: bool) -> None:
        """Adds an option for the instances `here`. `drains` marks those whose queue can drain for long enough."""
        if instead:
            self.kept[:, here] = np.inf
        np.minimum(self.cost, cost, out=self.cost, where=here)
        np.minimum(self.least, least, out=self.least, where=here)
        if drains is not None:
            np.minimum(self.draining, least, out=self.draining, where=drains & here)

    def free(self, here: Mask, cost: Floats) -> None:
        """Notes that the instances `here` may have an option that costs no less than this and passes in any case."""
        np.minimum(self.cost, cost, out=self.cost, where=here)
        self.least[here] = -np.inf


@dataclass(slots=True)
class AnswerBounds:
    """The terms of each instance's decode score, in seconds. `short` marks those that lack pages for prompt and answer
    together."""

    tbt: Floats
    landing: Floats | float
    slot: Floats | float
    tail: Floats | float
    short: Mask
    sum: Floats | None = None  # of the four before, if it is known

    @property
    def score(self) -> Floats:
        """The score as `DecodeChoice.score_s` computes it."""
        if self.sum is not None:
            return self.sum
        found: Floats = score.token_cost_s(self.tbt, self.landing, self.slot, 0.0, self.tail)
        return found


@dataclass(frozen=True, slots=True)
class FittedColumns:
    """The coefficients of one fitted model at every instance: see `score.FittedTerms`."""

    a: Floats
    b: Floats
    c: Floats
    d: Floats | float
    knee: Floats


def fitted(view: View, model: int, x1: Floats | float, x2: Floats | float, n: Floats | float = 1.0) -> Floats:
    """Returns `Estimate.predict` for every instance."""
    seconds: Floats = score.fitted_s(_known(view, model), x1, x2, n)
    return seconds


def admitted(view: View, model: int, x1: Floats | float, x2: Floats | float, n: Floats | float = 1.0) -> Floats:
    """Returns `Estimate.admission_s` for every instance."""
    seconds, before = fitted(view, model, x1, x2, n), score.fitted_s(_known(view, model, prior=True), x1, x2, n)
    if (seconds <= before).all():  # nothing to fade
        return seconds
    faded: Floats = score.faded_s(seconds, before, left(view, model))
    return faded


def _known(view: View, model: int, *, prior: bool = False) -> FittedColumns:
    at, columns = model + 5 * prior, view.columns
    a, b, c, d, knee = (columns[at + k] for k in range(5))
    return FittedColumns(a, b, c, d if columns.rare(BENDS[model]) else 0.0, knee)


def left(view: View, model: int) -> Floats:
    """Returns what still counts (0 to 1) of each fit, to which nothing was added for a while."""
    age_s = np.maximum(0.0, view.now - view.columns[model + 10])
    return np.exp2(-age_s / HALF_LIFE_S)


class CostBounds:
    """The bounds of one request at every instance of a view. `among` are those of one KV identity that matter."""

    def __init__(
        self, request: Schedule, planner: FetchPlanner, scoring: ScoringContext, blocks: HeldBlocks, among: Selection
    ) -> None:
        self.view, self.request, self.planner, self.scoring, self.held = among.view, request, planner, scoring, blocks
        one = among.first
        self.block = one.model.block_tokens
        self.usable_blocks = (request.prompt_tokens - 1) // self.block
        self.peers = one.fits
        self.arriving = 0  # bytes, at the decode instance that was chosen

    @cached_property
    def short_queue_s(self) -> Floats:
        """The wait of a short prompt, as `queues.passing_s` computes it from `queue_s`."""
        columns, ahead_s = self.view.columns, self.queue_s
        if not columns.rare(RareField.LONG):
            return ahead_s
        long_s = ahead_s * columns[ColumnField.LONG_SHARE]
        short_s = ahead_s - long_s
        return np.asarray(short_s + np.minimum(long_s, short_s + columns[ColumnField.LONG_CHUNK] / 2))

    def _queue_of(self, computed: Floats | float, size_s: Floats) -> Floats:
        """Returns the wait of a prompt of which so many tokens are computed in `size_s` seconds."""
        queue_s = self.queue_s
        if self.short_queue_s is not queue_s:
            queue_s = np.where(computed <= self.view.columns[ColumnField.FITTED_CHUNK], self.short_queue_s, queue_s)
        if self.by_size is None:
            return queue_s
        columns, ahead_s = self.view.columns, self._ahead_s(size_s)
        speedups = np.where(self.by_size, columns[ColumnField.SPEEDUP], 1.0)
        weights, sizes_s = columns[ColumnField.SIZE_WEIGHT], np.maximum(0.0, size_s - ROUNDING_S)
        least_s = self.scoring.overtaking.least_wait_s(ahead_s, sizes_s, weights, speedups)
        return np.asarray(np.where(self.by_size, least_s, queue_s))

    @cached_property
    def by_size(self) -> Mask | None:
        """The instances whose queue goes by size, or None if there is none."""
        columns = self.view.columns
        if not columns.rare(RareField.BY_SIZE):
            return None
        found: Mask = columns[ColumnField.SIZE_WEIGHT] > 0
        return found

    def _ahead_s(self, size_s: Floats) -> Floats:
        """Returns a lower bound of the wait that `ahead` and `OvertakingTerms.wait_s` compute."""
        columns = self.view.columns
        before = np.count_nonzero(columns.several(ColumnField.MARK, MARKS) <= self._rank(size_s - ROUNDING_S), axis=0)
        least_s: Floats = np.maximum(0.0, self.wait_s - columns[ColumnField.LISTED] * (1 - before / MARKS) - ROUNDING_S)
        return least_s

    def _others_s(self, queue_s: Floats, fetch_s: Floats | float, size_s: Floats, *, exact: bool) -> Floats | float:
        """Returns a lower bound of `OvertakingTerms.others_s`, for a start no earlier than these two say: what begins
        later has less behind it. `exact` says that the size is exact; else the prompt may be longer and rank behind
        some of these."""
        if self.by_size is None:
            return 0.0
        settings = self.scoring.overtaking.settings
        others_s = min(1.0, settings.later) * np.maximum(0.0, self.wait_s - np.maximum(queue_s, fetch_s))
        if exact and settings.others > 0:
            others_s += settings.others * np.maximum(0.0, size_s - ROUNDING_S) * self._behind(size_s)
        return np.where(self.by_size, others_s, 0.0)

    def _behind(self, size_s: Floats) -> Floats:
        """Returns a lower bound of `QueuePosition.behind` of a prompt of that size: one of those that rank behind it
        may have begun."""
        columns = self.view.columns
        rank = self._rank(size_s + ROUNDING_S) + ROUNDING_S * (1 + columns[ColumnField.SIZE_WEIGHT])
        count = np.count_nonzero(columns.several(ColumnField.LAST, LASTS) > rank, axis=0)
        least: Floats = np.maximum(0, count - 1) * (self.wait_s > 0)
        return least

    def _rank(self, size_s: Floats) -> Floats:
        """Returns `PrefillQueue.rank` of a prompt of that size that is placed now."""
        placed = self.view.now + self.request.priority * PRIORITY_STEP_S
        rank: Floats = placed + work_classes(np.maximum(0.0, size_s)) * self.view.columns[ColumnField.SIZE_WEIGHT]
        return rank

    @cached_property
    def queue_s(self) -> Floats:
        """The wait of long prompts, as `PrefillQueue.ahead_s` computes it."""
        columns, now, wait = self.view.columns, self.view.now, self.wait_s
        if not self.request.priority and not columns.rare(RareField.RANKED):
            return wait
        wait = wait.copy()
        ranked = (wait > 0) & self.view.able
        if not self.request.priority:
            ranked &= columns[ColumnField.RANKED] > 0
        if self.by_size is not None:
            ranked &= ~self.by_size
        for row in np.flatnonzero(ranked).tolist():
            wait[row] = columns.instances[row].queue.ahead_s(now, self.request.priority)[0]
        return wait

    @cached_property
    def yielding_s(self) -> Floats:
        """The part of `queue_s` that yields, for which nobody is refused."""
        columns, found = self.view.columns, np.zeros(len(self.view.columns))
        for row in sorted(columns.rare(RareField.YIELDS)):
            if not self.view.able[row]:
                continue
            queue = columns.instances[row].queue
            if queue.size_weight:  # all that yields there, be it behind this one
                found[row] = ahead(queue, self.view.now, self.request.priority, np.inf).yielding_s
            else:
                found[row] = queue.ahead_s(self.view.now, self.request.priority)[1]
        if self.scoring.overtaking.by_tenant:  # at the least nothing is before it
            for row in np.flatnonzero(self.view.able).tolist():
                if columns.instances[row].queue.passes(self.request.tenant):
                    found[row] = np.inf
        return found

    @cached_property
    def reach(self) -> int:
        """How far all holders together bring the prefix, in blocks."""
        return self.planner.reach(_NOBODY, 0)

    # ── prompts ───────────────────────────────────────────────────────────────────────────────────

    def prompts(self, among: Mask, at_decode: int, room_s: Floats | float, *, alone: bool = False) -> PromptBounds:
        """Returns the bounds of computing the prompt at each of `among`. `room_s`, the wait for room at decode, is
        added to the TTFT. With `alone` nothing is pushed."""
        found = PromptBounds(len(self.view.columns))
        self._offer_use(found, self._pushed(at_decode, alone=alone), room_s, among)
        odd = (self.held.last > self.held.depth) & among
        end = min(self.usable_blocks, self.planner.survey.runs[-1].end if self.planner.survey.runs else 0)
        if self.scoring.fetch is not Fetch.NEVER and end:
            for local in self._depths(among):
                more = self._fetch(found, among, local, at_decode, room_s, alone=alone)
                if more is not None:
                    odd |= more
        if np.count_nonzero(odd):  # the most that it could have, for nothing
            self._free(found, odd, end, self._pushed(max(at_decode, end), alone=alone))
        return found

    def _pushed(self, at_decode: int, *, alone: bool) -> float:
        """Returns how many tokens prefill sends to decode."""
        return 0.0 if alone else float(max(0, self.request.prompt_tokens - at_decode * self.block))

    def _offer_use(self, found: PromptBounds, pushed: float, room_s: Floats | float, among: Mask) -> None:
        """Adds, for each of `among`, the option to use what it has."""
        cached = np.minimum(self.held.depth, self.usable_blocks) * self.block
        self._offer(found, self._way(cached, pushed, 0.0, exact=True), room_s, among)

    def _offer_part(
        self,
        found: PromptBounds,
        part: Fetching,
        pushed: float,
        room_s: Floats | float,
        among: Mask,
        local: int,
        *,
        instead: bool,
    ) -> None:
        """Adds an option to fetch, for those of `among` that have `local` blocks."""
        way = self._way(float(part.until * self.block), pushed, self._fetch_s(part), exact=True)
        self._offer(found, way, room_s, among & (self.held.depth == local), instead=instead)

    def _free(self, found: PromptBounds, here: Mask, end: int, pushed: float) -> None:
        """Notes that the instances `here` may have blocks up to `end` without fetching."""
        found.free(here, self._way(float(end * self.block), pushed, 0.0).cost)

    def _depths(self, among: Mask) -> Sequence[int]:
        """Returns the numbers of blocks that any of `among` has, ascending, and perhaps some that none has."""
        return [local for local in self.held.ends if (among & (self.held.depth == local)).any()]

    def _fetch(
        self, found: PromptBounds, among: Mask, local: int, at_decode: int, room_s: Floats | float, *, alone: bool
    ) -> Mask | None:
        """Adds the options to fetch for those of `among` that have `local` blocks; returns which of them are odd."""
        reach = self.reach if local <= self.reach else self.planner.reach(_NOBODY, local)
        reach = min(reach, self.usable_blocks)
        if not worth_weighing(reach, local, self.scoring.threshold):
            return None
        segments, end = self.planner.plan(_NOBODY, "", local, reach, self.planner.sources(_NOBODY))
        if not segments or not worth_weighing(end, local, self.scoring.threshold):
            return None
        if self.planner.grouped and self.planner.lower:  # shorter plans are not parts of the longest
            here: Mask = among & (self.held.depth == local)
            return here
        instead = self.scoring.fetch is Fetch.ALWAYS
        for part in self._parts(segments, local, end):
            spared = part.until if part.memory and local <= at_decode < part.until else at_decode
            pushed = self._pushed(spared, alone=alone)
            self._offer_part(found, part, pushed, room_s, among, local, instead=instead and part.memory)
            instead = False
        if self.planner.lower and not all(segment.tier is Tier.DRAM for segment in segments):
            self._hide(found, among & (self.held.depth == local), segments, local, end, at_decode, alone=alone)
        if len(segments) > 1:  # a holder on the reader's own node is preferred: its plan may have fewer of them
            odd: Mask = (
                among & (self.held.depth == local) & np.isin(self.view.columns[ColumnField.NODE], self._nodes(segments))
            )
            return odd
        return None

    def _parts(self, segments: Sequence[FetchSegment], local: int, end: int) -> list[Fetching]:
        if not self.planner.lower:
            return [self._fetching(segments, end)]
        ends = {end}
        if not all(segment.tier is Tier.DRAM for segment in segments):
            ends |= {segment.first for segment in segments} - {local}
        return [self._fetching(segments, until) for until in sorted(ends)]

    def _fetching(self, segments: Sequence[FetchSegment], until: int) -> Fetching:
        part = segments
        if segments[-1].first + segments[-1].blocks > until:
            part = [segment.until(until) for segment in segments if segment.first < until]
        lives = {segment.holder.ref.life for segment in part}
        blocks = blocks_of(part)
        memory, read_s = True, 0.0
        if self.planner.lower:
            memory = all(segment.tier is Tier.DRAM for segment in part)
            block_bytes = self.block * int(self.view.columns[ColumnField.KV_BYTES].min())
            read_s = self.planner.load_s(part, [segment.blocks * block_bytes for segment in part])[1]
        return Fetching(until, blocks, self.planner.ahead_of(lives), len(lives), read_s, memory)

    def _fetch_s(self, part: Fetching) -> Floats:
        columns = self.view.columns
        pulled = part.blocks * self.block * columns[ColumnField.KV_BYTES]
        nbytes = pulled + np.maximum(part.ahead, score.shared_bytes(pulled, columns[ColumnField.ARRIVING]))
        pull_s = self.planner.congestion * admitted(
            self.view, ColumnField.PULL, nbytes, float(max(0, part.holders - 1))
        )
        seconds: Floats = score.fetch_s(0.0, part.read_s, pull_s)
        return seconds

    def _hide(
        self,
        found: PromptBounds,
        here: Mask,
        segments: Sequence[FetchSegment],
        local: int,
        end: int,
        at_decode: int,
        *,
        alone: bool,
    ) -> None:
        """Adds a lower bound for the option that fetches what hides behind the queue, whose end lies between two of the
        steps tried."""
        busy = here & (self.queue_s > 0) & self.view.able
        if not busy.any():
            return
        ends = {
            segment.first + segment.blocks * k // HIDDEN_STEPS for segment in segments for k in range(HIDDEN_STEPS)
        } | {end}
        grid = [local, *sorted(e for e in ends if local < e <= end)]
        pushed = self._pushed(at_decode, alone=alone)
        for low, high in pairwise(grid):
            enough = 0.0 if low == local else self._fetch_s(self._fetching(segments, low))
            fits = busy & (enough <= self.queue_s + ROUNDING_S)
            if not fits.any():
                return
            self._free(found, fits, high, pushed)

    def _nodes(self, segments: Sequence[FetchSegment]) -> list[float]:
        """Returns hashes of the nodes of all instances that could be holders in one of these segments."""
        found = set()
        for segment in segments:
            alive = self.planner.among if segment.tier is Tier.DRAM else dict(self.planner.lower)[segment.tier]
            for run in self.planner.survey.runs:
                if run.end > segment.first and run.first < segment.first + segment.blocks:
                    alive &= run.sealed
            found |= {node(member.node_id) for member in self.planner.named(alive)}
        return list(found)

    def _way(
        self, cached: Floats | float, pushed: float, fetch_s: Floats | float, *, exact: bool = False
    ) -> PromptBound:
        """Computes what `prefills._choice` computes, for every instance. Sizes are in tokens. `exact` says that exactly
        so much is cached, and not at most so much."""
        view, columns = self.view, self.view.columns
        computed = self.request.prompt_tokens - cached
        pairs = score.attention_pairs(computed, cached)
        steps: Floats | float = 1.0
        if columns.rare(RareField.CHUNKED):
            steps = np.maximum(1.0, np.ceil(computed / columns[ColumnField.FITTED_CHUNK]))
        alone_s = prefill_s = fitted(view, ColumnField.PREFILL, computed, pairs, steps)
        slower_s: Floats | float = 0.0
        stall_s: Floats | float = 0.0
        if columns.rare(RareField.RUNNING):
            rows = columns[ColumnField.RUNNING]
            chunks = np.maximum(1.0, np.ceil(computed / columns[ColumnField.CHUNK]))
            step_s = fitted(view, ColumnField.DECODE, rows, columns[ColumnField.CONTEXT])
            slower_s, stall_s = score.slower_s(rows, chunks, step_s), score.stall_s(rows, alone_s)
            prefill_s = alone_s + slower_s
        queue_s = self._queue_of(computed, prefill_s)
        tail_s = self._tail_s(pushed, prefill_s) if pushed else 0.0
        ttft_s = score.ttft_s(queue_s, fetch_s, prefill_s, tail_s)
        cost_s = score.prompt_cost_s(ttft_s, stall_s, self._others_s(queue_s, fetch_s, prefill_s, exact=exact))
        return PromptBound(ttft_s, cost_s, queue_s, fetch_s, computed, pairs, steps, alone_s, slower_s, tail_s)

    def _tail_s(self, pushed: float, prefill_s: Floats) -> Floats:
        """Returns the tail of so many tokens that are sent to decode."""
        columns = self.view.columns
        sent = pushed * columns[ColumnField.KV_BYTES]
        before = score.shared_bytes(sent, columns[ColumnField.SENDING], self.arriving)
        tail_s: Floats = score.tail_s(sent, before, columns[ColumnField.TRANSFER], prefill_s)
        return tail_s

    def _offer(
        self, found: PromptBounds, way: PromptBound, room_s: Floats | float, here: Mask, *, instead: bool = False
    ) -> None:
        """Adds an option for the instances `here`; with `instead` it replaces earlier ones."""
        slo_s = self.scoring.ttft_slo_s - room_s
        cost, least, drains = way.cost, way.ttft, None
        tight = bool(self.view.columns.rare(RareField.RUNNING)) and self.scoring.tbt_slo_s < np.inf
        if tight or ((way.ttft > slo_s) & self.view.able & here).any():
            prompt_s = admitted(self.view, ColumnField.PREFILL, way.computed, way.pairs, way.steps)
            prompt_s, alone_s = prompt_s + way.slower_s, prompt_s
            least = score.judged_ttft_s(way.queue_s, self.yielding_s, way.fetch_s, prompt_s, way.tail_s)
            passes = least <= slo_s + ROUNDING_S
            if tight:
                rows = self.view.columns[ColumnField.RUNNING]
                passes &= (rows <= 0) | (self._rows_tbt_s(way, alone_s) <= self.scoring.tbt_slo_s + ROUNDING_S)
            cost = np.where(passes, cost, np.inf)
            start_s = score.most(way.queue_s - self.yielding_s, way.fetch_s)
            drains = least - slo_s <= start_s - way.fetch_s + ROUNDING_S
        found.offer(cost, least, drains, here, instead=instead)

    def _rows_tbt_s(self, way: PromptBound, prompt_s: Floats) -> Floats:
        columns = self.view.columns
        chunks = np.maximum(1.0, np.ceil(way.computed / columns[ColumnField.CHUNK]))
        step_s = admitted(self.view, ColumnField.DECODE, columns[ColumnField.RUNNING], columns[ColumnField.CONTEXT])
        busy_s = self.wait_s + way.alone
        tbt_s: Floats = score.mixed_tbt_s(step_s, prompt_s / chunks, busy_s, columns[ColumnField.RESIDENCE])
        return tbt_s

    @cached_property
    def wait_s(self) -> Floats:
        """The queue of each instance, as `PrefillQueue.wait_s` computes it."""
        columns = self.view.columns
        return np.maximum(
            0.0, columns[ColumnField.BACKLOG] - np.maximum(0.0, self.view.now - columns[ColumnField.AS_OF])
        )

    # ── answers ───────────────────────────────────────────────────────────────────────────────────

    def answers(self, *, alone: bool = False) -> AnswerBounds:
        """Computes what `decodes.choice` computes, for every instance."""
        view, columns, request = self.view, self.view.columns, self.request
        requests, limit, stay_s = (
            columns[ColumnField.REQUESTS],
            columns[ColumnField.MAX_RUNNING],
            columns[ColumnField.RESIDENCE],
        )
        size, context = requests + 1, columns[ColumnField.CONTEXT] + request.prompt_tokens
        slot_s: Floats | float = 0.0
        if columns.rare(RareField.LIMITED):
            too_many = np.maximum(0.0, size - limit)
            if too_many.any():
                slot_s = score.drain_s(too_many, requests, stay_s)
                size, context = score.running(size, context, limit)
        tbt_s = fitted(view, ColumnField.DECODE, size, context)
        if columns.rare(RareField.BESIDE):
            chunk = columns[ColumnField.CHUNK]
            steps = np.maximum(1.0, np.ceil(chunk / columns[ColumnField.FITTED_CHUNK]))
            chunk_s = fitted(view, ColumnField.PREFILL, chunk, score.attention_pairs(chunk, 0.0), steps)
            tbt_s = score.mixed_tbt_s(tbt_s, chunk_s, self.wait_s + columns[ColumnField.COMING] * stay_s, stay_s)
        blocks, whole = self._blocks()
        free = columns[ColumnField.FREE_BLOCKS]
        short = free < np.minimum(whole, columns[ColumnField.CAPACITY])
        landing_s: Floats | float = 0.0
        lacking = blocks - (columns[ColumnField.FREE_PAGES] if alone else free)
        if (lacking > 0).any():
            each = np.where(columns[ColumnField.EACH] > 0, columns[ColumnField.EACH], blocks)
            landing_s = score.room_s(lacking, each, requests, stay_s)
        tail_s: Floats | float = 0.0
        if not alone:
            sent = (
                np.maximum(0.0, request.prompt_tokens - self.held.sealed * self.block) * columns[ColumnField.KV_BYTES]
            )
            before = score.shared_bytes(sent, columns[ColumnField.ARRIVING])
            tail_s = score.tail_s(sent, before, self.peers.transfer.bytes_per_s, np.inf)
        return AnswerBounds(tbt_s, landing_s, slot_s, tail_s, short)

    def _blocks(self) -> tuple[int, int]:
        """Returns the blocks of the prompt with its first token, and of the prompt with the whole answer."""
        request = self.request
        whole = -(-(request.prompt_tokens + max(1, request.max_tokens)) // self.block)
        return -(-(request.prompt_tokens + 1) // self.block), whole
