"""Who gets pages, extents and seats in the batch next, and who gives them back.

`next_grant` makes one decision from what is true now; its caller carries it out and asks again. Order everywhere:
priority (smaller first), then arrival. A request that waits for memory is not overtaken by another that waits for
memory of that kind; only what runs already may grow before it, and that ends. Whoever is first in order
runs, or waits for hands that come off by a timer: a request that fits the whole pool always finishes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from kvmesh.clock import NEVER
from kvmesh.errors import ContextTooLong, KvmeshError, Overloaded
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.page_pool import PagePool, Pages
from kvmesh.services.decode import events as e
from kvmesh.services.decode import rules
from kvmesh.services.decode.events import LandingPlace, Phase
from kvmesh.services.decode.handoff import Handoff
from kvmesh.services.decode.limits import NS_PER_MS, Limits, Shape
from kvmesh.services.decode.sealing import Sealing
from kvmesh.services.decode.step_times import StepTimes

Grant = tuple[Handoff, e.Event]
MAX_RETRY_AFTER_MS = 30_000


class Scheduler:
    """Pools and queues of one instance. `file` keeps the queues true after every step of a request."""

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
        self.requests: dict[int, Handoff] = {}  # not FREE
        self.live = 0  # whose client still waits for its end
        self.seats = 0  # in the batch, or on the way into it with pages
        self.needy: dict[int, Handoff] = {}  # running, want a page
        self.dirty = False  # something changed that may make a grant possible
        self._landing: dict[int, Handoff] = {}
        self._loading: dict[int, Handoff] = {}
        self.running: dict[int, Handoff] = {}
        self._ready: dict[int, Handoff] = {}
        self._seated: set[int] = set()
        self._epochs = itertools.count(first_epoch)
        self.step_times = StepTimes()
        self._mean_request_ms = 1_000.0
        self._watermark = rules.watermark(shape.num_pages, limits)
        self._swap_reserve = rules.swap_reserve(shape.num_extents, limits)

    # ── admission ────────────────────────────────────────────────────────────────────────────────

    def refusal(self, spec: e.Spec, now: int, adopts: bool = False) -> KvmeshError | None:
        """Why this request cannot be taken: the second check, after the conductor's. `adopts`: it needs no landing."""
        limit = self.shape.context_limit
        if spec.prompt_tokens + 1 > limit:
            why = f"prompt and answer together have {limit} tokens here"
            return ContextTooLong.of("prompt_tokens", spec.prompt_tokens, why)
        blocks = self.shape.blocks(spec.prompt_tokens)
        landing = max(self.shape.num_extents, self.shape.num_pages if self.shape.direct_landing else 0)
        if blocks > landing and not adopts:
            why = f"a landing here holds {landing * self.shape.block_tokens} tokens"
            return ContextTooLong.of("prompt_tokens", spec.prompt_tokens, why)
        if not rules.admits(self.live, self.limits):
            room = self.limits.max_running + self.limits.max_waiting
            wait = int(self._mean_request_ms * (self.live - self.seats + 1) / self.limits.max_running)
            return Overloaded(
                f"{self.live} requests here, room for {room}", retry_after_ms=max(100, min(wait, MAX_RETRY_AFTER_MS))
            )
        return self._too_slow(spec, now)

    def _too_slow(self, spec: e.Spec, now: int) -> KvmeshError | None:
        """Why steps would become longer than this request or one beside it may have. The conductor has asked the same,
        of what it knew; this is what is here now. Beside it are those that will not have left when it joins the batch,
        and those that should have left and have not. Alone it is taken in any case: it shows how long steps are."""
        if not spec.tbt_slo_ns:
            return None
        beside = [
            h
            for h in self.requests.values()
            if not h.ended and (h.spec.leaves_ns > spec.joins_ns or h.spec.leaves_ns <= now)
        ]
        if not beside:
            return None
        rows = min(len(beside) + 1, self.limits.max_running)
        context = (sum(h.context for h in beside) + spec.prompt_tokens) * rows // (len(beside) + 1)
        bound_ns = min(spec.tbt_slo_ns, *(h.spec.held_tbt_ns or NEVER for h in beside))
        predicted_ns = self.step_times.predict_ns(rows, context)
        if predicted_ns <= bound_ns:
            return None
        wait = int(self._mean_request_ms / rows)
        return Overloaded(
            f"predicted TBT {predicted_ns / NS_PER_MS:.0f} ms with {rows} rows is over the SLO of "
            f"{bound_ns / NS_PER_MS:.0f} ms",
            retry_after_ms=max(100, min(wait, MAX_RETRY_AFTER_MS)),
        )

    def note_ended(self, request: Handoff) -> None:
        """The client has its end: what the next refusal's retry_after is estimated from."""
        self.live -= 1
        took_ms = (request.times.ended - request.times.asked) / NS_PER_MS
        self._mean_request_ms += 0.1 * (took_ms - self._mean_request_ms)

    # ── a pool that is shared with prompts being computed ─────────────────────────────────────────

    @property
    def reserve(self) -> int:
        """Pages that no new prompt may take: room for running requests to grow, and for those that have been preempted
        (or have landed in extents) to come back. 0 when nobody decodes here: then any prompt that fits is taken."""
        coming = sum(self.shape.blocks(h.context + 1) for h in self._loading.values())
        return coming + self._watermark if self.seats or coming or self._ready else 0

    @property
    def waits(self) -> bool:
        """Somebody waits for pages or extents."""
        return bool(self.needy or self._loading or self._landing)

    # ── queues ───────────────────────────────────────────────────────────────────────────────────

    def file(self, h: Handoff) -> None:
        """Put a request where its phase belongs."""
        handle = h.handle
        if h.seated != (handle in self._seated):
            (self._seated.add if h.seated else self._seated.discard)(handle)
            self.seats = len(self._seated)
            self.dirty = True
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
        """A running request has used its last page but for the look-ahead."""
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
        """How many blocks may be written for the shared pool now: landings and swaps go first."""
        landings = sum(h.prompt_blocks for h in self._landing.values())
        return max(0, self.extents.free - self._swap_reserve - landings)

    def look_again(self) -> None:
        """Extents may have become free by themselves: leases of other nodes run out."""
        self.dirty = self.dirty or self.waits

    def keep(self, h: Handoff, extents: Sequence[int], shared: int) -> None:
        """The request's leading blocks lie in `extents`, which nobody touches any more: those that are not the store's
        already (`shared` are) become blocks of it, the rest goes back."""
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
        """One decision: what the request gets (its memory is already taken from the pool); None: nothing to do."""
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
        """Pages ran out and somebody stands still: the last in order gives its pages back."""
        if self.sealing.frees_pages or any(h.moving_out and h.pages for h in self.requests.values()):
            return None  # some come back soon
        victim = rules.victim(rules.in_order((*self.running.values(), *self._ready.values())))
        if victim is None:
            return None  # the others are being filled or fenced; their hands come off by a timer
        if self.extents.free >= len(victim.pages):
            return victim, e.Preempt(self.extents.allocate(len(victim.pages)))
        free = f"{self.pages.free} of {self.pages.total} pages and {self.extents.free} of {self.extents.total} extents"
        retry_ms = int(min(self._mean_request_ms, MAX_RETRY_AFTER_MS))
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
            need = self.shape.blocks(h.context + 1)
            if rules.may_load(self.pages.free, need, self._watermark, self.seats):
                return h, e.LoadExtents(self.pages.allocate(need))
            pages_wanted = True
        return None

    def _next_landing(self) -> Grant | None:
        for h in rules.in_order(self._landing.values()):
            place = self._place(h.prompt_blocks)
            if place is None:
                return None
            held = self.extents.hold(h.shared_keys)
            if place is LandingPlace.PAGES:
                slots = self.pages.allocate(h.prompt_blocks)
            else:
                slots = self.extents.allocate(h.prompt_blocks - len(held))
            return h, e.Land(next(self._epochs), place, slots, h.writers, held)
        return None

    def _place(self, blocks: int) -> LandingPlace | None:
        """Pages for those who will run soon; a burst waits in extents, but leaves some of them for those who must
        get out of the pages. None: no room for it now. Blocks that are here already count as if they were not: holding
        them takes no more than they would."""
        if self.shape.direct_landing and not self._loading:
            idle = self.pages.free == self.pages.total
            holders = sum(1 for h in self.requests.values() if h.pages)
            free, spare = self.pages.free, self._watermark
            if rules.may_land_in_pages(free, blocks, spare, holders, self.limits, idle=idle):
                return LandingPlace.PAGES
        idle = not any(h.extents or h.swap or h.held for h in self.requests.values())
        lands = rules.may_land_in_extents(self.extents.free, blocks, self._swap_reserve, idle=idle)
        return LandingPlace.EXTENTS if lands else None
