"""Decode fetches objects of prompt blocks from other nodes, group by group, before a request lands (ADR 0037). Pure.

What DecodePulls says of blocks holds of objects: a pull fills extents of the groups' stores and seals them. Of each
group of tokens what the prompt needs at decode is fetched, as far as it goes on without a gap from the first of it; a
state is never fetched: the writer sends the one after the prompt's last token.
"""

from __future__ import annotations

from collections.abc import Callable

from kvmesh.kvcache.cache_groups import GroupPages
from kvmesh.kvcache.grouped_store import GroupedStore, Mask
from kvmesh.kvcache.sources import Pulled, PullJob, ranges_with
from kvmesh.services.decode.grouped.handoff import GroupedHandoff, is_state
from kvmesh.services.decode.handoff import Handoff
from kvmesh.services.decode.sources import DecodePulls, PullUnderWay
from kvmesh.transfer import TrafficClass


class GroupedPulls(DecodePulls):
    """Keeps the pulls of one instance whose model has several cache groups."""

    def __init__(self, store: GroupedStore, timeout_ms: int, new_ticket: Callable[[], int]) -> None:
        super().__init__(store.stores[0], timeout_ms, new_ticket)
        self._groups = store

    def begin(self, h: Handoff, room: int) -> PullJob | None:
        """Begins a pull of what `h` needs and others do not fetch already, at most `room` objects of each group. `h`
        waits for both. Returns None if there is nothing to fetch."""
        assert isinstance(h, GroupedHandoff)
        self._groups.touch(
            h.shared_keys, use=False
        )  # what the stores have of them should still be there at the landing
        if self.lower is not None:
            self.lower.note(h.shared_keys)
        masks = self._masks(h, room)
        if not any(masks):
            return None
        end = max(block for block, mask in enumerate(masks) if mask) + 1
        prefix = h.shared_keys[:end]
        begun = self._groups.begin(prefix, masks[:end])
        taken = [sum(1 << g for g, x in enumerate(given) if x is not None) for given in begun]
        blocks = tuple(block for block, mask in enumerate(taken) if mask)
        if not blocks:
            return None
        places = []
        for g in range(len(h.groups)):
            at = [i for i, block in enumerate(blocks) if begun[block][g] is not None]
            if at:
                given = [begun[blocks[i]][g] for i in range(at[0], at[-1] + 1)]
                places.append(GroupPages(g, at[0], tuple(-1 if x is None else x for x in given)))
        ticket = self._new_ticket()
        job = PullJob(
            ticket,
            blocks,
            tuple(prefix[block] for block in blocks),
            (),
            ranges_with(h.spec.pulls, self.lower, h.shared_keys),
            self._timeout_ms,
            h.spec.request_id,
            traffic_class=TrafficClass.HANDOFF,  # its landing waits for it
            groups=bytes(taken[block] for block in blocks),
            places=tuple(places),
        )
        self._pulls[ticket] = PullUnderWay(job, {h.handle: h})
        self._by_key.update(dict.fromkeys(job.keys, ticket))
        h.pulling.add(ticket)
        return job

    def _masks(self, h: GroupedHandoff, room: int) -> list[Mask]:
        """Returns which objects of each block are to be fetched."""
        keys = h.shared_keys
        masks = [0] * len(keys)
        named = [0] * len(keys)  # masks of what hints and lower tiers of this node offer
        lower = self.lower.ranges(keys[: h.spec.load_until]) if self.lower is not None else ()
        for r in (*h.spec.pulls, *lower):
            for block in range(r.first_block, min(r.first_block + r.blocks, len(keys))):
                named[block] |= r.groups or -1
        if not any(named):
            return masks
        for g, group in enumerate(h.groups):
            store, left = self._groups.stores[g], room
            for block in h.needed(g) if not is_state(group) else ():
                if block >= len(keys):
                    break
                key = keys[block]
                if store.holds(key):
                    continue
                ticket = self._by_key.get(key)
                if store.writing(key):
                    if ticket is not None:  # else this node itself copies the object, which is done in a moment
                        h.pulling.add(ticket)
                        self._pulls[ticket].waiting[h.handle] = h
                elif ticket is None and left > 0 and named[block] >> g & 1:
                    left -= 1
                    masks[block] |= 1 << g
                else:
                    break
        return masks

    def _arrived(self, job: PullJob, result: Pulled) -> None:
        came = dict(zip(result.arrived, result.groups, strict=True)) if result.groups else {}
        for at, (key, mask) in enumerate(zip(job.keys, job.groups, strict=True)):
            here = came.get(at, 0) & mask
            self._groups.abandon(key, mask & ~here)
            self._groups.seal(key, here)
