"""The way of a get: where it is ─▶ lease at the best holder ─▶ READ one-sided ─▶ release; what one did not give, the
next.

A block counts as read when all of its bytes are here, and its checksum is right where that was asked for; else when the
holder has confirmed that the lease was open until then.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import xxhash

from kvmesh.errors import DeadlinePassed, InvalidRequest, KvmeshError, Overloaded
from kvmesh.kvcache.tiers import Tier
from kvmesh.storeclient import lease as leases
from kvmesh.storeclient.calls import every
from kvmesh.storeclient.choice import Holder, Replica, share_out
from kvmesh.storeclient.context import ClientContext
from kvmesh.storeclient.gather import GATHER_MOST, Run, Shard, plan, portions, runs
from kvmesh.storeclient.lease import Lease
from kvmesh.storeclient.memory import INLINE_COPY, Span, bytes_of, in_thread
from kvmesh.transfer import Opcode, TransferRequest
from kvmesh.transfer.memory import copy_runs

log = logging.getLogger(__name__)

LEASE_KEYS = 4096
REBUILDING = "the store master has not heard from all nodes yet"
REBUILD_S = 0.05  # a master that has not heard from all nodes is asked again so often


@dataclass(slots=True)
class Got:
    """One block of a get. `tier`: which served it, None: it was not read. `data`: unless it went to memory of the
    caller. `cause`: why it was not read although somebody was said to hold it; "": nobody has it."""

    key: bytes
    nbytes: int = 0
    tier: Tier | None = None
    store_id: str = ""
    data: bytes | None = None
    cause: str = ""

    @property
    def here(self) -> bool:
        return self.tier is not None


@dataclass(eq=False, slots=True)
class _Job:
    """One call of `Reader.read`."""

    got: list[Got]
    targets: Sequence[Span] | None
    deadline: float
    verify: bool
    known: dict[int, Sequence[Replica]] = field(default_factory=dict)
    failed: dict[Holder, set[int]] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)  # positions that the master was asked about
    # Until when a master that has not heard from all nodes is asked again, and the keys that it could not tell of.
    look_until: float = math.inf
    untold: set[bytes] = field(default_factory=set)


@dataclass(slots=True)
class ReadStats:
    blocks: int = 0
    nbytes: int = 0
    misses: int = 0
    failed_replicas: int = 0  # did not answer, lapsed, or gave wrong bytes
    gathered: int = 0  # blocks that came with others in one READ


class Reader:
    """All gets of one client. On the event loop."""

    def __init__(self, context: ClientContext, met: Callable[[str], None]) -> None:
        """`met`: hears the address of each node that gave something."""
        self.stats = ReadStats()
        self._config = context.config
        self._engine = context.engine
        self._memory = context.memory
        self._peers = context.peers
        self._directory = context.directory
        self._hints = context.hints
        self._here = context.here
        self._met = met
        self._rng = random.Random()
        self._releases = leases.Releases(context.peers)

    async def read(
        self,
        keys: Sequence[bytes],
        targets: Sequence[Span] | None,
        deadline: float,
        verify: bool,
        *,
        look_until: float = math.inf,
        untold: set[bytes] | None = None,
    ) -> list[Got]:
        """Each key's block, into its target or as bytes. `look_until`: so long a master that has not heard from all
        nodes is asked again; keys that it could not tell of come to `untold`. KvmeshError when no master can be asked;
        InvalidRequest for a target that is too small; what is wrong with one holder or block is in its `Got`."""
        job = _Job([Got(key) for key in keys], targets, deadline, verify, look_until=look_until)
        if untold is not None:
            job.untold = untold
        now = time.monotonic()
        for position, key in enumerate(keys):
            hinted = self._hints.of(key, now)
            if hinted:
                job.known[position] = hinted
        open_ = set(range(len(keys)))
        while open_:
            await self._find(job, open_)
            plan_ = share_out({p: job.known.get(p, ()) for p in open_}, job.failed, self._here, self._rng)
            if not plan_:
                break  # nobody has them, or those who should have failed
            if time.monotonic() >= deadline:
                raise DeadlinePassed(f"{len(open_)} of {len(keys)} blocks were not read in time")
            await every(self._from(job, holder, positions) for holder, positions in plan_.items())
            open_ = {p for p in open_ if not job.got[p].here}
        self.stats.misses += len(open_)
        return job.got

    async def _find(self, job: _Job, open_: Collection[int]) -> None:
        """Ask the master about those for which nobody is left to ask: once when it has heard from everybody; until
        then again, also when all that it knew of have been asked in vain."""
        while True:
            lost = [p for p in open_ if p not in job.asked and not self._askable(job, p)]
            if not lost:
                return
            keys = [job.got[p].key for p in lost]
            found, complete = await self._directory.find(keys, max(job.deadline - time.monotonic(), 0.001))
            now = time.monotonic()
            for position, key, replicas in zip(lost, keys, found, strict=True):
                one = job.got[position]
                if replicas or complete:
                    one.cause = one.cause if replicas and one.cause != REBUILDING else ""
                    job.known[position] = replicas
                    self._hints.learn(key, replicas, now)
                if complete:
                    job.asked.add(position)
                elif not self._askable(job, position):
                    one.cause = one.cause or REBUILDING
            if complete or any(self._askable(job, p) for p in lost):
                return
            if now + REBUILD_S >= min(job.deadline, job.look_until):
                job.untold.update(keys)
                return
            await asyncio.sleep(REBUILD_S)

    def _askable(self, job: _Job, position: int) -> bool:
        return any(position not in job.failed.get(r.holder, ()) for r in job.known.get(position, ()))

    # ── one holder ───────────────────────────────────────────────────────────────────────────────

    async def _from(self, job: _Job, holder: Holder, positions: list[int]) -> None:
        """What it gives goes to `job.got`, all else to `job.failed`. Raises InvalidRequest alone."""
        for at in range(0, len(positions), LEASE_KEYS):
            some = positions[at : at + LEASE_KEYS]
            cause = ""
            try:
                async with self._peers.use(holder.address) as peer:
                    try:
                        cause = await self._leased(job, holder, some, peer)
                    except KvmeshError as error:
                        if leases.worth_forgetting(error) and not isinstance(error, Overloaded):
                            self._peers.forget(peer)
                        raise
            except InvalidRequest as error:
                if error.field == "target":
                    raise
                cause = error.message
            except KvmeshError as error:
                cause = error.message
            missing = [p for p in some if not job.got[p].here]
            if len(missing) < len(some):
                self._met(holder.address)
            job.failed.setdefault(holder, set()).update(missing)
            for position in missing:
                one = job.got[position]
                one.cause = f"{holder.store_id}: {cause}" if cause else one.cause
                self._hints.forget_holder(one.key, (holder.store_id,))
            if cause and missing:
                self.stats.failed_replicas += 1
                log.info("%d blocks not read from %s: %s", len(missing), holder.store_id, cause)

    async def _leased(self, job: _Job, holder: Holder, positions: list[int], peer: Any) -> str:
        lease = await leases.ask(
            peer,
            self._peers,
            holder,
            [job.got[p].key for p in positions],
            self._releases,
            reader=self._engine.name,
            lease_ms=self._config.lease_ms,
            checksums=job.verify,
            timeout_s=max(job.deadline - time.monotonic(), 0.001),
        )
        if lease is None:
            return ""
        try:
            shards = [Shard(positions[s.position], s.offset, s.nbytes) for s in lease.shards]
            lease.tiers = {positions[i]: tier for i, tier in lease.tiers.items()}
            lease.checksums = {positions[i]: sum_ for i, sum_ in lease.checksums.items()}
            if job.targets is None:
                cause = await self._to_bytes(job, lease, shards)
            else:
                cause = await self._into(job, lease, shards, job.targets)
            # Checksums say themselves whether the bytes are right.
            confirmed = not lease.landed or job.verify or await self._releases.confirm(lease)
            for shard in lease.landed:
                if confirmed:
                    self._arrived(job, holder, lease, shard)
                else:
                    job.got[shard.position].data = None
            return cause if confirmed else leases.UNCONFIRMED
        finally:
            self._releases.give_back(lease)

    async def _into(self, job: _Job, lease: Lease, shards: Sequence[Shard], targets: Sequence[Span]) -> str:
        for shard in shards:
            if targets[shard.position].nbytes < shard.nbytes:
                room = targets[shard.position].nbytes
                raise InvalidRequest(f"target: {room} bytes for a block of {shard.nbytes}", field="target")
        direct, gathered = plan(shards)
        cause = ""
        if direct:
            landing = [(shard.offset, shard.nbytes, targets[shard.position].address) for shard in direct]
            wrong = await self._reads(job, lease, landing)
            for shard, bad in zip(direct, wrong, strict=True):
                if not bad and lease.checksums:
                    check = partial(self._check, lease, shard, targets[shard.position].memory)
                    bad = await in_thread(check) if shard.nbytes > INLINE_COPY else check()
                cause = bad or cause
                if not bad:
                    lease.landed.append(shard)
        for group in portions(gathered, GATHER_MOST):
            cause = await self._staged(job, lease, group, targets) or cause
        return cause

    async def _to_bytes(self, job: _Job, lease: Lease, shards: Sequence[Shard]) -> str:
        most = min(GATHER_MOST, self._memory.staging_bytes // 4)
        causes = await every(self._staged(job, lease, group, None) for group in portions(runs(shards, most), most))
        return next(filter(None, causes), "")

    async def _staged(self, job: _Job, lease: Lease, group: Sequence[Run], targets: Sequence[Span] | None) -> str:
        """Read these runs into staging and take the blocks out of it."""
        staged = await self._memory.stage(sum(run.nbytes for run in group), job.deadline)
        cause = ""
        try:
            landing, at = [], 0
            for run in group:
                landing.append((run.offset, run.nbytes, staged.span.address + at))
                at += run.nbytes
            wrong = await self._reads(job, lease, landing)
            start = 0
            for run, bad in zip(group, wrong, strict=True):
                cause = bad or cause
                if not bad:
                    span = staged.span.part(start, run.nbytes)
                    work = partial(self._take_out, job, lease, run, span, targets)
                    bad, good = await in_thread(work) if run.nbytes > INLINE_COPY else work()
                    cause = bad or cause
                    lease.landed += good
                    self.stats.gathered += len(good) if len(run.shards) > 1 else 0
                start += run.nbytes
        finally:
            self._memory.give_back(staged)
        return cause

    def _take_out(
        self, job: _Job, lease: Lease, run: Run, span: Span, targets: Sequence[Span] | None
    ) -> tuple[str, list[Shard]]:
        """(what is wrong with some, those that are good and where they belong now). Any thread: of a run of its own."""
        cause, good = "", []
        for shard in run.shards:
            memory = span.part(shard.offset - run.offset, shard.nbytes).memory
            bad = self._check(lease, shard, memory)
            cause = bad or cause
            if bad:
                continue
            good.append(shard)
            if targets is None:
                job.got[shard.position].data = bytes_of(memory)
        if targets is not None:
            sources = [span.address + shard.offset - run.offset for shard in good]
            copy_runs([targets[s.position].address for s in good], sources, [s.nbytes for s in good])
        return cause, good

    def _arrived(self, job: _Job, holder: Holder, lease: Lease, shard: Shard) -> None:
        one = job.got[shard.position]
        one.nbytes, one.tier, one.store_id, one.cause = shard.nbytes, lease.tiers[shard.position], holder.store_id, ""
        self.stats.blocks += 1
        self.stats.nbytes += shard.nbytes

    def _check(self, lease: Lease, shard: Shard, memory: memoryview) -> str:
        want = lease.checksums.get(shard.position)
        if want is None or xxhash.xxh3_64_intdigest(memory[: shard.nbytes]) == want:
            return ""
        return "wrong bytes: the checksum differs"

    async def _reads(self, job: _Job, lease: Lease, landing: Sequence[tuple[int, int, int]]) -> list[str]:
        """`landing`: (offset there, bytes, address here)."""
        requests = [TransferRequest(Opcode.READ, to, lease.segment, at, n) for at, n, to in landing]
        return await leases.read(self._engine, lease, requests, job.deadline, self._config.lease_ms)

    async def close(self) -> None:
        """What was begun for nobody (releases) ends within a second."""
        await self._releases.close()
