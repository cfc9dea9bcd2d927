"""Any interleaving of decode, rank and time: pages have holders, KV is right, every handoff has one ending.

The rank here is a model that keeps what a real one would: messages in order both ways (copies are done before steps
that were sent later, perhaps before earlier ones; pushes overtake everything), the content of every page and extent (as
the token prefix it was computed from), the pulls that may still write and the pushes that may still read. The decode
instances and the other nodes are rules.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from kvmesh.clock import Tick
from kvmesh.kvcache.sources import PullRange
from kvmesh.ranks import protocol as m
from kvmesh.services.prefill import events as ev
from kvmesh.services.prefill.handoff import PrefillPhase
from tests.support.prefill.pool_model import BLOCK, PATIENCE_MS, Copy, SharedPool
from tests.support.prefill.script import MS, check_scores, prompt, sampling_of, scores_of

ENDINGS = (ev.SendDrained, ev.SendFailed)


@dataclass
class Life:
    """What decode has seen of one handoff."""

    start: ev.Start
    said: list[ev.Action] = field(default_factory=list)
    ended: ev.HandoffEnded | None = None
    cancelled: bool = False
    landed: bool = False

    def has(self, *kinds: type) -> bool:
        return any(isinstance(a, kinds) for a in self.said)

    @property
    def finished(self) -> bool:
        return self.has(*ENDINGS) or (self.has(ev.SendFirstToken) and self.has(ev.SendFillDone))


@dataclass
class RankPush:
    spec: m.PushOpen
    cancelled: bool = False


class Machine(SharedPool):
    def __init__(self) -> None:
        super().__init__()
        self.lives: dict[int, Life] = {}
        self.broken: set[int] = set()
        self.epoch = 0
        self.pushes: dict[int, RankPush] = {}
        self.written: dict[int, int] = {}  # handle → tokens computed in unbroken order
        self.doubt: set[int] = set()  # handles with bytes that may fly without a holder
        self.lost = False

    # ── plumbing ─────────────────────────────────────────────────────────────────────────────────

    def step(self, event: ev.Event) -> None:
        self.now += 1
        for action in self.state.step(event, self.now):
            if isinstance(action, m.TellRank):
                self.at_rank(action.message)
                continue
            if isinstance(action, ev.FetchBlocks):
                self.pull_begins(action.job)
                continue
            if isinstance(action, ev.CancelPull):
                assert action.ticket in self.jobs and action.ticket not in self.cancelled
                self.cancelled.add(action.ticket)
                continue
            life = self.lives[action.handle]
            assert life.ended is None, f"{action} after the end"
            if isinstance(action, ev.HandoffEnded):
                life.ended = action
                assert life.finished or life.start.stream in self.broken, "ended, and decode does not know how"
                continue
            assert not life.has(*ENDINGS), f"{action} after {life.said[-1]}"
            assert type(action) not in (type(a) for a in life.said) or isinstance(action, ev.SendRenew)
            assert life.start.stream not in self.broken, f"{action} to a broken stream"
            self.check_promise(action)
            life.said.append(action)

    def check_promise(self, action: ev.Action) -> None:
        """ "Drained" and "done" mean that no byte is on its way and none will follow. A prompt that is to be scored is
        so from its second token on, whatever of it is cached."""
        if isinstance(action, ev.SendFirstToken):
            check_scores(self.lives[action.handle].start, action)
        if isinstance(action, ev.SendFailed) and not action.drained:
            assert action.handle in self.doubt or self.lost, "a fence for nothing"
        elif isinstance(action, (*ENDINGS, ev.SendFillDone)):
            assert action.handle not in self.pushes, f"{action} while the rank pushes"
            assert action.handle not in self.doubt, f"{action} with bytes in doubt"

    def at_rank(self, message: m.ToRank) -> None:
        if self.lost:
            return
        match message:
            case m.PrefillStep():
                self.one_writer(message)
                self.inbox.append(message)
            case m.PushOpen(handle):
                assert handle not in self.pushes, "pushed twice"
                assert not self.lives[handle].has(*ENDINGS), "pushed after the end"
                assert message.lease_until_ns > self.now, "a push was opened after its lease"
                tokens = self.lives[handle].start.token_ids
                for block in range(message.ready_tokens // BLOCK):  # it may be read before anything else is done
                    assert self.content.get(message.pages[block]) == tokens[: (block + 1) * BLOCK], "pushed too early"
                self.pushes[handle] = RankPush(message)
            case m.SealCopy() | m.LoadCopy():
                assert message.ticket not in self.copies
                self.one_owner(message)
                self.copies[message.ticket] = message
                self.inbox.append(message)
            case m.PushCancel(handle):
                if handle in self.pushes:
                    self.pushes[handle].cancelled = True
                else:
                    self.outbox.append(m.PushDrained(handle))

    def one_writer(self, step: m.PrefillStep) -> None:
        """A page that this step writes is read or written by no other request, and by no later step of its own."""
        for item in step.items:
            assert item.start % BLOCK == 0
            self.nobody_else(set(item.pages[item.start // BLOCK :]), item.handle)

    # ── decode ───────────────────────────────────────────────────────────────────────────────────

    @precondition(lambda self: len(self.lives) < 14)
    @rule(
        blocks=st.text(alphabet="ab", max_size=4),
        more=st.integers(0, 3),
        stream=st.integers(1, 3),
        deadline_ms=st.sampled_from([0, 0, 0, 700]),
        priority=st.integers(-1, 1),
        hints=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=2),
        later_ms=st.sampled_from([0, 0, 30, 2 * PATIENCE_MS]),
    )
    def start(
        self,
        blocks: str,
        more: int,
        stream: int,
        deadline_ms: int,
        priority: int,
        hints: list[tuple[int, int]],
        later_ms: int,
    ) -> None:
        if stream in self.broken:
            return
        tokens, keys = prompt(f"{blocks}+{more}", BLOCK)
        handle = len(self.lives) + 1
        deadline = self.now + deadline_ms * MS if deadline_ms else 0
        pulls = tuple(PullRange("A", "A:1", 1, at, min(n, len(keys) - at)) for at, n in hints if at < len(keys))
        sampling = sampling_of(handle)
        at = self.now + later_ms * MS if later_ms else 0
        name = f"r{handle}"
        start = ev.Start(handle, stream, name, tokens, keys, sampling, deadline, priority, pulls, pull_at_ns=at)
        self.lives[handle] = Life(start)
        self.starts[start.request_id] = start
        self.step(start)

    def open(self, *, landed: bool | None = None) -> list[int]:
        """Handles that decode still cares for."""
        return [
            n
            for n, life in self.lives.items()
            if life.ended is None and life.start.stream not in self.broken and landed in (None, life.landed)
        ]

    @precondition(lambda self: any(self.lives[n].has(ev.SendBeginFill) for n in self.open(landed=False)))
    @rule(data=st.data(), lease_ms=st.sampled_from([100, 1000, 5000]), skip=st.booleans())
    def land(self, data: st.DataObject, lease_ms: int, skip: bool) -> None:
        self.landing(data.draw(st.sampled_from(self.begun())), lease_ms, skip)

    def begun(self) -> list[int]:
        return [n for n in self.open(landed=False) if self.lives[n].has(ev.SendBeginFill)]

    def landing(self, handle: int, lease_ms: int, skip: bool) -> None:
        life = self.lives[handle]
        life.landed = True
        self.epoch += 1
        begin = next(a for a in life.said if isinstance(a, ev.SendBeginFill))
        offsets = tuple(range(begin.num_blocks))
        target = ev.RankLanding(0, "decode", offsets, 1 if skip else 0)
        self.step(ev.Landing(handle, self.epoch, lease_ms, (target,)))

    @precondition(lambda self: self.open(landed=True))
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(self.open(landed=True)))
        self.step(ev.Renewed(handle, data.draw(st.integers(1, self.epoch)), 1000))

    @precondition(lambda self: self.open())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(self.open()))
        self.lives[handle].cancelled = True
        self.step(ev.HandoffCancelled(handle, "not wanted"))

    @precondition(lambda self: len(self.broken) < 2)
    @rule(stream=st.integers(1, 3))
    def stream_breaks(self, stream: int) -> None:
        if stream not in self.broken:
            self.broken.add(stream)
            self.step(ev.StreamBroken(stream))

    # ── rank ─────────────────────────────────────────────────────────────────────────────────────

    def next_step(self) -> m.PrefillStep | None:
        return next((message for message in self.inbox if isinstance(message, m.PrefillStep)), None)

    @precondition(lambda self: self.next_step())
    @rule(fails=st.sampled_from(["no"] * 9 + ["all", "some"]), data=st.data())
    def rank_runs_a_step(self, fails: str, data: st.DataObject) -> None:
        step = self.next_step()
        assert step is not None
        handles = [i.handle for i in step.items]
        bad = handles if fails == "all" else []
        if fails == "some":
            bad = data.draw(st.lists(st.sampled_from(handles), unique=True, min_size=1))
        self.run_step(bad, answers=fails != "all")

    def run_step(self, bad: list[int], answers: bool = True) -> None:
        """A step that fails as a whole is answered by the error alone; else it is run again without `bad`."""
        while isinstance(self.inbox[0], Copy):  # they were sent before it
            self.copy(self.inbox[0])
        step = self.next_step()
        assert step is not None
        self.inbox.remove(step)
        for item in step.items:
            if item.handle in bad:
                self.written[item.handle] = -1
                self.content.update(dict.fromkeys(item.pages[item.start // BLOCK :], ()))
            else:
                self.write(item)
        if bad:
            self.outbox.append(m.RankError(tuple(bad), "out of memory"))
        if answers:
            good = [i for i in step.items if i.sample is not None and i.handle not in bad]
            sampled = tuple(m.Sampled(i.handle, 7) for i in good)
            done = m.PrefillStepDone(step.step_id, self.now - 5, self.now, sampled, scores_of(step, bad))
            self.outbox.append(done)

    def write(self, item: m.PrefillItem) -> None:
        tokens = self.lives[item.handle].start.token_ids
        healthy = self.written.get(item.handle, item.start) == item.start
        for block in range(item.start // BLOCK) if healthy else ():
            seen = self.content.get(item.pages[block])
            assert seen == tokens[: (block + 1) * BLOCK], "attention would read another prompt's KV"
        end = item.start + len(item.token_ids)
        assert item.token_ids == tokens[item.start : end]
        assert len(item.pages) == -(-end // BLOCK)
        assert (item.sample is not None) == (end == len(tokens))
        for block in range(item.start // BLOCK, len(item.pages)):
            self.content[item.pages[block]] = tokens[: min((block + 1) * BLOCK, end)] if healthy else ()
        self.written[item.handle] = end if healthy else -1

    @precondition(lambda self: self.pushes)
    @rule(data=st.data(), how=st.sampled_from(["done", "done", "progress", "failed", "doubt"]))
    def push_moves(self, data: st.DataObject, how: str) -> None:
        self.push(data.draw(st.sampled_from(sorted(self.pushes))), how)

    def push(self, handle: int, how: str) -> None:
        push = self.pushes[handle]
        spec = push.spec
        self.check_kv(spec)
        if how == "progress":
            self.outbox.append(m.PushProgress(handle, 64))
            return
        if how == "doubt":
            self.doubt.add(handle)
        if push.cancelled:
            self.outbox.append(m.PushDrained(handle, certain=how != "doubt"))
        elif how == "done":
            if self.written.get(handle) != spec.prompt_tokens:
                return
            self.outbox.append(m.PushDone(handle, spec.handoff_epoch, self.now - 9, self.now, 640))
        else:
            self.outbox.append(m.PushFailed(handle, spec.handoff_epoch, "path broken", how == "failed"))
        del self.pushes[handle]

    def check_kv(self, spec: m.PushOpen) -> None:
        """Whatever the push may read now is this prompt's KV."""
        tokens = self.lives[spec.handle].start.token_ids
        complete = max(self.written.get(spec.handle, 0), spec.ready_tokens)
        if self.written.get(spec.handle, 0) < 0:
            complete = spec.ready_tokens
        for block in range(complete // BLOCK):
            assert self.content[spec.pages[block]] == tokens[: (block + 1) * BLOCK], "another prompt's KV is pushed"

    @precondition(lambda self: self.outbox)
    @rule()
    def rank_is_heard(self) -> None:
        message = self.outbox.popleft()
        if isinstance(message, m.SealCopied | m.LoadCopied):
            del self.copies[message.ticket]
        self.step(m.FromRank(0, message))

    @precondition(lambda self: not self.lost and len(self.lives) > 3)
    @rule(really=st.sampled_from([False] * 30 + [True]))
    def rank_dies(self, really: bool) -> None:
        if not really:
            return
        self.lost = True
        self.inbox.clear()
        self.outbox.clear()
        self.copies.clear()
        self.doubt.update(self.pushes)
        self.pushes.clear()
        self.step(ev.RankLost(0, "killed"))
        assert not self.state.handoffs
        assert not self.state.store.keys()

    @precondition(lambda self: not self.lost)
    @rule()
    def rank_is_silent_for_a_while(self) -> None:
        self.doubt.update(h.handle for h in self.state.handoffs.values() if not h.quiet)
        self.step(ev.RanksSilent("silent"))
        assert all(h.told or h.deaf for h in self.state.handoffs.values())
        self.step(ev.RanksBack())

    @rule(ms=st.sampled_from([1, 60, PATIENCE_MS, 800]))
    def time_passes(self, ms: int) -> None:
        self.now += ms * MS
        self.step(Tick())

    # ── what must hold ───────────────────────────────────────────────────────────────────────────

    @invariant()
    def references_are_holders(self) -> None:
        self.state.check_integrity()
        for step in self.inbox:
            for item in step.items if isinstance(step, m.PrefillStep) else ():
                assert set(item.pages) <= set(self.state.handoffs[item.handle].pages), "a step outlives its pages"
        for handle, push in self.pushes.items():
            h = self.state.handoffs.get(handle)
            assert h is not None, "a push outlives its handoff"
            assert tuple(h.pages) == push.spec.pages

    @invariant()
    def the_rank_is_busy_while_anything_can_run(self) -> None:
        ready = [h for h in self.state.handoffs.values() if h.phase is PrefillPhase.QUEUED]
        patient = self.now < max((h.patient_until_ns for h in ready), default=0)
        if ready and not self.inbox and not self.outbox and not self.lost and not (patient and self.jobs):
            held = [h for h in self.state.handoffs.values() if h.pages]
            assert held, "requests wait and nothing holds pages"

    @invariant()
    def a_planned_pull_is_not_waited_for(self) -> None:
        """Its time is to come, it holds nothing, and a timer is set."""
        for h in self.state.handoffs.values():
            if h.pull_at_ns:
                assert h.phase is PrefillPhase.QUEUED and h.start.request_id not in {
                    j.request_id for j in self.jobs.values()
                }
                assert self.now < h.pull_at_ns and self.state.next_due() <= h.pull_at_ns
            if h.phase is PrefillPhase.QUEUED:  # its own pull begins once, after that it waits as long as others do
                begun = h.arrived_ns if not h.start.pull_at_ns else h.start.pull_at_ns + MS * 800
                assert h.patient_until_ns <= begun + PATIENCE_MS * MS, "it might wait for ever"

    def teardown(self) -> None:
        """Let everything come to its natural end: the pools are full again, nobody was forgotten. Pulls end last:
        nobody waits for them for ever."""
        for _ in range(2):  # a planned pull begins, and is given up
            self.time_passes(2 * PATIENCE_MS)
        for _ in range(400):
            if not (self.state.handoffs or self.inbox or self.outbox):
                break
            if self.outbox:
                self.rank_is_heard()
            elif self.next_step():
                self.run_step([])
            elif self.inbox:
                self.rank_copies()
            elif self.begun():
                self.landing(self.begun()[0], 100_000, False)
            elif self.pushes:
                handle = next(iter(self.pushes))
                push = self.pushes[handle]
                self.push(handle, "done" if self.written.get(handle) == push.spec.prompt_tokens else "failed")
            self.references_are_holders()
        assert not self.state.handoffs, "handoffs that never end"
        for job in list(self.jobs.values()):
            self.end_pull(job, [0])
        for life in self.lives.values():
            assert life.ended is not None
        pool, cache = self.state.pool, self.state.cache
        assert pool.free + cache.evictable == self.pages
        cache.clear()
        assert pool.free == self.pages
        store = self.state.store
        assert store.free == self.extents_total and not store.stats.writing and not self.state.pulls
        store.check_integrity()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
