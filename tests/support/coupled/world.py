"""Both brains of a coupled instance and what they talk to: one rank, clients, instances elsewhere that do all right.

The shells' queues are played as they are: what one half says to the other is heard when that has finished its turn.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from dataclasses import dataclass, field

from kvmesh.blockservice.removals import NotHere
from kvmesh.clock import Tick
from kvmesh.errors import RequestCancelled
from kvmesh.kvcache import keys as block_keys
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.ranks import protocol as m
from kvmesh.services.coupled.coupling import Coupling, to_prefill
from kvmesh.services.decode import events as e
from kvmesh.services.decode import inputs as i
from kvmesh.services.decode.limits import NS_PER_MS, Limits, RankShape, Shape
from kvmesh.services.prefill import events as ev
from kvmesh.services.prefill.checks import BrainConfig
from kvmesh.services.prefill.handoff import PrefillPhase
from kvmesh.services.prefill.planner import PlanConfig
from tests.support.coupled.rank import BLOCK, EXTENT_BASE, Rank, Tokens

SESSION, PEER, STREAM = 1, 1, 1
CHUNK, MIXED = 8, 4
LEASE_MS = 10**6


def prompt(text: str, more: int) -> tuple[Tokens, tuple[bytes, ...]]:
    """`ab`, 2: two full blocks and two more tokens; equal beginnings are equal blocks."""
    tokens = [ord(letter) for letter in text for _ in range(BLOCK)] + [1] * more
    return tuple(tokens), tuple(text[: n + 1].encode().ljust(16) for n in range(len(text)))


@dataclass
class World:
    pages: int = 10
    extents: int = 8
    running: int = 3
    watermark: int = 0
    now: int = NS_PER_MS
    own: dict[int, int] = field(default_factory=dict)  # prefill handle → decode handle
    ends: Counter[int] = field(default_factory=Counter)  # by slot
    failed: dict[int, str] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    tokens: dict[int, list[int]] = field(default_factory=dict)  # by slot
    slots: dict[int, int] = field(default_factory=dict)  # decode handle → slot
    ended: list[ev.HandoffEnded] = field(default_factory=list)

    def __post_init__(self) -> None:
        plan = PlanConfig(
            block_tokens=BLOCK, prefill_chunk_tokens=CHUNK, max_batch_tokens=2 * CHUNK, long_prompt_tokens=CHUNK
        )
        config = BrainConfig(plan=plan, max_context_tokens=1000, vocab_size=10_000, max_queued=8)
        limits = Limits(
            max_running=self.running,
            max_waiting=8,
            lookahead_tokens=1,
            watermark_percent=self.watermark,
            swap_percent=0,
        )
        where = RankShape(segment="d", shard_bytes=1, page_base_offset=0, extent_base_offset=EXTENT_BASE)
        shape = Shape(
            block_tokens=BLOCK,
            num_pages=self.pages,
            num_extents=self.extents,
            direct_landing=True,
            max_context_tokens=1000,
            ranks=(where,),
        )
        self.store = NodeStore(self.extents, high_percent=100, low_percent=100)
        self.coupling = Coupling(config, limits, shape, self.store, MIXED)
        self.prefill, self.decode = self.coupling.prefill, self.coupling.decode
        self.prompts: dict[int, Tokens] = {}
        self.rank = Rank(self.prefill.pool, self.prompts)
        self.landings: dict[int, int] = {}  # decode handle → epoch, of prompts that are computed elsewhere
        self._handles = itertools.count(1)
        self._slots = itertools.count(1)
        self._epochs = itertools.count(1)
        self._queues: tuple[deque[ev.Event], deque[i.Input]] = (deque(), deque())
        self._busy = [False, False]
        self.feed_decode(i.SessionOpened(SESSION))
        self.feed_decode(i.PeerReady(PEER, ((0, "p1"),)))

    # ── the shells ───────────────────────────────────────────────────────────────────────────────

    def feed_prefill(self, event: ev.Event) -> None:
        queue = self._queues[0]
        queue.append(event)
        if self._busy[0]:
            return
        self._busy[0] = True
        while queue:
            for action in self.prefill.step(queue.popleft(), self.now):
                self._prefill_does(action)
        self._busy[0] = False
        self.coupling.prefill_looked()
        if self.coupling.decode_due():
            self.feed_decode(Tick())

    def feed_decode(self, event: i.Input) -> None:
        queue = self._queues[1]
        queue.append(event)
        if self._busy[1]:
            return
        self._busy[1] = True
        while queue:
            for output in self.decode.step(queue.popleft(), self.now):
                self._decode_does(output)
        self._busy[1] = False
        self.coupling.decode_looked()
        if self.coupling.prefill_due():
            self.feed_prefill(Tick())

    def _prefill_does(self, action: ev.Action) -> None:
        match action:
            case m.TellRank(_, message):
                self.rank.inbox.append(message)
            case ev.SendAdopted(handle, first, pages):
                told = e.FirstToken(first.sampled.token_id, None, first.found.cached_tokens)
                self.feed_decode(i.FromPrefill(i.OWN_PEER, self.own[handle], e.Adopted(told, pages)))
            case ev.HandoffEnded():
                self.ended.append(action)
            case ev.SendBeginFill(handle, blocks, _):
                if handle in self.own:
                    self._own_said(handle, e.BeginFill(blocks))
                else:
                    landing = ev.RankLanding(0, "elsewhere", tuple(range(blocks)), 0)
                    self.feed_prefill(ev.Landing(handle, next(self._epochs), LEASE_MS, (landing,)))
            case ev.SendDrained(handle, epoch):
                self._own_said(handle, e.Drained(epoch))
            case ev.SendFailed(handle, error, drained):
                self._own_said(handle, e.HandoffFailed(error, drained))
            case ev.SendFirstToken() | ev.SendFillDone() | ev.SendRenew():
                assert action.handle not in self.own, f"{action} within an instance"
            case other:
                raise AssertionError(f"unexpected {other}")

    def _own_said(self, handle: int, event: e.Event) -> None:
        if handle in self.own:
            self.feed_decode(i.FromPrefill(i.OWN_PEER, self.own[handle], event))

    def _decode_does(self, output: i.Output) -> None:
        match output:
            case m.TellRank(_, message):
                self.rank.inbox.append(message)
            case e.AskPrefill(i.OWN_PEER, theirs, spec):
                handle = next(self._handles)
                self.own[handle] = theirs
                tokens: Tokens = spec.carry
                self.prompts[handle] = self.prompts[theirs] = tokens
                self.feed_prefill(self._start(handle, tokens, spec.block_keys, spec.priority, adopt=True))
            case e.AskPrefill(_, handle, spec):
                self.prompts[handle] = spec.carry
                blocks = self.decode.shape.blocks(spec.prompt_tokens)
                self.feed_decode(i.FromPrefill(PEER, handle, e.BeginFill(blocks)))
            case e.TellLanding(_, handle, epoch, _, _, _):
                self.landings[handle] = epoch
            case e.TellCancel(i.OWN_PEER, handle, reason):
                ours = next((n for n, theirs in self.own.items() if theirs == handle), None)
                assert ours is not None, "cancelled before it was asked for"
                self.feed_prefill(ev.HandoffCancelled(ours, reason))
            case e.TellCancel(_, handle, _):
                self.feed_decode(i.FromPrefill(PEER, handle, e.Drained(self.landings.pop(handle, 0))))
            case i.Flush():
                self._read()

    def _start(self, handle: int, tokens: Tokens, keys: tuple[bytes, ...], priority: int, *, adopt: bool) -> ev.Start:
        sampling = m.Sampling(0.0, 1.0, 0, 0)
        return ev.Start(handle, STREAM, f"r{handle}", tokens, keys, sampling, priority=priority, adopt=adopt)

    def _read(self) -> None:
        parcel = self.decode.sessions[SESSION].take()
        for slot, token, index in zip(parcel.slots, parcel.token_ids, parcel.indices, strict=True):
            made = self.tokens[slot]
            assert index == len(made), "tokens come once each and in order"
            assert not self.ends[slot], "nothing comes after the end"
            made.append(token)
        for slot, _ in parcel.finished:
            self.ends[slot] += 1
            self.finished.add(slot)
        for slot, error in parcel.failed:
            self.ends[slot] += 1
            self.failed[slot] = error.message

    # ── what comes ───────────────────────────────────────────────────────────────────────────────

    def start(self, text: str, more: int, most: int, *, own: bool = True, priority: int = 0) -> int:
        """A request whose prompt is computed here (`own`) or elsewhere."""
        slot = next(self._slots)
        tokens, keys = prompt(text, more)
        spec = e.Spec(
            request_id=str(slot),
            prompt_tokens=len(tokens),
            max_tokens=min(most, self.decode.shape.context_limit - len(tokens)),
            deadline_ns=10**18,
            priority=priority,
            credit_tokens=10**6,
            stop_token_ids=(7,),
            block_keys=keys,
            chain_digest=(keys[-1] if keys else b"root").ljust(32),
            tail=block_keys.pack_tokens(tokens[len(keys) * BLOCK :]),
            carry=tokens,
        )
        self.tokens[slot] = []
        before = set(self.decode.requests)
        self.feed_decode(i.Admit(SESSION, slot, i.OWN_PEER if own else PEER, spec, self.now))
        for handle in self.decode.requests.keys() - before:
            self.slots[handle] = slot
        return slot

    def prefill_for_others(self, text: str, more: int) -> None:
        """A prompt whose KV is pushed to a decode instance elsewhere."""
        tokens, keys = prompt(text, more)
        handle = next(self._handles)
        self.prompts[handle] = tokens
        self.feed_prefill(self._start(handle, tokens, keys, 0, adopt=False))

    def cancel(self, slot: int) -> None:
        self.feed_decode(i.CancelSlot(SESSION, slot, RequestCancelled("gone")))

    def remove(self, key: bytes) -> None:
        """From the store and from both brains, in one turn."""
        self.store.remove([key])
        gone = NotHere(frozenset((key,)), None)
        self.feed_prefill(gone)
        self.feed_decode(gone)

    def hear(self) -> None:
        """The rank's oldest word."""
        message = self.rank.outbox.popleft()
        if to_prefill(message):
            self.feed_prefill(m.FromRank(0, message))
        else:
            self.feed_decode(m.FromRank(0, message))

    def fills(self) -> bool:
        """Writers elsewhere write what they were invited to; True if there was one."""
        found = list(self.landings.items())
        self.landings.clear()
        for handle, epoch in found:
            h = self.decode.requests.get(handle)
            if h is None or h.ended:
                continue
            self.feed_decode(i.FromPrefill(PEER, handle, e.FirstToken(600, None, 0)))
            self.rank.fill("p1", epoch, self.prompts[handle])
            self.feed_decode(i.FromPrefill(PEER, handle, e.FillDone(epoch)))
        return bool(found)

    def settle(self) -> None:
        """The rank catches up, but for steps."""
        while self.rank.inbox or self.rank.outbox or self.rank.seals:
            if self.rank.inbox:
                self.rank.take()
            elif self.rank.seals:
                self.rank.finish_seal()
            else:
                self.hear()
            self.check()

    def run(self, steps: int = 1000) -> None:
        """So many steps, or until nothing moves."""
        self.settle()
        while steps and (self.rank.step() or self.rank.outbox):
            self.settle()
            steps -= 1

    # ── what must hold ───────────────────────────────────────────────────────────────────────────

    def check(self) -> None:
        scheduler, requests = self.decode.scheduler, self.decode.requests.values()
        others = [page for h in requests for page in h.pages] + scheduler.sealing.pages
        self.prefill.check_integrity(others)
        for h in requests:
            assert len(set(h.pages)) == len(h.pages)
            # What follows the prompt's full blocks is nobody else's, cached or not.
            for page in h.pages[h.spec.prompt_tokens // BLOCK :] if h.running else ():
                sealing = scheduler.sealing.pages.count(page)
                assert self.prefill.pool.refcount(page) == 1 + sealing, f"page {page} of {h.handle} has another holder"
        assert scheduler.live == sum(not h.ended for h in requests)
        assert scheduler.seats <= self.running
        adopting = {n for n, h in self.prefill.handoffs.items() if h.start.adopt and not h.ending}
        assert all(self.own[n] in self.decode.requests for n in adopting), "a prompt is computed for nobody"

    def check_store(self) -> None:
        """A sealed block holds what its key names."""
        named: dict[bytes, Tokens] = {}
        for h in self.decode.requests.values():
            answer = self.rank.answers.get(h.handle, {})
            tokens = (*h.spec.carry, *(answer[at] for at in range(len(answer))))
            named.update((key, tokens[: (at + 1) * BLOCK]) for at, key in enumerate(h.chain.keys))
        for key, extent in self.store._sealed.items():
            if key in named:
                assert self.rank.extents[extent] == named[key], f"{key!r} is sealed with other bytes"

    # ── the end ──────────────────────────────────────────────────────────────────────────────────

    def wind_down(self) -> None:
        """Nothing new comes, and no time passes: every request ends all the same, and every page comes back."""
        for _ in range(600):
            self.settle()
            worked = self.rank.step() or bool(self.rank.outbox)
            worked = self.fills() or worked
            self.settle()
            if not worked and not self.rank.steps:
                break
        waiting = [(h.phase.name, h.where, len(h.pages)) for h in self.decode.requests.values()]
        assert not waiting, f"nobody moves, and these wait: {waiting}"
        left = [(h.phase, len(h.pages)) for h in self.prefill.handoffs.values()]
        assert not left, f"handoffs that never end: {left}"
        assert all(self.ends[slot] == 1 for slot in self.tokens), self.ends
        scheduler, pool, cache = self.decode.scheduler, self.prefill.pool, self.prefill.cache
        assert scheduler.pages.free == scheduler.pages.total == self.pages
        assert scheduler.sharing.is_empty
        assert scheduler.live == scheduler.seats == 0 and not scheduler.waits and not scheduler.reserve
        cache.clear()
        assert pool.free == self.pages
        assert self.store.free == self.extents and not self.store.stats.writing
        self.store.check_integrity()
        assert not any(h.phase is not PrefillPhase.QUEUED for h in self.prefill.handoffs.values())
