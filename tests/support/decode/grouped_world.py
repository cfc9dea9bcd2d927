"""A decode brain of a model of several cache groups, and a rank that follows what lies in every page and extent.

What lies somewhere is told by the tokens that it was computed from. What lies in a page or extent that nobody holds is
forgotten at once: whoever gave it back too early is found by who reads it next, be it a step in flight or a copy.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmesh.clock import Tick
from kvmesh.errors import RequestCancelled, Unavailable
from kvmesh.kvcache import keys as block_keys
from kvmesh.kvcache.cache_groups import CacheGroup, CacheKind, CacheLayout, GroupPages, first_seen
from kvmesh.kvcache.grouped_store import GroupedStore
from kvmesh.kvcache.layout import ShardLayout
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.quotas import NoTagQuotas, TagQuotas
from kvmesh.kvcache.sources import Pulled, PullJob, PullRange
from kvmesh.ranks import protocol as m
from kvmesh.services.decode import events as e
from kvmesh.services.decode import inputs as i
from kvmesh.services.decode.grouped.handoff import GroupedHandoff
from kvmesh.services.decode.grouped.scheduler import GroupedScheduler
from kvmesh.services.decode.limits import NS_PER_MS, GroupRoom, Limits, RankShape, Shape
from kvmesh.services.decode.state import DecodeState

B = 4
LAYOUT = CacheLayout(2, 1, 1)
ALL = CacheGroup("all", (0,), LAYOUT)
ROOT = b"root".ljust(32)
STRIDE = 1_000_000  # of the byte offsets of one group's pages, and of its extents
Place = tuple[str, int, int]  # ("page", group, 3)
Content = tuple[str, tuple[int, ...]]  # what was computed, after which tokens


def window(keep: int) -> CacheGroup:
    return CacheGroup(f"window{keep}", (1,), LAYOUT, CacheKind.WINDOW, keep)


def chunk(keep: int) -> CacheGroup:
    return CacheGroup(f"chunk{keep}", (2,), LAYOUT, CacheKind.CHUNK, keep)


def state(name: str = "state") -> CacheGroup:
    return CacheGroup(name, (3,), LAYOUT, CacheKind.STATE, 2)


def place_of(offset: int) -> Place:
    at, number = divmod(offset, STRIDE)
    return ("extent" if at % 2 else "page", at // 2, number)


@dataclass
class GroupedRow:
    join: m.Join
    tables: dict[int, GroupPages]
    tokens: list[int]  # of prompt and answer
    position: int  # of the token that the next step computes
    stalled: bool = False


@dataclass
class Flying:
    """One row of a step in flight."""

    handle: int
    tables: dict[int, GroupPages]
    position: int
    row: GroupedRow


Copies = m.CopyIn | m.CopyOut | m.LoadCopy | m.SealCopy


@dataclass
class GroupedRank:
    groups: tuple[CacheGroup, ...]
    memory: dict[Place, Content] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)  # by handle: prompt and answer
    commands: deque[m.ToRank] = field(default_factory=deque)
    says: deque[m.ToFront] = field(default_factory=deque)
    copies: list[Copies] = field(default_factory=list)
    windows: dict[tuple[str, int], set[Place]] = field(default_factory=dict)
    rows: dict[int, GroupedRow] = field(default_factory=dict)
    flights: deque[list[Flying]] = field(default_factory=deque)
    over: dict[int, m.ToFront] = field(default_factory=dict)  # said when no step in flight has the row
    vain: set[int] = field(default_factory=set)
    stops: set[int] = field(default_factory=set)  # rows that sample a stop token next
    steps: deque[m.PrefillStep] = field(default_factory=deque)
    doubts: bool = False  # now and then something that is sealed is not finite

    # ── commands ─────────────────────────────────────────────────────────────────────────────────

    def take(self) -> None:
        match self.commands.popleft():
            case m.OpenWindow(peer, epoch, offsets, sizes):
                assert len(sizes) == len(offsets)
                self.windows[peer, epoch] = {place_of(offset) for offset in offsets}
                self.says.append(m.WindowOpened(peer, epoch))
            case m.Fence(peer, epoch):
                self.windows.pop((peer, epoch), None)
                self.says.append(m.Fenced(peer, epoch))
            case m.CopyIn() | m.CopyOut() | m.LoadCopy() | m.SealCopy() as copy:
                self.copies.append(copy)
            case m.Join() as join:
                tables = {table.group: table for table in join.groups}
                assert sorted(tables) == list(range(len(self.groups)))
                tokens = [*self.tokens[join.handle][: join.context_tokens], join.next_token]
                self.rows[join.handle] = GroupedRow(join, tables, tokens, join.context_tokens)
            case m.Grant(handle, _, groups):
                if handle in self.rows:
                    row = self.rows[handle]
                    for g, first, ids in groups:
                        old = row.tables[g]
                        assert first == old.first + len(old.ids)
                        row.tables[g] = GroupPages(g, old.first, old.ids + ids)
                    row.stalled = False
            case m.DropPages(handle, g, first):
                if handle in self.rows:
                    row = self.rows[handle]
                    old = row.tables[g]
                    assert first > old.first
                    row.tables[g] = GroupPages(g, first, old.ids[first - old.first :])
            case m.PrefillStep() as step:
                for copy in [copy for copy in self.copies if isinstance(copy, m.LoadCopy)]:
                    self.finish_copy(self.copies.index(copy))  # it is done before the step
                self.steps.append(step)
            case m.Leave(handle):
                if self.rows.pop(handle, None) is not None or handle not in self.over:
                    self._say_when_over(handle, m.Left(handle))

    def _say_when_over(self, handle: int, message: m.ToFront) -> bool:
        if any(flying.handle == handle for flight in self.flights for flying in flight):
            self.over[handle] = message
            return True
        self.says.append(message)
        return False

    # ── steps ────────────────────────────────────────────────────────────────────────────────────

    def launch(self) -> None:
        flight = []
        for handle, row in self.rows.items():
            answered = row.position - row.join.context_tokens + row.join.token_index + 1
            if row.stalled or answered >= row.join.max_tokens:
                continue
            block = row.position // B
            token_tables = [t for g, t in row.tables.items() if self.groups[g].kind is not CacheKind.STATE]
            if any(t.first + len(t.ids) <= block for t in token_tables):
                if not any(flying.handle == handle for launched in self.flights for flying in launched):
                    row.stalled = True
                    self.says.append(m.Stalled(handle))
                continue
            flight.append(Flying(handle, dict(row.tables), row.position, row))
            row.position += 1
        if flight:
            self.flights.append(flight)

    def collect(self) -> None:
        """The oldest step in flight runs, and is told of."""
        if not self.flights:
            return
        flight, made = self.flights.popleft(), []
        for flying in flight:
            row, p = flying.row, flying.position
            self._compute(flying, row.tokens[: p + 1])
            if flying.handle in self.vain:
                continue
            index = p - row.join.context_tokens + row.join.token_index + 1
            stop = flying.handle in self.stops
            row.tokens.append(7 if stop else 1000 + index)
            self.tokens[flying.handle] = list(row.tokens)
            finish = 1 if stop else 2 if index + 1 >= row.join.max_tokens else 0
            made.append(m.Token(flying.handle, row.tokens[-1], index, finish))
        held = []
        for token in made:
            if token.finish:
                self.stops.discard(token.handle)
                self.rows.pop(token.handle, None)
                if any(flying.handle == token.handle for launched in self.flights for flying in launched):
                    self.vain.add(token.handle)
                    self.over.setdefault(token.handle, m.Left(token.handle))
                    held.append(token.handle)
        if made:
            self.says.append(m.DecodeStepDone(1, 2, len(flight), 1, tuple(made), held=tuple(held)))
        for handle in list(self.over):
            if not any(flying.handle == handle for launched in self.flights for flying in launched):
                self.says.append(self.over.pop(handle))
                self.vain.discard(handle)

    def chunks(self) -> None:
        """The oldest step of prompts runs."""
        step = self.steps.popleft()
        for item in step.items:
            tokens, end = self.tokens[item.handle], item.start + len(item.token_ids)
            tables = {table.group: table for table in item.groups}
            for g, group in enumerate(self.groups):
                table = tables[g]
                if group.kind is CacheKind.STATE:
                    slot, done = ("page", g, table.ids[0]), ("state", tuple(tokens[:end]))
                    if item.start:
                        assert self.memory.get(slot) == ("state", tuple(tokens[: item.start])), (
                            f"state of {item.handle}"
                        )
                    self.memory[slot] = done
                    if len(table.ids) > 1 and table.ids[1] >= 0:
                        self.memory["page", g, table.ids[1]] = done
                    continue
                for block in range(first_seen(group, item.start) // B, -(-item.start // B)):
                    found = self.memory.get(("page", g, table.ids[block - table.first]))
                    assert found == ("kv", tuple(tokens[: min(item.start, (block + 1) * B)])), f"{group.name} {block}"
                for block in range(item.start // B, -(-end // B)):
                    place = ("page", g, table.ids[block - table.first])
                    self.memory[place] = ("kv", tuple(tokens[: min(end, (block + 1) * B)]))
        sampled = tuple(m.Sampled(item.handle, 1000) for item in step.items if item.sample)
        self.says.append(m.PrefillStepDone(step.step_id, 1, 2, sampled))

    def _compute(self, flying: Flying, tokens: list[int]) -> None:
        """Reads all that the token at `position` sees, and writes its own."""
        p = flying.position
        for g, group in enumerate(self.groups):
            table = flying.tables[g]
            if group.kind is CacheKind.STATE:
                slot = ("page", g, table.ids[0])
                assert self.memory.get(slot) == ("state", tuple(tokens[:p])), f"state of {flying.handle} at {p}"
                if p % B == 0 and len(table.ids) > 1:
                    self.memory["page", g, table.ids[1]] = self.memory[slot]
                self.memory[slot] = ("state", tuple(tokens))
                continue
            for block in range(first_seen(group, p) // B, p // B + 1):
                have = min(p, (block + 1) * B)
                if have <= block * B:
                    continue  # the block begins with this token
                at = ("page", g, table.ids[block - table.first])
                assert block >= table.first, f"{flying.handle} sees block {block} of {group.name} at {p}: it is gone"
                found = self.memory.get(at)
                assert found == ("kv", tuple(tokens[:have])), f"{flying.handle} reads {found} of {group.name} at {p}"
            self.memory["page", g, table.ids[p // B - table.first]] = ("kv", tuple(tokens))

    # ── copies and landings ──────────────────────────────────────────────────────────────────────

    def finish_copy(self, at: int = 0) -> None:
        copy = self.copies.pop(at)
        into_pages = isinstance(copy, m.CopyIn | m.LoadCopy)
        assert len(copy.groups) == len(copy.group_extents)
        for pages, extents in zip(copy.groups, copy.group_extents, strict=True):
            assert pages.group == extents.group and len(pages.ids) == len(extents.ids)
            for page, extent in zip(pages.ids, extents.ids, strict=True):
                assert (page < 0) == (extent < 0)
                if page < 0:
                    continue
                source, target = ("extent", pages.group, extent), ("page", pages.group, page)
                if not into_pages:
                    source, target = target, source
                self.memory[target] = self.memory.get(source, ("nothing", ()))
        match copy:
            case m.LoadCopy(ticket):
                self.says.append(m.LoadCopied(ticket, 1, 2))
            case m.SealCopy(ticket):
                self.says.append(m.SealCopied(ticket, 1, 2, (), self._bad(copy)))
            case _:
                self.says.append(m.Copied(copy.handle, into_pages, 1, 2))

    def _bad(self, copy: m.SealCopy) -> tuple[tuple[int, int], ...]:
        if not self.doubts or copy.ticket % 5 != 4:
            return ()
        extents = copy.group_extents[copy.ticket % len(copy.group_extents)]
        self.memory["extent", extents.group, extents.ids[-1]] = ("not finite", ())
        return ((extents.group, extents.first + len(extents.ids) - 1),)

    def fill(self, peer: str, epoch: int, handle: int, landing: e.RankOffsets) -> None:
        allowed = self.windows.get((peer, epoch))
        if allowed is None:
            return
        tokens = self.tokens[handle]
        written = set()
        for g, first, offsets in landing.groups:
            kind = "state" if self.groups[g].kind is CacheKind.STATE else "kv"
            for at, offset in enumerate(offsets):
                end = len(tokens) if kind == "state" else min(len(tokens), (first + at + 1) * B)
                written.add(place_of(offset))
                self.memory[place_of(offset)] = (kind, tuple(tokens[:end]))
        assert written == allowed, "the window is what prefill is to send"
        self.says.append(m.FillEnded(peer, epoch))


class GroupedWorld:
    peer = 1  # of requests

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        pages: Sequence[int],
        extents: Sequence[int],
        *,
        running: int = 3,
        direct: bool = True,
        lookahead: int = 1,
    ) -> None:
        self.groups = tuple(groups)
        self.limits = Limits(max_running=running, lookahead_tokens=lookahead, watermark_percent=0, swap_percent=0)
        memories = tuple(
            m.GroupMemory(ShardLayout(1, 1, 1, 1, 1, planes=1, group=g), p, x, 2 * g * STRIDE, (2 * g + 1) * STRIDE)
            for g, (p, x) in enumerate(zip(pages, extents, strict=True))
        )
        rooms = tuple(
            GroupRoom(group=group, num_pages=p, num_extents=x)
            for group, p, x in zip(groups, pages, extents, strict=True)
        )
        self.shape = Shape(
            block_tokens=B,
            num_pages=pages[0],
            num_extents=extents[0],
            direct_landing=direct,
            max_context_tokens=1000,
            ranks=(RankShape(segment="d", shard_bytes=1, page_base_offset=0, extent_base_offset=0, groups=memories),),
            groups=rooms,
        )
        stores = [
            NodeStore(x, high_percent=100, low_percent=80, quotas=NoTagQuotas() if g else TagQuotas())
            for g, x in enumerate(extents)
        ]
        self.store = GroupedStore(groups, stores, B)
        self.state = self.make_state()
        assert isinstance(self.state.scheduler, GroupedScheduler)
        self.scheduler = self.state.scheduler
        self.rank = GroupedRank(self.groups)
        self.known: dict[bytes, tuple[int, ...]] = {}  # key → the tokens up to its end
        self.jobs: list[PullJob] = []
        self.landings: dict[int, tuple[int, e.RankOffsets]] = {}
        self.asked: dict[int, int] = {}
        self.slots = itertools.count(1)
        self.ends: Counter[int] = Counter()
        self.finished: set[int] = set()
        self.made: Counter[int] = Counter()
        self.errors: list[str] = []
        self.now = NS_PER_MS
        self.feed(i.SessionOpened(1))
        self.feed(i.PeerReady(1, ((0, "p"),)))

    def make_state(self) -> DecodeState:
        return DecodeState(self.limits, self.shape, self.store)

    # ── into the brain ───────────────────────────────────────────────────────────────────────────

    def feed(self, event: i.Input) -> None:
        for output in self.state.step(event, self.now):
            self.does(output)
        self.check()

    def does(self, output: i.Output) -> None:
        """Carries out what the brain wants."""
        match output:
            case m.TellRank(_, message):
                self.rank.commands.append(message)
            case e.AskPrefill(_, handle, spec):
                self.asked[handle] = self.shape.blocks(spec.prompt_tokens)
                self.rank.tokens[handle] = block_keys.unpack_tokens(spec.carry)
            case e.TellLanding(_, handle, epoch, _, ranks, _):
                self.landings[handle] = epoch, ranks[0]
            case i.Pull(job, _):
                self.jobs.append(job)
            case i.Flush(session):
                self._read(session)

    def _read(self, session: int) -> None:
        parcel = self.state.sessions[session].take()
        for slot, index in zip(parcel.slots, parcel.indices, strict=True):
            assert index == self.made[slot] and not self.ends[slot]
            self.made[slot] += 1
        for slot, _ in parcel.finished:
            self.ends[slot] += 1
            self.finished.add(slot)
        for slot, error in parcel.failed:
            self.ends[slot] += 1
            self.errors.append(error.code)

    def start(
        self, prompt: int, most: int, *, text: int = 0, pull: tuple[int, int] = (0, 0), mask: int = 0, priority: int = 0
    ) -> int:
        slot = next(self.slots)
        tokens = [text or 100 + slot] * prompt
        digest, keys = ROOT, []
        for block in range(prompt // B):
            key, digest = block_keys.extend(digest, block_keys.pack_tokens(tokens[block * B : (block + 1) * B]))
            keys.append(key)
        spec = e.Spec(
            request_id=str(slot),
            prompt_tokens=prompt,
            max_tokens=max(1, min(most, self.shape.context_limit - prompt)),
            deadline_ns=self.now + 10**9 * NS_PER_MS,
            priority=priority,
            credit_tokens=1000,
            stop_token_ids=(7,),
            block_keys=tuple(keys),
            chain_digest=digest,
            tail=block_keys.pack_tokens(tokens[prompt // B * B :]),
            pulls=(PullRange("h", "h:1", 1, *pull, groups=mask),) if pull[1] else (),
            carry=block_keys.pack_tokens(tokens),
        )
        self.feed(i.Admit(1, slot, self.peer, spec, self.now))
        return slot

    def cancel(self, slot: int) -> None:
        self.feed(i.CancelSlot(1, slot, RequestCancelled("gone")))

    def begin_fills(self) -> None:
        for handle in sorted(self.asked):
            if handle in self.state.requests:
                self.feed(i.FromPrefill(1, handle, e.BeginFill(self.asked.pop(handle))))
            else:
                del self.asked[handle]

    def fills(self) -> None:
        """Every landing that was told is filled, by a writer that does all right."""
        for handle, (epoch, landing) in list(self.landings.items()):
            del self.landings[handle]
            if handle not in self.state.requests or self.state.requests[handle].ended:
                self.feed(i.FromPrefill(1, handle, e.Drained(epoch)))
                continue
            self.rank.fill("p", epoch, handle, landing)
            self.feed(i.FromPrefill(1, handle, e.FirstToken(1000, None, 0)))
            self.feed(i.FromPrefill(1, handle, e.FillDone(epoch)))

    def pull_ends(self, came: int) -> None:
        """Of the oldest pull the objects in the mask `came` arrive."""
        job = self.jobs.pop(0)
        masks = [mask & came for mask in job.groups]
        for g, first, ids in job.places:
            for at, extent in enumerate(ids):
                if extent >= 0 and masks[first + at] >> g & 1:
                    self.learn()
                    self.rank.memory["extent", g, extent] = ("kv", self.known[job.keys[first + at]])
        arrived = tuple(at for at, mask in enumerate(masks) if mask)
        self.feed(Pulled(job.ticket, arrived, 1, 1, groups=bytes(masks[at] for at in arrived)))

    def hear(self) -> None:
        self.feed(m.FromRank(0, self.rank.says.popleft()))

    def part(self) -> None:
        self.feed(i.EndAll(Unavailable("it stops"), part=True))

    # ── what must hold at every moment ───────────────────────────────────────────────────────────

    def learn(self) -> None:
        """Names all blocks of what requests and ranks know."""
        for tokens in list(self.rank.tokens.values()):
            digest = ROOT
            for end in range(B, len(tokens) + B + 1, B):
                if end <= len(tokens):
                    key, digest = block_keys.extend(digest, block_keys.pack_tokens(tokens[end - B : end]))
                    self.known.setdefault(key, tuple(tokens[:end]))

    def check(self) -> None:
        requests = [h for h in self.state.requests.values() if isinstance(h, GroupedHandoff)]
        memory = self.rank.memory
        for g, pool in enumerate(self.scheduler.pools):
            own = [page for h in requests if g in h.runs for page in h.runs[g].ids]
            own += [page for h in requests if g in h.dropped for page in h.dropped[g].ids]
            assert len(own) == len(set(own)), f"two requests hold a page of group {g}"
            if not self.scheduler._keeps_all(g):
                reserved = self.scheduler.others(g) + self.scheduler._claims(g)
                assert reserved <= pool.total, f"{reserved} of the {pool.total} pages of group {g} are reserved"
            held = Counter(own + [page for at, page in self.scheduler.group_sealing.pages if at == g])
            for page in range(pool.total):
                assert pool.refcount(page) == held[page], f"page {page} of group {g}: references are not holders"
                if not held[page]:
                    memory.pop(("page", g, page), None)
            assert self.scheduler.free(g) >= 0, f"more pages of group {g} are claimed than there are"
        for g, store in enumerate(self.store.stores):
            raw = [x for h in requests for runs in (h.parked, h.swap_runs) if g in runs for x in runs[g].ids]
            lent = [x for h in requests for at, _, ids in h.borrowed if at == g for x in ids]
            blocks = [*store._sealed.values(), *store._writing.values()]
            held = Counter((*raw, *lent, *blocks))
            for extent in range(store.total):
                assert store._pool.refcount(extent) == held[extent], f"extent {extent} of {g}: references"
                if not held[extent]:
                    memory.pop(("extent", g, extent), None)
            if store._sealed:
                self.learn()
            kind = "state" if self.groups[g].kind is CacheKind.STATE else "kv"
            for key, extent in store._sealed.items():
                found, wanted = memory.get(("extent", g, extent)), (kind, self.known[key])
                assert found == wanted, f"sealed in group {g} is {found}, named {wanted}"
        for slots in self.rank.windows.values():
            for kind, g, number in slots:
                refs = self.scheduler.pools[g] if kind == "page" else self.store.stores[g]._pool
                assert refs.refcount(number), "a writer may write to what is free"
        assert self.scheduler.seats <= self.limits.max_running

    # ── letting it run ───────────────────────────────────────────────────────────────────────────

    def settle(self) -> None:
        """Commands, copies and messages, until there are none; no steps."""
        rank = self.rank
        while rank.commands or rank.says or rank.copies:
            if rank.commands:
                rank.take()
            elif rank.copies:
                rank.finish_copy()
            if rank.says:
                self.hear()

    def go_on(self) -> None:
        while self.jobs:
            self.pull_ends(-1)
        self.begin_fills()
        self.settle()
        self.fills()
        self.settle()

    def run(self, steps: int = 1, ahead: bool = False) -> None:
        for _ in range(steps):
            self.go_on()
            before = len(self.rank.flights)
            if self.rank.steps:
                self.rank.chunks()
            self.rank.launch()
            if not ahead or len(self.rank.flights) > 1 or len(self.rank.flights) == before:
                self.rank.collect()
            self.settle()

    def wind_down(self) -> None:
        """All that is admitted ends, and everything comes back."""
        for _ in range(400):
            self.run()
            if not self.state.requests:
                break
            if not self.rank.flights and not self.rank.rows:
                self.now += 5_000 * NS_PER_MS
                self.feed(Tick())
        assert not self.state.requests, [(h.phase.name, h.stalled, h.in_batch) for h in self.state.requests.values()]
        while self.rank.flights:
            self.rank.collect()
        self.settle()
        for g, (pool, store) in enumerate(zip(self.scheduler.pools, self.store.stores, strict=True)):
            pool.check_integrity()
            assert pool.free == pool.total, f"group {g} lost pages"
            assert store.free == store.total and not store.stats.writing, f"group {g} lost extents"
        self.store.check_integrity()
        assert not self.scheduler.seals and not len(self.state.pulls)
        assert self.scheduler.sharing.is_empty
        for slot in range(1, next(self.slots)):
            assert self.ends[slot] == 1, f"{slot} ended {self.ends[slot]} times"
