"""This module decides who gets pages, extents and seats in the batch next, and who gives them back.

`next_grant` makes one decision from what is true now; its caller carries the decision out and asks again. The order is
the same everywhere: priority (smaller first), then arrival. A request that waits for memory is not overtaken by another
that waits for memory of the same kind. Only a request that runs already may take a page before it, and that ends: so a
request that fits the whole pool always finishes, because whoever is first in order runs, or waits for hands that come
off its memory by a timer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from kvmesh.errors import ContextTooLong, KvmeshError, Overloaded
from kvmesh.kvcache.cache_groups import GroupPages
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.page_pool import PagePool, Pages
from kvmesh.kvcache.store_stats import StoreStats
from kvmesh.ranks import protocol as m
from kvmesh.rpc.pb import common_pb2
from kvmesh.services.decode import events as e
from kvmesh.services.decode import rules
from kvmesh.services.decode.events import LandingPlace, Phase
from kvmesh.services.decode.handoff import Handoff
from kvmesh.services.decode.limits import NS_PER_MS, Limits, Shape
from kvmesh.services.decode.sealing import Sealing
from kvmesh.services.decode.sharing import PromptSharing
from kvmesh.services.decode.step_times import StepTimes

Grant = tuple[Handoff, e.Event]


class Scheduler:
    """Keeps the memory pools and queues of one decode instance. `file` must be called after every step of a request: it
    moves the request to the queue of its phase."""

    def __init__(
        self,
        limits: Limits,
        shape: Shape,
        store: NodeStore,
        new_ticket: Callable[[], int],
        pages: Pages | None = None,
        first_epoch: int = 1,
    ) -> None:
        self.limits = limits
        self.shape = shape
        self.pages: Pages = PagePool(shape.num_pages) if pages is None else pages
        self.extents = store  # landing and swap; idle sealed blocks in it count as free
        self.sealing = Sealing(store, self.pages, len(shape.ranks), new_ticket)
        self.sharing = PromptSharing(self.pages)
        self.requests: dict[int, Handoff] = {}  # by handle; all that are not FREE
        self.live = 0  # requests whose client has not been told the end
        self.seats = 0  # requests in the batch, or on their way into it with pages
        self.needy: dict[int, Handoff] = {}  # running requests that want another page
        self.dirty = False  # something changed that may make a grant possible
        self._landing: dict[int, Handoff] = {}
        self._loading: dict[int, Handoff] = {}
        self.running: dict[int, Handoff] = {}
        self._ready: dict[int, Handoff] = {}
        self._seated: set[int] = set()
        self._epochs = itertools.count(first_epoch)
        self.step_times = StepTimes()
        self._request_ms = rules.MeanRequest()
        self._watermark = rules.watermark(shape.num_pages, limits)
        self._swap_reserve = rules.swap_reserve(shape.num_extents, limits)

    # ── admission ────────────────────────────────────────────────────────────────────────────────

    def refusal(self, spec: e.Spec, now: int, adopts: bool = False) -> KvmeshError | None:
        """Returns why this request cannot be taken, or None. It is the second check, after the conductor's, by what is
        known here. A request that `adopts` pages needs no landing."""
        limit = self.shape.context_limit
        if spec.prompt_tokens + 1 > limit:
            why = f"prompt and answer together have {limit} tokens here"
            return ContextTooLong.of("prompt_tokens", spec.prompt_tokens, why)
        if (lacking := self._landing_fault(spec.prompt_tokens)) and not adopts:
            return ContextTooLong.of("prompt_tokens", spec.prompt_tokens, lacking)
        if not rules.admits(self.live, self.limits):
            room = self.limits.max_running + self.limits.max_waiting
            share = self.limits.max_running / (self.live - self.seats + 1)
            retry_ms = rules.retry_after_ms(self._request_ms.mean, share)
            return Overloaded(f"{self.live} requests here, room for {room}", retry_after_ms=retry_ms)
        return self._too_slow(spec, now)

    def _landing_fault(self, tokens: int) -> str:
        """Returns why a prompt of so many tokens could never land here; "" if it can."""
        landing = max(self.shape.num_extents, self.shape.num_pages if self.shape.direct_landing else 0)
        if self.shape.blocks(tokens) <= landing:
            return ""
        return f"a landing here holds {landing * self.shape.block_tokens} tokens"

    def _too_slow(self, spec: e.Spec, now: int) -> KvmeshError | None:
        """Returns the refusal of a request beside which steps would become longer than its own SLO, or that of a
        request beside it, allows (`rules.too_slow`, by what is here now)."""
        claims = (
            rules.Claim(h.context, h.spec.held_tbt_ns, h.spec.leaves_ns) for h in self.requests.values() if not h.ended
        )
        slow = rules.too_slow(
            self.step_times,
            spec.prompt_tokens,
            spec.tbt_slo_ns,
            spec.joins_ns,
            claims,
            self.limits.max_running,
            now,
        )
        if slow is None:
            return None
        return Overloaded(str(slow), retry_after_ms=rules.retry_after_ms(self._request_ms.mean, slow.rows))

    def note_ended(self, request: Handoff) -> None:
        """Records that the client has been told its end. The next refusal's retry_after is estimated from such
        durations."""
        self.live -= 1
        self._request_ms.add((request.times.ended - request.times.asked) / NS_PER_MS)

    # ── a pool that is shared with prompts being computed ─────────────────────────────────────────

    @property
    def reserve(self) -> int:
        """How many pages no new prompt may take, where prefill shares the pool: room for running requests to grow, and
        for those that were preempted (or landed in extents) to come back. It is 0 when nobody decodes here, so that any
        prompt that fits is taken."""
        coming = sum(self.shape.blocks(h.context + 1) for h in self._loading.values())
        return coming + self._watermark if self.seats or coming or self._ready else 0

    @property
    def waits(self) -> bool:
        """Whether any request waits for pages or extents."""
        return bool(self.needy or self._loading or self._landing)

    # ── what states give back, and seal ───────────────────────────────────────────────────────────

    def release_pages(self, pages: Sequence[int], groups: Sequence[GroupPages] = (), holder: int = 0) -> None:
        """Drops one reference of each page, that of the row `holder` if there is one."""
        self.sharing.release(holder, pages)
        self.dirty = True

    def release_extents(self, extents: Sequence[int], groups: Sequence[GroupPages] = ()) -> None:
        """Drops one reference of each extent."""
        self.extents.release(extents)
        self.dirty = True

    def seal(self, h: Handoff) -> m.SealCopy | None:
        """Begins to copy full blocks of a running request into the store."""
        return self.sealing.running(h, self.room_for_blocks)

    def seal_last(self, h: Handoff, action: e.FreePages) -> m.SealCopy | None:
        """Begins to copy full blocks of a request that has ended, whose pages are about to be given back."""
        return self.sealing.last(h, action.pages, self.room_for_blocks)

    def sealed(self, rank: int, done: m.SealCopied) -> bool:
        """Notes that a rank has copied; returns whether it was the last one."""
        if done.bad:
            pages = self.sealing.pages_of(done.ticket)
            self.sharing.pages.distrust(pages[at] for at in done.bad)
        return self.sealing.copied(rank, done.ticket, done.bad)

    def adopt(self, adopted: e.Adopted) -> e.Adopted:
        """Returns what a request gets that adopts the pages of its prompt."""
        return adopted

    def close_sealing(self) -> None:
        """Seals nothing more."""
        self.sealing.closed = True

    def drop_seals(self) -> None:
        """Forgets the copies under way, because the ranks are gone."""
        self.sealing.drop()

    @property
    def seals(self) -> int:
        """The number of copies under way."""
        return len(self.sealing)

    @property
    def store_stats(self) -> list[StoreStats]:
        """Counts of the node store, of each cache group's where the model has several."""
        return [self.extents.stats]

    @property
    def memory(self) -> list[tuple[str, Pages, NodeStore]]:
        """The pages and the store of each cache group, with its name; "all" where the model has one group."""
        return [("all", self.pages, self.extents)]

    @property
    def group_counters(self) -> list[common_pb2.GroupPages]:
        """Pages and extents of each cache group, where the model has several."""
        return []

    def drop_store(self) -> None:
        """Forgets all blocks, because their memory is gone."""
        self.sharing.pages.clear()
        self.extents.drop_all()

    # ── queues ───────────────────────────────────────────────────────────────────────────────────

    def file(self, h: Handoff) -> None:
        """Moves a request to the queue of its phase, and counts its seat."""
        handle = h.handle
        if h.seated != (handle in self._seated):
            (self._seated.add if h.seated else self._seated.discard)(handle)
            self.seats = len(self._seated)
            self.dirty = True
        if h.phase >= Phase.READY:
            for other in self.sharing.moved(h):
                other.awaits_no_more()
                self.file(other)
        queue = self._queue_of(h)
        if queue == "running" and h.made >= h.grow_at:
            self.want_page(h)
        if queue == h.queue:
            return
        for name, members in self._queues():
            if name == h.queue:
                del members[handle]
            elif name == queue:
                members[handle] = h
        h.queue = queue
        self.dirty = True
        if queue != "running":
            self.needy.pop(handle, None)

    def want_page(self, h: Handoff) -> None:
        """Notes that a running request needs another page: it has used its last one but for the look-ahead."""
        self.needy[h.handle] = h
        self.dirty = True

    def _queues(self) -> tuple[tuple[str, dict[int, Handoff]], ...]:
        return (
            ("landing", self._landing), ("loading", self._loading), ("ready", self._ready), ("running", self.running),
        )  # fmt: skip

    @staticmethod
    def _queue_of(h: Handoff) -> str:
        if h.wants_landing:
            return "landing"
        if h.wants_pages:
            return "loading"
        if h.wants_seat:
            return "ready"
        return "running" if h.running else ""

    @property
    def room_for_blocks(self) -> int:
        """How many blocks may be written into the store now. Landings that wait and the extents kept for swapping go
        first."""
        landings = sum(h.prompt_blocks for h in self._landing.values())
        return max(0, self.extents.free - self._swap_reserve - landings)

    def look_again(self) -> None:
        """Marks the scheduler dirty if somebody waits: extents become free without an event when leases of other nodes
        expire."""
        self.dirty = self.dirty or self.waits

    def keep(self, h: Handoff, extents: Sequence[int], shared: int) -> None:
        """Makes blocks of the store of `extents`, in which the request's leading blocks lie and which nobody touches
        any more. The first `shared` of them are the store's already; what cannot be named or may not be sealed is given
        back."""
        # Without a first token the step that computed the prompt may have failed after its bytes were on their way.
        known = min(h.context // self.shape.block_tokens, h.sealable) if h.first is not None else 0
        keys = h.chain.upto(known)
        own = range(shared, min(len(keys), len(extents)))
        for block in reversed(own):
            self.extents.adopt(keys[block], extents[block])
        self.extents.release((*extents[:shared], *extents[max(own.stop, shared) :]))
        self.dirty = True

    # ── decisions ────────────────────────────────────────────────────────────────────────────────

    def next_grant(self) -> Grant | None:
        """Makes one decision and returns the request and the event that grants it memory or a seat, or ends it. The
        memory has been taken from the pool already. Returns None if nothing can be granted."""
        return self._growth() or self._batch() or self._next_landing()

    def _growth(self) -> Grant | None:
        for h in rules.in_order(self.needy.values()):
            if self.pages.free:
                del self.needy[h.handle]
                return h, e.Grow(self.pages.allocate(1))
            if h.stalled:
                return self._make_room()
        return None

    def _make_room(self) -> Grant | None:
        """Decides who gives its pages back when they ran out and a request stands still: the last in order."""
        if self.sealing.frees_pages or any(h.moving_out and h.has_pages for h in self.requests.values()):
            return None  # some pages come back soon
        victim = rules.victim(rules.in_order((*self.running.values(), *self._ready.values())))
        if victim is None:
            return None  # the other pages are being filled or fenced; hands come off those by a timer
        if self.extents.free >= len(victim.pages):
            return victim, e.Preempt(self.extents.allocate(len(victim.pages)))
        free = f"{self.pages.free} of {self.pages.total} pages and {self.extents.free} of {self.extents.total} extents"
        retry_ms = rules.retry_after_ms(self._request_ms.mean, 1)
        return victim, e.Cancel(Overloaded(f"out of KV memory: {free} are free", retry_after_ms=retry_ms))

    def _batch(self) -> Grant | None:
        if not rules.has_seat(self.seats, self.limits) or not (self._ready or self._loading):
            return None
        pages_wanted = False
        for h in rules.in_order((*self._ready.values(), *self._loading.values())):
            if h.phase is Phase.READY:
                return h, e.Seat()
            if pages_wanted:
                continue
            load = self._load(h)
            if load is not None:
                return h, load
            pages_wanted = True
        return None

    def _load(self, h: Handoff) -> e.LoadExtents | None:
        keys = h.shared_keys
        shared = self.sharing.pages.count(keys)
        need = self.shape.blocks(h.context + 1) - shared
        if rules.may_load(self.pages.free, need, self._watermark, self.seats):
            found = self.sharing.pages.take(h.handle, keys[:shared])
            return e.LoadExtents([*found, *self.pages.allocate(need)], shared=shared)
        return None

    def _next_landing(self) -> Grant | None:
        for h in rules.in_order(self._landing.values()):
            awaited = self.sharing.awaited(h)
            if awaited:
                self.sharing.wait(h, awaited)
                return h, e.AwaitLanding(awaited)
            land = self._land(h)
            return None if land is None else (h, land)
        return None

    def _land(self, h: Handoff) -> e.Land | None:
        keys = h.shared_keys
        shared = self.sharing.pages.count(keys)
        place = self._place(h.prompt_blocks, shared)
        if place is None:
            return None
        if place is LandingPlace.PAGES:
            slots = self.sharing.pages.take(h.handle, keys[:shared])
            slots += self.pages.allocate(h.prompt_blocks - shared)
        else:
            shared = 0  # extents are copied into pages as a whole, or as far as there are such pages then
        held = self.extents.hold(keys[shared:])
        if place is LandingPlace.EXTENTS:
            slots = self.extents.allocate(h.prompt_blocks - len(held))
        self.sharing.lands(h, shared)
        return e.Land(next(self._epochs), place, slots, h.writers, held, shared=shared)

    def _place(self, blocks: int, shared: int) -> LandingPlace | None:
        """Chooses the kind of memory for a landing of `blocks` blocks, or None if there is no room now. Requests that
        will run soon land in pages, of which they share the first `shared` with other rows; a burst waits in extents,
        but leaves some of those for running requests that must give up their pages. Blocks that the store has already
        count as if they had to be sent: holding them takes no more than sending them would."""
        if self.shape.direct_landing and not self._loading:
            idle = self.pages.free == self.pages.total
            holders = sum(1 for h in self.requests.values() if h.has_pages)
            free, spare = self.pages.free, self._watermark
            if rules.may_land_in_pages(free, blocks - shared, spare, holders, self.limits, idle=idle):
                return LandingPlace.PAGES
        idle = not any(h.has_host_memory for h in self.requests.values())
        lands = rules.may_land_in_extents(self.extents.free, blocks, self._swap_reserve, idle=idle)
        return LandingPlace.EXTENTS if lands else None
