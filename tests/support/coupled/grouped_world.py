"""Both brains of a coupled instance of a model of several cache groups, over a rank that follows what lies where."""

from __future__ import annotations

import itertools
from collections import deque

from kvmesh.clock import Tick
from kvmesh.kvcache import keys as block_keys
from kvmesh.kvcache.cache_groups import CacheKind
from kvmesh.ranks import protocol as m
from kvmesh.services.coupled.coupling import Coupling, to_prefill
from kvmesh.services.decode import events as e
from kvmesh.services.decode import inputs as i
from kvmesh.services.decode.grouped.handoff import GroupedHandoff
from kvmesh.services.decode.state import DecodeState
from kvmesh.services.prefill import events as ev
from kvmesh.services.prefill.checks import BrainConfig
from kvmesh.services.prefill.planner import PlanConfig
from tests.support.decode.grouped_world import B, GroupedWorld

CHUNK, MIXED = 2 * B, B


class CoupledGroupedWorld(GroupedWorld):
    """Prompts are computed here, and adopted."""

    peer = i.OWN_PEER

    def make_state(self) -> DecodeState:
        plan = PlanConfig(
            block_tokens=B, prefill_chunk_tokens=CHUNK, max_batch_tokens=2 * CHUNK, long_prompt_tokens=CHUNK
        )
        config = BrainConfig(plan=plan, max_context_tokens=1000, vocab_size=10_000, max_queued=8, groups=self.groups)
        self.coupling = Coupling(config, self.limits, self.shape, self.store, MIXED)
        self.prefill = self.coupling.prefill
        assert self.prefill.grouped is not None
        self.table = self.prefill.grouped
        self.own: dict[int, int] = {}  # prefill handle → decode handle
        self.handles = itertools.count(1)
        self.queues: tuple[deque[ev.Event], deque[i.Input]] = (deque(), deque())
        self.busy = [False, False]
        return self.coupling.decode

    # ── the shells ───────────────────────────────────────────────────────────────────────────────

    def feed(self, event: i.Input) -> None:
        queue = self.queues[1]
        queue.append(event)
        if self.busy[1]:
            return
        self.busy[1] = True
        while queue:
            for output in self.state.step(queue.popleft(), self.now):
                self.does(output)
        self.busy[1] = False
        self.coupling.decode_looked()
        if self.coupling.prefill_due():
            self.feed_prefill(Tick())
        if not any(self.busy):
            self.check()

    def feed_prefill(self, event: ev.Event) -> None:
        queue = self.queues[0]
        queue.append(event)
        if self.busy[0]:
            return
        self.busy[0] = True
        while queue:
            for action in self.prefill.step(queue.popleft(), self.now):
                self._prefill_does(action)
        self.busy[0] = False
        self.coupling.prefill_looked()
        if self.coupling.decode_due():
            self.feed(Tick())

    def does(self, output: i.Output) -> None:
        match output:
            case e.AskPrefill(_, theirs, spec):
                handle = next(self.handles)
                self.own[handle] = theirs
                tokens = block_keys.unpack_tokens(spec.carry)
                self.rank.tokens[handle], self.rank.tokens[theirs] = tokens, list(tokens)
                sampling = m.Sampling(0.0, 1.0, 0, 0)
                start = ev.Start(handle, 1, spec.request_id, tuple(tokens), spec.block_keys, sampling, adopt=True)
                self.feed_prefill(start)
            case e.TellCancel(_, theirs, reason):
                ours = next(n for n, other in self.own.items() if other == theirs)
                self.feed_prefill(ev.HandoffCancelled(ours, reason))
            case _:
                super().does(output)

    def _prefill_does(self, action: ev.Action) -> None:
        match action:
            case m.TellRank(_, message):
                self.rank.commands.append(message)
            case ev.SendAdopted(handle, first, _, groups):
                told = e.FirstToken(first.sampled.token_id, None, first.found.cached_tokens)
                self._own_said(handle, e.Adopted(told, (), groups))
            case ev.SendBeginFill(handle, blocks, _):
                self._own_said(handle, e.BeginFill(blocks))
            case ev.SendDrained(handle, epoch):
                self._own_said(handle, e.Drained(epoch))
            case ev.SendFailed(handle, error, drained):
                self._own_said(handle, e.HandoffFailed(error, drained))
            case ev.HandoffEnded():
                pass
            case other:
                raise AssertionError(f"unexpected {other}")

    def _own_said(self, handle: int, event: e.Event) -> None:
        self.feed(i.FromPrefill(i.OWN_PEER, self.own[handle], event))

    def hear(self) -> None:
        message = self.rank.says.popleft()
        if to_prefill(message):
            self.feed_prefill(m.FromRank(0, message))
            self.check()
        else:
            self.feed(m.FromRank(0, message))

    # ── what must hold ───────────────────────────────────────────────────────────────────────────

    def check(self) -> None:
        requests = [h for h in self.state.requests.values() if isinstance(h, GroupedHandoff)]
        held = [
            (g, page) for h in requests for runs in (h.runs, h.dropped) for g, run in runs.items() for page in run.ids
        ]
        self.table.check_integrity([*held, *self.scheduler.group_sealing.pages])
        for g, pool in enumerate(self.table.pages.pools):
            for page in range(pool.total):
                if not pool.refcount(page):
                    self.rank.memory.pop(("page", g, page), None)
        self.learn()
        for g, store in enumerate(self.store.stores):
            kind = "state" if self.groups[g].kind is CacheKind.STATE else "kv"
            for extent in range(store.total):
                if not store._pool.refcount(extent):
                    self.rank.memory.pop(("extent", g, extent), None)
            for key, extent in store._sealed.items():
                found, wanted = self.rank.memory.get(("extent", g, extent)), (kind, self.known[key])
                assert found == wanted, f"sealed in group {g} is {found}, named {wanted}"

    def wind_down(self) -> None:
        """No time passes: every request ends all the same."""
        for _ in range(600):
            self.run()
            if not self.state.requests and not self.rank.steps:
                break
        assert not self.state.requests, [
            (h.phase.name, h.where, h.stalled, h.runs, h.dropped) for h in self.state.requests.values()
        ]
        while self.rank.flights:
            self.rank.collect()
        self.settle()
        assert not self.prefill.handoffs
        self.table.cache.clear()
        for g, (pool, store) in enumerate(zip(self.table.pages.pools, self.store.stores, strict=True)):
            pool.check_integrity()
            assert pool.free == pool.total and not self.table.pages.claimed[g], f"group {g} lost pages"
            assert store.free == store.total and not store.stats.writing, f"group {g} lost extents"
        assert not self.scheduler.seals
        for slot in range(1, next(self.slots)):
            assert self.ends[slot] == 1, f"{slot} ended {self.ends[slot]} times"
