"""This module does all I/O around the node stores of one process: leases to readers, pulls from holders, announcements,
offload.

    readers ──Lease──▶ NodeStoreServicer ─┐
    brain ──PullJob──▶ Pulls ─────────────┼──▶ Partitions (NodeStore: metadata)     ranks: the bytes
    master ◀─Announce─ Announcing ────────┤
    pool nodes ◀─Pull─ Offload ───────────┘

Everything runs on one event loop: stores are pure and never entered twice.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from prometheus_client import Gauge

from kvmesh.blockservice.checksums import ChecksumClient
from kvmesh.blockservice.copies import Copies
from kvmesh.blockservice.lease_spans import LeaseSpans
from kvmesh.blockservice.leasing import Leasing
from kvmesh.blockservice.object_family import GroupPlace
from kvmesh.blockservice.offload import Offload
from kvmesh.blockservice.partitions import Partitions
from kvmesh.blockservice.peer_segments import PeerSegments
from kvmesh.blockservice.peers import SERVICE, PeerPool
from kvmesh.blockservice.pulls import Pulls
from kvmesh.blockservice.puts import Puts
from kvmesh.blockservice.removal_applier import RemovalApplier
from kvmesh.blockservice.replica_tracker import ReplicaTracker
from kvmesh.blockservice.servicer import FastPathServers, NodeStoreServicer, counted
from kvmesh.blockservice.tiers.parts import TierSettings
from kvmesh.blockservice.tiers.tiering import Tiering
from kvmesh.clock import lease_clock_ns
from kvmesh.kvcache.announce import AnnouncedSource, Announcer, GroupedSource
from kvmesh.kvcache.sources import LowerTiers, Pulled, PullJob
from kvmesh.kvcache.tiers import Tier, store_name
from kvmesh.membership.announcing import Announcing
from kvmesh.membership.registrar import Registrar
from kvmesh.ranks import protocol as m
from kvmesh.ranks.client import RankClient
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.rpc.pb import blocks_pb2_grpc as pb_grpc
from kvmesh.rpc.pb import common_pb2 as pb_common
from kvmesh.rpc.pb import store_pb2 as pb_store
from kvmesh.rpc.server import Server
from kvmesh.rpc.terms import LeaderTerms
from kvmesh.telemetry import names
from kvmesh.telemetry.summed_gauges import SummedGauges


class QuotaEnforcer:
    """Keeps each tenant within what it may have at this node, as the master says, over several turns of the loop.
    `start` makes a task that ends with the node."""

    def __init__(
        self, partitions: Partitions, start: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
    ) -> None:
        self._partitions = partitions
        self._start = start
        self._enforcing: asyncio.Task[None] | None = None

    def set_limits(self, limits: Mapping[bytes, int]) -> None:
        """Sets the limits (tag → blocks): these and no others hold from now on."""
        quotas = self._partitions.quotas
        # Stores of groups behind the anchor count nothing: what the anchor's store evicts goes there too.
        stores = [partition.store for partition in self._partitions.all() if partition.store.quotas is quotas]
        quotas.limit(limits, stores)
        self.enforce()

    def enforce(self) -> None:
        """Evicts a first slice of what is too much, and the rest in later turns of the loop. It is to be called
        regularly, as blocks that could not be evicted become idle."""
        if (self._enforcing is None or self._enforcing.done()) and self._partitions.quotas.enforce():
            self._enforcing = self._start(self._go_on(), "enforce quotas")

    async def _go_on(self) -> None:
        more = True
        while more:
            await asyncio.sleep(0)
            more = self._partitions.quotas.enforce()
            self._partitions.settle()


KEPT = 0.5  # the weight of the mean so far at each count


class SendRate:
    """Estimates how fast others read this node's blocks, for readers that choose among several holders. It counts
    leased bytes: a leased block is read as a rule, and the front does not see the bytes themselves."""

    def __init__(self) -> None:
        self.bytes_per_s = 0
        self._leased = 0
        self._at = time.monotonic()

    def count(self, partitions: Partitions) -> None:
        """Updates the rate; to be called about once a second."""
        now, before = time.monotonic(), self._leased
        self._leased = sum(p.store.stats.leased_blocks * p.shard_bytes for p in partitions.all())
        grown = max(self._leased - before, 0)  # a partition that is gone takes its count with it
        rate = grown / max(now - self._at, 1e-3)
        self.bytes_per_s = int(KEPT * self.bytes_per_s + (1 - KEPT) * rate)
        self._at = now


log = logging.getLogger(__name__)

TIDY_S = 1.0
MAX_EXPIRED = 256  # leases and pins that are ended in one turn of the loop


class BlockService:
    """Runs the block service of one process. `Front.attach` (an instance) or `pool.run` makes it; `start` is called
    once the server listens.

    `ref()` is the reference of this incarnation; `transports` are those of the ranks. With `offload_percent` 100
    nothing is offloaded, and neither at a pool node. `tiers` are the tiers below DRAM, in use once `open_tiers` has
    returned. `returning()` gives the keys of blocks that may come back from an earlier incarnation's memory. `gauges`
    are those of all block services of this process.
    """

    def __init__(
        self,
        ref: Callable[[], pb_common.InstanceRef],
        ranks: Sequence[RankClient],
        segments: PeerSegments,
        partitions: Partitions,
        on_pulled: Callable[[Pulled], None],
        *,
        transports: Sequence[str],
        lease_ms: int,
        announce_ms: int,
        offload_percent: int = 100,
        tiers: TierSettings | None = None,
        returning: Callable[[], list[bytes]] | None = None,
        gauges: SummedGauges | None = None,
    ) -> None:
        names.activate("node")
        self._gauges = gauges or SummedGauges()
        own = ref()
        self.partitions = partitions
        self.max_lease_ms = lease_ms
        self._ref = ref
        self._ranks = ranks
        self._on_pulled = on_pulled
        self._announce_s = announce_ms / 1000
        self._peers = PeerPool(segments, transports)
        self._tiering = Tiering(tiers, ref, ranks, partitions) if tiers is not None else None
        self.terms = LeaderTerms()
        self.draining = False
        self.leasing = Leasing(partitions)
        self.lease_spans = LeaseSpans(ranks)
        self.sums = ChecksumClient(ranks)
        folder = tiers.path if tiers is not None and not tiers.url else None
        again = returning is not None or (tiers is not None and tiers.opens_later)
        self.removals = RemovalApplier(partitions, self.forget, self._lower_names, folder, again=again)
        below, refuses = self._tiering, self.removals.refuses
        self._pulls = Pulls(own.instance_id, ranks, segments, self._peers, lease_ms, refuses, below)
        self._returning = returning
        if tiers is not None and below is not None and any(each.url for each in tiers.chain):
            below.remember(self.removals.watch())
        self.puts = Puts(len(ranks), partitions, segments, self._pulls, self.sums, self.removals, below)
        self.copies = Copies(partitions, self._pulls, self._peers, self.removals, below, self.puts.freed)
        # What is announced looks like one store; see `announce.Source`.
        self._announcer = Announcer(own.instance_id, own.incarnation, partitions.source)
        self._lower_tiers: dict[Tier, Announcer] = {}
        self._announcing: Announcing | None = None
        self._servicer = NodeStoreServicer(self)
        self.fast_paths = FastPathServers(self._servicer, own.incarnation)
        self._offload: Offload | None = None
        if offload_percent < 100:
            self._offload = Offload(partitions.all(), offload_percent, self._peers, ref, random.Random())
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0
        self._sending = SendRate()
        self._quotas = QuotaEnforcer(partitions, self._spawn)
        self._burying: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    # ── what roles use ───────────────────────────────────────────────────────────────────────────

    def pull(self, job: PullJob) -> None:
        """Fetches blocks that the role's store has begun. `on_pulled` is called once, in a later turn of the loop. Of a
        model of several cache groups the job has `groups` and `places`."""
        parts = self.partitions.all()
        self._pulls.start(job, {part.group: part for part in parts} if job.groups else parts[0], self._on_pulled)

    def cancel_pull(self, ticket: int) -> None:
        """Ends a pull soon, with what has arrived; `on_pulled` is called as ever. Unknown tickets are ignored."""
        self._pulls.cancel(ticket)

    @property
    def pulls(self) -> int:
        """How many pulls are under way, those that others ordered included."""
        return self._pulls.active

    @property
    def pulled_bytes(self) -> int:
        """Bytes pulled since the start."""
        return self._pulls.stats.nbytes

    @property
    def leases(self) -> int:
        """How many leases readers have here."""
        return sum(partition.store.stats.leases for partition in self.partitions.all())

    @property
    def lower(self) -> LowerTiers | None:
        """The tiers below DRAM as the brain of an instance may ask them; None without any."""
        return self._tiering.lower(self.layout) if self._tiering is not None else None

    @property
    def layout(self) -> str:
        """The layout of the only partition, or the family of all of them; "" when there are several or none."""
        found = self.partitions.all()
        families = {part.family for part in found}
        if len(families) == 1 and "" not in families:
            return found[0].family
        return found[0].layout if len(found) == 1 else ""

    # ── what the front uses ──────────────────────────────────────────────────────────────────────

    def add_to(self, server: Server) -> None:
        """Serves NodeStore on `server`."""
        pb_grpc.add_NodeStoreServicer_to_server(self._servicer, server.grpc)
        server.serves(SERVICE.full_name)

    async def open_tiers(self) -> None:
        """Recovers what the tiers below DRAM hold; to be called before the server listens. Raises ConfigError naming
        ssd_path."""
        if self._tiering is not None:
            await self._tiering.open()
            if self._tiering.missing:
                self.removals.leave_out_tier()
            for level in self._tiering.levels:
                self.announce_tier(level.tier, level.source)

    def start(self, registrar: Registrar) -> None:
        """Begins to announce, offload and tidy up, once the server listens and the address is known."""
        self._announcing = announcing = Announcing(
            self._announcer,
            registrar.masters,
            self._announce_s,
            lambda: registrar.registered["store"],
            registrar.urge_store,
        )
        for announcer in self._lower_tiers.values():
            announcing.add(announcer)
        elsewhere = ReplicaTracker(
            self._ref().instance_id,
            self.partitions,
            lambda layout, key: self.below(layout, key) is not None,
            registrar.masters,
            lambda: registrar.registered["store"],
        )
        self._spawn(announcing.run(), "announce")
        self._spawn(elsewhere.run(), "ask who else has the coldest blocks")
        self._spawn(self._tidy(), "tidy node store")
        if self._offload is not None:
            self._spawn(self._offload.run(), "offload")

    def announce_tier(self, tier: Tier, source: AnnouncedSource) -> None:
        """Announces a tier below DRAM too, from now on, in numbers and snapshots of its own. It is called once for each
        tier."""
        assert tier is not Tier.DRAM and tier not in self._lower_tiers, f"{tier.name} is announced already"
        own = self._ref()
        announcer = self._lower_tiers[tier] = Announcer(store_name(own.instance_id, tier), own.incarnation, source)
        if self._announcing is not None:
            self._announcing.add(announcer)

    def rank_said(self, rank: int, message: m.ToFront) -> bool:
        """Takes a message of a rank; returns whether it was for the block service (the end of a read, a checksum, a
        tier)."""
        if isinstance(message, m.PullEnded):
            self._pulls.rank_said(rank, message)
            return True
        if isinstance(message, m.Summed):
            self.sums.rank_said(rank, message)
            return True
        if isinstance(message, m.ReadsServed):
            self.lease_spans.rank_said(message)
            return True
        return self._tiering is not None and self._tiering.rank_said(rank, message)

    def ranks_lost(self, cause: str) -> None:
        """Ends pulls and drops every block, because a rank is gone and its memory with it."""
        self._pulls.ranks_lost(cause)
        self.sums.ranks_lost(cause)
        if self._tiering is not None:
            self._tiering.ranks_lost(cause)
        for partition in self.partitions.all():
            partition.store.drop_all()

    def pools_changed(self, pools: Sequence[pb_store.PoolNode]) -> None:
        """Takes the list of live pool nodes, as the master has it."""
        if self._offload is not None:
            self._offload.pools = pools

    @property
    def removed_seq(self) -> int:
        """See `store_orders.StoreOrders`."""
        return self.removals.removed_seq

    @property
    def lasting_seq(self) -> int | None:
        """See `store_orders.StoreOrders`."""
        return self.removals.lasting_seq

    async def bury(self, tombstones: Sequence[pb_store.Tombstone], asked_ns: int) -> None:
        """See `store_orders.StoreOrders`."""
        await self.removals.apply(tombstones)
        if not tombstones:
            self.removals.heard_all(asked_ns)

    def beat_answered(self, answer: pb_store.BeatResponse, asked_ns: int) -> None:
        """Carries out what the master's answer to a heartbeat says of this node: removals, whether it drains,
        quotas."""
        if not answer.tombstones:
            self.removals.heard_all(asked_ns)
        if answer.tombstones and not self._closed and (self._burying is None or self._burying.done()):
            self._burying = self._spawn(self.removals.apply(answer.tombstones), "apply tombstones")
        if answer.draining != self.draining:
            self.draining = answer.draining
            log.info("this node %s", "drains: it takes no more blocks" if self.draining else "drains no more")
        if answer.quotas:
            self._quotas.set_limits({quota.tag: quota.blocks for quota in answer.quotas})

    @property
    def usage(self) -> pb_store.StoreUsage:
        """What the heartbeat reports to the master."""
        stats = [partition.store.stats for partition in self.partitions.all()]
        return pb_store.StoreUsage(
            capacity_bytes=self.partitions.capacity_bytes,
            free_bytes=0 if self.draining else self.partitions.free_bytes,
            blocks=sum(part.store.stats.sealed for part in self.partitions.all() if not part.group),
            writing=sum(each.writing for each in stats),
            sending_bytes_per_s=self._sending.bytes_per_s,
            tiers=self._tiering.usages if self._tiering is not None else [],
            leases=self.leases,
        )

    async def close(self) -> None:
        """Ends tasks, pulls and channels. It may be called at any moment and more than once; it takes a bounded
        time."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.fast_paths.close()
        if self._tiering is not None:
            await self._tiering.close()
        await self._pulls.close()
        await self._peers.close()

    # ── what the servicer uses ───────────────────────────────────────────────────────────────────

    @property
    def ref(self) -> pb_common.InstanceRef:
        return self._ref()

    @property
    def segments(self) -> Sequence[tuple[str, bytes]]:
        return [(rank.ready.engine_name, rank.ready.descriptor) for rank in self._ranks]

    def listed(self) -> list[tuple[Tier, Sequence[bytes], int, bytes]]:
        """Returns each tier's keys as they are now, the number of its last announcement, and where the keys have cache
        groups one mask a key; the fastest tier first. Its cost is O(blocks)."""
        levels = self._tiering.levels if self._tiering is not None else []
        sources: list[tuple[Tier, AnnouncedSource, int]] = [(Tier.DRAM, self.partitions.source, self._announcer.seq)]
        sources += [(level.tier, level.source, self._lower_tiers[level.tier].seq) for level in levels]
        found = []
        for tier, source, seq in sources:
            keys = source.keys()
            found.append((tier, keys, seq, source.masks(keys) if isinstance(source, GroupedSource) else b""))
        return found

    @property
    def counters(self) -> pb.GetNodeStoreResponse:
        answer = counted(self.partitions)
        answer.instance.CopyFrom(self.ref)
        answer.pools.pulls = self.pulls
        answer.pulled_blocks = self._pulls.stats.blocks
        answer.pulled_bytes = self._pulls.stats.nbytes
        answer.offloaded_blocks = self._offload.blocks if self._offload is not None else 0
        answer.layout = self.layout
        answer.shard_bytes = sum(part.shard_bytes for part in self.partitions.all()) if answer.layout else 0
        answer.term = self.terms.highest
        answer.transports = self._ranks[0].ready.transports
        answer.settings = self._ranks[0].ready.settings
        if self._tiering is not None:
            answer.tiers.extend(self._tiering.counters)
        return answer

    async def stage(self, keys: Sequence[bytes], layout: str, timeout_s: float) -> dict[bytes, Tier]:
        """Brings blocks that lie only below DRAM into it, within the budget for that and the time. Returns, for each
        block that can be leased now, the tier it was found in."""
        if self._tiering is not None:
            return await self._tiering.stage(layout, keys, timeout_s)
        stores = [partition.store for partition in self.partitions.family(layout)]
        return {key: Tier.DRAM for key in keys if any(store.holds(key) for store in stores)}

    async def stage_objects(
        self, keys: Sequence[bytes], masks: Sequence[int], places: Mapping[int, GroupPlace], timeout_s: float
    ) -> dict[int, dict[bytes, Tier]]:
        """Brings objects that lie only below DRAM into it, as `stage` does. Returns, of each group, where each object
        that can be leased now was found."""
        if self._tiering is None:
            return {}
        wanted = {g: [key for key, mask in zip(keys, masks, strict=True) if mask >> g & 1] for g in places}
        groups = [g for g, some in wanted.items() if some]
        done = await asyncio.gather(*(self._tiering.stage(places[g].layout, wanted[g], timeout_s) for g in groups))
        return dict(zip(groups, done, strict=True))

    async def forget(self, keys: Sequence[bytes]) -> int:
        """Removes blocks from every tier, also for after a restart; returns how many there were. Readers under a lease
        go on. Raises Unavailable when a lower tier could not write the removal: it is to be repeated then."""
        here: set[bytes] = set()
        for partition in self.partitions.all():
            here.update(itertools.compress(keys, partition.store.remove(keys)))
        if self._tiering is not None:
            here |= await self._tiering.forget(keys)
        self.partitions.settle()
        self.leases_changed()
        return len(here)

    def used(self, layout: str, keys: Sequence[bytes]) -> None:
        """See `Tiering.used`."""
        if self._tiering is not None:
            self._tiering.used(layout, keys)

    def below(self, layout: str, key: bytes) -> tuple[Tier, str, int, int] | None:
        """See `Tiering.below`."""
        return self._tiering.below(layout, key) if self._tiering is not None else None

    def lower_keys(self) -> list[bytes]:
        """Returns the keys of all blocks in tiers below DRAM. Its cost is O(blocks)."""
        return self._tiering.keys() if self._tiering is not None else []

    def _lower_names(self) -> list[bytes]:
        """See `RemovalApplier`."""
        below = self._tiering.named() if self._tiering is not None else []
        return below if self._returning is None else [*below, *self._returning()]

    # ── time ─────────────────────────────────────────────────────────────────────────────────────

    def leases_changed(self) -> None:
        """Sets the timer for the next lease that ends. It is called too when a lease has ended, as puts may wait for
        its memory."""
        self.puts.freed()
        ends = [end for p in self.partitions.all() if (end := p.store.next_expiry) is not None]
        due = min(ends, default=0)
        if (due == self._timer_ns and self._timer is not None) or self._closed:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_ns = due
        if due:
            delay_s = max(0, due - lease_clock_ns()) * 1e-9
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._expire)

    def _expire(self) -> None:
        self._timer = None
        for partition in self.partitions.all():
            partition.store.expire(lease_clock_ns(), MAX_EXPIRED)
        self.partitions.settle()
        self.leases_changed()

    async def _tidy(self) -> None:
        while True:
            self._peers.tidy()
            self.puts.tidy()
            self.lease_spans.tidy()
            self._sending.count(self.partitions)
            self._quotas.enforce()
            self.partitions.settle()
            if self._tiering is not None:
                self._tiering.tidy()
            answer = counted(self.partitions)
            values: dict[Gauge, float] = {
                names.NODE_LEASES: answer.pools.store_leases,
                names.NODE_EVICTED: answer.evicted,
                names.NODE_CAPACITY: answer.capacity_bytes,
                names.NODE_FREE: self.partitions.free_bytes,
                names.NODE_FRAGMENTATION: self.partitions.fragmentation,  # of a pool node, which is alone
                names.NODE_BLOCKS.labels(state="sealed"): answer.pools.store_blocks,
                names.NODE_BLOCKS.labels(state="writing"): answer.pools.store_writing,
                names.NODE_BLOCKS.labels(state="free"): answer.pools.extents_free,
            }
            if self._tiering is not None:
                values |= self._tiering.gauges
            self._gauges.set(self, values)
            await asyncio.sleep(TIDY_S)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        self._tasks = [task for task in self._tasks if not task.done()]
        task = asyncio.get_running_loop().create_task(work, name=name)
        task.add_done_callback(_report)
        self._tasks.append(task)
        return task


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("%s failed", task.get_name(), exc_info=task.exception())
