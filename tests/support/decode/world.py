"""Everything around the brain, adversarial: writers that write whenever a window is open, a rank that takes its time,
a network that repeats, delays and lies, readers with leases. The world checks every touch of memory against who holds
it, and follows what lies in every page and extent: a sealed block holds what its key names, always.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from kvmesh.clock import Tick
from kvmesh.errors import HandoffLost, RequestCancelled
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.sources import Pulled, PullJob, PullRange
from kvmesh.ranks import protocol as m
from kvmesh.services.decode import events as e
from kvmesh.services.decode import inputs as i
from kvmesh.services.decode.limits import NS_PER_MS, Limits, RankShape, Shape
from kvmesh.services.decode.state import DecodeState
from tests.support.decode.rank import (
    BLOCK,
    EXTENT_BASE,
    PAGE_BASE,
    SHARD,
    Prompt,
    Rank,
    Use,
    digest_of,
    slots_of,
)

# Who reads what somebody else may still write: a copy out of a landing beside its own closing window (complete since
# the end mark), and a copy of full blocks of a row that only writes behind them.
HARMLESS = ({"window", "copy in"}, {"batch", "seal"})


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
        self.store = NodeStore(extents, high_percent=100, low_percent=80)
        self.state = DecodeState(self.limits, self.shape, self.store)
        self.prompts: dict[int, Prompt] = {}
        self.rank = Rank(self.prompts)
        self.jobs: list[PullJob] = []
        self.leases: list[int] = []
        self.told: dict[int, tuple[int, ...]] = {}  # handle → offsets of its landing
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
                case m.TellRank(_, message):
                    self.rank.commands.append(message)
                case e.AskPrefill(_, handle, spec):
                    self.asked[handle] = self.state.shape.blocks(spec.prompt_tokens)
                case e.TellLanding(_, handle, epoch, _, ranks, first):
                    self.landings[handle] = epoch
                    self.told[handle] = ranks[0].offsets
                    (window,) = [w for (_, opened), w in self.rank.windows.items() if opened == epoch]
                    assert window == slots_of(ranks[0].offsets[first:]), "the window is what prefill is to send"
                case i.Pull(job, _):
                    self.jobs.append(job)
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
        self.feed(i.PeerReady(self.peer, ((0, f"p{self.peer}"),)))
        return self.peer

    def start(
        self,
        prompt: int,
        max_tokens: int,
        *,
        priority: int = 0,
        credit: int = 1000,
        deadline: int = 10**9,
        text: int = 0,
        pull: tuple[int, int] = (0, 0),
    ) -> int:
        """`text`: prompts of the same text begin with the same blocks; 0 shares with nobody. `pull`: first, blocks."""
        slot = next(self.slots)
        name = f"{text}." if text else f"s{slot}."
        keys = tuple(f"{name}{block}".encode().ljust(16) for block in range(prompt // BLOCK))
        spec = e.Spec(
            request_id=str(slot),
            prompt_tokens=prompt,
            max_tokens=max_tokens,
            deadline_ns=self.now + deadline * NS_PER_MS,
            priority=priority,
            credit_tokens=credit,
            stop_token_ids=(7,),
            block_keys=keys,
            chain_digest=digest_of(keys),
            tail=bytes(4 * (prompt % BLOCK)),
            pulls=(PullRange("h", "h:1", 1, *pull),) if pull[1] else (),
        )
        before = set(self.state.requests)
        self.tokens[self.session, slot] = []
        self.feed(i.Admit(self.session, slot, self.peer, spec, self.now))
        for handle in self.state.requests.keys() - before:
            self.prompts[handle] = Prompt(prompt, keys)
        return slot

    def cancel(self, session: int, slot: int) -> None:
        self.feed(i.CancelSlot(session, slot, RequestCancelled("gone")))

    def prefill_says(self, handle: int, event: e.Event) -> None:
        h = self.state.requests.get(handle)
        self.feed(i.FromPrefill(h.peer if h else self.peer, handle, event))

    def rank_says(self) -> None:
        self.feed(m.FromRank(0, self.rank.says.popleft()))

    def have(self, text: int, blocks: int) -> None:
        """The store holds these already."""
        names = [f"{text}.{block}".encode().ljust(16) for block in range(blocks)]
        for name, extent in zip(names, self.store.begin(names), strict=True):
            assert extent is not None
            self.rank.memory["extent", extent] = name
            self.store.seal(name)

    def pull_ends(self, arrived: Sequence[int]) -> None:
        """Of the oldest pull, these blocks."""
        job = self.jobs.pop(0)
        for at in arrived:
            self.rank.memory["extent", job.extents[at]] = job.keys[at]
        self.feed(Pulled(job.ticket, tuple(arrived), 1, 1))

    def lease(self, keys: Sequence[bytes]) -> None:
        """Another node reads these."""
        lease = self.store.lease(keys, 5_000 * NS_PER_MS, self.now)
        if lease.lease_id:
            self.leases.append(lease.lease_id)
        self.check()

    def unlease(self) -> None:
        self.store.unlease(self.leases.pop(0))
        self.feed(Tick())

    def end_mark(self, handle: int) -> None:
        """The writer has written everything."""
        h = self.state.requests[handle]
        self.rank.fill(f"p{h.peer}", self.landings[handle], handle, self.told[handle])

    def wait(self, ms: int) -> None:
        self.now += ms * NS_PER_MS
        self.store.expire(self.now)
        self.feed(Tick())

    # ── what must hold at every moment ───────────────────────────────────────────────────────────

    def check(self) -> None:
        scheduler = self.state.scheduler
        self._references_are_holders()
        uses = self.rank.touched()
        uses += [Use(f"pull {job.ticket}", set(), {("extent", x) for x in job.extents}) for job in self.jobs]
        for use in uses:
            for kind, number in use.reads | use.writes:
                held = self.extent_refs(number) if kind == "extent" else scheduler.pages.refcount(number)
                assert held, f"{use.who} can touch {kind} {number}, which is free"
        for one, other in itertools.combinations(uses, 2):
            assert not one.writes & other.writes, f"{one.who} and {other.who} can write {one.writes & other.writes}"
            if one.reads & other.writes or one.writes & other.reads:
                pair = {use.who.rpartition(" ")[0].partition(" (")[0] for use in (one, other)}
                assert pair in HARMLESS, f"{one.who} and {other.who} read and write the same"
        self._windows_belong_to_their_requests()
        for key, extent in self.store._sealed.items():
            assert self.rank.memory.get(("extent", extent)) == key, f"{key!r} is sealed, and something else lies there"
        assert scheduler.live == sum(not h.ended for h in self.state.requests.values())
        assert scheduler.seats <= self.limits.max_running

    def extent_refs(self, extent: int) -> int:
        return self.store._pool.refcount(extent)

    def _references_are_holders(self) -> None:
        scheduler, store, requests = self.state.scheduler, self.store, self.state.requests.values()
        own = [page for h in requests for page in h.pages]
        named: dict[int, set[tuple[int, bytes]]] = {}
        for h in requests:
            assert len(set(h.pages)) == len(h.pages), f"{h.handle} holds a page twice"
            keys = self.prompts[h.handle].keys if h.pages else ()
            for at, page in enumerate(h.pages):
                # A full block of the prompt has one name, wherever it lies; what rows write to has none.
                named.setdefault(page, set()).add((at, keys[at]) if at < len(keys) else (h.handle, b""))
        for page, names in named.items():
            assert len(names) == 1, f"page {page} is held as different blocks: {names}"
        scheduler.sharing.pages.check_integrity()
        held = Counter((*own, *scheduler.sealing.pages))
        for page in range(scheduler.pages.total):
            assert scheduler.pages.refcount(page) == held[page], f"page {page}: references are not holders"
        raw = [x for h in requests for x in (*h.extents[h.shared :], *h.swap)]
        shared = [x for h in requests for x in (*h.extents[: h.shared], *h.held)]
        blocks = [*store._sealed.values(), *store._writing.values()]
        assert not set(raw) & set(blocks), "a raw extent is a block"
        held = Counter((*raw, *shared, *blocks, *store._leases.held()))
        for extent in range(store.total):
            assert self.extent_refs(extent) == held[extent], f"extent {extent}: references are not holders"
        assert len(raw) == len(set(raw)), f"two requests hold an extent: {sorted(raw)}"
        assert (
            set(store._writing.values())
            == {x for job in self.jobs for x in job.extents}
            | {
                x
                for copy in (*self.rank.copies, *self.rank.commands)
                if isinstance(copy, m.SealCopy)
                for x in copy.extents
            }
            | self._copied_unheard()
        ), "what is being written is what somebody writes"

    def _copied_unheard(self) -> set[int]:
        """Extents of copies whose SealCopied the front has not heard."""
        unheard = {said.ticket for said in self.rank.says if isinstance(said, m.SealCopied)}
        copies = self.state.scheduler.sealing._copies
        return {self.store._writing[k] for ticket in unheard for k in copies[ticket].keys}

    def _windows_belong_to_their_requests(self) -> None:
        for (_, epoch), slots in self.rank.windows.items():
            owners = [h for h in self.state.requests.values() if h.epoch == epoch]
            assert len(owners) == 1, f"epoch {epoch} has a window and no request"
            own = {("page", p) for p in owners[0].pages} | {
                ("extent", x) for x in owners[0].extents[owners[0].shared :]
            }
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
            self.rank.fill(f"p{h.peer}", epoch, handle, self.told[handle])
            self.settle(fences=fences, copies=copies)
            self.prefill_says(handle, e.FillDone(epoch))
            done = True
        return done

    def wind_down(self) -> None:
        """No more input but time: every request ends, every slot comes back."""
        for _ in range(200):
            while self.jobs:
                self.pull_ends(range(len(self.jobs[0].keys)))
            self.settle()
            self.rank.step()
            self.settle()
            if not self.state.requests:
                break
            self.wait(5_000)
        assert not self.state.requests, [(h.phase.name, h.windows, h.in_batch) for h in self.state.requests.values()]
        self.now += 10**12 * NS_PER_MS
        self.store.expire(self.now)
        self.feed(Tick())  # answers that nobody gave credit for
        scheduler = self.state.scheduler
        scheduler.pages.check_integrity()
        scheduler.extents.check_integrity()
        assert scheduler.pages.free == scheduler.pages.total
        assert scheduler.extents.free == scheduler.extents.total
        assert not self.store.stats.writing and not scheduler.sealing.pages and not len(self.state.pulls)
        assert not self.rank.windows and not self.rank.rows
        assert scheduler.sharing.is_empty
        assert scheduler.live == 0 and scheduler.seats == 0
        for session, slot in self.tokens:
            ends = self.ends[session, slot]
            assert ends == 1 or (session in self.closed and ends <= 1), f"{slot} ended {ends} times"

    def failure(self, drained: bool) -> e.HandoffFailed:
        return e.HandoffFailed(HandoffLost("a path broke"), drained)
