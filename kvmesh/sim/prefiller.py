"""A prefill instance in virtual time: the service's planner over a node store, steps as long as the hardware takes.

As in `services/prefill`: a request joins the line and pulls what its placement names, at once, at the time that this
asks for, or when its turn comes sooner; the planner forms steps of whoever has his blocks; a block that somebody else
computes or pulls is waited for; what is computed is sealed chunk by chunk. Steps follow one another without a gap. KV
leaves with each step (pushes.py).

Where layers lie in several stages, a step begins when the first stage is free: the steps before it are in later stages.
It ends in each stage as `kvmesh.chunk_pipeline.pipeline_ends` has it. Its KV is reckoned to leave while it is in the
last stage: there chunks follow one another as they do in each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Protocol

from kvmesh.chunk_pipeline import stage_ends
from kvmesh.services.conductor.domain import Load, PrefillSample
from kvmesh.services.prefill.compute_progress import ComputeProgress
from kvmesh.services.prefill.planner import Chunk, Planner, Wait
from kvmesh.services.prefill.rates import NEWEST, Rates
from kvmesh.sim.config import SimConfig
from kvmesh.sim.life import Life
from kvmesh.sim.loop import Loop
from kvmesh.sim.node import Node
from kvmesh.sim.transfers import Puller, Pushes, TransferJob


class PrefillListener(Protocol):
    """What a prefill instance tells the simulation."""

    def begun(self, life: Life) -> None:
        """Its first step begins: decode may reserve the landing."""

    def prefilled(self, life: Life) -> None:
        """Its first token is there."""


class _Step(NamedTuple):
    """A step that is being computed."""

    chunks: list[Chunk]
    began_s: float
    device_s: float  # that it keeps the whole instance busy


class Prefiller:
    """One instance. `may_compute`: whether the device is free for prompts."""

    def __init__(
        self, node: Node, config: SimConfig, loop: Loop, puller: Puller, pushes: Pushes, owner: PrefillListener
    ) -> None:
        self.node = node
        self.store = node.store
        pipeline = node.spec.pipeline
        self.planner = Planner(replace(config.plan, chunk_cost=None if pipeline is None else pipeline.chunk_cost()))
        self.lives: dict[int, Life] = {}
        self.pages = node.spec.kv_tokens // config.block_tokens
        self.free_pages = self.pages
        self.may_compute: Callable[[], bool] = lambda: True
        self._block = config.block_tokens
        self._loop, self._puller, self._pushes, self._owner = loop, puller, pushes, owner
        self._promised: dict[bytes, int] = {}  # blocks that admitted requests will have computed
        self._pulling: dict[bytes, TransferJob] = {}
        self._waiters: dict[TransferJob, dict[Life, None]] = {}
        self._under_way: deque[_Step] = deque()  # in order; several in the stages of a pipeline
        self._step_ends_s = 0.0  # the last one of them
        self._busy = False  # whether the device, or its first stage, computes
        self._stage_ends_s: list[float] = []  # when each stage ends what it has
        self.rates = Rates()
        self._steps = 0  # begun since the start
        self._resting = False  # between two steps, where that takes time
        self.dead = False
        self._done = ComputeProgress()
        self._samples: list[PrefillSample] = []
        self._finished: list[str] = []
        self._hits = [0, 0, 0]  # tokens: of prompts, found here, pulled
        self._pulled_bytes = 0

    # ── in ───────────────────────────────────────────────────────────────────────────────────────

    def expect(self, life: Life, pull_after_s: float) -> None:
        """A placement named this instance: it joins the line, and pulls so long after that."""
        self.lives[life.handle] = life
        self.node.note(life.request.keys)
        now = self._loop.now
        size_ns = round(life.placed.life.prefill_s * 1e9) if life.placed is not None else 0
        cached = life.placed.cached_tokens if life.placed is not None else 0
        self.planner.waiting.add(
            life.handle,
            life.request.priority,
            int(now * 1e9),
            size_ns,
            tenant=life.request.tenant if self.planner.config.fair else "",
            weight=life.request.tenant_weight,
            tokens=max(1, life.tokens - cached),
        )
        if pull_after_s > 0 and life.placed is not None and life.placed.pulls:
            life.planned_to = self._reach(life)
            self._loop.after(pull_after_s, lambda: self._begin_planned(life))
        else:
            self._begin_pull(life)
        found = max(self._found(life), life.planned_to)
        life.expected_rest = life.tokens - found * self._block
        self.pump()

    def _usable(self, life: Life) -> tuple[bytes, ...]:
        # The last token is always computed: its logits are the answer's first token.
        return life.request.keys[: (life.tokens - 1) // self._block]

    def _found(self, life: Life) -> int:
        """How many leading blocks lie here that it can go on behind."""
        usable = self._usable(life)
        return self.node.cut(usable, self.store.peek(usable))

    def _reach(self, life: Life) -> int:
        """Up to which block its prefix goes when all that it asks for comes."""
        usable, can_come = self._usable(life), self._sources(life)
        for at, key in enumerate(usable):
            if not (can_come(at) or key in self._promised or key in self._pulling or self.store.holds(key)):
                return self.node.cut(usable, at)
        return self.node.cut(usable, len(usable))

    def _sources(self, life: Life) -> Callable[[int], bool]:
        """Whether a block can be fetched: its placement names it, or a lower tier of this node may be read for it."""
        placed, usable = life.placed, self._usable(life)
        assert placed is not None
        covered = set[int]()
        for r in placed.pulls:
            covered.update(range(r.first_block, r.first_block + r.blocks))
        limit = len(usable) if placed.load_until is None else placed.load_until
        ssd = self.node.ssd
        return lambda at: at in covered or (ssd is not None and at < limit and ssd.holds(usable[at]))

    def _begin_planned(self, life: Life) -> None:
        if life.planned_to and not self.dead:
            self._begin_pull(life)
            self.pump()

    def _begin_pull(self, life: Life) -> None:
        """Fetch what its placement, or a lower tier of this node, covers without a gap, and nobody fetches yet."""
        placed = life.placed
        assert placed is not None
        life.planned_to = 0
        if not placed.pulls and self.node.ssd is None and not self._pulling:
            return
        usable, can_come = self._usable(life), self._sources(life)
        below = self.node.below(usable)
        needed: list[tuple[int, bytes]] = []
        for at, key in enumerate(usable):
            pull = self._pulling.get(key)
            if self.store.holds(key):
                needed.append((at, key))
            elif key in self._promised:
                continue
            elif pull is not None:
                self._join(life, pull)
            elif can_come(at):
                needed.append((at, key))
            else:
                break
        # Blocks that are here already get None, and are not evicted to make room for the others.
        extents = self.store.begin([key for _, key in needed])
        wanted = [block for block, extent in zip(needed, extents, strict=True) if extent is not None]
        if wanted:
            sources = sorted((*placed.pulls, *([below] if below is not None else ())), key=lambda r: r.tier)
            pull = self._puller.pull(self.node, wanted, sources, self._pulled)
            self._pulling.update(dict.fromkeys(pull.keys, pull))
            self._join(life, pull)
            self._loop.at(pull.until_s, self.pump)

    def _join(self, life: Life, pull: TransferJob) -> None:
        waiters = self._waiters.setdefault(pull, {})
        if life not in waiters:
            waiters[life] = None
            life.pulls += 1
            life.waits_until_s = max(life.waits_until_s, pull.until_s)

    def _pulled(self, pull: TransferJob) -> None:
        """Seal what has arrived, and keep it for those who waited."""
        if self.dead:
            return
        waiters = self._waiters.pop(pull, {})
        for key in pull.keys:
            del self._pulling[key]
        pull.keep(self.store)
        arrived = [key for key in pull.keys if key in pull.arrived]
        self._pulled_bytes += pull.wire_bytes
        self.rates.pulled(len(arrived), round((self._loop.now - pull.began_s) * 1e9))
        for at, life in enumerate(waiters):
            life.pulls -= 1
            if life.handle in self.planner.waiting:
                life.pinned += self.store.borrow([key for key in arrived if self.store.holds(key)])
            life.pulled_keys.update(arrived)
            life.pull_s = self._loop.now - pull.began_s
            if at == 0:
                life.pull_bytes += pull.wire_bytes
        self.pump()

    # ── what the planner asks ────────────────────────────────────────────────────────────────────

    def _rest(self, handle: int) -> int | Wait:
        """See `prefill.handoff_table.HandoffTable.rest`."""
        life = self.lives[handle]
        patient = self._loop.now < life.waits_until_s
        if life.pulls and patient:
            return Wait.PULL
        usable = self._usable(life)
        found = self.store.peek(usable)
        if found < len(usable):
            key = usable[found]
            if key in self._promised:
                return Wait.TWIN
            pull = self._pulling.get(key)
            if pull is not None and self._loop.now < pull.until_s:
                self._join(life, pull)
                return Wait.PULL
        found = self.node.cut(usable, found)
        if self._pays(life, found):
            found = life.planned_to
        life.expected_rest = life.tokens - found * self._block
        return life.expected_rest

    def _pays(self, life: Life, found: int) -> bool:
        """See `prefill.handoff_table.HandoffTable`: whether its planned pull is to be waited for now."""
        alone = len(self.planner.waiting) == 1 and not self.planner.unsubmitted_tokens
        return found < life.planned_to and (not alone or self.rates.pull_pays)

    def _admit(self, handle: int) -> int | Wait:
        """See `prefill.handoff_table.HandoffTable.admit`. A pull that was planned for later begins now, or
        never."""
        life = self.lives[handle]
        if life.planned_to and self._pays(life, self._found(life)):
            self._begin_pull(life)
            if life.pulls:
                return Wait.PULL
        usable = self._usable(life)
        need = -(-life.tokens // self._block)
        if need > self.free_pages:
            return Wait.PAGES
        self.free_pages -= need
        life.pages = need
        life.planned_to = 0
        extents = self.store.hold(usable)
        life.cached_blocks = life.promised_from = self.node.cut(usable, len(extents))
        self.store.release(extents)  # loaded into pages
        for end in (len(extents), len(usable)):
            if end > life.cached_blocks:
                self.node.keep_states(usable[end - 1])
        self.store.release(life.pinned)
        life.pinned = []
        for key in life.request.keys[life.cached_blocks :]:
            self._promised[key] = self._promised.get(key, 0) + 1
        record = life.record
        life.computed = record.cached_tokens = life.cached_blocks * self._block
        pulled = sum(key in life.pulled_keys for key in usable[: life.cached_blocks]) if life.pulled_keys else 0
        record.pulled_tokens = pulled * self._block
        self._hits[0] += life.tokens
        self._hits[1] += record.cached_tokens - record.pulled_tokens
        self._hits[2] += record.pulled_tokens
        life.expected_rest = 0
        return record.cached_tokens

    def _total(self, handle: int) -> int:
        return self.lives[handle].tokens

    # ── steps ────────────────────────────────────────────────────────────────────────────────────

    @property
    def pulls(self) -> int:
        """Under way."""
        return len(self._waiters)

    @property
    def idle(self) -> bool:
        """Whether nothing is being computed."""
        return not self._under_way

    def pump(self) -> None:
        """Begin the next step if none is being computed and there is one."""
        if self._busy or self._resting or self.dead or not self.may_compute():
            return
        chunks = self.planner.next_step(self._rest, self._admit, self._total)
        if not chunks:
            return
        now = self._loop.now
        pieces = [(chunk.end - chunk.start, chunk.start) for chunk in chunks]
        pipeline = self.node.spec.pipeline
        stages = [self.node.spec.times.prefill_s(pieces)] if pipeline is None else list(pipeline.stages_s(pieces))
        if self.node.clock is not None:
            seconds = sum(stages)
            factor = self.node.clock.step_s(now, seconds, "prefill", self._steps) / seconds
            stages = [one * factor for one in stages]
        self._steps += 1
        tokens = sum(new for new, _ in pieces)
        device_s = sum(stages) / len(stages)
        for chunk in chunks:
            life = self.lives[chunk.handle]
            life.record.prefill_gpu_s += device_s * (chunk.end - chunk.start) / tokens
            if life.first_step_s < 0:
                life.first_step_s = life.record.prefill_start_s = now
                life.record.queue_s = now - life.record.at_s
                self._owner.begun(life)
        self._busy = True
        self._under_way.append(_Step(chunks, now, device_s))
        if pipeline is not None:
            self._go_through(chunks, now, stages, pipeline.send_s(tokens))
            return
        self._push(chunks, now, stages[0])
        self._step_ends_s = now + stages[0]
        if self.node.machine is not None:
            self.node.machine.prefill(stages[0], self._step_done)
        else:
            self._loop.after(stages[0], self._step_done)

    def _go_through(self, chunks: list[Chunk], now: float, stages: list[float], send_s: float) -> None:
        """Has a step go through all stages of a pipeline."""
        ends = stage_ends(self._stage_ends_s or [now] * len(stages), stages, send_s, now)
        self._stage_ends_s = ends
        self._step_ends_s = ends[-1]
        last_s = ends[-1] - stages[-1]
        self._loop.at(last_s, lambda: self._push(chunks, last_s, stages[-1]))
        self._loop.at(ends[-1], self._step_done)
        self._loop.at(ends[0], self._first_stage_free)

    def _first_stage_free(self) -> None:
        self._busy = False
        self.pump()

    def _push(self, chunks: list[Chunk], now: float, seconds: float) -> None:
        if self.dead:
            return
        for chunk in chunks:
            life = self.lives[chunk.handle]
            if self.node.spec.pipeline is None or not life.lost:
                self._pushes.computing(life, chunk, now, seconds)

    def _step_done(self) -> None:
        if self.dead:
            return
        chunks, began_s, device_s = self._under_way.popleft()
        now = self._loop.now
        piped = self.node.spec.pipeline is not None
        if not piped:
            self._busy = False
        tokens = sum(chunk.end - chunk.start for chunk in chunks)
        each_ns = (device_s if piped else now - began_s) * 1e9 / tokens * self._block
        known_ns = self.rates.computed_ns
        self.rates.computed_ns += (each_ns - known_ns) * (NEWEST if known_ns else 1.0)
        before, self._done = self._done, self._done.plus(chunks)
        for chunk in chunks:
            life = self.lives[chunk.handle]
            life.last_step_s = now
            life.chunks += 1
            life.done_before = life.done_before or before
            life.meanwhile = self._done.since(life.done_before)
            self._seal(life, chunk)
            life.over = chunk.last
            self._pushes.computed(life, chunk)
            if life.lost:
                if not self._computes(life):
                    self._drop(life)
            elif chunk.last:
                life.record.prefill_end_s = now
                self._owner.prefilled(life)
        if self.node.machine is not None and self.node.machine.model.rest_s:
            self._resting = True
            self.node.machine.rest(self._rested)
        else:
            self.pump()

    def _computes(self, life: Life) -> bool:
        """Whether a step under way has a chunk of it."""
        return any(chunk.handle == life.handle for step in self._under_way for chunk in step.chunks)

    def _rested(self) -> None:
        self._resting = False
        self.pump()

    def _seal(self, life: Life, chunk: Chunk) -> None:
        """Full blocks of the chunk are in the store from now on, if it has room; nobody waits for them any more."""
        keys = life.request.keys
        full = chunk.end // self._block
        self._unpromise(life, full)
        first = chunk.start // self._block
        new = keys[first:full]
        begun = [key for key, extent in zip(new, self.store.begin(new), strict=True) if extent is not None]
        evicted = self.store.evicted
        self.store.seal_all(reversed(begun))
        # Where all of them were sealed just now, and nothing went, they have their places already.
        placed = len(begun) == len(new) and self.store.evicted == evicted
        self.store.touch(keys[: first if placed else full], use=False)

    def _unpromise(self, life: Life, full: int) -> None:
        for key in life.request.keys[life.promised_from : full]:
            self._promised[key] -= 1
            if not self._promised[key]:
                del self._promised[key]
        life.promised_from = max(life.promised_from, full)

    # ── out ──────────────────────────────────────────────────────────────────────────────────────

    def leave(self, life: Life) -> None:
        """Its last byte is at decode, or nobody wants it: pages come back."""
        if life.left_prefill:
            return
        assert life.over, "it is being computed"
        life.left_prefill = True
        del self.lives[life.handle]
        self.free_pages += life.pages
        self.store.touch(life.request.keys)
        self._finished.append(life.name)
        self._samples.append(self._sample(life))
        self.pump()

    def withdraw(self, life: Life) -> None:
        """Nobody wants it any more, whatever became of it here; a step that computes for it goes on to its end."""
        assert life.lost
        if self.dead or life.handle not in self.lives:
            return
        if not self._computes(life):
            self._drop(life)
            self.pump()
        elif self.node.spec.pipeline is not None:  # else nothing is planned before the step ends
            self.planner.drop(life.handle)

    def _drop(self, life: Life) -> None:
        """Takes a request away without a sample, and frees what it holds."""
        self.planner.drop(life.handle)
        for waiters in self._waiters.values():
            waiters.pop(life, None)
        life.planned_to = 0
        self.store.release(life.pinned)
        life.pinned = []
        if life.pages:
            self._unpromise(life, len(life.request.keys))
            self.free_pages += life.pages
        del self.lives[life.handle]
        self._finished.append(life.name)

    def die(self) -> list[Life]:
        """The process is gone, with all that it had; returns the requests."""
        self.dead = True
        lost, self.lives = list(self.lives.values()), {}
        return lost

    def backlog_s(self) -> float:
        """Seconds of work that are here, as steps go now: the rest of the one under way, and those who wait,
        as they would share steps."""
        now, times, limit = self._loop.now, self.node.spec.times, self.planner.config.max_batch_tokens
        factor = self._times_as_long()
        left_s = max(0.0, self._step_ends_s - now) if self._under_way else 0.0
        pieces: list[tuple[int, int]] = []
        room = limit
        for life in self.lives.values():
            new = life.tokens - life.computed if life.pages else life.expected_rest
            if life.over or new <= 0:
                continue
            new -= sum(c.end - c.start for step in self._under_way for c in step.chunks if c.handle == life.handle)
            if new > room and pieces:
                left_s += factor * times.prefill_s(pieces)
                pieces, room = [], limit
            if new > 0:
                pieces.append((new, life.tokens - new))
                room -= new
        return left_s + (factor * times.prefill_s(pieces) if pieces else 0.0)

    def _times_as_long(self) -> float:
        return 1.0 if self.node.clock is None else self.node.clock.times(self._loop.now)

    def alone_s(self, tokens: int, keys: tuple[bytes, ...]) -> float:
        """Seconds that a prompt takes here, as steps go now, behind what of it is in the store."""
        usable = keys[: (tokens - 1) // self._block]
        cached = self.node.cut(usable, self.store.peek(usable)) * self._block
        return self._times_as_long() * self.node.spec.times.prefill_s([(tokens - cached, cached)])

    def _sample(self, life: Life) -> PrefillSample:
        """Makes the sample that `kvmesh.services.prefill.report` would make of it."""
        cached = life.record.cached_tokens
        computed, pairs = life.tokens - cached, (life.tokens**2 - cached**2) // 2
        return PrefillSample(
            life.name,
            computed,
            cached,
            life.last_step_s - life.first_step_s,
            life.push_bytes,
            life.flow.busy_s if life.push_bytes and life.flow is not None else 0.0,
            life.record.pulled_tokens,
            life.pull_bytes,
            life.pull_s,
            steps=life.meanwhile.steps,
            chunks=life.chunks,
            beside_tokens=max(0, life.meanwhile.tokens - computed),
            beside_pairs=max(0, life.meanwhile.double_pairs // 2 - pairs),
        )

    def load(self) -> Load:
        """For heartbeats."""
        lives, waiting, queued = self.lives, len(self.planner.waiting), 0
        if lives:  # else nothing is anywhere
            queued = sum([lives[handle].expected_rest for handle in self.planner.waiting])
            queued += self.planner.unsubmitted_tokens + sum(
                [chunk.end - chunk.start for step in self._under_way for chunk in step.chunks]
            )
        store = self.store
        return Load(
            queued_requests=waiting,
            queued_tokens=queued,
            running_requests=len(lives) - waiting,
            free_pages=self.free_pages,
            free_extents=store.free,
            store_blocks=store.sealed_blocks,
            store_capacity=store.total,
            prompt_tokens=self._hits[0],
            host_hit_tokens=self._hits[1],
            remote_hit_tokens=self._hits[2],
            pulled_bytes=self._pulled_bytes,
        )

    def report(self) -> tuple[tuple[PrefillSample, ...], tuple[str, ...]]:
        """Samples and names of requests that have left since the last call."""
        told = tuple(self._samples), tuple(self._finished)
        self._samples, self._finished = [], []
        return told

    def check_empty(self) -> None:
        """AssertionError unless everything came back: after the last request."""
        assert not (self.lives or self._promised or self._pulling or self._under_way or len(self.planner.waiting))
        assert self.free_pages == self.pages, f"{self.node.name}: {self.free_pages} of {self.pages} pages came back"
        self.store.check_integrity()
