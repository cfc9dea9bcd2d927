"""Decode itself fetches prompt blocks from other nodes, or from its own lower tiers, before a request lands. Pure.

A pull fills extents of this node's store and seals them; the landing then finds them like any other block of the store.
A request waits for the pulls of its blocks, whoever began them; the job's timeout bounds that. Nothing cancels a pull:
its blocks are useful whatever became of the request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.sources import LowerTiers, Pulled, PullJob, ranges_with
from kvmesh.services.decode.handoff import Handoff
from kvmesh.transfer import TrafficClass


@dataclass(slots=True)
class PullUnderWay:
    """A pull, and the requests whose landings wait for it."""

    job: PullJob
    waiting: dict[int, Handoff] = field(default_factory=dict)  # by handle


class DecodePulls:
    """Keeps the pulls of one instance that are under way. `lower` is what this node keeps below its host segment; it is
    set once, before the first request."""

    def __init__(self, store: NodeStore, timeout_ms: int, new_ticket: Callable[[], int]) -> None:
        self.lower: LowerTiers | None = None
        self._store = store
        self._timeout_ms = timeout_ms
        self._new_ticket = new_ticket
        self._pulls: dict[int, PullUnderWay] = {}
        self._by_key: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._pulls)

    def begin(self, h: Handoff, room: int) -> PullJob | None:
        """Begins a pull of the blocks that `h` needs and that others do not fetch already, at most `room` of them. `h`
        waits for both. Returns None if there is nothing to fetch."""
        self._store.touch(h.shared_keys, use=False)  # what the store has of them should still be there at the landing
        if self.lower is not None:
            self.lower.note(h.shared_keys)
        blocks_wanted = self._wanted(h, room)
        if not blocks_wanted:
            return None
        # The blocks before them are passed, too: they must not be evicted to make room for their successors.
        prefix = h.shared_keys[: blocks_wanted[-1] + 1]
        begun = enumerate(zip(prefix, self._store.begin(prefix), strict=True))
        taken = [(block, key, x) for block, (key, x) in begun if x is not None]
        if not taken:
            return None
        blocks, keys, given = zip(*taken, strict=True)
        ticket = self._new_ticket()
        job = PullJob(
            ticket,
            blocks,
            keys,
            given,
            ranges_with(h.spec.pulls, self.lower, h.shared_keys),
            self._timeout_ms,
            h.spec.request_id,
            traffic_class=TrafficClass.HANDOFF,  # its landing waits for it
        )
        self._pulls[ticket] = PullUnderWay(job, {h.handle: h})
        self._by_key.update(dict.fromkeys(keys, ticket))
        h.pulling.add(ticket)
        return job

    def _wanted(self, h: Handoff, room: int) -> list[int]:
        """Returns the indices of the blocks to fetch: those that the store lacks, as long as they continue the prefix
        that is here or comes."""
        store = self._store
        wanted: list[int] = []
        keys = h.shared_keys
        named = bytearray(len(keys))
        for r in h.spec.pulls:
            end = min(r.first_block + r.blocks, len(keys))
            named[r.first_block : end] = b"\1" * (end - r.first_block)
        lower = self.lower
        below = len(keys) if h.spec.load_until is None else h.spec.load_until
        for block, key in enumerate(keys if any(named) or lower is not None else ()):
            if store.holds(key):
                continue
            if store.writing(key):
                ticket = self._by_key.get(key)
                if ticket is not None:  # else this node itself copies the block, which is done in a moment
                    h.pulling.add(ticket)
                    self._pulls[ticket].waiting[h.handle] = h
            elif len(wanted) < room and (named[block] or (lower is not None and block < below and lower.holds(key))):
                wanted.append(block)
            else:
                break
        return wanted

    def ended(self, result: Pulled) -> list[int]:
        """Seals the blocks that arrived and drops the others. Returns the handles of the requests that waited for the
        pull."""
        pull = self._pulls.pop(result.ticket, None)
        if pull is None:
            return []
        job = pull.job
        for key in job.keys:
            del self._by_key[key]
        self._arrived(job, result)
        asked = next(iter(pull.waiting.values()))
        asked.times.pulled_blocks += len(set(result.arrived)) - len(result.lower)
        for h in pull.waiting.values():
            h.pulling.discard(job.ticket)
        return list(pull.waiting)

    def _arrived(self, job: PullJob, result: Pulled) -> None:
        arrived = set(result.arrived)
        for at, key in enumerate(job.keys):
            if at in arrived:
                self._store.seal(key)
            else:
                self._store.abandon(key)

    def drop(self) -> None:
        """Ends all pulls without a block, because the memory is gone."""
        for ticket in list(self._pulls):
            self.ended(Pulled(ticket, (), 0, 0, "the memory is gone"))
