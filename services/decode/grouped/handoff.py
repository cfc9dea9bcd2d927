"""The state machine of one request of a model that has several cache groups: what it holds in each of them (ADR 0037).

When what happens is decided as for one group (services/decode/handoff.py); here is what it is then. Of a group of
tokens a request holds a run of neighbouring blocks, of a state two slots: the one that steps change, and a second one
into which the rank copies it at block borders.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvmesh.clock import NEVER
from kvmesh.kvcache.cache_groups import CacheGroup, CacheKind, GroupPages, first_seen, freed_blocks
from kvmesh.ranks import protocol as m
from kvmesh.services.decode import events as e
from kvmesh.services.decode.events import LandingPlace
from kvmesh.services.decode.handoff import Handoff
from kvmesh.services.decode.limits import Limits, Shape
from kvmesh.services.decode.rules import grow_at


@dataclass(slots=True)
class BlockRun:
    """The pages or extents of neighbouring blocks: `ids[i]` is of block `first + i`. Of a state they are its slots."""

    first: int
    ids: list[int]

    @property
    def end(self) -> int:
        return self.first + len(self.ids)


def is_state(group: CacheGroup) -> bool:
    return group.kind is CacheKind.STATE


def landing_blocks(group: CacheGroup, g: int, block_tokens: int, tokens: int) -> range:
    """Returns the blocks of group number g that a prompt of so many tokens needs at decode; of a state it is the one
    that it lies in. The block with the prompt's last token is always one of group 0's."""
    end = -(-tokens // block_tokens)
    if is_state(group):
        return range(end - 1, end)
    first = first_seen(group, tokens) // block_tokens
    return range(min(first, end - 1) if g == 0 else first, end)


def freed_at(group: CacheGroup, block_tokens: int, block: int) -> int:
    """Returns after how many tokens block `block` of a bounded group is seen by no token any more."""
    end = (block + 1) * block_tokens  # of its tokens, the last of which is seen longest
    if group.kind is CacheKind.WINDOW:
        return end + group.keep - 1
    return -(-end // group.keep) * group.keep


def messages(runs: Mapping[int, BlockRun]) -> tuple[GroupPages, ...]:
    """Returns the runs that are not empty, by ascending group, as messages name them."""
    return tuple(GroupPages(g, runs[g].first, tuple(runs[g].ids)) for g in sorted(runs) if runs[g].ids)


class GroupedHandoff(Handoff):
    """Keeps the state of one request of a model with several cache groups. `pages`, `extents`, `held` and `swap` of
    Handoff stay empty."""

    def __init__(self, handle: int, spec: e.Spec, limits: Limits, shape: Shape) -> None:
        super().__init__(handle, spec, limits, shape)
        self.groups = tuple(room.group for room in shape.groups)
        self.claims = {g: room.claim(shape.block_tokens, self.blocks_max) for g, room in enumerate(shape.groups)}
        self.runs: dict[int, BlockRun] = {}  # pages, by group
        self.dropped: dict[int, BlockRun] = {}  # pages that no token sees any more, until a step has been collected
        self.parked: dict[int, BlockRun] = {}  # extents, by group: of the landing, or of a request that was preempted
        self.swap_runs: dict[int, BlockRun] = {}  # extents reserved for a preemption under way
        self.borrowed: tuple[GroupPages, ...] = ()  # the store's extents under `loading`
        self.sent_from: dict[int, int] = {}  # first block that the writer sends, of groups of which it sends something
        self.began = 0  # tokens whose KV was there when it first joined the batch
        self.extra = 0  # tokens that steps have made and that its client was not told
        self.vain = False  # a step has computed its last token, whose KV is nobody's

    # ── what the scheduler asks ──────────────────────────────────────────────────────────────────

    @property
    def has_pages(self) -> bool:
        return bool(self.runs)

    def extents_of(self, group: int) -> Sequence[int]:
        return self.parked[group].ids if group in self.parked else ()

    @property
    def has_extents(self) -> bool:
        return bool(self.parked)

    @property
    def has_tail(self) -> bool:
        return self.chain.pending is not None

    @property
    def has_host_memory(self) -> bool:
        return bool(self.parked or self.swap_runs or self.borrowed)

    @property
    def _has_swap(self) -> bool:
        return bool(self.swap_runs)

    @property
    def room(self) -> int:
        end = min((run.end for _, run in self._token_runs()), default=self.blocks_max)
        return end * self.shape.block_tokens - self.context

    def credit(self, g: int) -> int:
        """Returns how many pages of group g are reserved for the request beside those that it holds."""
        claim = self.claims[g]
        if claim is None or g not in self.runs:
            return 0
        out = len(self.dropped[g].ids) if g in self.dropped else 0
        return max(0, claim - len(self.runs[g].ids) - out)

    def short(self) -> list[int]:
        """Returns the groups in which another page is wanted now."""
        return [g for g, run in self._token_runs() if self.made >= self._grow_at(g, run)]

    def needs(self, context: int, blocks: int) -> dict[int, BlockRun]:
        """Returns, for each group, the first block and how many pages (their ids are not given yet: -1) a row has that
        goes on after `context` tokens and has `blocks` blocks."""
        found = {}
        for g, group in enumerate(self.groups):
            if is_state(group):
                found[g] = BlockRun(0, [-1, -1])
            else:
                first = min(freed_blocks(group, self.shape.block_tokens, context), self._parked_first(g, blocks))
                found[g] = BlockRun(first, [-1] * (blocks - first))
        return found

    def _parked_first(self, g: int, otherwise: int) -> int:
        """Returns the first block of group g that lies in extents."""
        return self.parked[g].first if g in self.parked else otherwise

    def plan_growth(self) -> None:
        self.grow_at = min((self._grow_at(g, run) for g, run in self._token_runs()), default=NEVER)
        self.drop_at = self._next_drop()

    def _grow_at(self, g: int, run: BlockRun) -> int:
        step, ahead = self.shape.block_tokens, self.limits.lookahead_tokens
        if self.claims[g] is not None:
            ahead = min(ahead, step)  # one page ahead is what is reserved
        return grow_at(run.end, self.blocks_max, self.spec.prompt_tokens, step, ahead)

    def _token_runs(self) -> Iterator[tuple[int, BlockRun]]:
        return ((g, run) for g, run in self.runs.items() if not is_state(self.groups[g]))

    # ── pages that no token sees any more ────────────────────────────────────────────────────────

    def drop(self, out: list[e.Action], *, idle: bool = False) -> None:
        """Has the ranks forget pages that no token from now on sees, and gives back those of the last time; if no step
        has the row (`idle`), all of them."""
        self._free_dropped(out)
        for g, run in self._token_runs():
            count = self._freed(g) - run.first
            if self.claims[g] is None or count <= 0:
                continue
            gone = BlockRun(run.first, run.ids[:count])
            del run.ids[:count]
            run.first += count
            out.extend(self._to_all(m.DropPages(self.handle, g, run.first)))
            self.dropped[g] = gone
        if idle:
            self._free_dropped(out)
        self.drop_at = self._next_drop()

    def _freed(self, g: int) -> int:
        return freed_blocks(self.groups[g], self.shape.block_tokens, self.context)

    def _next_drop(self) -> int:
        if self.dropped:
            return self.made + 1  # the next step's token says that the one that ran is over
        step, before = self.shape.block_tokens, self.spec.prompt_tokens - 1
        bounded = ((g, run) for g, run in self._token_runs() if self.claims[g] is not None)
        return min((freed_at(self.groups[g], step, run.first) - before for g, run in bounded), default=NEVER)

    def _free_dropped(self, out: list[e.Action]) -> None:
        if self.dropped:
            out.append(e.FreeDropped(messages(self.dropped)))
            self.dropped = {}

    # ── the landing ──────────────────────────────────────────────────────────────────────────────

    def needed(self, g: int) -> range:
        """Returns the blocks of group g that the prompt needs here."""
        return landing_blocks(self.groups[g], g, self.shape.block_tokens, self.spec.prompt_tokens)

    def _take_landing(self, event: e.Land) -> None:
        held = {g: BlockRun(first, list(ids)) for g, first, ids in event.group_held}
        slots = {g: BlockRun(first, list(ids)) for g, first, ids in event.group_slots}
        end = self.prompt_blocks
        self.sent_from = {g: held[g].end if g in held else slots[g].first for g in slots}
        self.sent_from = {g: first for g, first in self.sent_from.items() if first < end}
        self.first_block = self.sent_from[0]
        for g in slots:
            if is_state(self.groups[g]):
                slots[g].first = 0
        if event.place is LandingPlace.PAGES:
            self.runs, self.borrowed = slots, event.group_held
            return
        for g, run in held.items():
            slots[g] = BlockRun(run.first, run.ids + (slots[g].ids if g in slots else []))
        self.parked = slots

    def _load_held(self) -> m.LoadCopy | None:
        if not self.borrowed:
            return None
        pages = []
        for g, first, ids in self.borrowed:
            at = first - self.runs[g].first
            pages.append(GroupPages(g, first, tuple(self.runs[g].ids[at : at + len(ids)])))
        return m.LoadCopy(self.epoch, (), (), tuple(pages), self.borrowed)

    def _drop_held(self) -> e.FreeExtents:
        held, self.borrowed = self.borrowed, ()
        return e.FreeExtents((), held)

    def _landing(self, rank: int) -> e.RankOffsets:
        return e.RankOffsets(rank, self.shape.ranks[rank].segment, (), tuple(self._places(rank)))

    def _places(self, rank: int) -> Iterable[GroupPages]:
        """Yields the byte offsets of what is to be sent, group by group, in the segment of rank `rank`."""
        where = self.runs or self.parked
        for g, first in sorted(self.sent_from.items()):
            memory = self.shape.ranks[rank].groups[g]
            base = memory.page_base_offset if self.runs else memory.extent_base_offset
            ids = where[g].ids[:1] if is_state(self.groups[g]) else where[g].ids[first - where[g].first :]
            ids = ids[: self.prompt_blocks - first]
            yield GroupPages(g, first, tuple(base + x * memory.shard.shard_bytes for x in ids))

    def _invite(self, rank: int, peer: str) -> m.TellRank:
        offsets: list[int] = []
        sizes: list[int] = []
        for g, _, places in self._places(rank):
            offsets += places
            sizes += [self.shape.ranks[rank].groups[g].shard.shard_bytes] * len(places)
        return m.TellRank(rank, m.OpenWindow(peer, self.epoch, tuple(offsets), tuple(sizes)))

    # ── pages and the batch ──────────────────────────────────────────────────────────────────────

    def _take_adopted(self, event: e.Adopted) -> None:
        self.runs = {g: BlockRun(first, list(ids)) for g, first, ids in event.groups}
        for g, run in self.runs.items():
            if is_state(self.groups[g]):
                run.first = 0
            elif not run.ids:
                run.first = self.needed(g).start  # nothing of the prompt is seen any more

    def _keep_extents(self) -> e.FreeExtents:
        """What lies in extents is in pages, too, and sealed out of those."""
        parked, self.parked = self.parked, {}
        return e.FreeExtents((), messages(parked))

    def _take_pages(self, event: e.LoadExtents) -> m.CopyIn:
        self.runs = {g: BlockRun(first, list(ids)) for g, first, ids in event.groups}
        pages = {g: BlockRun(run.first, self.runs[g].ids[: len(run.ids)]) for g, run in self.parked.items()}
        assert all(self.runs[g].first == run.first for g, run in self.parked.items())
        return m.CopyIn(self.handle, (), (), messages(pages), messages(self.parked))

    def _tables(self) -> tuple[GroupPages, ...]:
        self.began = self.began or self.context
        return tuple(GroupPages(g, run.first, tuple(run.ids)) for g, run in sorted(self.runs.items()))

    def _take_growth(self, event: e.Grow) -> m.Grant:
        for g, first, ids in event.groups:
            assert first == self.runs[g].end, "pages are granted in the order of blocks"
            self.runs[g].ids += ids
        return m.Grant(self.handle, (), event.groups)

    def _take_swap(self, event: e.Preempt) -> None:
        assert not self.parked
        self.swap_runs = {g: BlockRun(first, list(ids)) for g, first, ids in event.groups}

    def _use_swap(self, out: list[e.Action]) -> m.CopyOut:
        """What is live is copied out, and nothing else. It has left the batch: its run is what it was when the extents
        were reserved, or shorter at its begin, or one that ends later, of which the last pages have no KV."""
        used, spare = self.shape.blocks(self.context), {}
        pages: dict[int, BlockRun] = {}
        for g, run in self.runs.items():
            count = len(run.ids) if is_state(self.groups[g]) else used - run.first
            extents = self.swap_runs[g].ids if g in self.swap_runs else []
            pages[g] = BlockRun(run.first, run.ids[:count])
            self.parked[g] = BlockRun(run.first, extents[:count])
            spare[g] = BlockRun(0, extents[count:])
        self.swap_runs = {}
        if any(run.ids for run in spare.values()):
            out.append(e.FreeExtents((), messages(spare)))
        return m.CopyOut(self.handle, (), (), messages(pages), messages(self.parked))

    # ── what steps have computed ─────────────────────────────────────────────────────────────────

    def step(self, event: e.Event, now: int) -> list[e.Action]:
        if type(event) is e.Ended and event.held and self.in_batch:
            self.vain = True
        return super().step(event, now)

    def token(self, token_id: int, index: int, now: int) -> bool:
        known = super().token(token_id, index, now)
        if not known and self.ended and self.in_batch:
            self.extra += 1
        return known

    def states(self) -> tuple[int, int] | None:
        """Returns (tokens, which of its two slots): that slot of each STATE group is the state after so many tokens, a
        whole number of blocks, the last for which there is one; None where there is none that its answer contains."""
        computed, step = self.context + self.extra, self.shape.block_tokens
        border = computed // step * step
        if border > self.context:
            return None
        if border == computed and not self.vain:
            return border, 0
        return (border, 1) if self.began and border >= self.began else None

    # ── ends ─────────────────────────────────────────────────────────────────────────────────────

    def _give_pages(self, out: list[e.Action]) -> None:
        self._free_dropped(out)
        if self.runs:
            out.append(e.FreePages((), messages(self.runs)))
        self.runs = {}

    def _give_extents(self, out: list[e.Action]) -> None:
        if self.parked or self.swap_runs:
            out.append(e.FreeExtents((), (*messages(self.parked), *messages(self.swap_runs))))
        self.parked, self.swap_runs = {}, {}
