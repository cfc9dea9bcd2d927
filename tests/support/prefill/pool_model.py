"""The part of the prefill machine's world that shares blocks: copies at the rank, pulls by other nodes, extents.

`SharedPool` is the base of `test_machine.Machine`: it keeps the content of every page and extent as the token prefix it
was computed from, and knows who may touch an extent.
"""

from __future__ import annotations

from collections import Counter, deque

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvmesh.blockservice.removals import NotHere
from kvmesh.kvcache.sources import Pulled, PullJob
from kvmesh.ranks import protocol as m
from kvmesh.services.prefill import events as ev
from tests.support.lower import Below
from tests.support.prefill.script import BOOT_NS, make_state, prompt

BLOCK, PATIENCE_MS = 4, 300
Copy = m.SealCopy | m.LoadCopy


class SharedPool(RuleBasedStateMachine):
    pages, extents_total = 10, 7

    def __init__(self) -> None:
        super().__init__()
        limits = {"pages": self.pages, "block": BLOCK, "chunk": 8, "batch": 16, "long": 8, "queued": 6}
        self.state = make_state(**limits, extents=self.extents_total, patience=PATIENCE_MS)
        self.below = Below()
        self.state.lower = self.below
        self.now = BOOT_NS
        self.starts: dict[str, ev.Start] = {}  # by request id
        self.inbox: deque[m.PrefillStep | Copy] = deque()
        self.outbox: deque[m.ToFront] = deque()
        self.copies: dict[int, Copy] = {}  # sent, answer not heard
        self.jobs: dict[int, PullJob] = {}  # pulls under way
        self.cancelled: set[int] = set()
        self.content: dict[int, tuple[int, ...]] = {}  # page → tokens [0, end of its block)
        self.extents: dict[int, tuple[int, ...]] = {}  # extent → likewise
        self.removed: dict[bytes, int] = {}  # key → how many requests with it had come when it was removed

    def step(self, event: ev.Event) -> None:
        raise NotImplementedError

    # ── copies ───────────────────────────────────────────────────────────────────────────────────

    def one_owner(self, copy: Copy) -> None:
        """Extents that are written are nobody else's; those that are read are not written."""
        written = [e for job in self.jobs.values() for e in job.extents]
        written += [e for c in self.copies.values() if isinstance(c, m.SealCopy) for e in c.extents]
        assert len(set(written)) == len(written) and set(written).isdisjoint(copy.extents)
        assert len(set(copy.extents)) == len(copy.extents) == len(copy.pages)
        if isinstance(copy, m.LoadCopy):
            owner = next(h for h in self.state.handoffs.values() if h.loading == copy.ticket)
            self.nobody_else(set(copy.pages), owner.handle)
        else:
            read = [e for c in self.copies.values() if isinstance(c, m.LoadCopy) for e in c.extents]
            assert set(read).isdisjoint(copy.extents), "an extent is written while it is loaded"

    def nobody_else(self, mine: set[int], handle: int) -> None:
        """Pages that are about to be written for `handle`."""
        assert mine.isdisjoint(self.state.cache.pages()), "a cached page is written"
        for other in self.state.handoffs.values():
            assert other.handle == handle or mine.isdisjoint(other.pages), "two holders of a page being written"
        for copy in self.copies.values():
            if isinstance(copy, m.SealCopy):
                assert mine.isdisjoint(copy.pages), "a page is written while it is copied"

    @precondition(lambda self: any(isinstance(message, Copy) for message in self.inbox))
    @rule()
    def rank_copies(self) -> None:
        self.copy(next(message for message in self.inbox if isinstance(message, Copy)))

    def copy(self, copy: Copy) -> None:
        """Of every fifth SealCopy the last block is found not finite."""
        self.inbox.remove(copy)
        for page, extent in zip(copy.pages, copy.extents, strict=True):
            if isinstance(copy, m.SealCopy):
                self.extents[extent] = self.content[page]
            else:
                self.content[page] = self.extents[extent]
        if isinstance(copy, m.LoadCopy):
            self.outbox.append(m.LoadCopied(copy.ticket, self.now - 3, self.now))
            return
        bad = (len(copy.extents) - 1,) if copy.ticket % 5 == 4 else ()
        for at in bad:
            self.extents[copy.extents[at]] = ()  # of use to nobody
        self.outbox.append(m.SealCopied(copy.ticket, self.now - 3, self.now, bad))

    # ── other nodes ──────────────────────────────────────────────────────────────────────────────

    def pull_begins(self, job: PullJob) -> None:
        assert job.ticket not in self.jobs
        held = [e for j in self.jobs.values() for e in j.extents] + [e for c in self.copies.values() for e in c.extents]
        assert set(held).isdisjoint(job.extents), "two owners of an extent being written"
        assert 0 < len(job.blocks) == len(job.keys) == len(job.extents) == len(set(job.extents))
        start = self.starts[job.request_id]
        for block, key in zip(job.blocks, job.keys, strict=True):
            assert start.block_keys[block] == key
            assert any(r.first_block <= block < r.first_block + r.blocks for r in job.ranges), "nobody has it"
            assert (block + 1) * BLOCK < len(start.token_ids), "the last token's block is computed"
        self.jobs[job.ticket] = job

    @precondition(lambda self: self.state.store.keys())
    @rule(data=st.data())
    def goes_below(self, data: st.DataObject) -> None:
        """A block of the store is copied to the own SSD."""
        self.below.keys.add(data.draw(st.sampled_from(sorted(self.state.store.keys()))))

    @precondition(lambda self: self.below.keys)
    @rule(data=st.data())
    def is_lost_below(self, data: st.DataObject) -> None:
        self.below.keys.discard(data.draw(st.sampled_from(sorted(self.below.keys))))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), arrives=st.sampled_from(["all", "all", "some", "none"]))
    def pull_ends(self, data: st.DataObject, arrives: str) -> None:
        job = self.jobs[data.draw(st.sampled_from(sorted(self.jobs)))]
        places = range(len(job.keys))
        arrived = {"all": list(places), "none": []}.get(arrives)
        if arrived is None:
            arrived = data.draw(st.lists(st.sampled_from(places), unique=True))
        self.end_pull(job, arrived)

    def end_pull(self, job: PullJob, arrived: list[int]) -> None:
        del self.jobs[job.ticket]
        for at, (key, extent) in enumerate(zip(job.keys, job.extents, strict=True)):
            self.extents[extent] = prompt(key.decode(), BLOCK)[0] if at in arrived else ()
        own = tuple(at for at in arrived if self.below.holds(job.keys[at]))
        self.step(Pulled(job.ticket, tuple(arrived), 64 * (len(arrived) - len(own)), 0, lower=own))

    @precondition(lambda self: self.starts)
    @rule(data=st.data(), by_prefix=st.booleans())
    def is_removed(self, data: st.DataObject, by_prefix: bool) -> None:
        """In every tier, in one turn; with all that its key is a prefix of, or alone."""
        known = {key for start in self.starts.values() for key in start.block_keys}
        if not known:
            return
        key = data.draw(st.sampled_from(sorted(known)))
        keys = {one for one in known if one.startswith(key)} if by_prefix else {key}
        store = self.state.store
        here = {*store.keys(), *store.written()}
        store.remove([one for one in keys if one in here])
        self.below.keys -= keys
        self.removed.update((one, self.wanted(one)) for one in keys)
        self.step(NotHere(frozenset(() if by_prefix else keys), key if by_prefix else None))

    def wanted(self, key: bytes) -> int:
        return sum(key in start.block_keys for start in self.starts.values())

    # ── what must hold ───────────────────────────────────────────────────────────────────────────

    @invariant()
    def blocks_are_what_their_keys_say(self) -> None:
        store = self.state.store
        writers: Counter[int] = Counter(e for job in self.jobs.values() for e in job.extents)
        writers.update(e for copy in self.copies.values() if isinstance(copy, m.SealCopy) for e in copy.extents)
        assert store.stats.writing == writers.total()
        holders = writers.copy()
        holders.update(e for copy in self.copies.values() if isinstance(copy, m.LoadCopy) for e in copy.extents)
        holders.update(e for h in self.state.handoffs.values() for e in h.pinned)
        for key, extent in store._sealed.items():
            assert self.extents[extent] == prompt(key.decode(), BLOCK)[0], f"{key!r} is sealed with other bytes"
            assert not writers[extent], f"{key!r} is sealed and being written"
            holders[extent] += 1
        for extent in range(self.extents_total):
            assert store._pool.refcount(extent) == holders[extent], f"extent {extent}: {holders[extent]} holders"

    @invariant()
    def what_was_removed_comes_back_with_a_later_request_alone(self) -> None:
        for key, wanted in self.removed.items():
            if self.wanted(key) == wanted:
                assert not self.state.store.holds(key), f"{key!r} is sealed again"
                assert key not in self.state.cache.keys(), f"{key!r} is in pages"  # noqa: SIM118

    @invariant()
    def nobody_waits_for_a_pull_that_is_over(self) -> None:
        for h in self.state.handoffs.values():
            assert h.pulls <= set(self.jobs), "a pull that has ended is waited for"
