"""This module has what prefill and decode instances share: ranks, gRPC server, registration, liveness, one orderly
end."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kvmesh.blockservice.blocks import BlockService
from kvmesh.blockservice.group_wire import groups_to_wire
from kvmesh.blockservice.partitions import OnePartition, Partition, Partitions, layout_tag
from kvmesh.blockservice.peer_segments import PeerSegments
from kvmesh.blockservice.tiers.config import checked_id
from kvmesh.blockservice.warm.memory import WarmMemory
from kvmesh.engine.axes import Axes
from kvmesh.errors import ConfigError, FailedWeights, InternalError, InvalidRequest, KvmeshError, Overloaded, Paused
from kvmesh.instance.config import InstanceConfig
from kvmesh.instance.grouped_memory import GroupedMemory, groups_of_model
from kvmesh.instance.host_link import RankHostLink, ranks_at
from kvmesh.instance.order_holds import HoldOutcome, OrderIdentity
from kvmesh.instance.pausing import InstancePause, PausableHalf, PauseMode
from kvmesh.instance.profiling import RankProfiles
from kvmesh.instance.served_weights import LiveWeights, NewWeights, ServedWeights, WeightsTaken
from kvmesh.instance.servicer import add_instance
from kvmesh.instance.sleeping import InstanceSleep, MemoryReleased, SleepLevel
from kvmesh.kvcache.cache_groups import CacheGroup
from kvmesh.kvcache.grouped_store import GroupedStore
from kvmesh.kvcache.keys import check_epoch
from kvmesh.kvcache.layout import ShardLayout
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.sources import Pulled
from kvmesh.kvcache.whole_blocks import whole_blocks
from kvmesh.membership.evacuation import evacuate_node
from kvmesh.membership.places import place_name
from kvmesh.membership.registrar import Registrar
from kvmesh.ranks import protocol as m
from kvmesh.ranks.client import RankClient
from kvmesh.ranks.devices import check_device, device_of
from kvmesh.ranks.network import check_network
from kvmesh.ranks.rendezvous import RendezvousStore
from kvmesh.ranks.sizing import STEP_KEYS, choose_order
from kvmesh.ranks.speculation import NO_DRAFTS
from kvmesh.ranks.transfer_config import listed
from kvmesh.ranks.turn_sockets import SECRET_BYTES
from kvmesh.rpc.addresses import check_addresses, split_address
from kvmesh.rpc.pb import common_pb2 as pb
from kvmesh.rpc.pb import conductor_pb2 as pb_conductor
from kvmesh.rpc.server import Server
from kvmesh.telemetry.summed_gauges import SummedGauges

log = logging.getLogger(__name__)

Settled = TypeVar("Settled", bound=InstanceConfig)

LOAD_TIMEOUT_S = 1800.0  # long enough for a large checkpoint from a slow disk
PING_INTERVAL_S = 0.5
GOODBYE_S = 1.5
ROLE_NAMES = {pb.ROLE_PREFILL: "prefill", pb.ROLE_DECODE: "decode", pb.ROLE_BOTH: "both"}
BLOCK_TOKENS = (16, 32, 64, 128, 256, 512)


class Front:
    """Runs one instance's front process, without its role's brain.

    `on_message(rank, message)` runs on the event loop for every message of a rank after Ready. `on_rank_lost(cause)` is
    called when a rank process ends: an instance without a rank cannot serve, so the service should stop.

    Of an instance with data-parallel groups of ranks there is one front for each (`start_groups`), at its
    `place` on `dp` (`fronts_of`): it has that group's ranks, memory and address, and is a member of the mesh by
    itself. `gauges` are those of all fronts of this process.

    `segments` are peers' segments that the ranks have open; `blocks` is the I/O of the node store, once a service has
    attached one.
    """

    def __init__(
        self,
        config: InstanceConfig,
        role: pb.Role.ValueType,
        on_message: Callable[[int, m.ToFront], None],
        on_rank_lost: Callable[[str], None] = log.error,
        place: int = 0,
        gauges: SummedGauges | None = None,
    ) -> None:
        check_config(config)
        self.config = config
        self.gauges = gauges or SummedGauges()
        self.role = role
        name = checked_id(config.instance_id, config.node_id, ROLE_NAMES[role])
        self.instance_id = place_name(name, place)
        self.incarnation = time.time_ns() & ~0xFFFF | secrets.randbits(16)
        self.on_rank_lost = on_rank_lost
        self.together: Sequence[Front] = (self,)  # the fronts of all places on `dp`
        self._first_rank = place * config.axes.replica
        self.ranks = [RankClient(rank, self._rank_said, self._rank_lost) for rank in range(config.axes.replica)]
        self._hosts = self._links()
        self.here = self.ranks[: len(self.ranks) // (len(self._hosts) + 1)]  # the ranks that are this front's children
        self._store = RendezvousStore(lambda rank, message: self.ranks[rank].send(message)) if self._hosts else None
        self._secret = secrets.token_bytes(SECRET_BYTES) if self._hosts else b""
        self.segments = PeerSegments(self.ranks)
        self.profiles = RankProfiles(self.ranks)
        self._live = LiveWeights(self.ranks, config.weights_epoch)
        self._pause = InstancePause(self.instance_id, ())
        self._sleep = InstanceSleep(self.ranks)
        self._on_weights: Callable[[], None] = lambda: None
        self.blocks: BlockService | None = None
        self._grouped: GroupedMemory | None = None  # where the ranks keep several cache groups
        self._warm: WarmMemory | None = None
        self._on_message = on_message
        self.server: Server | None = None
        self.address = ""
        self._lost = ""
        self.meeting = -1  # the file in memory where the ranks of all fronts find each other
        self._registrar: Registrar | None = None
        # Takes another role, where the instance can; the service that composes it sets this. Raises KvmeshError when it
        # cannot switch now.
        self.switch: Callable[[pb.Role.ValueType], None] | None = None
        self._stop = asyncio.Event()
        self._retired = False
        self._tasks: list[asyncio.Task[None]] = []

    # ── ranks ────────────────────────────────────────────────────────────────────────────────────

    async def configure_ranks(self, stop: asyncio.Event, meeting: str) -> None:
        """Configures the ranks, whose processes of this machine have been started and meet in the file `meeting`;
        returns when each has loaded its weights. Raises as `start_groups` does."""
        stopping: asyncio.Future[Any] = asyncio.ensure_future(stop.wait())
        loaded: asyncio.Future[Any] = asyncio.ensure_future(self._load_ranks(meeting))
        try:
            await asyncio.wait({loaded, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not loaded.done():
                loaded.cancel()
                raise InternalError("stopped while the model was loading")
            loaded.result()
        finally:
            stopping.cancel()
        for rank in self.ranks:
            log.info("rank %d: %s", rank.rank, rank.ready.settings)
        self._check_weights()
        readies = [rank.ready for rank in self.ranks]
        if any(ready.groups for ready in readies):
            self._grouped = GroupedMemory(groups_of_model(self.config.model), self.config, readies)
        self._tasks.append(asyncio.create_task(self._watch_ranks(), name="ping ranks"))

    def _check_weights(self) -> None:
        """Raises ConfigError where a rank on another host has loaded other weights than rank 0."""
        first = self.ranks[0].ready.fingerprint
        places = ranks_at(len(self.ranks), len(self._hosts))[1:]
        for host, ranks in zip(self._hosts, places, strict=True):
            for rank in ranks:
                if (found := self.ranks[rank].ready.fingerprint) != first:
                    why = (
                        f"rank {rank} on {host.address} has loaded other weights ({found[:12]}) than this machine "
                        f"({first[:12]}); give the rank host the folder of the same checkpoint with --model"
                    )
                    raise _bad("model", self.config.model, why)

    def _links(self) -> list[RankHostLink]:
        """Returns the links to the rank hosts, with the ranks that each has."""
        c, addresses = self.config, self.config.rank_host_list
        return [
            RankHostLink(
                address,
                self.instance_id,
                self.incarnation,
                [self.ranks[rank] for rank in ranks],
                c.threads,
                c.rank_timeout_ms / 1000,
                c.rank_hosts_wait_ms / 1000,
            )
            for address, ranks in zip(addresses, ranks_at(len(self.ranks), len(addresses))[1:], strict=True)
        ]

    async def _load_ranks(self, meeting: str) -> None:
        """Starts the processes on other hosts and configures all. Raises KvmeshError for the first that cannot."""
        await asyncio.gather(*(host.open() for host in self._hosts))
        calls = (rank.configure(self._configure(rank.rank, meeting), LOAD_TIMEOUT_S) for rank in self.ranks)
        await asyncio.gather(*calls)

    def _configure(self, rank: int, meeting: str) -> m.Configure:
        c, rank, here = self.config, self._first_rank + rank, len(self.here)
        return m.Configure(
            instance_id=self.instance_id,
            incarnation=self.incarnation,
            rank=rank,
            world_size=c.axes.world,
            mesh=str(c.axes),
            model_path=c.model,
            dtype=c.dtype,
            device=device_of(c.device, rank % here if self._hosts else rank, c.axes.world),
            cuda_graphs=c.cuda_graphs,
            async_steps=c.async_steps,
            experts_cut=c.experts_cut,
            block_tokens=c.block_tokens,
            num_pages=c.num_pages,
            num_extents=c.num_extents,
            memory_bytes=c.memory_mb << 20,
            threads=c.threads,
            max_context_tokens=c.max_context_tokens,
            transports=c.transport_list,
            nics=c.nic_list,
            topology=c.topology,
            rdma=c.rdma_settings,
            fault=c.fault,
            host=c.host,
            advertise_host=c.advertise_host,
            leave_host=c.leave_host,
            tls=c.transfer_tls,
            ssd_path=str(Path(c.ssd_path).absolute()) if c.ssd_path else "",
            warm_segment=c.warm_segment,
            warm_lease_ms=c.store_lease_ms,
            group_file=meeting,
            group_timeout_ms=c.rank_timeout_ms,
            rank_network=c.rank_network,
            rank_route=split_address(self._hosts[0].address)[0] if self._hosts else "",
            elsewhere=tuple(range(here, len(self.ranks))),
            secret=self._secret,
            cache_dir=c.cache_dir,
            weights_epoch=c.weights_epoch,
            rollout_folders=listed(c.rollout_folders),
            rollout_trainers=listed(c.rollout_trainers),
            room_bytes=c.room_mb << 20,
            device_instances=c.device_instances,
            steps={key: getattr(c, key) for key in STEP_KEYS if hasattr(c, key)},
            cache_groups=c.cache_groups,
            speculate=getattr(c, "speculate", NO_DRAFTS),  # of an instance that decodes
            max_draft_tokens=getattr(c, "max_draft_tokens", 0),
            draft_model=getattr(c, "draft_model", ""),
        )

    def settled(self, config: Settled) -> Settled:
        """Returns `config` with those sizes of steps that it leaves to the device as the ranks have chosen them."""
        steps = [rank.ready.steps for rank in self.ranks]
        chosen: dict[str, Any] = {key: min(one[key] for one in steps) for key in steps[0]}
        return dataclasses.replace(config, **chosen)

    async def _watch_ranks(self) -> None:
        while True:
            for rank in self.ranks:
                rank.ping()
            self._follow_holds()
            if self.server is not None and not self._retired:
                self.server.set_ready(self.ready, self.not_ready_reason)
            await asyncio.sleep(PING_INTERVAL_S)

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """The cache groups of the model, group 0 first; () if it has one that keeps all, and everything is of whole
        blocks."""
        return self._grouped.groups if self._grouped is not None else ()

    @property
    def group_shards(self) -> tuple[ShardLayout, ...]:
        """Every rank's cut of every cache group, rank by rank and within a rank by group; () without `cache_groups`."""
        return self._grouped.cuts if self._grouped is not None else ()

    def new_grouped_store(self) -> GroupedStore:
        """Returns the node stores of all `cache_groups`, of which there must be some, over the ranks' host extents."""
        assert self._grouped is not None, "a model of one cache group has one store"
        return self._grouped.new_store(self.incarnation)

    def new_store(self) -> NodeStore:
        """Returns a node store over the ranks' host extents, as configured. There must be no `cache_groups`."""
        assert self._grouped is None, "a model of several cache groups has a store for each"
        readies, c = [rank.ready for rank in self.ranks], self.config
        return NodeStore(
            min(ready.num_extents for ready in readies),
            high_percent=c.store_high_percent,
            low_percent=c.store_low_percent,
            eviction=c.store_eviction,
            block_tokens=c.block_tokens,
            block_bytes=readies[0].shard_bytes,
            lease_seed=self.incarnation,
        )

    def attach(self, store: NodeStore | GroupedStore, on_pulled: Callable[[Pulled], None]) -> BlockService:
        """Serves this node store, whose extents are the ranks' host extents: that of `new_store`, or where there are
        `cache_groups` that of `new_grouped_store`. It is called once, after `start_groups` and before `serve`.
        `on_pulled` is called at the end of every pull job, on the event loop and never from inside
        `BlockService.pull`."""
        assert self.blocks is None, "one node store an instance"
        c = self.config
        partitions = self._partitions(store)
        slots = sum(partition.store.total for partition in partitions.all())
        if c.warm_segment:
            self._warm = WarmMemory(c.warm_segment, self.ranks, slots, self.incarnation)
        self.blocks = BlockService(
            lambda: self.ref,
            self.ranks,
            self.segments,
            partitions,
            on_pulled,
            transports=c.transport_list,
            lease_ms=c.store_lease_ms,
            announce_ms=c.announce_ms,
            offload_percent=c.offload_percent,
            tiers=c.tiers(),
            returning=self._warm.candidates if self._warm is not None else None,
            gauges=self.gauges,
        )
        if self._warm is not None and isinstance(store, GroupedStore):
            assert self._grouped is not None
            self._warm.keep_groups(self._grouped.kept(store))
        elif self._warm is not None and isinstance(store, NodeStore):
            self._warm.keep(store, partitions.all()[0].shard_bytes)
        return self.blocks

    def _partitions(self, store: NodeStore | GroupedStore) -> Partitions:
        if isinstance(store, GroupedStore):
            assert self._grouped is not None, "the ranks keep one cache group"
            return self._grouped.partitions(store)
        readies = [rank.ready for rank in self.ranks]
        bases = tuple(ready.extent_base_offset for ready in readies)
        shards, size = self.shards, readies[0].shard_bytes
        whole = whole_blocks(readies[0].layout, shards) if len(shards) > 1 else None
        return OnePartition(Partition(layout_tag(readies), size, store, bases, shards, whole=whole))

    def _rank_said(self, rank: int, message: m.ToFront) -> None:
        if isinstance(message, m.StoreCall):
            if self._store is not None:
                self._store.ask(rank, message)
            return
        if self._warm is not None and self._warm.rank_said(message):
            return
        if self.blocks is not None and self.blocks.rank_said(rank, message):
            return
        if self._live.rank_said(rank, message) or self._sleep.rank_said(rank, message):
            return
        if not self.profiles.rank_said(rank, message):
            self._on_message(rank, message)

    def _rank_lost(self, _: int, cause: str) -> None:
        if self._lost:
            return  # the others end because the first did
        # One that is killed is the cause, though another one, which was in a step with it, may be heard first.
        ranks = (rank for front in self.together for rank in front.ranks)
        cause = next(filter(None, (rank.killed() for rank in ranks)), cause)
        for front in self.together:
            front.lose(cause)
        self.on_rank_lost(cause)

    def lose(self, cause: str) -> None:
        """Takes it that the ranks are gone, or end because one of another place on `dp` is."""
        self._lost = cause
        if self._warm is not None:
            self._warm.close()  # the memory is still there, for the next incarnation
        self.profiles.ranks_lost(cause)
        self._live.ranks_lost(cause)
        self._sleep.ranks_lost(cause)
        if self.blocks is not None:
            self.blocks.ranks_lost(cause)
        self.urge()

    @property
    def not_ready_reason(self) -> str:
        """Why this instance should get no work now; "" when it should."""
        if self._live.torn:
            return self.unhealthy_reason or self._live.torn
        return self.unhealthy_reason or (f"{Paused.PREFIX}{self._pause.reason}" if self._pause.reason else "")

    @property
    def unhealthy_reason(self) -> str:
        """Why its ranks cannot be trusted to answer, or that it ends; "" when it is well, if perhaps paused."""
        if self._lost:
            return self._lost
        now, limit = time.monotonic(), self.config.rank_silence_ms / 1000
        for rank in self.ranks:
            silent = rank.silent_s(now)
            if silent > limit:
                return f"rank {rank.rank} has been silent for {silent:.1f} s"
        return "shutting down" if self._retired else ""

    @property
    def ready(self) -> bool:
        return not self.not_ready_reason

    @property
    def shards(self) -> tuple[ShardLayout, ...]:
        """The layout of each rank's part of a block."""
        shards = [rank.ready.shard for rank in self.ranks]
        return tuple(shard for shard in shards if shard is not None)

    @property
    def max_context_tokens(self) -> int:
        return self.ranks[0].ready.max_context_tokens

    @property
    def weights(self) -> ServedWeights:
        """Which weights its ranks compute with now."""
        return ServedWeights(self.ranks[0].ready.fingerprint, self._live.epoch)

    @property
    def card(self) -> pb.ModelCard:
        ready, c, grouped = self.ranks[0].ready, self.config, self._grouped
        return pb.ModelCard(
            name=c.served_name or ready.model_name,
            fingerprint=ready.fingerprint,
            block_tokens=c.block_tokens,
            kv_dtype=ready.dtype,
            max_context_tokens=ready.max_context_tokens,
            vocab_size=ready.vocab_size,
            eos_token_ids=ready.eos_token_ids,
            kv_bytes_per_token=ready.kv_bytes_per_token if grouped is None else grouped.kv_bytes_per_token,
            weights_epoch=self._live.epoch,
            weights_path=self._live.path,
            cache_groups=groups_to_wire(grouped.groups, grouped.object_bytes) if grouped is not None else (),
        )

    @property
    def ref(self) -> pb.InstanceRef:
        return pb.InstanceRef(instance_id=self.instance_id, address=self.address, incarnation=self.incarnation)

    # ── the mesh ─────────────────────────────────────────────────────────────────────────────────

    async def serve(
        self,
        add: Callable[[Server], None],
        report: Callable[[], pb_conductor.HeartbeatRequest],
        max_running: int = 0,
        *,
        local_prefill_tokens: int = 0,
        prefill_chunk_tokens: int = 0,
        switchable: bool = False,
        prefill_size_weight: float = 0.0,
        prefill_tenant_fairness: bool = False,
    ) -> None:
        """Binds the port, adds the role's servicers, reports SERVING, then registers and sends heartbeats. Raises
        ConfigError when the port is taken, or the folder of the SSD tier cannot be used."""
        blocks = self.blocks
        if blocks is not None:
            await blocks.open_tiers()
        server = Server(self.config.host, self.config.port)
        add(server)
        add_instance(self, server)
        if blocks is not None:
            blocks.add_to(server)
        port = await server.start()
        self.server = server
        self.address = f"{self.config.advertise_host or self.config.host}:{port}"
        if blocks is not None:
            await blocks.fast_paths.open(self.config.host, self.config.door_port)
        server.set_ready(True)
        self._registrar = Registrar(
            self.ref,
            self.role,
            self.config.node_id,
            self.card,
            min(rank.ready.num_pages for rank in self.ranks),
            max_running,
            self.config.conductor,
            self.config.store,
            lambda: self._report(report),
            lambda: self.ready,
            usage=(lambda: blocks.usage) if blocks is not None else None,
            on_pools=blocks.pools_changed if blocks is not None else None,
            terms=blocks.terms if blocks is not None else None,
            orders=blocks,
            local_prefill_tokens=local_prefill_tokens,
            prefill_chunk_tokens=prefill_chunk_tokens,
            switchable=switchable,
            prefill_size_weight=prefill_size_weight,
            prefill_tenant_fairness=prefill_tenant_fairness,
            axes=axes_pb(self.config.axes),
        )
        if blocks is not None:
            blocks.start(self._registrar)
        self._tasks.append(asyncio.create_task(self._registrar.run(self._stop), name="registrar"))

    # ── pauses, and weights that change ───────────────────────────────────────────────────────────

    def can_pause(self, *halves: PausableHalf, on_weights: Callable[[], None]) -> None:
        """Says how this instance is paused, decode before prefill. `on_weights` is called when its weights are
        others."""
        self._pause = InstancePause(self.instance_id, halves)
        self._on_weights = on_weights

    def hold_order(self, order: OrderIdentity, lease_s: float) -> HoldOutcome:
        """Begins an order of a conductor, or renews its lease. See `OrderHolds.hold`."""
        return self._pause.holds.hold(order, lease_s, time.monotonic())

    async def pause(
        self,
        mode: PauseMode,
        reason: str,
        deadline_s: float,
        order: OrderIdentity | None = None,
        for_s: float = math.inf,
    ) -> int:
        """Takes no requests as long as `order` runs; of none, until `resume` or for `for_s`. Returns how many in flight
        were ended, once none is left. Raises as `InstancePause.pause` does."""
        try:
            return await self._pause.pause(mode, reason, deadline_s, order, for_s)
        finally:
            self.urge()

    def resume(self) -> int:
        """Ends a pause by hand; returns the epoch of the weights that requests get. Raises Overloaded while an update
        or an order runs, FailedWeights while the weights are not whole."""
        self._sleep.check_awake(self.instance_id)
        self._check_whole()
        self._pause.holds.resume(time.monotonic())
        self._follow_holds()
        return self._live.epoch

    def end_order(
        self,
        order: OrderIdentity,
        *,
        result: bytes = b"",
        needs_epoch: int = 0,
        pause_s: float = 0.0,
        ends_pause: bool = False,
    ) -> int:
        """Ends an order as `OrderHolds.end` does. Returns the epoch of the weights. With `ends_pause` it raises as
        `resume` does; else an instance whose weights are not whole stays without work. One that sleeps is held no
        longer by the order when it refuses."""
        check_epoch(needs_epoch, self._live.epoch, time.time_ns())
        if ends_pause:
            self._check_whole()
            if self._sleep.level:
                self._pause.holds.end(order, time.monotonic())
                self._sleep.check_awake(self.instance_id)
        self._pause.holds.end(
            order,
            time.monotonic(),
            result=result,
            needs_epoch=needs_epoch,
            pause_s=pause_s,
            ends_pause=ends_pause,
        )
        self._follow_holds()
        return self._live.epoch

    def _check_whole(self) -> None:
        """Raises Overloaded while the weights that its requests are computed with change, and FailedWeights while they
        are not whole."""
        if any(other._live.changing for other in self._share_experts):
            raise Overloaded(f"{self.instance_id}: its weights are being changed", retry_after_ms=1000)
        if self._live.torn:
            raise FailedWeights(f"{self.instance_id}: {self._live.torn}: it needs another update first")
        for other in self._share_experts:
            if other._live.torn or other._live.epoch != self._live.epoch:
                why = f"{other.instance_id}, whose experts it shares, has other weights"
                raise FailedWeights(f"{self.instance_id}: {why}: update all places first")

    def _follow_holds(self) -> None:
        """Goes on when nothing holds it any more, as when an order's lease has ended, and its weights are whole."""
        try:
            self._check_whole()
        except KvmeshError:
            return  # it is looked at again
        if self._pause.follow_holds(self._live.epoch):
            self.urge()

    async def update_weights(
        self, new: NewWeights, deadline_s: float, order: OrderIdentity | None = None
    ) -> WeightsTaken:
        """Takes other weights while it is paused, and stays so. Raises as `LiveWeights.update` does, InvalidRequest
        while requests may be in flight, and as `OrderHolds.check` does."""
        self._pause.holds.check(order, time.monotonic())
        if not all(front._pause.empty for front in self._share_experts):
            what = "the instance" if len(self._share_experts) == 1 else "all places of the instance"
            raise InvalidRequest(f"epoch: weights change while nothing runs: pause {what} first", field="epoch")
        if self._sleep.turn.locked():
            raise Overloaded(f"{self.instance_id}: it is falling asleep, or waking", retry_after_ms=1000)
        try:
            taken = await self._live.update(new, deadline_s)
        finally:
            self.urge()
        self._sleep.dropped = False
        self._on_weights()
        if self._registrar is not None:
            self._registrar.serve(self.card)
        return taken

    async def sleep(
        self, level: SleepLevel, mode: PauseMode, reason: str, deadline_s: float, order: OrderIdentity | None = None
    ) -> MemoryReleased:
        """Takes no requests, and gives the memory of pages and weights back until `wake`. Weights that were kept may be
        dropped later; else it does nothing where it sleeps. Raises InvalidRequest for ranks that step with those of
        other places, Overloaded while weights change, and as `OrderHolds.check`, `pause` and
        `InstanceSleep.fall_asleep` do; then it goes on, unless something else holds it."""
        if len(self._share_experts) > 1:
            text = f"{self.instance_id}: an instance whose experts lie over dp cannot sleep"
            raise InvalidRequest(text, field="level")
        until = time.monotonic() + deadline_s
        async with self._sleep.in_turn(until):
            self._pause.holds.check(order, time.monotonic())
            if self._live.changing:
                raise Overloaded(f"{self.instance_id}: its weights are being changed", retry_after_ms=1000)
            if self._sleep.level >= level:
                return MemoryReleased(self._sleep.level)
            self._pause.sleeps = reason or "falling asleep"
            try:
                ended = await self._pause.empty_out(mode, self._pause.sleeps, until - time.monotonic())
                await self._pause.leave_pages(until)
                pages, weights = await self._sleep.fall_asleep(level, until, self._pause.pages_moved)
            finally:
                self._follow_sleep()
        return MemoryReleased(self._sleep.level, pages, weights, ended)

    async def wake(self, deadline_s: float, order: OrderIdentity | None = None) -> int:
        """Has pages and weights again, and goes on unless something else holds it. Returns the epoch of its weights.
        Weights that were dropped are those of an update since, or the checkpoint's. It does nothing where it is awake.
        Raises InvalidRequest where neither is there, Overloaded while weights change, and as `OrderHolds.check` and
        `InstanceSleep.wake` do; then it sleeps on."""
        until = time.monotonic() + deadline_s
        async with self._sleep.in_turn(until):
            self._pause.holds.check(order, time.monotonic())
            if self._sleep.level:
                if self._live.changing:
                    raise Overloaded(f"{self.instance_id}: its weights are being changed", retry_after_ms=1000)
                self._sleep.check_weights(self._live.epoch, self.config.weights_epoch)
                await self._sleep.wake(until)
                self._pause.pages_moved()
            self._follow_sleep()
        return self._live.epoch

    def _follow_sleep(self) -> None:
        level = self._sleep.level
        self._pause.sleeps = f"asleep at level {level.value}" if level else ""
        self._follow_holds()
        self.urge()

    @property
    def _share_experts(self) -> Sequence[Front]:
        """The fronts whose requests are computed with experts of this one's ranks, itself among them."""
        return self.together if "dp" in self.config.axes.ep else (self,)

    def become(self, role: pb.Role.ValueType) -> None:
        """Takes this role from now on; the conductor is told at once."""
        self.role = role
        if self._registrar is not None:
            self._registrar.become(role)

    def _report(self, report: Callable[[], pb_conductor.HeartbeatRequest]) -> pb_conductor.HeartbeatRequest:
        beat = report()
        beat.not_ready_reason = self.not_ready_reason
        if self.blocks is not None:
            beat.tiers.extend(self.blocks.usage.tiers)
        return beat

    def urge(self) -> None:
        """Sends a heartbeat soon, because the load has changed a lot."""
        if self._registrar is not None:
            self._registrar.urge()

    async def depart(self, after: asyncio.Event | None = None) -> None:
        """Takes no new work from now on, moves away what only this node holds within `evacuate_ms`, once `after` is
        set, then calls `leave`."""
        self._retired = True
        if self.server is not None:
            self.server.set_ready(False, "shutting down")
        self.urge()
        if after is not None:
            await after.wait()
        if self.config.evacuate_ms and not self._lost and self.server is not None:
            await evacuate_node(self.ref, self.config.store, self.config.evacuate_ms / 1000)
        await self.leave()

    async def leave(self) -> None:
        """Deregisters from conductor and master, within a bounded time: no new work comes from here on."""
        self._retired = True
        self._stop.set()
        if self.server is not None:
            self.server.set_ready(False, "shutting down")
        registrar = [t for t in self._tasks if t.get_name() == "registrar"]
        if registrar:
            await asyncio.wait(registrar, timeout=GOODBYE_S)

    async def close(self) -> None:
        """Ends everything this front owns. It may be called at any moment and more than once."""
        await self.leave()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.blocks is not None:
            await self.blocks.close()
        if self.server is not None:
            await self.server.stop(0.5)
            self.server = None
        if self._warm is not None:
            self._warm.close()
        await asyncio.gather(*(rank.close() for rank in self.ranks))
        await asyncio.gather(*(host.close() for host in self._hosts))
        if self.meeting >= 0:
            os.close(self.meeting)
            self.meeting = -1


async def start_groups(fronts: Sequence[Front], stop: asyncio.Event) -> None:
    """Starts the ranks of all data-parallel groups of one instance, and configures them; returns when each
    has loaded its weights.

    Raises CheckpointError or ConfigError as a rank answered it, or when ranks keep parts of cache groups that no store
    can be made of; InternalError when stopped meanwhile."""
    first = fronts[0]
    if first.config.axes.world > 1 and not first.config.rank_hosts:
        first.meeting = os.memfd_create("kvmesh-ranks")  # in no folder, so that nothing is left when all are killed
    spawn_ranks([rank for front in fronts for rank in front.here], first.config.threads, len(fronts))
    file = f"/proc/{os.getpid()}/fd/{first.meeting}" if first.meeting >= 0 else ""
    await asyncio.gather(*(front.configure_ranks(stop, file) for front in fronts))


def fronts_of(
    config: InstanceConfig,
    role: pb.Role.ValueType,
    said: Callable[[int], Callable[[int, m.ToFront], None]],
    on_rank_lost: Callable[[str], None],
) -> list[Front]:
    """Returns the fronts of one instance, one for each place on `dp`; `said(place)` is the place's `on_message`. A rank
    that is lost anywhere ends all of them; `on_rank_lost` is called once."""
    gauges = SummedGauges()
    fronts = [
        Front(at_place(config, place), role, said(place), on_rank_lost, place, gauges)
        for place in range(config.axes.dp)
    ]
    for front in fronts:
        front.together = fronts
    return fronts


def at_place(config: Settled, place: int) -> Settled:
    """Returns the settings of the front at this place on `dp`: ports that are given count up, and every place but the
    first has its own folder in each folder that is one node's alone. (An object store may be many nodes'.)"""
    if not place:
        return config
    port, door_port = (given + place if given else 0 for given in (config.port, config.door_port))
    ssd_path, warm_segment = (
        str(Path(given, f"dp{place}")) if given else "" for given in (config.ssd_path, config.warm_segment)
    )
    return dataclasses.replace(config, port=port, door_port=door_port, ssd_path=ssd_path, warm_segment=warm_segment)


def spawn_ranks(ranks: Sequence[RankClient], threads: int, replicas: int = 1) -> None:
    """Starts the processes. Those of each of so many data-parallel groups have a socket from their first to each of
    the others, and the first ones have sockets among each other, in the order of the groups."""
    size = len(ranks) // replicas
    peers: list[list[socket.socket]] = [[] for _ in ranks]
    leaders = range(0, len(ranks), size)
    pairs = [(leader, leader + at) for leader in leaders for at in range(1, size)]  # before those among leaders
    pairs += [(one, other) for one in leaders for other in leaders if one < other]
    try:
        for one, other in pairs:
            ours, theirs = socket.socketpair()
            peers[one].append(ours)
            peers[other].append(theirs)
        for rank, own in zip(ranks, peers, strict=True):
            rank.spawn(threads, peers=own)
    finally:
        for own in peers:
            for sock in own:
                sock.close()


def check_config(config: InstanceConfig) -> None:
    """Raises ConfigError naming the key and the value."""
    if config.block_tokens not in BLOCK_TOKENS:
        raise _bad("block_tokens", config.block_tokens, "a power of two in 16..512")
    if not config.model:
        raise _bad("model", config.model, "a checkpoint folder (--model PATH)")
    if not Path(config.model).is_dir():
        raise _bad("model", config.model, "not a folder")
    config.check_transfer()
    check_device(config.device)
    for key in ("threads", "tensor_parallel"):
        if getattr(config, key) < 1:
            raise _bad(key, getattr(config, key), "at least 1")
    device_of(config.device, 0, config.axes.world)
    choose_order(config.async_steps, config.device, config.axes.world)
    try:
        config.axes.check_blocks(config.block_tokens)
    except ConfigError as error:
        raise _bad("mesh", config.mesh, error.message) from None
    check_hosts(config)
    if not 1 <= config.store_high_percent <= 100:
        raise _bad("store_high_percent", config.store_high_percent, "in 1..100")
    if not 0 <= config.store_low_percent <= config.store_high_percent:
        why = f"in 0..{config.store_high_percent} (store_high_percent)"
        raise _bad("store_low_percent", config.store_low_percent, why)
    config.check_tiers(config.store_low_percent)
    for key in (
        "memory_mb",
        "room_mb",
        "device_instances",
        "num_pages",
        "num_extents",
        "max_context_tokens",
        "rank_silence_ms",
    ):
        if getattr(config, key) < 0:
            raise _bad(key, getattr(config, key), "not negative")


def axes_pb(axes: Axes) -> pb_conductor.InstanceAxes | None:
    """Returns what the conductor is told of the axes; None of one rank."""
    if axes.world == 1:
        return None
    return pb_conductor.InstanceAxes(dp=axes.dp, pp=axes.pp, cp=axes.cp, tp=axes.tp, dcp=axes.dcp, ep=axes.ep)


def check_hosts(config: InstanceConfig) -> None:
    """Raises ConfigError unless this instance's ranks can be on the hosts that it names."""
    check_network(config.rank_network)
    if not config.rank_hosts:
        return
    count, axes = config.rank_host_count, config.axes
    if not count:
        check_addresses(config.rank_hosts, "rank_hosts")
        count = len(config.rank_host_list)
    if axes.dp > 1:
        raise _bad("rank_hosts", config.rank_hosts, f"the ranks of dp={axes.dp} groups are on one machine")
    if axes.world % (count + 1):
        why = f"{count} and this machine do not have equal parts of {axes.world} ranks"
        raise _bad("rank_hosts", config.rank_hosts, why)
    if (config.tls_cert or config.tls_ca) and not config.rank_network:
        why = (
            "under TLS ranks compute together over a network that is declared trusted alone (an interface, or a "
            "network like 10.0.0.0/8), as what gloo and NCCL send between hosts is not encrypted"
        )
        raise _bad("rank_network", config.rank_network, why)


def _bad(key: str, value: object, why: str) -> KvmeshError:
    return ConfigError(f"{key}={value!r}: {why}", field=key)
