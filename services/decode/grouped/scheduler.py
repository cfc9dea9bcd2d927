"""Who gets pages, extents and seats, where the model has several cache groups (ADR 0037).

The order and the rules are those of one group (services/decode/scheduler.py). What is new is that memory is counted
group by group. A group that keeps all is granted page by page as rows grow. Of the others a row gets a number reserved
when it gets pages at all, its *claim*: so it never waits there for another row, only for a seal that reads a page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from kvmesh.errors import Overloaded
from kvmesh.kvcache.cache_groups import GroupPages
from kvmesh.kvcache.grouped_store import GroupedStore
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.page_pool import PagePool, Pages
from kvmesh.kvcache.store_stats import StoreStats
from kvmesh.ranks import protocol as m
from kvmesh.rpc.pb import common_pb2
from kvmesh.services.decode import events as e
from kvmesh.services.decode import rules
from kvmesh.services.decode.events import LandingPlace
from kvmesh.services.decode.grouped.handoff import BlockRun, GroupedHandoff, is_state, landing_blocks, messages
from kvmesh.services.decode.grouped.sealing import GroupedSealing
from kvmesh.services.decode.handoff import Handoff
from kvmesh.services.decode.limits import Limits, Shape
from kvmesh.services.decode.scheduler import Grant, Scheduler


class GroupedScheduler(Scheduler):
    """Keeps the pools of each group, `pools[g]` of pages, and the queues. `pages` and `extents` of Scheduler are those
    of group 0."""

    def __init__(
        self,
        limits: Limits,
        shape: Shape,
        store: GroupedStore,
        new_ticket: Callable[[], int],
        pools: Sequence[Pages] | None = None,
        first_epoch: int = 1,
    ) -> None:
        self.pools: tuple[Pages, ...] = tuple(pools or (PagePool(room.num_pages) for room in shape.groups))
        super().__init__(limits, shape, store.stores[0], new_ticket, self.pools[0], first_epoch)
        self.store = store
        self.group_sealing = GroupedSealing(store, self.pools, shape.block_tokens, len(shape.ranks), new_ticket)
        # How many pages of a group that does not keep all are claimed by others, who share its pool: prompts.
        self.others: Callable[[int], int] = lambda _: 0
        self._spares = [
            rules.watermark(room.num_pages, limits) if room.claim(shape.block_tokens, 1) is None else 0
            for room in shape.groups
        ]
        self._swaps = [rules.swap_reserve(room.num_extents, limits) for room in shape.groups]

    # ── counts ───────────────────────────────────────────────────────────────────────────────────

    def free(self, g: int) -> int:
        """Returns how many pages of group g are neither held nor reserved."""
        free = self.pools[g].free - self._credits(g)
        if self._keeps_all(g):
            return free
        return min(free, self.pools[g].total - self.others(g) - self._claims(g))

    def _keeps_all(self, g: int) -> bool:
        return self.shape.groups[g].claim(self.shape.block_tokens, 1) is None

    def _claims(self, g: int) -> int:
        """Returns how many pages of a group rows hold, or have reserved."""
        return sum(len(h.runs[g].ids) + h.credit(g) for h in self._grouped() if g in h.runs)

    def _credits(self, g: int) -> int:
        return sum(h.credit(g) for h in self._grouped())

    def _grouped(self) -> list[GroupedHandoff]:
        return cast("list[GroupedHandoff]", list(self.requests.values()))

    def _wanted_to_load(self, h: GroupedHandoff) -> dict[int, BlockRun]:
        return h.needs(h.context, self.shape.blocks(h.context + 1))

    def _claimed(self, h: GroupedHandoff, g: int, need: int) -> int:
        """Returns how many pages of group g must be free for a request that gets `need` of them now."""
        claim = h.claims[g]
        return need if claim is None else max(need, claim)

    def reserved(self, g: int) -> int:
        """Returns how many pages of group g no new prompt may take, as `reserve` says. Of a group that gives back what
        lies behind, these are of all its pages: those that rows have, and have reserved, are among them."""
        coming = sum(
            self._claimed(h, g, len(self._wanted_to_load(h)[g].ids))
            for h in cast("list[GroupedHandoff]", list(self._loading.values()))
        )
        if not self._keeps_all(g):
            return coming + self._claims(g)
        return coming + (self._spares[g] if self.seats or self._loading or self._ready else 0)

    @property
    def reserve(self) -> int:
        return self.reserved(0)

    @property
    def object_room(self) -> list[int]:
        """How many objects of each group may be written into the store now."""
        landings = cast("list[GroupedHandoff]", list(self._landing.values()))
        return [
            max(0, store.free - self._swaps[g] - sum(len(h.needed(g)) for h in landings))
            for g, store in enumerate(self.store.stores)
        ]

    @property
    def room_for_blocks(self) -> int:
        room = self.object_room
        return min((room[g] for g, one in enumerate(self.shape.groups) if not is_state(one.group)), default=0)

    # ── what states give back, and seal ───────────────────────────────────────────────────────────

    def release_pages(self, pages: Sequence[int], groups: Sequence[GroupPages] = (), holder: int = 0) -> None:
        for g, _, ids in groups:
            self.pools[g].release(ids)
        self.dirty = True

    def release_extents(self, extents: Sequence[int], groups: Sequence[GroupPages] = ()) -> None:
        self.store.release(groups)
        self.dirty = True

    def seal(self, h: Handoff) -> m.SealCopy | None:
        assert isinstance(h, GroupedHandoff)
        return self.group_sealing.running(h, self.object_room)

    def seal_last(self, h: Handoff, action: e.FreePages) -> m.SealCopy | None:
        assert isinstance(h, GroupedHandoff)
        runs = {g: BlockRun(first, list(ids)) for g, first, ids in action.groups}
        return self.group_sealing.last(h, runs, self.object_room)

    def sealed(self, rank: int, done: m.SealCopied) -> bool:
        return self.group_sealing.copied(rank, done.ticket, done.bad_groups)

    def adopt(self, adopted: e.Adopted) -> e.Adopted:
        """Adds a second slot for each state, for snapshots at block borders; where there is none there will be none."""
        groups = []
        for g, first, ids in adopted.groups:
            second = is_state(self.shape.groups[g].group) and len(ids) == 1 and self.pools[g].free > 0
            groups.append(GroupPages(g, first, (*ids, *self.pools[g].allocate(1)) if second else ids))
        return e.Adopted(adopted.first, (), tuple(groups))

    def close_sealing(self) -> None:
        self.group_sealing.closed = True

    def drop_seals(self) -> None:
        self.group_sealing.drop()

    @property
    def seals(self) -> int:
        return len(self.group_sealing)

    @property
    def store_stats(self) -> list[StoreStats]:
        return [store.stats for store in self.store.stores]

    @property
    def memory(self) -> list[tuple[str, Pages, NodeStore]]:
        names = [room.group.name for room in self.shape.groups]
        return list(zip(names, self.pools, self.store.stores, strict=True))

    @property
    def group_counters(self) -> list[common_pb2.GroupPages]:
        return [
            common_pb2.GroupPages(
                group=g,
                pages_total=pool.total,
                pages_free=pool.free,
                extents_total=store.total,
                extents_free=store.free,
            )
            for g, (pool, store) in enumerate(zip(self.pools, self.store.stores, strict=True))
        ]

    def drop_store(self) -> None:
        self.store.drop_all()

    # ── admission ────────────────────────────────────────────────────────────────────────────────

    def _landing_fault(self, tokens: int) -> str:
        rooms = self.shape.groups
        needs = [len(landing_blocks(r.group, g, self.shape.block_tokens, tokens)) for g, r in enumerate(rooms)]
        fits = all(need <= room.num_pages for need, room in zip(needs, rooms, strict=True))
        if self.shape.direct_landing and fits:
            return ""
        for need, room in zip(needs, rooms, strict=True):
            if need > room.num_extents:
                return f"a landing here holds {room.num_extents} blocks of cache group {room.group.name}"
        return ""

    # ── decisions ────────────────────────────────────────────────────────────────────────────────

    def _growth(self) -> Grant | None:
        for h in cast("list[GroupedHandoff]", rules.in_order(self.needy.values())):
            short = h.short()
            if not short:
                del self.needy[h.handle]
                continue
            given = [
                GroupPages(g, h.runs[g].end, tuple(self.pools[g].allocate(1)))
                for g in short
                if self.pools[g].free and (h.claims[g] is None or h.credit(g))
            ]
            if len(given) == len(short):
                del self.needy[h.handle]
            if given:
                return h, e.Grow([], tuple(given))
            if h.stalled:
                return self._make_room()
        return None

    def _make_room(self) -> Grant | None:
        if self.group_sealing.frees_pages or any(h.moving_out and h.has_pages for h in self.requests.values()):
            return None  # some pages come back soon
        victim = rules.victim(rules.in_order((*self.running.values(), *self._ready.values())))
        if victim is None:
            return None  # the other pages are being filled or fenced; hands come off those by a timer
        assert isinstance(victim, GroupedHandoff)
        stores = self.store.stores
        if all(stores[g].free >= len(run.ids) for g, run in victim.runs.items()):
            swap = {g: BlockRun(run.first, stores[g].allocate(len(run.ids))) for g, run in victim.runs.items()}
            return victim, e.Preempt([], messages(swap))
        free = ", ".join(
            f"{pool.free} of {pool.total} pages and {store.free} of {store.total} extents of {room.group.name}"
            for room, pool, store in zip(self.shape.groups, self.pools, stores, strict=True)
        )
        retry_ms = rules.retry_after_ms(self._request_ms.mean, 1)
        return victim, e.Cancel(Overloaded(f"out of KV memory: {free} are free", retry_after_ms=retry_ms))

    def _load(self, h: Handoff) -> e.LoadExtents | None:
        assert isinstance(h, GroupedHandoff)
        wanted = self._wanted_to_load(h)
        for g, run in wanted.items():
            if not rules.may_load(self.free(g), self._claimed(h, g, len(run.ids)), self._spares[g], self.seats):
                return None
        for g, run in wanted.items():
            run.ids = self.pools[g].allocate(len(run.ids))
        return e.LoadExtents([], tuple(GroupPages(g, run.first, tuple(run.ids)) for g, run in sorted(wanted.items())))

    def _land(self, h: Handoff) -> e.Land | None:
        assert isinstance(h, GroupedHandoff)
        place = self._grouped_place(h)
        if place is None:
            return None
        held, slots = [], []
        for g, group in enumerate(h.groups):
            needed, first = h.needed(g), h.needed(g).start
            if is_state(group):
                slots.append(GroupPages(g, first, self._state_slots(g, place)))
                continue
            extents = self.store.stores[g].hold(h.shared_keys[needed.start : needed.stop])
            if extents:
                held.append(GroupPages(g, first, tuple(extents)))
            if place is LandingPlace.PAGES:
                slots.append(GroupPages(g, first, tuple(self.pools[g].allocate(len(needed)))))
            else:
                rest = self.store.stores[g].allocate(len(needed) - len(extents))
                slots.append(GroupPages(g, first + len(extents), tuple(rest)))
        return e.Land(next(self._epochs), place, [], h.writers, [], tuple(slots), tuple(held))

    def _state_slots(self, g: int, place: LandingPlace) -> tuple[int, ...]:
        in_pages = place is LandingPlace.PAGES
        return tuple(self.pools[g].allocate(2) if in_pages else self.store.stores[g].allocate(1))

    def _grouped_place(self, h: GroupedHandoff) -> LandingPlace | None:
        """Chooses as `_place` does: a kind of memory that has room in every group."""
        needs = {g: len(h.needed(g)) for g in range(len(h.groups))}
        if self.shape.direct_landing and not self._loading:
            idle = all(pool.free == pool.total for pool in self.pools)
            holders = sum(1 for other in self.requests.values() if other.has_pages)
            if all(
                rules.may_land_in_pages(
                    self.free(g), self._claimed(h, g, need), self._spares[g], holders, self.limits, idle=idle
                )
                for g, need in needs.items()
            ):
                return LandingPlace.PAGES
        idle = not any(other.has_host_memory for other in self.requests.values())
        lands = all(
            rules.may_land_in_extents(self.store.stores[g].free, need, self._swaps[g], idle=idle)
            for g, need in needs.items()
        )
        return LandingPlace.EXTENTS if lands else None
