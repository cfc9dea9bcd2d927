"""Everything around the brain, adversarial: writers that write whenever a window is open, a rank that takes its time,
a network that repeats, delays and lies. The world checks every touch of memory against who holds it.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from dataclasses import dataclass, field

from kvmesh.kvcache.page_pool import PagePool
from kvmesh.node import messages as m
from kvmesh.rpc.errors import HandoffLost, RequestCancelled
from services.decode import events as e
from services.decode import inputs as i
from services.decode.limits import NS_PER_MS, Limits, RankShape, Shape
from services.decode.state import DecodeState

PAGE_BASE, EXTENT_BASE, SHARD = 0, 1_000_000, 10
BLOCK = 4
Slot = tuple[str, int]  # ("page", 3)


def slots_of(offsets: tuple[int, ...]) -> set[Slot]:
    return {("extent", (o - EXTENT_BASE) // SHARD) if o >= EXTENT_BASE else ("page", o // SHARD) for o in offsets}


@dataclass
class Row:
    """One request in the rank's batch."""

    join: m.Join
    pages: list[int]
    context: int
    made: int
    stalled: bool = False


@dataclass
class Rank:
    """A rank as the front knows it: commands are taken in order, fences and copies take their time."""

    commands: deque[m.ToRank] = field(default_factory=deque)
    says: deque[m.ToFront] = field(default_factory=deque)
    windows: dict[tuple[str, int], set[Slot]] = field(default_factory=dict)
    fencing: list[tuple[str, int]] = field(default_factory=list)
    copies: list[m.CopyIn | m.CopyOut] = field(default_factory=list)
    rows: dict[int, Row] = field(default_factory=dict)

    def take_command(self) -> None:
        match self.commands.popleft():
            case m.OpenWindow(peer, epoch, offsets):
                self.windows[peer, epoch] = slots_of(offsets)
                self.says.append(m.WindowOpened(peer, epoch))
            case m.Fence(peer, epoch):
                self.fencing.append((peer, epoch))
            case m.CopyIn() | m.CopyOut() as copy:
                self.copies.append(copy)
            case m.Join() as join:
                assert join.handle not in self.rows
                self.rows[join.handle] = Row(join, list(join.pages), join.context_tokens, join.token_index + 1)
            case m.Grant(handle, pages):
                if handle in self.rows:
                    self.rows[handle].pages += pages
                    self.rows[handle].stalled = False
            case m.Leave(handle):
                self.rows.pop(handle, None)
                self.says.append(m.Left(handle))

    def finish_fence(self) -> None:
        key = self.fencing.pop(0)
        self.windows.pop(key, None)
        self.says.append(m.Fenced(*key))

    def finish_copy(self) -> None:
        copy = self.copies.pop(0)
        self.says.append(m.Copied(copy.handle, isinstance(copy, m.CopyIn), 1, 2))

    def step(self, stop: bool = False) -> None:
        """One decode step; `stop`: the first row samples EOS."""
        tokens: list[m.Token] = []
        context = 0
        for handle, row in list(self.rows.items()):
            if row.context >= len(row.pages) * BLOCK:
                if not row.stalled:
                    row.stalled = True
                    self.says.append(m.Stalled(handle))
                continue
            row.context += 1
            finish = 1 if stop and not tokens else 2 if row.made + 1 >= row.join.max_tokens else 0
            tokens.append(m.Token(handle, 1000 + row.made, row.made, finish))
            row.made += 1
            context += row.context
            if finish:
                del self.rows[handle]
        if tokens:
            self.says.append(m.DecodeStepDone(1, 2, len(tokens), context, tuple(tokens)))

    def touched(self) -> dict[str, set[Slot]]:
        """Slots that something may write or read now, by who."""
        found: dict[str, set[Slot]] = {f"window {key}": slots for key, slots in self.windows.items()}
        for handle, row in self.rows.items():
            found[f"batch {handle}"] = {("page", p) for p in row.pages}
        for copy in self.copies:
            slots = {("page", p) for p in copy.pages} | {("extent", x) for x in copy.extents}
            found[f"copy {copy.handle}"] = slots
        return found


class World:
    """One brain and what it talks to."""

    def __init__(
        self,
        *,
        pages: int = 6,
        extents: int = 4,
        running: int = 2,
        waiting: int = 4,
        direct: bool = True,
        swap: int = 0,
    ):
        self.limits = Limits(
            max_running=running, max_waiting=waiting, lookahead_tokens=1, watermark_percent=0, swap_percent=swap
        )
        rank = RankShape(segment="d", shard_bytes=SHARD, page_base_offset=PAGE_BASE, extent_base_offset=EXTENT_BASE)
        self.shape = Shape(
            block_tokens=BLOCK,
            num_pages=pages,
            num_extents=extents,
            direct_landing=direct,
            max_context_tokens=1000,
            ranks=(rank,),
        )
        self.state = DecodeState(self.limits, self.shape)
        self.rank = Rank()
        self.now = NS_PER_MS
        self.slots = itertools.count(1)
        self.sessions = itertools.count(1)
        self.peers = itertools.count(1)
        self.ends: Counter[tuple[int, int]] = Counter()
        self.finished: set[tuple[int, int]] = set()
        self.errors: list[str] = []
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.closed: set[int] = set()
        self.peer_of: dict[int, int] = {}
        self.landings: dict[int, int] = {}  # handle → epoch, as prefill was told
        self.asked: dict[int, int] = {}  # handle → prompt blocks
        self.session = self.open_session()
        self.peer = self.open_peer()

    # ── into the brain ───────────────────────────────────────────────────────────────────────────

    def feed(self, event: i.Input) -> None:
        for output in self.state.step(event, self.now):
            match output:
                case i.TellRank(_, message):
                    self.rank.commands.append(message)
                case i.AskPrefill(_, request):
                    self.asked[request.handle] = request.prompt_blocks
                case i.TellLanding(_, handle, epoch, _, _):
                    self.landings[handle] = epoch
                case i.Flush(session):
                    self._read(session)
        self.check()

    def _read(self, session: int) -> None:
        parcel = self.state.sessions[session].take()
        for slot, index in zip(parcel.slots, parcel.indices, strict=True):
            made = self.tokens.setdefault((session, slot), [])
            assert index == len(made), "tokens come once each and in order"
            assert not self.ends[session, slot], "nothing comes after the end"
            made.append(index)
        for slot, _ in parcel.finished:
            self.ends[session, slot] += 1
            self.finished.add((session, slot))
        for slot, error in parcel.failed:
            self.ends[session, slot] += 1
            self.errors.append(error.code)

    def open_session(self) -> int:
        self.session = next(self.sessions)
        self.feed(i.SessionOpened(self.session))
        return self.session

    def open_peer(self) -> int:
        self.peer = next(self.peers)
        self.feed(i.PeerReady(self.peer, (f"p{self.peer}",)))
        return self.peer

    def start(
        self, prompt: int, max_tokens: int, *, priority: int = 0, credit: int = 1000, deadline: int = 10**9
    ) -> int:
        slot = next(self.slots)
        spec = e.Spec(
            request_id=str(slot),
            prompt_tokens=prompt,
            max_tokens=max_tokens,
            deadline_ns=self.now + deadline * NS_PER_MS,
            priority=priority,
            credit_tokens=credit,
            stop_token_ids=(7,),
        )
        self.tokens[self.session, slot] = []
        self.feed(i.Admit(self.session, slot, self.peer, spec, self.now))
        return slot

    def cancel(self, session: int, slot: int) -> None:
        self.feed(i.CancelSlot(session, slot, RequestCancelled("gone")))

    def prefill_says(self, handle: int, event: e.Event) -> None:
        h = self.state.requests.get(handle)
        self.feed(i.FromPrefill(h.peer if h else self.peer, handle, event))

    def rank_says(self) -> None:
        self.feed(i.FromRank(0, self.rank.says.popleft()))

    def wait(self, ms: int) -> None:
        self.now += ms * NS_PER_MS
        self.feed(i.Tick())

    # ── what must hold at every moment ───────────────────────────────────────────────────────────

    def check(self) -> None:
        scheduler = self.state.scheduler
        self._references_are_holders(scheduler.pages, [p for h in self.state.requests.values() for p in h.pages])
        held = [x for h in self.state.requests.values() for x in (*h.extents, *h.swap)]
        self._references_are_holders(scheduler.extents, held)
        pools = {"page": scheduler.pages, "extent": scheduler.extents}
        seen: dict[Slot, str] = {}
        for who, slots in self.rank.touched().items():
            for slot in slots:
                kind, number = slot
                assert pools[kind].refcount(number), f"{who} can touch {slot}, which is free"
                other = seen.get(slot)
                # A copy out of a landing beside its own closing window reads what is complete already.
                assert other is None or "copy" in who or "copy" in other, f"{who} and {other} can touch {slot}"
                seen[slot] = who
        self._windows_belong_to_their_requests()
        assert scheduler.live == sum(not h.ended for h in self.state.requests.values())
        assert scheduler.seats <= self.limits.max_running

    @staticmethod
    def _references_are_holders(pool: PagePool, held: list[int]) -> None:
        assert len(held) == len(set(held)), f"two holders: {sorted(held)}"
        assert pool.total - pool.free == len(held), "references are not holders"
        assert all(pool.refcount(slot) == 1 for slot in held)

    def _windows_belong_to_their_requests(self) -> None:
        for (_, epoch), slots in self.rank.windows.items():
            owners = [h for h in self.state.requests.values() if h.epoch == epoch]
            assert len(owners) == 1, f"epoch {epoch} has a window and no request"
            own = {("page", p) for p in owners[0].pages} | {("extent", x) for x in owners[0].extents}
            assert slots <= own, f"epoch {epoch} writes to slots that its request gave up"

    # ── letting it run ───────────────────────────────────────────────────────────────────────────

    def settle(self, *, fences: bool = True, copies: bool = True) -> None:
        """The rank catches up, but for the fences or copies that take their time; nobody sends anything new."""
        rank = self.rank
        while rank.commands or rank.says or (fences and rank.fencing) or (copies and rank.copies):
            if rank.commands:
                rank.take_command()
            elif fences and rank.fencing:
                rank.finish_fence()
            elif copies and rank.copies:
                rank.finish_copy()
            self.check()
            if rank.says:
                self.rank_says()

    def honest_prefill(self, handle: int) -> None:
        """A writer that does everything right, all at once."""
        self.prefill_says(handle, e.BeginFill(self.asked[handle]))

    def honest_fills(self, *, fences: bool = True, copies: bool = True) -> bool:
        """Complete every landing that was told; True if there was one."""
        done = False
        for handle, epoch in list(self.landings.items()):
            del self.landings[handle]
            if (h := self.state.requests.get(handle)) is None or h.ended:
                continue
            self.prefill_says(handle, e.FirstToken(1000, None, 0))
            self.rank.says.append(m.FillEnded(f"p{h.peer}", epoch))
            self.settle(fences=fences, copies=copies)
            self.prefill_says(handle, e.FillDone(epoch))
            done = True
        return done

    def wind_down(self) -> None:
        """No more input but time: every request ends, every slot comes back."""
        for _ in range(200):
            self.settle()
            self.rank.step()
            self.settle()
            if not self.state.requests:
                break
            self.wait(5_000)
        assert not self.state.requests, [(h.phase.name, h.windows, h.batch) for h in self.state.requests.values()]
        self.now += 10**12 * NS_PER_MS
        self.feed(i.Tick())  # answers that nobody gave credit for
        scheduler = self.state.scheduler
        scheduler.pages.check_integrity()
        scheduler.extents.check_integrity()
        assert scheduler.pages.free == scheduler.pages.total
        assert scheduler.extents.free == scheduler.extents.total
        assert not self.rank.windows and not self.rank.rows
        assert scheduler.live == 0 and scheduler.seats == 0
        for session, slot in self.tokens:
            ends = self.ends[session, slot]
            assert ends == 1 or (session in self.closed and ends <= 1), f"{slot} ended {ends} times"

    def failure(self, drained: bool) -> e.HandoffFailed:
        return e.HandoffFailed(HandoffLost("a path broke"), drained)
