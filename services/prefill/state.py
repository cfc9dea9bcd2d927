"""The prefill brain manages every handoff, from the waiting prompts to the last acknowledged byte. Pure.

    state = PrefillState(config, PagePool(num_pages), NodeStore(num_extents))
    actions = state.step(event, now_ns)

It keeps these promises, whatever the order of events:

- a page is held by every handoff that may still read or write it: it is released only when decode knows how the
  handoff ended and neither load nor step nor push can touch it (PrefillHandoff.over);
- an extent of the host segment has one writer, a pull or a copy, and is read only once it is sealed; nobody waits
  longer for a pull than its timeout, and what has not arrived is computed;
- a pull that is planned for later begins when its request's turn comes, if that is sooner (or what it would bring is
  computed, if that is): nobody waits for a pull that has not begun;
- decode is told exactly one ending: FirstToken and FillDone, or Drained, or Failed (nothing once its stream broke);
- computation never waits for the landing; the push never begins without one or after its lease.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvmesh.blockservice.removals import NotHere
from kvmesh.chunk_pipeline import FittedChunkCost
from kvmesh.clock import NEVER, Tick
from kvmesh.errors import (
    BY_CODE,
    DeadlinePassed,
    HandoffLost,
    InvalidRequest,
    KvmeshError,
    Overloaded,
    Unavailable,
)
from kvmesh.instance.sampling import history_of
from kvmesh.kvcache.grouped_store import GroupedStore
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.page_pool import PagePool
from kvmesh.kvcache.prefix_cache import PrefixCache
from kvmesh.kvcache.sources import LowerTiers, Pulled
from kvmesh.ranks import protocol as m
from kvmesh.services.prefill import events as ev
from kvmesh.services.prefill.checks import BrainConfig
from kvmesh.services.prefill.compute_progress import ComputeProgress
from kvmesh.services.prefill.grouped_table import GroupedTable
from kvmesh.services.prefill.handoff import PrefillHandoff, PrefillPhase
from kvmesh.services.prefill.handoff_book import HandoffBook
from kvmesh.services.prefill.handoff_table import HandoffTable
from kvmesh.services.prefill.pipeline_times import PipelineTimes, StageTime
from kvmesh.services.prefill.planner import NS, Chunk, Planner, Wait
from kvmesh.services.prefill.pushes import HandoffPushes

NO_RATE_RETRY_MS = 1000
MAX_RETRY_MS = 60_000
RATE_WEIGHT = 0.2  # the weight of the newest step in the moving average
QUEUED_NS = 100_000_000  # how long a count of queued tokens serves refusals
# In the heap of deadlines, PATIENCE in place of a handle is the time when some request stops waiting for its pull, and
# a negative handle is the time of the planned pull of -handle.
PATIENCE = 0


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """Tells what waits and runs now. `queued_tokens` are those still to be computed."""

    queued_requests: int
    queued_tokens: int
    running_requests: int
    free_pages: int  # pages that are free or can be evicted


@dataclass(slots=True)
class _Step:
    """Is one step that was sent to the ranks."""

    chunks: tuple[Chunk, ...]
    waiting: set[int]  # ranks that have not answered
    sampled: dict[int, m.Sampled] = field(default_factory=dict)
    scores: dict[int, m.PromptScores] = field(default_factory=dict)  # of the tokens after those of its chunks
    failed: set[tuple[int, int]] = field(default_factory=set)  # (rank, handle)
    busy: dict[int, tuple[int, int]] = field(default_factory=dict)  # from when to when each stage computed it
    start_ns: int = 0
    end_ns: int = 0

    @property
    def tokens(self) -> int:
        return sum(c.end - c.start for c in self.chunks)


class PrefillState:
    """Keeps all handoffs of one instance. It has one owner and one thread; a request costs O(its blocks), a message
    O(1). For a model of several cache groups `store` is a GroupedStore, and `pool` has one pool for each of them."""

    def __init__(
        self, config: BrainConfig, pool: PagePool | Sequence[PagePool], store: NodeStore | GroupedStore
    ) -> None:
        self.config = config
        self.planner = Planner(config.plan)
        self._lives: HandoffBook
        if isinstance(store, GroupedStore):
            assert not isinstance(pool, PagePool), "one pool a cache group"
            self._lives = GroupedTable(config, pool, store, self.planner)
        else:
            assert isinstance(pool, PagePool), "one pool"
            self._lives = HandoffTable(config, pool, store, self.planner)
        self.pipeline = PipelineTimes(config.stages)
        self._chunk_cost = None if config.plan.chunk_cost is None else FittedChunkCost(config.plan.chunk_cost)
        self._done = ComputeProgress()  # of the steps that every rank has answered; steps run one after another
        self._pushes = HandoffPushes(self._lives, config.world, config.layouts, at_end=config.push_at_end)
        self._block = config.plan.block_tokens
        self._steps: dict[int, _Step] = {}
        self._next_step = 1
        self._deadlines: list[tuple[int, int]] = []
        self._ns_per_token = 0.0
        self._queued_tokens = self._queued_until_ns = 0  # the count that refusals use, and until when
        self._refusing = ""  # why no new work is taken
        self._silent = ""  # why no new work is taken until the ranks answer again
        self._doors = ev.Doors("", "")
        # The most tokens of the next step, where rows of a decode batch wait for it. None: as configured.
        self.most: Callable[[], int | None] = lambda: None

    # ── queries ──────────────────────────────────────────────────────────────────────────────────

    @property
    def grouped(self) -> GroupedTable | None:
        """The handoffs of a model of several cache groups; None: it has one."""
        return self._lives if isinstance(self._lives, GroupedTable) else None

    @property
    def _single(self) -> HandoffTable:
        assert isinstance(self._lives, HandoffTable), "the model has several cache groups"
        return self._lives

    @property
    def pool(self) -> PagePool:
        """The pages; of several cache groups those of the first."""
        return self._single.pool if self.grouped is None else self.grouped.pages.pools[0]

    @property
    def cache(self) -> PrefixCache:
        """Which pages have which blocks, for a model of one cache group."""
        return self._single.cache

    @property
    def cached_pages(self) -> int:
        """How many of `pool`'s pages hold what can be evicted."""
        return self._single.cache.evictable if self.grouped is None else self.grouped.cache.evictable(0)

    def page_pools(self) -> list[tuple[str, PagePool, int]]:
        """Returns the pages of each cache group, with its name ("all" where the model has one), and how many of them
        hold what can be evicted."""
        table = self.grouped
        if table is None:
            return [("all", self.pool, self.cached_pages)]
        numbered = enumerate(zip(table.groups, table.pages.pools, strict=True))
        return [(group.name, pool, table.cache.evictable(g)) for g, (group, pool) in numbered]

    @property
    def store(self) -> NodeStore:
        """The node store; of several cache groups that of the first."""
        return self._single.blocks.store if self.grouped is None else self.grouped.blocks.store.stores[0]

    @property
    def lower(self) -> LowerTiers | None:
        """What this node keeps below its host segment. It is set once, before the first event."""
        return self._lives.blocks.lower

    @lower.setter
    def lower(self, lower: LowerTiers | None) -> None:
        self._lives.blocks.lower = lower

    @property
    def reserve(self) -> Callable[[], int]:
        """Returns how many pages no new prompt may take. Whoever shares the pool sets it once."""
        return self._single.reserve

    @reserve.setter
    def reserve(self, reserve: Callable[[], int]) -> None:
        self._single.reserve = reserve

    @property
    def pulls(self) -> int:
        """The number of pulls under way, cancelled ones included."""
        return self._lives.blocks.pulls

    @property
    def seals(self) -> bool:
        """Whether blocks are being copied out of pages."""
        return self._lives.blocks.seals

    @property
    def handoffs(self) -> dict[int, PrefillHandoff]:
        """The handoffs that have not ended, by handle. To be read only."""
        return self._lives.handoffs

    def next_due(self) -> int:
        """When a Tick is due at the latest (monotonic ns); NEVER if nothing waits for the time."""
        return self._deadlines[0][0] if self._deadlines else NEVER

    def load(self) -> PrefillLoad:
        """Returns the load for heartbeats. Its cost is O(waiting requests)."""
        queued, ahead = 0, set[bytes]()  # the prompts, by their last usable keys, of those before in the queue
        for handle in self.planner.waiting:
            h = self.handoffs[handle]
            usable = self._lives.usable(h)
            if usable and usable[-1] in ahead:
                queued += h.prompt_tokens - len(usable) * self._block
            else:
                queued += self._lives.expected_rest(handle)
                ahead.update(usable[-1:])
        at_ranks = sum(step.tokens for step in self._steps.values())
        return PrefillLoad(
            queued_requests=len(self.planner.waiting),
            queued_tokens=queued + self.planner.unsubmitted_tokens + at_ranks,
            running_requests=sum(
                h.phase in (PrefillPhase.COMPUTING, PrefillPhase.PUSHING) for h in self.handoffs.values()
            ),
            free_pages=self._lives.free_pages,
        )

    def check_integrity(self, others: Sequence[int] = ()) -> None:
        """Raises AssertionError unless pages, holders (`others` are pages that others hold), promises and steps agree.
        Its cost is O(everything); it is for tests."""
        self._lives.check_integrity(others)
        for h in self.handoffs.values():
            assert h.steps == {n for n, s in self._steps.items() if any(c.handle == h.handle for c in s.chunks)}

    # ── the machine ──────────────────────────────────────────────────────────────────────────────

    def step(self, event: ev.Event, now: int) -> list[ev.Action]:
        """Takes one event at `now` (monotonic ns, never going back) and returns what to do, in order."""
        self._lives.blocks.now = now
        match event:
            case ev.Start():
                self._start(event, now)
            case ev.Landing():
                self._pushes.landing(event, now)
            case ev.Renewed():
                self._pushes.renewed(event)
            case ev.HandoffCancelled(handle, reason):
                if handle in self.handoffs:
                    self._lives.abort(self.handoffs[handle], reason=reason)
            case ev.StreamBroken(stream):
                self._stream_broken(stream)
            case m.FromRank(rank, message):
                self._from_rank(rank, message, now)
            case Pulled():
                self._lives.blocks.pulled(event)
            case NotHere():
                self._lives.removed(event)
            case ev.RankLost(_, cause):
                self._refusing = cause
                self._steps.clear()
                self._lives.blocks.lost()
                self._give_up(cause, dead=True)
                self._lives.clear()
            case ev.RanksSilent(cause):
                self._silent = cause
                self._give_up(cause, dead=False)
            case ev.RanksBack():
                self._silent = ""
            case ev.Stop():
                self._refusing = self._refusing or "this prefill instance is shutting down"
                for handle in list(self.planner.waiting):
                    self._lives.abort(self.handoffs[handle], Unavailable(self._refusing))
            case ev.Doors():
                self._doors = event
            case ev.EndHandoffs(error):
                for h in list(self.handoffs.values()):
                    self._lives.abort(h, error)
            case ev.LeavePages():
                assert not (self.handoffs or self.seals), "pages are in use"
                self._lives.clear()
            case Tick():
                pass
        self._expire(now)
        self._pump(now)
        actions, self._lives.actions = self._lives.actions, []
        return actions

    def _start(self, start: ev.Start, now: int) -> None:
        assert start.handle > 0 and start.handle not in self.handoffs, "handles are unique"
        h = self.handoffs[start.handle] = PrefillHandoff(start, now, self.config.world)
        error = self._lives.refusal(start) or self._no_room(start, now)
        if error is not None:
            self._lives.abort(h, error)
            return
        fair = self.config.plan.fair
        self.planner.waiting.add(
            start.handle,
            start.priority,
            now,
            start.size_ns,
            tenant=start.tenant if fair else "",
            weight=start.tenant_weight,
            tokens=start.uncached_tokens,
        )
        if start.sampling.grammar:
            h.compiling = set(range(self.config.world))
            order = m.CompileGrammar(h.handle, start.sampling.grammar)
            self._lives.actions.extend(m.TellRank(rank, order) for rank in range(self.config.world))
        if start.deadline_ns:
            heapq.heappush(self._deadlines, (start.deadline_ns, start.handle))
        self._patience(self._lives.arrive(h))
        if h.pull_at_ns:
            heapq.heappush(self._deadlines, (h.pull_at_ns, -h.handle))

    def _patience(self, until_ns: int) -> None:
        if until_ns:
            heapq.heappush(self._deadlines, (until_ns, PATIENCE))

    def _no_room(self, start: ev.Start, now: int) -> KvmeshError | None:
        shut = self._refusing or self._silent or (self._doors.own if start.adopt else self._doors.remote)
        if shut:
            return Unavailable(shut)
        waiting = len(self.planner.waiting)
        if waiting < self.config.max_queued:
            return None
        if now >= self._queued_until_ns:  # counting what waits costs too much for every refusal of a storm
            self._queued_tokens, self._queued_until_ns = self.load().queued_tokens, now + QUEUED_NS
        drain_ms = int(self._queued_tokens * self._ns_per_token / 1e6) or NO_RATE_RETRY_MS
        return Overloaded(f"{waiting} requests wait here already", retry_after_ms=min(drain_ms, MAX_RETRY_MS))

    def _stream_broken(self, stream: int) -> None:
        for h in [h for h in self.handoffs.values() if h.start.stream == stream]:
            h.deaf = True
            self._lives.abort(h, reason="the decode instance's stream broke")

    def _expire(self, now: int) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            handle = heapq.heappop(self._deadlines)[1]
            h = self.handoffs.get(abs(handle))
            if h is not None and handle < 0:
                if h.pull_at_ns:
                    self._patience(self._lives.fetch(h))
            elif h is not None:
                where = "in the prefill queue" if h.phase is PrefillPhase.QUEUED else "in prefill"
                waited = (now - h.arrived_ns) // 1_000_000
                self._lives.abort(h, DeadlinePassed(f"the deadline passed after {waited} ms {where}"))

    # ── steps ────────────────────────────────────────────────────────────────────────────────────

    def _pump(self, now: int) -> None:
        """Keeps the ranks busy: they have `pipeline_depth` steps while anything can run."""
        while len(self._steps) < self.config.plan.pipeline_depth:
            lives = self._lives
            lives.idle = not self._steps
            total = lambda handle: self.handoffs[handle].prompt_tokens  # noqa: E731
            chunks = self.planner.next_step(self._rest, self._admit, total, self.most())
            if not chunks:
                return
            self._submit(chunks, now)

    def _rest(self, handle: int) -> int | Wait:
        """Returns how many tokens of a request are not cached now, or what it waits for."""
        return Wait.GRAMMAR if self.handoffs[handle].compiling else self._lives.rest(handle)

    def _admit(self, handle: int) -> int | Wait:
        """Gives a request whose turn has come its pages. A pull that was planned for later begins now, or never."""
        if self._lives.comes_first(handle):
            h = self.handoffs[handle]
            self._patience(self._lives.fetch(h))
            if self._lives.blocks.waits(h):
                return Wait.PULL
        return self._lives.admit(handle)

    def _submit(self, chunks: list[Chunk], now: int) -> None:
        number = self._next_step
        self._next_step += 1
        self._steps[number] = _Step(tuple(chunks), set(range(self.config.world)))
        for chunk in chunks:
            h = self.handoffs[chunk.handle]
            h.steps.add(number)
            h.chunks += 1
            if h.chunks == 1:
                h.begin_sent_ns = now
                self._lives.tell(h, ev.SendBeginFill(h.handle, h.prompt_blocks(self._block), h.start.removed_seq))
        message = m.PrefillStep(number, tuple(self._item(chunk) for chunk in chunks))
        self._lives.actions.extend(m.TellRank(rank, message) for rank in range(self.config.world))

    def _item(self, chunk: Chunk) -> m.PrefillItem:
        h = self.handoffs[chunk.handle]
        sampling = h.start.sampling if chunk.last else None
        pages, groups = self._lives.for_step(h, chunk.end)
        return m.PrefillItem(
            handle=h.handle,
            token_ids=h.start.token_ids[chunk.start : chunk.end],
            start=chunk.start,
            pages=pages,
            sample=sampling,
            push=not h.start.adopt,
            history=history_of(sampling, h.start.token_ids) if sampling is not None else None,
            groups=groups,
            scores=h.start.sampling.prompt_logprobs,
            next_token=h.start.token_ids[chunk.end] if h.scored and not chunk.last else -1,
        )

    def _from_rank(self, rank: int, message: m.ToFront, now: int) -> None:
        match message:
            case m.PrefillStepDone():
                self._step_done(rank, message)
            case m.RankError(handles, text, code):
                self._step_failed(rank, handles, text, code)
            case m.GrammarCompiled(handle, why_not):
                self._compiled(rank, handle, why_not)
            case m.SealCopied():
                self._lives.sealed(rank, message)
            case m.LoadCopied():
                self._lives.loaded(rank, message)
            case m.PushProgress() | m.PushDone() | m.PushFailed() | m.PushDrained():
                self._pushes.from_rank(rank, message)
            case _:
                return
        self._pushes.progress(rank, now)

    def _step_done(self, rank: int, done: m.PrefillStepDone) -> None:
        step = self._steps.get(done.step_id)
        if step is None or rank not in step.waiting:
            return
        step.sampled.update((s.handle, s) for s in done.sampled)
        step.scores.update(done.scores)
        step.start_ns = min(step.start_ns or done.start_ns, done.start_ns)
        step.end_ns = max(step.end_ns, done.end_ns)
        stage = self.pipeline.stages.get(rank)
        if stage is not None and done.busy_until_ns:
            step.busy[stage] = (done.busy_from_ns, done.busy_until_ns)
        rate = (done.end_ns - done.start_ns) / step.tokens
        self._ns_per_token += (rate - self._ns_per_token) * (RATE_WEIGHT if self._ns_per_token else 1.0)
        self._lives.blocks.rates.computed_ns = self._ns_per_token * self.config.plan.block_tokens
        self._answered(done.step_id, step, rank)

    def _compiled(self, rank: int, handle: int, why_not: str) -> None:
        h = self.handoffs.get(handle)
        if h is None or rank not in h.compiling:
            return
        h.compiling.discard(rank)
        if why_not:
            self._lives.abort(h, InvalidRequest(why_not, field="grammar"))

    def _step_failed(self, rank: int, handles: tuple[int, ...], text: str, code: str) -> None:
        """Fails requests of the oldest step at the rank (a rank runs steps in order). A step that failed as a whole has
        no other answer; a step that goes on without these requests is answered by PrefillStepDone."""
        number = next((n for n, s in self._steps.items() if rank in s.waiting), None)
        members = {c.handle for c in self._steps[number].chunks} if number is not None else set()
        if number is None or not members.issuperset(handles):
            return
        step = self._steps[number]
        step.failed.update((rank, handle) for handle in handles)
        if not code:
            # The ranks check only the result for a prompt's last token. What made it fail may lie in any block before,
            # and would fail whoever shares that block. So all are computed again, or loaded from the store, which only
            # takes blocks whose KV is finite.
            self._lives.forget([key for handle in handles for key in self.handoffs[handle].start.block_keys])
        for handle in handles:
            error = BY_CODE[code](text, field="grammar") if code else Unavailable(f"the prefill failed: {text}")
            self._lives.abort(self.handoffs[handle], error)
        if step.failed.issuperset((rank, handle) for handle in members):
            self._answered(number, step, rank)

    def _answered(self, number: int, step: _Step, rank: int) -> None:
        step.waiting.discard(rank)
        if step.waiting:
            return
        del self._steps[number]
        before, self._done = self._done, self._done.plus(step.chunks)
        times = self.pipeline.step_ended(step.busy, bool(self._steps))
        self._learn_cost(step, times)
        for chunk in step.chunks:
            h = self.handoffs[chunk.handle]
            h.steps.discard(number)
            h.done_before = h.done_before or before
            h.meanwhile = self._done.since(h.done_before)
            h.times.add(chunk, times)
            h.first_step_ns = h.first_step_ns or step.start_ns
            h.last_step_ns = max(h.last_step_ns, step.end_ns)
            if not h.ending:
                if h.handle in step.scores:
                    h.scores.append(step.scores[h.handle])
                self._lives.computed(h, chunk, step.sampled.get(h.handle), step.end_ns)
            self._lives.settle(h)

    def _learn_cost(self, step: _Step, times: Sequence[StageTime]) -> None:
        """Has chunks that are planned from now on take equal time by what the slowest stage took for this step. Within
        a prompt what the first stage stood still before it counts, too: there was a chunk to compute, but a step has to
        be sent and begun."""
        if self._chunk_cost is None or not times:
            return
        seconds = max(time.busy_ns for time in times) / NS
        if all(self.handoffs[chunk.handle].times.chunks for chunk in step.chunks):
            seconds = max(seconds, (times[0].busy_ns + times[0].idle_ns) / NS)
        pairs = sum((c.end - c.start) * (c.start + (c.end - c.start + 1) / 2) for c in step.chunks)
        self._chunk_cost.add(step.tokens, pairs, seconds)
        self.planner.chunk_cost = self._chunk_cost.cost

    def _give_up(self, cause: str, *, dead: bool) -> None:
        """Fails all handoffs at once because the ranks do not answer, so that the requests can go elsewhere. Nothing is
        waited for of `dead` ranks; pages that a frozen rank may still touch stay held until that rank has answered."""
        for h in list(self.handoffs.values()):
            if dead:
                h.steps.clear()
            self._pushes.doubt(h, dead=dead)
            self._lives.abort(h, HandoffLost(cause))
            self._lives.settle(h)
