"""What a request would cost at every instance at once, in numpy: the formulas of prefills.py, decodes.py and
interference.py over columns. A *bound*: never more than weighing the instance says (but for rounding), and just as much
for all instances but the few *odd* ones, which hold blocks in ways that only a plan of their own tells. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from kvmesh.kvcache.tiers import Tier
from services.conductor.costs.fit import HALF_LIFE_S
from services.conductor.costs.interference import SLOWEST, STALL_WEIGHT
from services.conductor.costs.models import HIDDEN_SHARE
from services.conductor.domain import Fetch, Schedule
from services.conductor.loads.queues import PRIORITY_STEP_S
from services.conductor.loads.sizes import MARKS, ahead
from services.conductor.placing.prefills import worth_weighing
from services.conductor.placing.terms import Terms
from services.conductor.prefixes.index import Place
from services.conductor.prefixes.routes import Leg, Mesh
from services.conductor.screening.columns import Chosen, View
from services.conductor.screening.fields import Field, Floats, Mask
from services.conductor.screening.filling import node
from services.conductor.screening.holders import MAX_RUNS, Held

ROUNDING_S = 1e-9
TAIL_SHARE = 1 - HIDDEN_SHARE  # of a transfer: see `TransferModel.tail_s`
HIDDEN_STEPS = 4  # parts of a leg in which the end that hides behind a queue is looked for
_NOBODY = Place(0)


def fitted(view: View, model: int, x1: Floats, x2: Floats, n: Floats | float = 1.0, *, prior: bool = False) -> Floats:
    """As `FittedModel.predict`; `prior`: what its prior says."""
    a, b, c, d, knee = (view.columns[model + i + 5 * prior] for i in range(5))
    seconds: Floats = a * n + b * x1 + c * x2
    return seconds + d * np.maximum(0.0, x1 - knee) if d.any() else seconds


def admitted(view: View, model: int, x1: Floats, x2: Floats, n: Floats | float = 1.0) -> Floats:
    """As `FittedModel.admission_s`."""
    seconds, before = fitted(view, model, x1, x2, n), fitted(view, model, x1, x2, n, prior=True)
    if (seconds <= before).all():  # nothing to fade
        return seconds
    floor = np.minimum(seconds, before)
    age_s = np.maximum(0.0, view.now - view.columns[model + 10])
    return np.maximum(floor, seconds * np.exp2(-age_s / HALF_LIFE_S))


def mixed(step_s: Floats, chunk_s: Floats, busy_s: Floats, stay_s: Floats) -> Floats:
    """As `interference.mixed_tbt_s`."""
    share = np.minimum(1.0, np.maximum(0.0, busy_s) / np.maximum(SLOWEST * stay_s, 1e-9))
    return step_s + chunk_s * share


@dataclass(frozen=True)
class Fetching:
    """One way to fetch, for all instances that have the same blocks: up to block `until`, `blocks` of them by wire."""

    until: int
    blocks: int
    ahead: int  # bytes
    holders: int
    read_s: float  # at the holders, before they send
    memory: bool  # all of it out of memory


class Weights:
    """One request beside every instance of a view; `among` them those of one KV identity that matter."""

    def __init__(self, request: Schedule, mesh: Mesh, terms: Terms, blocks: Held, among: Chosen) -> None:
        self.view, self.request, self.mesh, self.terms, self.held = among.view, request, mesh, terms, blocks
        one = among.first
        self.block = one.model.block_tokens
        self.usable_blocks = (request.prompt_tokens - 1) // self.block
        self.peers = one.fits
        self.arriving = 0  # bytes, at the decode instance that was chosen

    @cached_property
    def short_queue_s(self) -> Floats:
        """As `load.passing_s` tells of `queue_s`."""
        columns, ahead_s = self.view.columns, self.queue_s
        if not columns[Field.LONG_CHUNK].any():
            return ahead_s
        long_s = ahead_s * columns[Field.LONG_SHARE]
        short_s = ahead_s - long_s
        return np.asarray(short_s + np.minimum(long_s, short_s + columns[Field.LONG_CHUNK] / 2))

    def _queue_of(self, computed: Floats, size_s: Floats) -> Floats:
        """What a prompt waits, of which so many tokens are computed in `size_s`."""
        queue_s = self.queue_s
        if self.short_queue_s is not queue_s:
            queue_s = np.where(computed <= self.view.columns[Field.FITTED_CHUNK], self.short_queue_s, queue_s)
        if not self.by_size.any():
            return queue_s
        return np.where(self.by_size, self._ahead_s(size_s), queue_s)

    @cached_property
    def by_size(self) -> Mask:
        """Whose line goes by size."""
        return self.view.columns[Field.SIZE_WEIGHT] > 0

    def _ahead_s(self, size_s: Floats) -> Floats:
        """Never more than `sizes.ahead` and `Line.wait_s` tell."""
        columns = self.view.columns
        rank = self.view.now + self.request.priority * PRIORITY_STEP_S + size_s * columns[Field.SIZE_WEIGHT]
        before = sum((columns[Field.MARK + n] <= rank).astype(np.float64) for n in range(MARKS))
        return np.maximum(0.0, self.wait_s - columns[Field.LISTED] * (1 - before / MARKS) - ROUNDING_S)

    def _others_s(self, queue_s: Floats, fetch_s: Floats | float) -> Floats | float:
        """Never more than `Line.others_s` tells, beside a start as late as these two tell: what begins later has less
        behind it."""
        if not self.by_size.any():
            return 0.0
        behind_s = np.maximum(0.0, self.wait_s - np.maximum(queue_s, fetch_s))
        return np.where(self.by_size, min(1.0, self.terms.line.settings.later) * behind_s, 0.0)

    @cached_property
    def queue_s(self) -> Floats:
        """As `PrefillQueue.ahead_s` tells of long prompts."""
        columns, now = self.view.columns, self.view.now
        wait = np.maximum(0.0, columns[Field.BACKLOG] - np.maximum(0.0, now - columns[Field.AS_OF]))
        ranked = wait > 0
        if not self.request.priority:
            ranked &= columns[Field.RANKED] > 0
        ranked &= ~self.by_size
        for row in np.flatnonzero(ranked & self.view.able).tolist():
            wait[row] = columns.instances[row].queue.ahead_s(now, self.request.priority)[0]
        return wait

    @cached_property
    def yielding_s(self) -> Floats:
        """Of `queue_s`, work for which nobody is refused."""
        columns, found = self.view.columns, np.zeros(len(self.view.columns))
        for row in np.flatnonzero((columns[Field.YIELDS] > 0) & self.view.able).tolist():
            queue = columns.instances[row].queue
            if queue.size_weight:  # all that yields there, be it behind this one
                found[row] = ahead(queue, self.view.now, self.request.priority, np.inf).yielding_s
            else:
                found[row] = queue.ahead_s(self.view.now, self.request.priority)[1]
        return found

    # ── prompts ───────────────────────────────────────────────────────────────────────────────────

    def prompts(self, among: Mask, at_decode: int, room_s: Floats | float, *, alone: bool = False) -> Prompts:
        """Computing the prompt at each of `among`. `room_s`: waiting for room at decode, in the TTFT besides. `alone`:
        nothing is pushed."""
        found = Prompts(len(self.view.columns))
        self._use(found, at_decode, room_s, alone=alone)
        odd = self.held.last > self.held.depth
        end = min(self.usable_blocks, self.mesh.survey.runs[-1].end if self.mesh.survey.runs else 0)
        if self.terms.fetch is not Fetch.NEVER and end:
            for local in (0, *(run.end for run in self.mesh.survey.runs[:MAX_RUNS])):
                here = among & (self.held.depth == local)
                if here.any():
                    odd |= here & self._fetch(found, here, local, at_decode, room_s, alone=alone)
        if odd.any():  # the most that it could have, for nothing
            tokens = float(end * self.block)
            pushed = max(0, self.request.prompt_tokens - max(at_decode, end) * self.block)
            free = self._way(tokens, 0.0 if alone else float(pushed), 0.0)
            found.cost[odd] = np.minimum(found.cost, free.cost)[odd]
            found.least[odd] = -np.inf
        return found

    def _use(self, found: Prompts, at_decode: int, room_s: Floats | float, *, alone: bool) -> None:
        cached = np.minimum(self.held.depth, self.usable_blocks) * self.block
        pushed = 0.0 if alone else float(max(0, self.request.prompt_tokens - at_decode * self.block))
        self._offer(found, self._way(cached, pushed, 0.0), room_s, None)

    def _fetch(
        self, found: Prompts, here: Mask, local: int, at_decode: int, room_s: Floats | float, *, alone: bool
    ) -> Mask:
        """What those `here`, who have `local` blocks, could fetch; returns who of them is odd."""
        nobody = np.zeros(len(here), dtype=np.bool_)
        reach = min(self.mesh.reach(_NOBODY, local), self.usable_blocks)
        if not worth_weighing(reach, local, self.terms.threshold):
            return nobody
        legs, end = self.mesh.plan(_NOBODY, "", local, reach, self.mesh.ways(_NOBODY))
        if not legs or not worth_weighing(end, local, self.terms.threshold):
            return nobody
        instead = self.terms.fetch is Fetch.ALWAYS
        for part in self._parts(legs, local, end):
            spared = part.until if part.memory and local <= at_decode < part.until else at_decode
            pushed = 0.0 if alone else float(max(0, self.request.prompt_tokens - spared * self.block))
            fetch_s = self._fetch_s(part)
            way = self._way(float(part.until * self.block), pushed, fetch_s)
            self._offer(found, way, room_s, here, instead=instead and part.memory)
            instead = False
        if not all(leg.tier is Tier.DRAM for leg in legs):
            self._hide(found, here, legs, local, end, at_decode, alone=alone)
        if len(legs) > 1:  # a holder on the reader's own node is preferred: its plan may have fewer of them
            return here & np.isin(self.view.columns[Field.NODE], self._nodes(legs))
        return nobody

    def _parts(self, legs: Sequence[Leg], local: int, end: int) -> list[Fetching]:
        ends = {end}
        if not all(leg.tier is Tier.DRAM for leg in legs):
            ends |= {leg.first for leg in legs} - {local}
        return [self._fetching(legs, until) for until in sorted(ends)]

    def _fetching(self, legs: Sequence[Leg], until: int) -> Fetching:
        part = [leg.until(until) for leg in legs if leg.first < until]
        lives = {leg.holder.ref.life for leg in part}
        block_bytes = self.block * int(self.view.columns[Field.KV_BYTES].min())
        blocks = sum(leg.blocks for leg in part)
        memory = all(leg.tier is Tier.DRAM for leg in part)
        return Fetching(
            until, blocks, self.mesh.ahead(part), len(lives), self.mesh.load_s(part, block_bytes)[1], memory
        )

    def _fetch_s(self, part: Fetching) -> Floats:
        columns = self.view.columns
        pulled = part.blocks * self.block * columns[Field.KV_BYTES]
        nbytes = pulled + np.maximum(part.ahead, np.minimum(pulled, columns[Field.ARRIVING]))
        holders = np.full(len(columns), float(max(0, part.holders - 1)))
        return part.read_s + self.mesh.congestion * admitted(self.view, Field.PULL, nbytes, holders)

    def _hide(
        self, found: Prompts, here: Mask, legs: Sequence[Leg], local: int, end: int, at_decode: int, *, alone: bool
    ) -> None:
        """The end that hides behind the queue is somewhere between two of these: no dearer than what it can be."""
        busy = here & (self.queue_s > 0) & self.view.able
        if not busy.any():
            return
        ends = {leg.first + leg.blocks * k // HIDDEN_STEPS for leg in legs for k in range(HIDDEN_STEPS)} | {end}
        grid = [local, *sorted(e for e in ends if local < e <= end)]
        pushed = 0.0 if alone else float(max(0, self.request.prompt_tokens - at_decode * self.block))
        for low, high in pairwise(grid):
            enough = 0.0 if low == local else self._fetch_s(self._fetching(legs, low))
            fits = busy & (enough <= self.queue_s + ROUNDING_S)
            if not fits.any():
                return
            way = self._way(float(high * self.block), pushed, 0.0)
            found.cost[fits] = np.minimum(found.cost, way.cost)[fits]
            found.least[fits] = -np.inf

    def _nodes(self, legs: Sequence[Leg]) -> list[float]:
        """Hashes of the nodes of all who could be named for one of these legs."""
        found = set()
        for leg in legs:
            alive = self.mesh.among if leg.tier is Tier.DRAM else dict(self.mesh.lower)[leg.tier]
            for run in self.mesh.survey.runs:
                if run.end > leg.first and run.first < leg.first + leg.blocks:
                    alive &= run.sealed
            found |= {node(member.node_id) for member in self.mesh.named(alive)}
        return list(found)

    def _way(self, cached: Floats | float, pushed: float, fetch_s: Floats | float) -> Way:
        """As `prefills._choice`. Tokens, but `fetch_s`."""
        view, columns = self.view, self.view.columns
        computed = self.request.prompt_tokens - cached + np.zeros(len(columns))
        pairs = computed * (computed + 2 * cached) / 2
        steps = np.maximum(1.0, np.ceil(computed / columns[Field.FITTED_CHUNK]))
        alone_s = prefill_s = fitted(view, Field.PREFILL, computed, pairs, steps)
        slower_s: Floats | float = 0.0
        stall_s: Floats | float = 0.0
        rows = columns[Field.RUNNING]
        if rows.any():
            chunks = np.maximum(1.0, np.ceil(computed / columns[Field.CHUNK]))
            step_s = fitted(view, Field.DECODE, rows, columns[Field.CONTEXT])
            slower_s, stall_s = np.where(rows > 0, chunks * step_s, 0.0), rows * alone_s
            prefill_s = alone_s + slower_s
        sent = pushed * columns[Field.KV_BYTES]
        ahead = np.minimum(sent, np.maximum(columns[Field.SENDING], self.arriving)) if pushed else 0.0
        whole_s = (sent + ahead) / columns[Field.TRANSFER]
        tail_s = np.maximum(whole_s - prefill_s, whole_s * TAIL_SHARE) if pushed else 0.0
        queue_s = self._queue_of(computed, prefill_s)
        ttft_s = np.maximum(queue_s, fetch_s) + prefill_s + tail_s
        cost_s = ttft_s + STALL_WEIGHT * stall_s + self._others_s(queue_s, fetch_s)
        return Way(ttft_s, cost_s, queue_s, fetch_s, computed, pairs, steps, alone_s, slower_s, tail_s)

    def _offer(
        self, found: Prompts, way: Way, room_s: Floats | float, here: Mask | None, *, instead: bool = False
    ) -> None:
        """One way more, for those `here`; `instead` of what was offered before."""
        slo_s = self.terms.ttft_slo_s - room_s
        able = self.view.able if here is None else self.view.able & here
        cost, least = way.cost, way.ttft
        drains = np.zeros(len(able), dtype=np.bool_)
        rows = self.view.columns[Field.RUNNING]
        tight = bool(rows.any()) and self.terms.tbt_slo_s < np.inf
        if tight or (way.ttft[able] > (slo_s if isinstance(slo_s, float) else slo_s[able])).any():
            prompt_s = admitted(self.view, Field.PREFILL, way.computed, way.pairs, way.steps)
            start_s = np.maximum(way.queue_s - np.minimum(self.yielding_s, way.queue_s), way.fetch_s)
            least = start_s + prompt_s + way.slower_s + way.tail_s
            passes = least <= slo_s + ROUNDING_S
            if tight:
                passes &= (rows <= 0) | (self._rows_tbt_s(way, prompt_s) <= self.terms.tbt_slo_s + ROUNDING_S)
            cost = np.where(passes, cost, np.inf)
            drains = least - slo_s <= start_s - way.fetch_s + ROUNDING_S
        found.offer(cost, least, drains, here, instead=instead)

    def _rows_tbt_s(self, way: Way, prompt_s: Floats) -> Floats:
        columns = self.view.columns
        chunks = np.maximum(1.0, np.ceil(way.computed / columns[Field.CHUNK]))
        step_s = admitted(self.view, Field.DECODE, columns[Field.RUNNING], columns[Field.CONTEXT])
        return mixed(step_s, prompt_s / chunks, self.wait_s + way.alone, columns[Field.RESIDENCE])

    @cached_property
    def wait_s(self) -> Floats:
        """As `PrefillQueue.wait_s` tells."""
        columns = self.view.columns
        return np.maximum(0.0, columns[Field.BACKLOG] - np.maximum(0.0, self.view.now - columns[Field.AS_OF]))

    # ── answers ───────────────────────────────────────────────────────────────────────────────────

    def answers(self, *, alone: bool = False) -> Answers:
        """As `decodes.choice`, for each."""
        view, columns, request = self.view, self.view.columns, self.request
        requests, limit, stay_s = columns[Field.REQUESTS], columns[Field.MAX_RUNNING], columns[Field.RESIDENCE]
        size, context = requests + 1, columns[Field.CONTEXT] + request.prompt_tokens
        too_many = np.maximum(0.0, size - limit)
        slot_s: Floats | float = 0.0
        if too_many.any():
            slot_s = stay_s * too_many / np.maximum(1.0, requests)
            context = np.where(too_many > 0, context * (limit / size), context)
            size = np.minimum(size, limit)
        tbt_s = fitted(view, Field.DECODE, size, context)
        busy_s = self.wait_s
        if busy_s.any():
            chunk = columns[Field.CHUNK]
            steps = np.maximum(1.0, np.ceil(chunk / columns[Field.FITTED_CHUNK]))
            chunk_s = fitted(view, Field.PREFILL, chunk, chunk * chunk / 2, steps)
            tbt_s = mixed(tbt_s, chunk_s, busy_s, stay_s)
        blocks = -(-(request.prompt_tokens + 1) // self.block)
        whole = -(-(request.prompt_tokens + max(1, request.max_tokens)) // self.block)
        free = columns[Field.FREE_BLOCKS]
        short = free < np.minimum(whole, columns[Field.CAPACITY])
        landing_s: Floats | float = 0.0
        lacking = blocks - (columns[Field.FREE_PAGES] if alone else free)
        if (lacking > 0).any():
            each = np.where(columns[Field.EACH] > 0, columns[Field.EACH], blocks)
            leavers = np.maximum(1.0, lacking / np.maximum(1.0, each))
            landing_s = np.where(lacking > 0, stay_s * leavers / np.maximum(1.0, requests), 0.0)
        tail_s: Floats | float = 0.0
        if not alone:
            sent = np.maximum(0.0, request.prompt_tokens - self.held.sealed * self.block) * columns[Field.KV_BYTES]
            seem = sent + np.minimum(sent, columns[Field.ARRIVING])  # see `outgoing.shared_bytes`
            tail_s = seem / self.peers.transfer.bytes_per_s * TAIL_SHARE
        return Answers(tbt_s, landing_s, slot_s, tail_s, short)


@dataclass(frozen=True)
class Way:
    """One way to compute the prompt, at each. Seconds but for `computed`, `pairs`, `steps`."""

    ttft: Floats
    cost: Floats
    queue_s: Floats
    fetch_s: Floats | float
    computed: Floats
    pairs: Floats
    steps: Floats
    alone: Floats
    slower_s: Floats | float
    tail_s: Floats | float


class Prompts:
    """Of the ways of each instance: the least cost of those that may pass (inf: none does), the least TTFT by which
    they are judged, and the same of those whose queue can drain for long enough."""

    def __init__(self, count: int) -> None:
        self.cost = np.full(count, np.inf)
        self.least = np.full(count, np.inf)
        self.draining = np.full(count, np.inf)

    def offer(self, cost: Floats, least: Floats, drains: Mask, here: Mask | None, *, instead: bool) -> None:
        """One way more."""
        if here is None:
            self.cost, self.least = np.minimum(self.cost, cost), np.minimum(self.least, least)
            self.draining = np.minimum(self.draining, np.where(drains, least, np.inf))
            return
        if instead:
            self.cost[here] = self.least[here] = self.draining[here] = np.inf
        self.cost[here] = np.minimum(self.cost, cost)[here]
        self.least[here] = np.minimum(self.least, least)[here]
        self.draining[here] = np.minimum(self.draining, np.where(drains, least, np.inf))[here]


@dataclass(frozen=True)
class Answers:
    """Terms of the TBT at each, seconds. `short`: of pages for prompt and answer together."""

    tbt: Floats
    landing: Floats | float
    slot: Floats | float
    tail: Floats | float
    short: Mask

    @property
    def score(self) -> Floats:
        """As `DecodeChoice.score_s`."""
        return self.tbt + self.landing + self.slot + self.tail
