"""A rank with a model owns the memory, runs steps, copies between pages and extents, pushes, pulls and receives KV."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, cast

import torch

from kvmesh.drafts.step_share import DraftCosts
from kvmesh.engine.cache_memory import GroupShape, group_shapes, is_state, named_by_group
from kvmesh.engine.checkpoint import open_checkpoint
from kvmesh.engine.parallel import ExpertsCut, RankMesh
from kvmesh.engine.runner import DecodeInput, PrefillInput, Runner, SampleParams, shard_layout, torch_dtype
from kvmesh.engine.sampling.grammar import GrammarCompiler
from kvmesh.engine.stages import stage_layers
from kvmesh.engine.work import chunk_products
from kvmesh.errors import InternalError, KvmeshError, TransferError
from kvmesh.kvcache.layout import ShardLayout
from kvmesh.kvcache.whole_blocks import shard_text
from kvmesh.ranks import protocol as m
from kvmesh.ranks.devices import STAGED_CPU
from kvmesh.ranks.expert_metrics import ExpertStats
from kvmesh.ranks.network import find_interface
from kvmesh.ranks.rendezvous import StoreCaller
from kvmesh.ranks.sizing import longest_context
from kvmesh.ranks.transfer_config import own_location, start_engine
from kvmesh.ranks.wake import axes_of
from kvmesh.ranks.worker.checksums import Sums
from kvmesh.ranks.worker.device import (
    CpuMemory,
    DeviceMemory,
    GroupBlocks,
    StagedCpuMemory,
    StagedMemory,
    blocks_bytes,
    blocks_of,
    num_extents,
)
from kvmesh.ranks.worker.device_cuda import CudaMemory, cuda_device
from kvmesh.ranks.worker.drafters import DraftingRank, draft_checkpoint, speculator_of, wants_mtp
from kvmesh.ranks.worker.prefault import touch
from kvmesh.ranks.worker.profiler import StepProfiler
from kvmesh.ranks.worker.puller import ShardPuller
from kvmesh.ranks.worker.pusher import PushedGroup, Pusher
from kvmesh.ranks.worker.read_counts import count_reads
from kvmesh.ranks.worker.setup import RankSetup
from kvmesh.ranks.worker.sleep_worker import SleepWorker
from kvmesh.ranks.worker.slices import Moves, Seals
from kvmesh.ranks.worker.stager import Stager
from kvmesh.ranks.worker.steps import Steps
from kvmesh.ranks.worker.tier_worker import TierWorker
from kvmesh.ranks.worker.warm_segment import host_region
from kvmesh.ranks.worker.weights_sources import WeightsLimits
from kvmesh.ranks.worker.weights_worker import WeightsWorker
from kvmesh.transfer import Notification, Range, TransferEngine
from kvmesh.transfer.transports.registry import described

log = logging.getLogger("kvmesh.rank")

FENCE_TIMEOUT_S = 10.0
LOAD_PATIENCE_S = 1800.0  # the longest wait for a rank that loads more slowly


class Worker:
    """Has the rank's state. All methods run on the main thread unless they say otherwise."""

    def __init__(
        self,
        configure: m.Configure,
        send: Callable[[m.ToFront], None],
        store: StoreCaller | None = None,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        """`store` is where ranks on several hosts meet; None where all are on one. `between` is called now and then
        by work that takes longer than a step."""
        started = time.monotonic()
        torch.set_num_threads(configure.threads)
        self._send = send
        self._checkpoint = open_checkpoint(configure.model_path, configure.max_context_tokens, configure.cache_dir)
        fingerprinted = self._checkpoint.begin_fingerprint()  # beside loading, the first time
        config, axes = self._checkpoint.config, axes_of(configure)
        tp, layers = axes.place(configure.rank).tp, stage_layers(config, axes, configure.rank)
        draft = draft_checkpoint(configure, self._checkpoint)
        setup = RankSetup(configure, self._checkpoint, draft)
        configure = self._configure = setup.configure
        block, dtype = configure.block_tokens, configure.dtype
        # Of each cache group, where the model is kept by them; else () and one layout.
        self._shapes = group_shapes(config, torch_dtype(dtype), block, tp, axes.tp, layers) if setup.grouped else ()
        whole = shard_layout(config, dtype, block, axes, configure.rank)
        self.layout = self._shapes[0].layout if self._shapes else whole
        pages = (
            setup.choose_group_pages(self._shapes, self._checkpoint)
            if self._shapes
            else setup.choose_pages(self.layout, self._checkpoint)
        )
        name = f"{configure.instance_id}/{configure.rank}@{configure.incarnation:x}"
        self.engine = start_engine(name, configure, self._notified)
        home = own_location()
        try:
            trial = setup.trial_memory(self._shapes) if self._shapes else setup.trial_pages(self.layout)
            device = trial.device if isinstance(trial, torch.Tensor) else trial[0].device
            self._mesh = _mesh(configure, device, store)
            cut = cast(ExpertsCut, configure.experts_cut)
            self._runner = Runner(
                self._checkpoint,
                dtype,
                device,
                block,
                trial,
                self._mesh,
                experts_cut=cut,
                mtp=wants_mtp(configure),
                weights_apart=configure.device == STAGED_CPU,
            )
            del trial
            fingerprinted.result().check()  # what was loaded is what was hashed
            self._mesh.connect(LOAD_PATIENCE_S)
            if setup.profiles:
                pages = setup.profiled(self._runner, self.layout, shapes=self._shapes)
            groups = blocks_of(self._shapes, pages.groups) if self._shapes else ()
            self.memory = open_memory(configure, self.layout, pages.count, self.engine, home, groups)
            if self._shapes:
                extents: tuple[int, ...] = setup.extent_counts(self._shapes, pages.groups)
                self._longest = longest_context(pages.groups, setup.needs(self._shapes), block)
            else:
                extents = (num_extents(configure, self.memory),)
                self._longest = pages.count * block
            owner = self._layout_text() if configure.warm_segment else ""  # this waits for the fingerprint
            sized = [group._replace(blocks=count) for group, count in zip(self.memory.groups, extents, strict=True)]
            self._extent_region, self.warm = host_region(
                self.engine, blocks_bytes(sized), home, configure, owner, sum(extents), send
            )
            self.memory.open_extents(self._extent_region, extents)
            self._captured = (setup.rows, setup.most_tokens, setup.max_drafts)
            self._use_pages()
            self._warm_up()
            self.memory.open_pages(self.engine)
        except BaseException:
            self.engine.close()
            raise
        memory = self.memory
        outbox = Stager(memory, self.engine.reaches_devices) if isinstance(memory, StagedMemory) else None
        kept, own_groups = (config.cache_groups, self._runner.groups) if self._shapes else ((), ())
        pushed = [
            PushedGroup(group.layers, own.layout, start, is_state(group))
            for group, own, start in zip(own_groups, memory.groups, memory.page_blocks.starts, strict=False)
        ]
        self.pusher = Pusher(self.engine, self.layout, self._first_page, send, outbox=outbox, groups=pushed)
        self.puller = ShardPuller(self.engine, self._extent_region, send)
        self.sums = Sums(self._extent_region, send)
        self.tiers = TierWorker(self._extent_region, send, configure.ssd_path)
        self.seals = Seals(memory, send)
        self.moves = Moves(memory, send)
        begin = memory.begin_step if setup.ahead else None
        self.grammars = GrammarCompiler(self._checkpoint.path, config.vocab_size, config.eos_token_ids)
        self.steps = Steps(
            self._runner,
            self.pusher,
            configure.block_tokens,
            send,
            begin,
            kept,
            grammars=self.grammars,
            speculator=speculator_of(
                DraftingRank(configure, self._runner, draft, setup.rows), any(is_state(group) for group in kept)
            ),
        )
        settings = (
            setup.group_settings(pages, self._shapes, self._runner)
            if self._shapes
            else setup.settings(pages, self.layout, self._runner)
        )
        self._settings = f"{settings}; {memory.pages_use}" if memory.pages_use else settings
        self.profiler = StepProfiler(self.steps, self._runner, send)
        self.weights = WeightsWorker(
            self._runner, self.engine, WeightsLimits(configure), lambda: self.wants_step, send, between
        )
        self.sleep = SleepWorker(
            self._runner,
            memory,
            self.engine,
            self._checkpoint,
            lambda: open_checkpoint(configure.model_path, configure.max_context_tokens, configure.cache_dir),
            lambda: self.wants_step or self.pusher.active > 0,
            self._settle_copies,
            self._use_new_pages,
            self.ready,
            send,
            between,
        )
        self._load_ms = int((time.monotonic() - started) * 1000)

    def _use_pages(self) -> None:
        """Has the runner compute over the pages that there are."""
        over = self.memory.page_blocks.tensors if self._shapes else self.memory.pages
        self._runner.use_pages(over, self._configure.cuda_graphs, *self._captured)

    def _use_new_pages(self) -> None:
        self._use_pages()
        self.pusher.pages_moved(self._first_page)

    @property
    def _first_page(self) -> int:
        """Where pushes find the first page: its address, or 0 as a Stager counts from it."""
        region = self.memory.page_region
        return 0 if region is None or isinstance(self.memory, StagedMemory) else region.address

    def _settle_copies(self) -> None:
        """Returns when all copies that were asked for are done and answered."""
        while self.has_chores or self.copying:
            self.tick()

    def _warm_up(self) -> None:
        """Runs two steps: the first steps of a process take tens of milliseconds more than the others, and no user
        should wait for them."""
        states = [is_state(shape.group) for shape in self._shapes] or [False]
        blocks = zip(states, self.memory.groups, strict=True)
        count = min(4, *(group.blocks for state, group in blocks if not state))
        pages = tuple(range(count))
        most = self._checkpoint.config.max_context_tokens
        tokens = (0,) * (min(count * self.layout.block_tokens, most) - 1)
        sample, groups = SampleParams(), named_by_group(self._runner.shapes, pages, 0)
        for _ in range(2):
            self._runner.prefill([PrefillInput(tokens, 0, pages, sample, groups)], lambda _: None)
            self._runner.decode([DecodeInput(0, len(tokens), pages, sample, groups)])
        # Touch every page once: a first write to shared memory costs a fault for each 4 KiB of it.
        self.memory.page_blocks.data.zero_()
        touch(self._extent_region)
        if self._runner.expert_counts is not None:
            self._runner.expert_counts.clear()

    @property
    def expert_stats(self) -> ExpertStats | None:
        """Returns how often each expert was chosen; None at other ranks of a group's stage than its first, which count
        the same."""
        counts, place = self._runner.expert_counts, self._mesh.place
        if counts is None or place.tp or place.cp:
            return None
        told = counts.told()
        return None if told is None else ExpertStats(tuple(counts.layers), tuple(map(tuple, told)))

    def ready(self) -> m.Ready:
        config, checkpoint = self._checkpoint.config, self._checkpoint
        # A request whose KV cannot lie in the pool at all must not be promised.
        num_pages, region = len(self.memory.pages), self.memory.page_region
        limit = config.max_context_tokens
        limit = limit if self._longest is None else min(limit, self._longest)
        wanted = self._configure.max_context_tokens
        token_products, pair_products = chunk_products(config)
        return m.Ready(
            engine_name=self.engine.name,
            descriptor=self.engine.local_descriptor().encode(),
            model_name=checkpoint.name,
            fingerprint=checkpoint.fingerprint,
            vocab_size=config.vocab_size,
            eos_token_ids=tuple(config.eos_token_ids),
            max_context_tokens=min(wanted, limit) if wanted else limit,
            kv_bytes_per_token=config.kv_elements_per_token * self.layout.itemsize,
            num_pages=num_pages,
            num_extents=len(self.memory.extents),
            shard_bytes=self.layout.shard_bytes,
            page_base_offset=region.base_offset if region is not None else 0,
            extent_base_offset=self._extent_region.base_offset,
            direct_landing=region is not None,
            load_ms=self._load_ms,
            layout=self._layout_text(),
            shard=self.layout,
            host_bytes=self._extent_region.length,
            warm_segment=self.warm.name if self.warm is not None else b"",
            warm_until_ns=self.warm.until_ns if self.warm is not None else 0,
            transports=described(self.engine.choices),
            dtype=self._configure.dtype,
            steps=self._configure.steps,
            settings=self._settings,
            groups=tuple(self._group_memory(number) for number in range(len(self._shapes))),
            token_products=token_products,
            pair_products=pair_products,
        )

    def _group_memory(self, number: int) -> m.GroupMemory:
        """Says what there is of one cache group."""
        pages, extents, region = self.memory.page_blocks, self.memory.extent_blocks, self.memory.page_region
        return m.GroupMemory(
            pages.groups[number].layout,
            pages.groups[number].blocks,
            extents.groups[number].blocks,
            region.base_offset + pages.starts[number] if region is not None else 0,
            self._extent_region.base_offset + extents.starts[number],
            self._layout_text((self._shapes[number],)),
        )

    def _layout_text(self, shapes: Sequence[GroupShape] | None = None) -> str:
        """Returns what is kept here, of these cache groups (None: of all). The epoch is the one that the instance was
        started with: layouts name folders, which outlive updates. Keys name the epoch of now."""
        c, shapes = self._configure, self._shapes if shapes is None else shapes
        epoch = f"+{c.weights_epoch}" if c.weights_epoch else ""
        begin, replica = f"{self._checkpoint.fingerprint[:16]}{epoch}", axes_of(c).replica
        place = f"{c.rank % replica}/{replica}"  # data-parallel groups have the same
        if not shapes:
            return f"{begin} {c.dtype} {shard_text(self.layout)} rank {place}"
        parts = (f"G{s.group.name} {str(s.dtype).removeprefix('torch.')} {shard_text(s.layout)}" for s in shapes)
        return f"{begin} {', '.join(parts)} rank {place}"

    def close(self) -> None:
        self.sums.close()
        self.tiers.close()
        self.grammars.close()
        self.weights.close()
        if self.warm is not None:
            self.warm.close()
        self.memory.close()
        self.engine.close()
        self._runner.drop_graphs()
        self._mesh.close()

    @property
    def wants_step(self) -> bool:
        """Whether some row of the batch can go on, or a step is in flight."""
        return self.steps.has_work

    @property
    def keeps_rounds(self) -> bool:
        """Whether other data-parallel ranks cannot make a step without this one."""
        return self._runner.rounds is not None

    @property
    def rounds(self) -> tuple[int, bool]:
        """How many steps the data-parallel ranks have made together, and whether any had work in the last one."""
        rounds = self._runner.rounds
        return (0, False) if rounds is None else (rounds.count, rounds.anyone)

    @property
    def has_chores(self) -> bool:
        """Whether `tick` has something to do."""
        return self.moves.ready or self.seals.ready

    @property
    def loads(self) -> int:
        """How many loads were asked for so far."""
        return self.moves.loads

    def loaded(self, loads: int) -> bool:
        """Whether the first `loads` loads are done, so that a PrefillStep behind them may run."""
        return self.moves.loaded(loads)

    @property
    def copying(self) -> bool:
        """Whether `tick` should be called soon and often: copies are under way, or pushes that wait for them."""
        return self.memory.copying or self.pusher.waiting

    @property
    def rows(self) -> int:
        """The number of rows in the batch."""
        return len(self.steps.batches)

    @property
    def needs_ticks(self) -> bool:
        """Whether `tick` should be called regularly even when nothing else happens."""
        return self.pusher.active > 0 or self.profiler.active

    def tick(self) -> None:
        """Begins copies and checks leases. It is called between steps and commands."""
        self.pusher.check_leases()
        self._attend_copies()
        self.moves.advance()
        self.seals.advance()
        self.profiler.check_deadline()

    def _attend_copies(self) -> None:
        """Answers what has been copied, and goes on with pushes."""
        if self.copying:
            self.memory.poll()
            self.pusher.pump()

    @property
    def draft_costs(self) -> DraftCosts:
        """What a token of a draft costs, as `Steps.draft_costs` has it."""
        return self.steps.draft_costs

    def step(
        self, prefill: m.PrefillStep | None, between_layers: Callable[[], None], costs: DraftCosts | None = None
    ) -> None:
        """Runs one step: the front's chunks and the rows of the batch, whichever there are. `costs` are what the
        leader has said (None: nothing)."""

        def meanwhile() -> None:
            self.pusher.check_leases()
            self._attend_copies()
            between_layers()

        def layer_launched() -> None:
            meanwhile()
            self.memory.keep_pace(meanwhile)

        if self.sleep.asleep:
            raise InternalError("a step was ordered of a rank that sleeps")
        prompt_tokens = sum(len(item.token_ids) for item in prefill.items) if prefill is not None else 0
        self.memory.step_tokens = prompt_tokens + self.rows
        self.steps.run(prefill, layer_launched, costs)
        self.memory.step_tokens = self.rows  # of the next step, at least

    # ── commands ─────────────────────────────────────────────────────────────────────────────────

    def handle(self, message: m.ToRank) -> None:
        match message:
            case m.PushOpen():
                self.pusher.open(message)
            case m.PushLease(handle, until):
                self.pusher.renew(handle, until)
            case m.PushCancel(handle):
                self.pusher.cancel(handle)
            case m.OpenSegment(descriptor):
                try:
                    self.engine.open_segment(descriptor)
                except TransferError as error:
                    # A peer that cannot be reached fails its own handoffs (PushFailed), not this rank.
                    log.error("%s", error)
            case m.CloseSegment(name):
                self.engine.close_segment(name)
            case m.OpenWindow(peer, epoch, offsets, sizes):
                sizes = sizes or (self.layout.shard_bytes,) * len(offsets)
                ranges = [Range(offset, size) for offset, size in zip(offsets, sizes, strict=True)]
                self.engine.open_window(peer, epoch, ranges)
                self._send(m.WindowOpened(peer, epoch))
            case m.Fence(peer, epoch):
                # The fence may wait for a slice in flight: never on the thread that runs steps.
                threading.Thread(target=self._fence, args=(peer, epoch), name="fence", daemon=True).start()
            case m.PullOpen():
                self.puller.open(message)
            case m.PullCancel(ticket):
                self.puller.cancel(ticket)
            case m.Sum():
                self.sums.add(message)
            case m.WatchReads() | m.UnwatchReads():
                served = count_reads(self.engine, message)
                if served is not None:
                    self._send(served)
            case m.CopyIn() | m.CopyOut() | m.LoadCopy():
                self.moves.add(message)
            case m.SealCopy():
                self.seals.add(message)
            case m.CompileGrammar(handle, grammar):
                self._compile(handle, grammar)
            case m.Join():
                self.steps.join(message)
            case m.Grant():
                self.steps.grant(message)
            case m.DropPages():
                self.steps.drop(message)
            case m.Leave(handle):
                self.steps.leave(handle)
            case m.Profile():
                self.profiler.begin(message)
            case m.ProfileStop(ticket):
                self.profiler.stop(ticket)
            case m.PrepareWeights() | m.ApplyWeights() | m.DropWeights():
                self.weights.handle(message)
            case m.PrepareSleep() | m.FallAsleep() | m.WakeUp():
                self.sleep.handle(message)
            case _ if self.tiers.handle(message) or (self.warm is not None and self.warm.handle(message)):
                pass
            case _:
                log.error("unexpected message %s", type(message).__name__)

    def _compile(self, handle: int, grammar: str) -> None:
        """Compiles a grammar beside the steps, and answers from there."""

        def answer(compiled: Future[Any]) -> None:
            error = compiled.exception()
            if error is not None and not isinstance(error, KvmeshError):
                log.error("a grammar could not be compiled", exc_info=error)
            why_not = "" if error is None else str(error) or type(error).__name__
            self._send(m.GrammarCompiled(handle, why_not))

        self.grammars.compile(grammar).add_done_callback(answer)

    def _fence(self, peer: str, epoch: int) -> None:
        while True:
            try:
                self.engine.fence(peer, epoch, FENCE_TIMEOUT_S)
                self.memory.landed()
            except TransferError as error:
                # Until it succeeds the landing stays quarantined: memory is lost for a while, never corrupted.
                log.error("fence of %s epoch %d: %s; trying again", peer, epoch, error)
                continue
            self._send(m.Fenced(peer, epoch))
            return

    def _notified(self, note: Notification) -> None:
        """Reports an end mark (transfer engine thread)."""
        self._send(m.FillEnded(note.peer, note.handoff_epoch))


def _mesh(configure: m.Configure, device: torch.device, store: StoreCaller | None) -> RankMesh:
    """Returns this instance's ranks, not connected yet. Raises ConfigError where no interface of this host has a part
    in the network of ranks on several."""
    axes, timeout_s = axes_of(configure), configure.group_timeout_ms / 1000
    if store is None:
        return RankMesh(axes, configure.rank, configure.group_file, device, timeout_s)
    from kvmesh.ranks.worker.rank_store import RankStore

    interface = find_interface(configure.rank_network, configure.rank_route).name
    return RankMesh(axes, configure.rank, "", device, timeout_s, RankStore(store), interface)


def open_memory(
    configure: m.Configure,
    layout: ShardLayout,
    num_pages: int,
    engine: TransferEngine,
    home: str,
    groups: Sequence[GroupBlocks] = (),
) -> DeviceMemory:
    """Returns `num_pages` pages, or those of `groups`, of the kind that `configure.device` names. Raises ConfigError
    when there is no such device."""
    name = configure.device
    if name in ("cpu", STAGED_CPU):
        kind = CpuMemory if name == "cpu" else StagedCpuMemory
        return kind(configure, layout, num_pages, engine, home, groups)
    device = cuda_device(name)
    return CudaMemory(configure, layout, device, num_pages, engine, home, groups)
