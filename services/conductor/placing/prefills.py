"""Algorithm 1 of the Mooncake paper (section 6, "KVCache-centric scheduling": for each prefill instance the queue, the
prefix that it has or would fetch, and the rest to compute; the least TTFT wins). What a request would cost at each
prefill instance, with the prefix that is in its memory or with more fetched: from others, or out of lower tiers, up to
where that pays. Pure: instances are only read here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvmesh.kvcache.tiers import Tier
from kvmesh.services.conductor import score
from kvmesh.services.conductor.costs.fit import ENOUGH_SAMPLES
from kvmesh.services.conductor.costs.interference import NOBODY, PromptAmongRows, shared
from kvmesh.services.conductor.domain import Fetch, Schedule
from kvmesh.services.conductor.fleet.instance import Instance
from kvmesh.services.conductor.loads.shortest_first import ALONE, OvertakingTerms, ahead
from kvmesh.services.conductor.prefixes.fetch_plan import FetchPlanner, FetchSegment, blocks_of, sizes_of
from kvmesh.services.conductor.prefixes.index import PrefixPlace

# A lower tier is forbidden to its own node when it would make the first token later by more than this.
DEAR_SHARE, DEAR_S = 0.25, 0.05
ALL_BLOCKS = 1 << 40  # at decode, of any prompt: nothing is sent
WAIT_STEPS = 12  # halvings of the time after which one would pass


@dataclass(slots=True)
class PrefillChoice:
    """One option for one prefill instance to serve the request, and the terms of its TTFT in seconds."""

    instance: Instance
    local_blocks: int  # leading prompt blocks that are in its memory or coming
    cached_tokens: int  # of the prompt, fetched ones included
    computed_tokens: int
    queue_s: float
    pull_s: float  # on the wires
    load_s: float  # out of lower tiers, its own or the holders'; 0 only when none are used
    fetch_s: float  # both: until all that is fetched is in its memory
    prefill_s: float
    tail_s: float
    admission_prefill_s: float
    segments: tuple[FetchSegment, ...] = ()
    fetched_to: int = 0  # the block that `legs` end before
    pull_bytes: int = 0
    ahead_bytes: int = 0  # what the holders have to send before, or what slows it down on the way here as much
    pushed_bytes: int = 0  # to decode
    pushed_tokens: int = 0  # whose computing these bytes are the fruit of
    push_ahead: int = 0  # what slows that down, as if it went before
    shared: PromptAmongRows = NOBODY  # with rows that run there; what they add is in `prefill_s`
    yielding_s: float = 0.0  # of `queue_s`: work for which nobody is refused
    others_s: float = 0.0  # what others in the queue lose by it
    # As they were when they were asked for first: one decision asks many times.
    _judged_s: float | None = field(default=None, init=False, repr=False, compare=False)
    _cost_s: float | None = field(default=None, init=False, repr=False, compare=False)
    _ttft_s: float | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def start_s(self) -> float:
        """The seconds until it computes; fetching goes on while others are served."""
        return max(self.queue_s, self.fetch_s)

    @property
    def ttft_s(self) -> float:
        """The predicted TTFT, without the wait for room at decode."""
        if self._ttft_s is None:
            self._ttft_s = score.ttft_s(self.queue_s, self.fetch_s, self.prefill_s, self.tail_s)
        return self._ttft_s

    @property
    def cost_s(self) -> float:
        """The cost for ranking, which includes what the running rows and the queue lose."""
        if self._cost_s is None:
            self._cost_s = score.prompt_cost_s(self.ttft_s, self.shared.stall_s, self.others_s)
        return self._cost_s

    @property
    def admission_start_s(self) -> float:
        """The seconds until it computes, if queued work that yields is left out."""
        return max(self.queue_s - self.yielding_s, self.fetch_s)

    @property
    def admission_ttft_s(self) -> float:
        """The TTFT by which work may be refused (see `Estimate.admission_s` in costs/fit.py, and margins.py)."""
        if self._judged_s is None:
            self._judged_s = self._judge_s()
        return self._judged_s

    def _judge_s(self) -> float:
        seconds = score.judged_ttft_s(
            self.queue_s, self.yielding_s, self.fetch_s, self.admission_prefill_s, self.tail_s
        )
        ahead_s = max(0.0, self.queue_s - self.yielding_s)
        return self.instance.margins.ttft.of(seconds, ahead_s / max(self.admission_prefill_s, 1e-9))

    @property
    def admission_alone_s(self) -> float:
        """The TTFT by which work may be refused, if there were no queue."""
        return self.fetch_s + self.admission_prefill_s + self.tail_s

    @property
    def pulled_blocks(self) -> int:
        """The number of blocks to fetch from others."""
        return blocks_of([segment for segment in self.segments if not segment.own]) if self.segments else 0

    @property
    def loaded_blocks(self) -> int:
        """The number of blocks to read from its own lower tiers."""
        return blocks_of([segment for segment in self.segments if segment.own]) if self.load_s else 0

    @property
    def tier(self) -> Tier:
        """The slowest tier that any block comes from."""
        return max(segment.tier for segment in self.segments) if self.load_s else Tier.DRAM


@dataclass(slots=True)
class PrefillCandidate:
    """One instance and its options: with the prefix that it has, and with what it could fetch if that is worth
    weighing. `rule` says whether fetching is weighed against computing or always done."""

    use: PrefillChoice
    fetches: tuple[PrefillChoice, ...] = ()
    rule: Fetch = Fetch.CHEAPER
    own: PrefillChoice | None = None  # with all that its own lower tiers have, as it does when nobody limits it
    _best: tuple[float, float, PrefillChoice | None] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def options(self) -> tuple[PrefillChoice, ...]:
        """The options, at least one. `Fetch.ALWAYS` concerns what lies in memory; reading a lower tier must pay in any
        case."""
        if self.rule is Fetch.ALWAYS and any(fetch.tier is Tier.DRAM for fetch in self.fetches):
            return self.fetches
        return (self.use, *self.fetches)

    def best(self, slo_s: float, tbt_slo_s: float = float("inf")) -> PrefillChoice | None:
        """Returns the cheapest option that may meet the TTFT SLO, and lets the rows beside it meet the TBT SLO; None if
        none does."""
        if self._best is None or self._best[0] != slo_s or self._best[1] != tbt_slo_s:
            options = self.options if self.fetches else (self.use,)
            passing = [o for o in options if o.admission_ttft_s <= slo_s and o.shared.rows_tbt_s <= tbt_slo_s]
            best = (min(passing, key=lambda o: o.cost_s) if len(passing) > 1 else passing[0]) if passing else None
            self._best = slo_s, tbt_slo_s, best
        return self._best[2]

    def load_until(self, chosen: PrefillChoice, slo_s: float) -> int | None:
        """Returns the block from which on the instance must not read its own lower tiers when `chosen` was chosen; None
        if it may read all. Reading that is only a little slower than computing is allowed, because the models are not
        exact enough to forbid it."""
        end = chosen.cached_tokens // chosen.instance.model.block_tokens
        if self.own is None or self.own.fetched_to <= end:
            return None
        return end if self.own.ttft_s > min(slo_s, chosen.ttft_s * (1 + DEAR_SHARE) + DEAR_S) else None

    @property
    def instance(self) -> Instance:
        """The instance."""
        return self.use.instance


def candidate(
    request: Schedule,
    instance: Instance,
    place: PrefixPlace,
    planner: FetchPlanner,
    at_decode: int,
    threshold: float,
    now: float,
    rule: Fetch = Fetch.CHEAPER,
    arriving: int = 0,
    overtaking: OvertakingTerms = ALONE,
) -> PrefillCandidate:
    """Weighs one prefill instance. `place` is where its blocks show in the survey, `at_decode` the leading blocks that
    need not be sent to decode, `arriving` the bytes that others send to decode."""
    there = _Decode(at_decode, arriving)
    local = planner.survey.depth(place)
    # The last token is always computed: its logits are the answer's first token.
    usable = (request.prompt_tokens - 1) // instance.model.block_tokens
    use = _choice(request, instance, local, min(local, usable), there, now, planner, overtaking)
    reach = min(planner.reach(place, local), usable)
    others = rule is not Fetch.NEVER and worth_weighing(reach, local, threshold)
    if not others:
        reach = min(planner.survey.depth_in_all(place), usable) if place.lower else local
    fetches = []
    for segments, end in _plans(instance, place, planner, local, reach, others=others):
        if not worth_weighing(end, local, threshold) and not all(segment.own for segment in segments):
            continue
        for part, until in _ends(instance, place, planner, segments, local, end, now):
            fetches.append(_choice(request, instance, local, until, there, now, planner, overtaking, part))
    own = None
    if place.lower and (found := _plans(instance, place, planner, local, usable, others=False)):
        own = _choice(request, instance, local, found[0][1], there, now, planner, overtaking, found[0][0])
    return PrefillCandidate(use, tuple(fetches), rule, own)


def worth_weighing(best: int, local: int, threshold: float) -> bool:
    """Says whether a prefix of `best` blocks is so much longer than the local one that fetching is weighed."""
    return best > local and best > threshold * local


def _plans(
    instance: Instance, place: PrefixPlace, planner: FetchPlanner, local: int, reach: int, *, others: bool
) -> list[tuple[tuple[FetchSegment, ...], int]]:
    """Returns ways to get the blocks up to `reach`, each with the block where it ends: others' memory before the
    instance's own lower tiers, and the reverse order where both hold something. Without `others`, only its own tiers
    are used."""
    if reach <= local:
        return []
    orders = [planner.sources(place, others=others)]
    if others and place.lower and (other := planner.sources(place, own_first=True)) != orders[0]:
        orders.append(other)
    plans = [planner.plan(place, instance.node_id, local, reach, order) for order in orders]
    return [plan for plan in plans if plan[0]]


def _ends(
    instance: Instance,
    place: PrefixPlace,
    planner: FetchPlanner,
    segments: tuple[FetchSegment, ...],
    local: int,
    end: int,
    now: float,
) -> list[tuple[tuple[FetchSegment, ...], int]]:
    """Returns a plan and, if it includes lower tiers, those beginnings of it that may be faster than the whole. Reading
    takes longer with each block, and each block read saves more computing than the one before; so the best end is the
    whole plan, a point where another segment begins, or what hides behind the queue."""
    if not planner.lower or all(segment.tier is Tier.DRAM for segment in segments):
        return [(segments, end)]
    if planner.grouped:  # a shorter prefix needs objects that the longer one does not
        shorter = {
            planner.plan(place, instance.node_id, local, until, planner.sources(place))
            for until in {segment.first for segment in segments} - {local, end}
            if until > local
        }
        return [(segments, end), *sorted((one for one in shorter if one[0]), key=lambda one: one[1])]
    ends = {segment.first for segment in segments} | {_hidden(instance, planner, segments, local, end, now)}
    return [(segments, end)] + [(cut(segments, until), until) for until in sorted(ends - {local, end})]


def _hidden(
    instance: Instance, planner: FetchPlanner, segments: tuple[FetchSegment, ...], local: int, end: int, now: float
) -> int:
    """Returns the last block up to which fetching takes no longer than the queue."""
    queue_s = instance.queue.wait_s(now)
    low, high = local, end
    while low < high:
        middle = (low + high + 1) // 2
        if _fetching(instance, planner, cut(segments, middle), now).fetch_s <= queue_s:
            low = middle
        else:
            high = middle - 1
    return low


def cut(segments: tuple[FetchSegment, ...], end: int) -> tuple[FetchSegment, ...]:
    """Returns the parts of the segments before block `end`."""
    return tuple(segment.until(end) for segment in segments if segment.first < end)


class _Decode(NamedTuple):
    """What decode contributes to a choice."""

    at_decode: int  # leading blocks that need not be sent
    arriving: int  # bytes that others send there


class _Fetching(NamedTuple):
    """How long fetching takes (in seconds), and how many bytes it moves."""

    pull_s: float
    load_s: float
    fetch_s: float
    pull_bytes: int
    ahead_bytes: int


_NOTHING = _Fetching(0.0, 0.0, 0.0, 0, 0)


def _fetching(instance: Instance, planner: FetchPlanner, segments: tuple[FetchSegment, ...], now: float) -> _Fetching:
    """Returns the time that fetching the segments takes. A holder reads before it sends; the reader's own tiers are
    read meanwhile."""
    sizes = sizes_of(segments, instance.model.cost)
    pulled = [segment for segment in segments if not segment.own]
    pull_bytes, ahead, pull_s = 0, 0, 0.0
    if pulled:
        pull_bytes, lives = (
            sum([nbytes for segment, nbytes in zip(segments, sizes, strict=True) if not segment.own]),
            {segment.holder.ref.life for segment in pulled},
        )
        ahead = max(planner.ahead_of(lives), score.shared_bytes(pull_bytes, planner.arriving(instance.ref.life)))
        pull_s = planner.congestion * instance.pull.seconds(pull_bytes + ahead, len(lives), now)
    own_s, others_s = planner.load_s(segments, sizes)
    return _Fetching(pull_s, max(own_s, others_s), score.fetch_s(own_s, others_s, pull_s), pull_bytes, ahead)


def _choice(
    request: Schedule,
    instance: Instance,
    local: int,
    cached_blocks: int,
    there: _Decode,
    now: float,
    planner: FetchPlanner,
    overtaking: OvertakingTerms,
    segments: tuple[FetchSegment, ...] = (),
) -> PrefillChoice:
    model = instance.model
    cached = cached_blocks * model.block_tokens
    computed = request.prompt_tokens - cached
    alone_s, admission_s = instance.prefill.both(computed, cached, now)
    beside = shared(instance, computed, alone_s, admission_s, now)
    prefill_s = alone_s + beside.slower_s
    took = _fetching(instance, planner, segments, now) if segments else _NOTHING
    # What decode fetches itself (see `placement._decode_pulls`) is not sent either.
    fetched = bool(segments) and all(segment.tier is Tier.DRAM for segment in segments)
    spared = cached_blocks if fetched and local <= there.at_decode < cached_blocks else there.at_decode
    pushed = push_ahead = 0
    tail_s = 0.0
    if spared < ALL_BLOCKS and (pushed := model.cost.handoff(request.prompt_tokens, spared)):
        push_ahead = score.shared_bytes(pushed, planner.outgoing.ahead(instance.ref.life), there.arriving)
        tail_s = instance.transfer.tail_s(pushed, prefill_s, push_ahead)
    queue_s, yielding_s, others_s = _queued(request, instance, prefill_s, computed, now, overtaking)
    return PrefillChoice(
        instance,
        local,
        cached,
        computed,
        queue_s=queue_s,
        pull_s=took.pull_s,
        load_s=took.load_s,
        fetch_s=took.fetch_s,
        prefill_s=prefill_s,
        tail_s=tail_s,
        admission_prefill_s=admission_s + beside.slower_s,
        segments=segments,
        fetched_to=cached_blocks if segments else 0,
        pull_bytes=took.pull_bytes,
        ahead_bytes=took.ahead_bytes,
        pushed_bytes=pushed,
        pushed_tokens=model.cost.sent_tokens(request.prompt_tokens, spared) if pushed else 0,
        push_ahead=push_ahead,
        shared=beside,
        yielding_s=yielding_s,
        others_s=others_s,
    )


def _queued(
    request: Schedule, instance: Instance, prefill_s: float, computed: int, now: float, overtaking: OvertakingTerms
) -> tuple[float, float, float]:
    """Returns, in seconds, the wait in the queue, how much of it yields, and what the prompt costs others in
    the queue."""
    queue, short, others_s = instance.queue, computed <= instance.prefill.chunk_tokens, 0.0
    if not queue.size_weight:
        queue_s, yielding_s = queue.ahead_s(now, request.priority, short=short)
    else:
        found = ahead(queue, now, request.priority, prefill_s)
        queue_s, yielding_s = overtaking.wait_s(found.wait_s, prefill_s, queue), found.yielding_s
        others_s = overtaking.others_s(found, prefill_s)
    if overtaking.by_tenant and queue.passes(request.tenant):
        turn_s = queue.turn_s(request.tenant, request.tenant_weight, now, short=short)
        yielding_s = max(yielding_s, queue_s - turn_s)
    return queue_s, yielding_s, others_s


def soonest(candidates: Sequence[PrefillCandidate], slo_s: float) -> tuple[PrefillChoice, float, float]:
    """For candidates that all miss the SLO, returns the option that comes nearest, the wait after which some option
    would meet the SLO (infinity if none would), and for how long waiting helps the nearest option. Only queues drain;
    fetching and computing take as long later."""
    options = [option for c in candidates for option in c.options]
    best = min(options, key=lambda o: o.admission_ttft_s)
    wanted_s = float("inf")
    for o in options:
        if o.admission_start_s + o.admission_prefill_s + o.tail_s - slo_s < wanted_s:  # else it waits no less
            wanted_s = min(wanted_s, wait_for_s(o, slo_s))
    return best, wanted_s, best.admission_start_s - best.fetch_s


def wait_for_s(option: PrefillChoice, slo_s: float) -> float:
    """Returns the seconds of waiting after which the option would be judged to meet the SLO; infinity if never. A
    multiple of the prediction is judged (margins.py), so the queue drains faster in that figure than by the clock."""
    if option.admission_alone_s > slo_s:
        return float("inf")
    if option.instance.margins.ttft.factor == 1.0:
        return min(option.admission_ttft_s - slo_s, option.admission_start_s - option.fetch_s)
    ahead_s = max(0.0, option.queue_s - option.yielding_s)
    margin, prompt_s = option.instance.margins.ttft, max(option.admission_prefill_s, 1e-9)

    def judged_s(waited_s: float) -> float:
        left_s = max(0.0, ahead_s - waited_s)
        seconds = max(left_s, option.fetch_s) + option.admission_prefill_s + option.tail_s
        return margin.of(seconds, left_s / prompt_s)

    low, high = 0.0, ahead_s
    for _ in range(WAIT_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if judged_s(middle) <= slo_s else (middle, high)
    return high


def least_s(candidates: Sequence[PrefillCandidate], slo_s: float) -> float:
    """Returns the least TTFT of any option if everything were idle, where even that is known to exceed the SLO. Returns
    0 where some option would meet it, or one was never measured and may be faster than assumed."""
    least = float("inf")
    for option in (option for c in candidates for option in c.options):
        if len(option.instance.fits.prefill(option.instance.axes).fit) < ENOUGH_SAMPLES:
            return 0.0
        least = min(least, _idle_s(option))
        if least <= slo_s:
            return 0.0
    return least


def _idle_s(option: PrefillChoice) -> float:
    """Returns the TTFT without a queue, rows beside it or other transfers. Fetching that was never measured counts as
    0."""
    seconds = option.admission_prefill_s - option.shared.slower_s
    if not option.load_s and not option.ahead_bytes and len(option.instance.fits.pull.fit) >= ENOUGH_SAMPLES:
        seconds += option.fetch_s
    return seconds if option.push_ahead else seconds + option.tail_s
