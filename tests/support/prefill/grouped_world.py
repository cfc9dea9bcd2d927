"""A rank, decode and other nodes around a prefill brain whose model has several cache groups, as rules of a machine.

The rank keeps what a real one would: of every page and extent of every group which tokens its bytes were computed from.
A page of a group of tokens has the tokens up to its block's end, a slot those that its state has seen. Copies are done
before steps that were sent later, perhaps before earlier ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvmesh.blockservice.removals import NotHere
from kvmesh.clock import Tick
from kvmesh.kvcache.cache_groups import CacheGroup, CacheKind, CacheLayout, GroupPages, first_seen, snapshot_grid
from kvmesh.kvcache.grouped_store import GroupedStore
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.page_pool import PagePool
from kvmesh.kvcache.quotas import NoTagQuotas
from kvmesh.kvcache.sources import Pulled, PullJob, PullRange
from kvmesh.ranks import protocol as m
from kvmesh.services.prefill import events as ev
from kvmesh.services.prefill.checks import BrainConfig
from kvmesh.services.prefill.planner import PlanConfig
from kvmesh.services.prefill.state import PrefillState
from tests.support.prefill.script import BOOT_NS, MS, check_scores, prompt, sampling_of, scores_of

BLOCK, PATIENCE_MS = 4, 300
Tokens = tuple[int, ...]
Place = tuple[int, int]  # group, page or extent
Copy = m.SealCopy | m.LoadCopy
BROKEN: Tokens = (-1,)  # of use to nobody


def group(name: str, kind: CacheKind = CacheKind.ALL, keep: int = 0) -> CacheGroup:
    """A group of one layer."""
    return CacheGroup(name, (0,), CacheLayout(1, 1, 1), kind, keep)


ALL = group("all")
WINDOW = group("window", CacheKind.WINDOW, 6)
CHUNK = group("chunk", CacheKind.CHUNK, 10)
STATE = group("state", CacheKind.STATE, 2)


def grouped_state(
    groups: Sequence[CacheGroup], pages: Sequence[int], extents: Sequence[int], chunk: int = 8
) -> PrefillState:
    """A brain with so many pages and extents of each group."""
    plan = PlanConfig(
        block_tokens=BLOCK,
        prefill_chunk_tokens=chunk,
        max_batch_tokens=2 * chunk,
        long_prompt_tokens=chunk,
        priority_step_ns=1000 * MS,
        grid=snapshot_grid(groups, BLOCK),
    )
    config = BrainConfig(
        plan=plan,
        max_context_tokens=64,
        vocab_size=256,
        max_queued=6,
        pull_timeout_ms=PATIENCE_MS,
        groups=tuple(groups),
    )
    stores = [
        NodeStore(count, high_percent=100, low_percent=100, quotas=NoTagQuotas() if at else None)
        for at, count in enumerate(extents)
    ]
    return PrefillState(config, [PagePool(count) for count in pages], GroupedStore(groups, stores, BLOCK))


@dataclass
class Asked:
    """What decode has seen of one handoff."""

    start: ev.Start
    said: list[ev.Action] = field(default_factory=list)
    ended: ev.HandoffEnded | None = None
    landed: bool = False

    def has(self, *kinds: type) -> bool:
        return any(isinstance(action, kinds) for action in self.said)


class GroupedWorld(RuleBasedStateMachine):
    groups: tuple[CacheGroup, ...] = (ALL, WINDOW, STATE)
    pages: tuple[int, ...] = (12, 8, 6)
    extents: tuple[int, ...] = (8, 7, 4)

    def __init__(self) -> None:
        super().__init__()
        self.state = grouped_state(self.groups, self.pages, self.extents)
        table = self.state.grouped
        assert table is not None
        self.table, self.store = table, table.blocks.store
        self.now = BOOT_NS
        self.asked: dict[int, Asked] = {}
        self.broken: set[int] = set()
        self.epoch = 0
        self.inbox: deque[m.PrefillStep | Copy] = deque()
        self.outbox: deque[m.ToFront] = deque()
        self.pushes: dict[int, m.PushOpen] = {}
        self.cancelled: set[int] = set()  # pushes
        self.jobs: dict[int, PullJob] = {}
        self.lost = False
        self.page: dict[Place, Tokens] = {}
        self.extent: dict[Place, Tokens] = {}
        self.computed: dict[int, int] = {}  # by handle: tokens in unbroken order; -1: broken
        self.given: list[tuple[GroupPages, ...]] = []  # adopted

    # ── plumbing ─────────────────────────────────────────────────────────────────────────────────

    def step(self, event: ev.Event) -> None:
        self.now += 1
        for action in self.state.step(event, self.now):
            match action:
                case m.TellRank(_, message):
                    self.at_rank(message)
                case ev.FetchBlocks(job):
                    self.check_job(job)
                    self.jobs[job.ticket] = job
                case ev.CancelPull():
                    pass
                case ev.HandoffEnded(handle):
                    assert self.asked[handle].ended is None
                    self.asked[handle].ended = action
                case _:
                    asked = self.asked[action.handle]
                    assert asked.ended is None and not asked.has(ev.SendDrained, ev.SendFailed)
                    assert asked.start.stream not in self.broken
                    asked.said.append(action)
                    if isinstance(action, ev.SendAdopted | ev.SendFirstToken):
                        first = action.first if isinstance(action, ev.SendAdopted) else action
                        check_scores(self.asked[action.handle].start, first)
                    if isinstance(action, ev.SendAdopted):
                        self.adopted(asked.start, action.groups)

    def named(self, key: bytes) -> Tokens:
        """Returns the tokens that a key stands for."""
        return prompt(key.decode(), BLOCK)[0]

    def check_job(self, job: PullJob) -> None:
        assert len(job.groups) == len(job.keys) and not job.extents
        named = {(one.group, one.first + i) for one in job.places for i, place in enumerate(one.ids) if place >= 0}
        asked = {(g, at) for at, mask in enumerate(job.groups) for g in range(len(self.groups)) if mask >> g & 1}
        assert named == asked, "places are not what is asked for"

    def at_rank(self, message: m.ToRank) -> None:
        if self.lost:
            return
        match message:
            case m.PrefillStep():
                for item in message.items:
                    self.one_writer(item)
                self.inbox.append(message)
            case m.SealCopy() | m.LoadCopy():
                self.check_copy(message)
                self.inbox.append(message)
            case m.PushOpen(handle):
                assert handle not in self.pushes and message.lease_until_ns > self.now
                self.pushes[handle] = message
                self.check_push(message, message.ready_tokens)
            case m.PushCancel(handle):
                if handle in self.pushes:
                    self.cancelled.add(handle)
                else:
                    self.outbox.append(m.PushDrained(handle))

    def nobody_else(self, place: Place, handle: int) -> None:
        """A page that is about to be written for a prompt is read or written for no other."""
        g, page = place
        assert not self.table.cache.holds_page(g, page), "a cached page is written"
        for other in self.state.handoffs.values():
            if other.handle != handle and other.memory is not None:
                mine = [*other.memory.held[g].values(), *(s.get(g) for s in other.memory.snapshots.values())]
                assert page not in mine, "two holders of a page being written"
        for copy in self.inbox:
            if isinstance(copy, m.SealCopy):
                assert not any(one.group == g and page in one.ids for one in copy.groups), "written while it is copied"

    def one_writer(self, item: m.PrefillItem) -> None:
        assert sorted(one.group for one in item.groups) == list(range(len(self.groups))) and not item.pages
        for g, first, ids in item.groups:
            state = self.groups[g].kind is CacheKind.STATE
            for at, page in enumerate(ids, 0 if state else first):
                if state or at >= item.start // BLOCK:
                    assert page >= 0, "a block to be written has no page"
                    self.nobody_else((g, page), item.handle)

    def check_copy(self, copy: Copy) -> None:
        for own, other in zip(copy.groups, copy.group_extents, strict=True):
            assert own.group == other.group and len(own.ids) == len(other.ids)
            assert [one < 0 for one in own.ids] == [one < 0 for one in other.ids]
        if isinstance(copy, m.LoadCopy):
            owner = next(h for h in self.state.handoffs.values() if h.loading == copy.ticket)
            for one in copy.groups:
                for page in one.ids:
                    if page >= 0:
                        self.nobody_else((one.group, page), owner.handle)

    # ── decode ───────────────────────────────────────────────────────────────────────────────────

    @precondition(lambda self: len(self.asked) < 12)
    @rule(
        blocks=st.text(alphabet="ab", max_size=6),
        more=st.integers(0, 3),
        stream=st.integers(1, 2),
        hints=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(0, 7)), max_size=2),
        later_ms=st.sampled_from([0, 0, 30]),
        adopt=st.sampled_from([False, False, True]),
    )
    def start(
        self,
        blocks: str,
        more: int,
        stream: int,
        hints: list[tuple[int, int, int]],
        later_ms: int,
        adopt: bool,
    ) -> None:
        if stream in self.broken:
            return
        tokens, keys = prompt(f"{blocks}+{more}", BLOCK)
        handle = len(self.asked) + 1
        every = (1 << len(self.groups)) - 1
        pulls = tuple(
            PullRange("A", "A:1", 1, at, min(n, len(keys) - at), groups=mask & every)
            for at, n, mask in hints
            if at < len(keys)
        )
        start = ev.Start(
            handle,
            stream,
            f"r{handle}",
            tokens,
            keys,
            sampling_of(handle),
            pulls=pulls,
            pull_at_ns=self.now + later_ms * MS if later_ms else 0,
            adopt=adopt,
        )
        self.asked[handle] = Asked(start)
        self.step(start)

    def open(self, *, landed: bool | None = None) -> list[int]:
        return [
            n
            for n, asked in self.asked.items()
            if asked.ended is None and asked.start.stream not in self.broken and landed in (None, asked.landed)
        ]

    def begun(self) -> list[int]:
        """Those that wait for a landing; whoever is adopted gets none."""
        known = [n for n in self.open(landed=False) if self.asked[n].has(ev.SendBeginFill)]
        return [n for n in known if not self.asked[n].start.adopt]

    @precondition(lambda self: self.begun())
    @rule(data=st.data(), lease_ms=st.sampled_from([100, 1000]), skip=st.integers(0, 3))
    def land(self, data: st.DataObject, lease_ms: int, skip: int) -> None:
        self.landing(data.draw(st.sampled_from(self.begun())), lease_ms, skip)

    def landing(self, handle: int, lease_ms: int, skip: int) -> None:
        asked = self.asked[handle]
        asked.landed = True
        self.epoch += 1
        named = []
        for g in range(len(self.groups)):
            kept = self.table.pages.rules.kept(g, len(asked.start.token_ids))
            first = min(kept.start + skip, kept.stop - 1) if g == 0 else kept.start + skip
            if first < kept.stop:
                named.append(GroupPages(g, first, tuple(range(kept.stop - first))))
        self.step(ev.Landing(handle, self.epoch, lease_ms, (ev.RankLanding(0, "decode", (), 0, tuple(named)),)))

    @precondition(lambda self: self.open())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.step(ev.HandoffCancelled(data.draw(st.sampled_from(self.open())), "not wanted"))

    @precondition(lambda self: not self.broken)
    @rule()
    def stream_breaks(self) -> None:
        self.broken.add(2)
        self.step(ev.StreamBroken(2))

    def adopted(self, start: ev.Start, groups: tuple[GroupPages, ...]) -> None:
        self.check_pages(start.token_ids, groups, len(start.token_ids))
        self.given.append(groups)

    @precondition(lambda self: self.given)
    @rule()
    def decode_gives_back(self) -> None:
        for g, _, ids in self.given.pop():
            self.table.pages.pools[g].release(page for page in ids if page >= 0)
        self.step(Tick())

    # ── rank ─────────────────────────────────────────────────────────────────────────────────────

    def next_step(self) -> m.PrefillStep | None:
        return next((message for message in self.inbox if isinstance(message, m.PrefillStep)), None)

    @precondition(lambda self: self.next_step())
    @rule(fails=st.sampled_from([False] * 9 + [True]))
    def rank_runs_a_step(self, fails: bool) -> None:
        while isinstance(self.inbox[0], Copy):
            self.copy(self.inbox[0])
        step = self.next_step()
        assert step is not None
        self.inbox.remove(step)
        for item in step.items:
            self.write(item, broken=fails)
        if fails:
            self.outbox.append(m.RankError(tuple(item.handle for item in step.items), "out of memory"))
            return
        sampled = tuple(m.Sampled(item.handle, 7) for item in step.items if item.sample is not None)
        self.outbox.append(m.PrefillStepDone(step.step_id, self.now - 5, self.now, sampled, scores_of(step)))

    def write(self, item: m.PrefillItem, *, broken: bool) -> None:
        tokens = self.asked[item.handle].start.token_ids
        end = item.start + len(item.token_ids)
        assert item.token_ids == tokens[item.start : end] and (item.sample is not None) == (end == len(tokens))
        healthy = self.computed.get(item.handle, item.start) == item.start and not broken
        for g, first, ids in item.groups:
            kind = self.groups[g]
            if kind.kind is CacheKind.STATE:
                if healthy and item.start:
                    assert self.page[g, ids[0]] == tokens[: item.start], "the state has seen other tokens"
                for slot in ids:
                    self.page[g, slot] = tokens[:end] if healthy else BROKEN
                continue
            assert first + len(ids) == -(-end // BLOCK)
            for block in range(first_seen(kind, item.start) // BLOCK, -(-item.start // BLOCK)):
                there = tokens[: min((block + 1) * BLOCK, item.start)]
                if healthy:
                    assert block >= first and ids[block - first] >= 0, "a page that is seen has gone"
                    assert self.page[g, ids[block - first]][: len(there)] == there, "another prompt's KV would be read"
            for block in range(item.start // BLOCK, first + len(ids)):
                self.page[g, ids[block - first]] = tokens[: min((block + 1) * BLOCK, end)] if healthy else BROKEN
        self.computed[item.handle] = end if healthy else -1

    @precondition(lambda self: any(isinstance(message, Copy) for message in self.inbox))
    @rule()
    def rank_copies(self) -> None:
        self.copy(next(message for message in self.inbox if isinstance(message, Copy)))

    def copy(self, copy: Copy) -> None:
        self.inbox.remove(copy)
        bad = []
        for (g, first, ids), (_, _, extents) in zip(copy.groups, copy.group_extents, strict=True):
            for at, (page, extent) in enumerate(zip(ids, extents, strict=True), first):
                if page < 0:
                    continue
                if isinstance(copy, m.LoadCopy):
                    self.page[g, page] = self.extent[g, extent]
                else:
                    self.extent[g, extent] = self.page[g, page]
                    if (copy.ticket + at) % 7 == 4:  # found not finite
                        bad.append((g, at))
                        self.extent[g, extent] = BROKEN
        if isinstance(copy, m.LoadCopy):
            self.outbox.append(m.LoadCopied(copy.ticket, self.now - 3, self.now))
        else:
            self.outbox.append(m.SealCopied(copy.ticket, self.now - 3, self.now, bad_groups=tuple(bad)))

    @precondition(lambda self: self.pushes)
    @rule(data=st.data(), how=st.sampled_from(["done", "done", "failed"]))
    def push_moves(self, data: st.DataObject, how: str) -> None:
        self.push(data.draw(st.sampled_from(sorted(self.pushes))), how)

    def push(self, handle: int, how: str) -> None:
        spec = self.pushes[handle]
        if handle in self.cancelled:
            self.outbox.append(m.PushDrained(handle))
        elif how == "done":
            if self.computed.get(handle) != spec.prompt_tokens:
                return
            self.check_push(spec, spec.prompt_tokens)
            self.outbox.append(m.PushDone(handle, spec.handoff_epoch, self.now - 9, self.now, 640))
        else:
            self.outbox.append(m.PushFailed(handle, spec.handoff_epoch, "path broken", True))
        del self.pushes[handle]

    def check_push(self, spec: m.PushOpen, complete: int) -> None:
        start = self.asked[spec.handle].start
        assert [(p.group, p.first, len(p.ids)) for p in spec.groups] == [
            (p.group, p.first, len(p.ids)) for p in spec.group_offsets
        ]
        self.check_pages(start.token_ids, spec.groups, complete)

    def check_pages(self, tokens: Tokens, named: Sequence[GroupPages], complete: int) -> None:
        """Of these pages, those that are complete have this prompt's tokens."""
        for g, first, ids in named:
            assert -1 not in ids, "decode needs a page that has gone"
            if self.groups[g].kind is CacheKind.STATE:
                if complete == len(tokens):
                    assert self.page[g, ids[0]] == tokens, "not the state after the prompt"
                continue
            for block, page in enumerate(ids, first):
                there = tokens[: (block + 1) * BLOCK]
                if len(there) <= complete:
                    assert self.page[g, page] == there, "another prompt's KV is sent"

    @precondition(lambda self: self.outbox)
    @rule()
    def rank_is_heard(self) -> None:
        self.step(m.FromRank(0, self.outbox.popleft()))

    @precondition(lambda self: not self.lost and len(self.asked) > 3)
    @rule(really=st.sampled_from([False] * 30 + [True]))
    def rank_dies(self, really: bool) -> None:
        if not really:
            return
        self.lost = True
        self.inbox.clear()
        self.outbox.clear()
        self.pushes.clear()
        self.step(ev.RankLost(0, "killed"))
        assert not self.state.handoffs and not self.store.keys()

    @rule(ms=st.sampled_from([1, 60, PATIENCE_MS]))
    def time_passes(self, ms: int) -> None:
        self.now += ms * MS
        self.step(Tick())

    # ── other nodes ──────────────────────────────────────────────────────────────────────────────

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), lacks=st.sampled_from([0, 0, 1, 5, 7]))
    def pull_ends(self, data: st.DataObject, lacks: int) -> None:
        self.end_pull(self.jobs[data.draw(st.sampled_from(sorted(self.jobs)))], lacks)

    def end_pull(self, job: PullJob, lacks: int) -> None:
        del self.jobs[job.ticket]
        came = {at: mask & ~lacks for at, mask in enumerate(job.groups) if mask & ~lacks}
        for g, first, ids in job.places:
            for at, extent in enumerate(ids, first):
                there = at in came and came[at] >> g & 1
                if extent >= 0:
                    self.extent[g, extent] = self.named(job.keys[at]) if there else BROKEN
        self.step(Pulled(job.ticket, tuple(came), 64 * len(came), 0, groups=bytes(came.values())))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def is_removed(self, data: st.DataObject) -> None:
        known = {key for asked in self.asked.values() for key in asked.start.block_keys}
        if known:
            key = data.draw(st.sampled_from(sorted(known)))
            self.store.remove([key])
            self.step(NotHere(frozenset({key})))

    # ── what must hold ───────────────────────────────────────────────────────────────────────────

    @invariant()
    def everything_has_its_holders(self) -> None:
        if not self.given:  # else decode is a holder
            self.state.check_integrity()

    @invariant()
    def objects_are_what_their_keys_say(self) -> None:
        for g, store in enumerate(self.store.stores):
            for key, extent in store._sealed.items():
                assert self.extent[g, extent] == self.named(key), f"{key!r} of group {g} is sealed with other bytes"

    @invariant()
    def the_rank_is_busy_while_anything_can_run(self) -> None:
        handoffs = self.state.handoffs.values()
        patient = self.jobs and any(self.now < h.patient_until_ns for h in handoffs)
        if handoffs and not self.inbox and not self.outbox and not self.lost and not self.given and not patient:
            assert self.pushes or self.begun() or any(h.sampled_ns for h in handoffs), "all wait, for nothing"

    def teardown(self) -> None:
        """Lets everything come to its natural end: the pools are full again, nobody was forgotten."""
        for _ in range(2):
            self.time_passes(2 * PATIENCE_MS)
        for _ in range(500):
            while self.given:
                self.decode_gives_back()
            if not (self.state.handoffs or self.inbox or self.outbox):
                break
            if self.outbox:
                self.rank_is_heard()
            elif self.next_step():
                self.rank_runs_a_step(False)
            elif self.inbox:
                self.rank_copies()
            elif self.begun():
                self.landing(self.begun()[0], 100_000, 0)
            elif self.pushes:
                handle = next(iter(self.pushes))
                whole = self.computed.get(handle) == self.pushes[handle].prompt_tokens
                self.push(handle, "done" if whole else "failed")
            self.everything_has_its_holders()
        assert not self.state.handoffs, "handoffs that never end"
        for job in list(self.jobs.values()):
            self.end_pull(job, 0)
        assert all(asked.ended is not None for asked in self.asked.values())
        self.state.check_integrity()
        for g, pool in enumerate(self.table.pages.pools):
            assert self.table.pages.free(g) == pool.total and not self.table.pages.claimed[g]
        self.table.clear()
        assert all(pool.free == pool.total for pool in self.table.pages.pools)
        for store in self.store.stores:
            assert store.free == store.total and not store.stats.writing
