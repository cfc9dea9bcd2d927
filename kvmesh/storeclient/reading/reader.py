"""A get uses the cheapest strategy that reaches each block:

shared index   the block lies in the memory of a node on this machine that is mapped here: no message (`local.py`)
fast path      a lease from its holder over a socket beside gRPC, then one-sided READs (`leased.py`)
gRPC           the same where no fast path is open: `Peer.call` picks one of the two for each call
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from kvmesh.errors import InvalidRequest
from kvmesh.storeclient.calls import turn, whole
from kvmesh.storeclient.context import ClientContext
from kvmesh.storeclient.memory import Span
from kvmesh.storeclient.naming import OwnKeys, Ref
from kvmesh.storeclient.reading.leased import Got, LeasedReader, ReadStats
from kvmesh.storeclient.reading.local import LocalReader

LOOK_S = 0.5  # a name whose block the master cannot find yet, because it is rebuilding, is resolved again so often


class BlockReader:
    """Carries out all gets of one client. It belongs to the event loop, except `read_at_hand`; its owner must `close`
    it."""

    def __init__(self, context: ClientContext, keys: OwnKeys) -> None:
        self.local = LocalReader(context.config, context.engine, context.memory, context.peers)
        self._leased = LeasedReader(context, self.local.met)
        self._keys = keys
        self._turns = context.turns

    @property
    def stats(self) -> ReadStats:
        """Counts of what was read under leases; `local` counts the rest."""
        return self._leased.stats

    async def read(
        self, refs: Sequence[Ref], targets: Sequence[Span] | None, verify: bool, deadline: float
    ) -> list[Got]:
        """Reads each ref's block, into its target or as bytes. Raises KvmeshError when no master can be asked,
        InvalidRequest for a target that is too small; what is wrong with one holder or block is in its `Got`.

        A name that has come to stand for another block while its old one was asked for is read again: whoever replaces
        a name may remove the old block at once. So a master that does not know yet whether a block is gone is asked for
        the name again every LOOK_S.
        """
        untold: set[bytes] = set()
        named = any(isinstance(ref, str) for ref in refs)
        got = await self._read_once(refs, targets, verify, deadline, untold if named else None)
        unread = [
            i
            for i, ref in enumerate(refs)
            if not got[i].here and got[i].key and (isinstance(ref, str) or got[i].key in untold)
        ]
        while unread and time.monotonic() < deadline:
            keys = await self._keys.resolved([refs[i] for i in unread], deadline)
            again = {
                i: key
                for i, key in zip(unread, keys, strict=True)
                if key is not None and (key != got[i].key or key in untold)
            }
            if not again:
                break
            untold.clear()
            spans = None if targets is None else [targets[i] for i in again]
            found = await self._read_once(list(again.values()), spans, verify, deadline, untold)
            for i, one in zip(again, found, strict=True):
                got[i] = one
            unread = [i for i in again if not got[i].here]
        return got

    def read_at_hand(self, refs: Sequence[Ref], targets: Sequence[Span] | None) -> list[Got] | None:
        """Returns all blocks if all of them lie in memory that is mapped here; the calling thread, which may be any,
        copies them. Returns None if `read` must be called."""
        plan = self.local.plan(refs, targets)
        if plan is None or plan.missing:
            return None
        got = [one for one in self.local.read_here(plan) if one is not None]
        return got if len(got) == len(refs) else None

    async def close(self) -> None:
        """Ends what was begun in the background, within a bounded time."""
        await self.local.close()
        await self._leased.close()

    async def _read_once(
        self,
        refs: Sequence[Ref],
        targets: Sequence[Span] | None,
        verify: bool,
        deadline: float,
        untold: set[bytes] | None,
    ) -> list[Got]:
        """Reads each ref's block once. `untold` is as in `LeasedReader.read`; with None a master that does not know all
        nodes is asked until the deadline."""
        plan = None if verify else self.local.plan(refs, targets)
        if plan is None:
            keys = await self._keys.resolved(refs, deadline)
            if not verify and any(isinstance(ref, str) for ref in refs):
                plan = self.local.plan(keys, targets)
            if plan is None:
                return await self._ask(keys, targets, verify, deadline, untold)
        here = await self.local.read(plan)
        got = [one for one in here if one is not None]
        if len(got) < len(here):
            rest = [i for i, one in enumerate(here) if one is None]
            others = None if targets is None else [targets[i] for i in rest]
            asked = iter(await self._ask([plan.keys[i] for i in rest], others, verify, deadline, untold))
            got = [next(asked) if one is None else one for one in here]
        return got

    async def _ask(
        self,
        keys: Sequence[bytes | None],
        targets: Sequence[Span] | None,
        verify: bool,
        deadline: float,
        untold: set[bytes] | None,
    ) -> list[Got]:
        """Reads blocks under leases, equal ones once."""
        first: dict[bytes, int] = {}
        for i, key in enumerate(keys):
            if key is not None:
                first.setdefault(key, i)
        spans = None if targets is None else [targets[i] for i in first.values()]
        async with turn(self._turns, deadline):
            until = math.inf if untold is None else time.monotonic() + LOOK_S
            reading = self._leased.read(list(first), spans, deadline, verify, look_until=until, untold=untold)
            read = dict(zip(first, await whole(reading), strict=True))
        for i, key in enumerate(keys if targets is not None else ()):
            if targets is not None and key is not None and first[key] != i and read[key].here:
                nbytes = read[key].nbytes
                if targets[i].nbytes < nbytes:
                    raise InvalidRequest(f"target: {targets[i].nbytes} bytes for a block of {nbytes}", field="target")
                targets[i].memory[:nbytes] = targets[first[key]].memory[:nbytes]
        return [Got(b"") if key is None else read[key] for key in keys]
