"""What a rank does: owns the memory, runs steps, copies between pages and extents, pushes, pulls and receives KV."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvmesh.engine.checkpoint import open_checkpoint
from kvmesh.engine.runner import (
    DecodeInput,
    PrefillInput,
    Runner,
    SampledToken,
    SampleParams,
    pages_over,
    shard_layout,
)
from kvmesh.node import messages as m
from kvmesh.node.memory import touch
from kvmesh.node.puller import Puller
from kvmesh.node.pusher import Pusher
from kvmesh.node.seals import Seals
from kvmesh.node.sums import Sums
from kvmesh.node.tier_worker import TierWorker
from kvmesh.node.transfer_config import own_location, start_engine
from kvmesh.node.warm_segment import host_region
from kvmesh.rpc.errors import ConfigError, NonFiniteLogits, TransferError
from kvmesh.transfer import Notification, Range, Region

log = logging.getLogger("kvmesh.rank")

FENCE_TIMEOUT_S = 10.0


@dataclass(slots=True)
class Row:
    """One running request. `step` is what the engine reads: its token is sampled, not yet computed, its position is
    the number of tokens whose KV lies in its pages. It is advanced in place, step by step."""

    handle: int
    step: DecodeInput
    max_tokens: int
    min_tokens: int
    stop: frozenset[int]
    stalled: bool = False


class Worker:
    """The rank's state. All methods run on the main thread unless they say otherwise."""

    def __init__(self, configure: m.Configure, send: Callable[[m.ToFront], None]) -> None:
        started = time.monotonic()
        self._configure = configure
        if configure.device != "cpu":
            raise ConfigError(f"device={configure.device!r}: instances of this version run on 'cpu'", field="device")
        torch.set_num_threads(configure.threads)
        self._send = send
        dtype = configure.dtype
        self._checkpoint = open_checkpoint(configure.model_path)
        self.layout = shard_layout(self._checkpoint.config, dtype, configure.block_tokens)
        shard = self.layout.shard_bytes
        self._num_pages = configure.num_pages or max(configure.memory_bytes // shard, 1)
        self._num_extents = configure.num_extents or self._num_pages
        name = f"{configure.instance_id}/{configure.rank}@{configure.incarnation:x}"
        self.engine = start_engine(name, configure, self._notified)
        home = own_location()
        try:
            self._page_region = self.engine.allocate(self._num_pages * shard, home)
            self._extent_region, self.warm = host_region(
                self.engine, self._num_extents * shard, home, configure, self._layout_text(), self._num_extents, send
            )
            self._pages = self._over(self._page_region, self._num_pages)
            self._extents = self._over(self._extent_region, self._num_extents)
            self._runner = Runner(self._checkpoint, dtype, configure.device, configure.block_tokens, self._pages)
            self._warm_up()
        except BaseException:
            self.engine.close()
            raise
        self.pusher = Pusher(self.engine, self.layout, self._page_region.address, send)
        self.puller = Puller(self.engine, self._extent_region, send)
        self.sums = Sums(self._extent_region, send)
        self.tiers = TierWorker(self._extent_region, send)
        self.seals = Seals(self._pages, self._extents, shard, send)
        self.running: dict[int, Row] = {}
        self._load_ms = int((time.monotonic() - started) * 1000)

    def _warm_up(self) -> None:
        """The first steps of a process take tens of milliseconds more than the others: no user should wait for them."""
        count = min(4, self._num_pages)
        pages = tuple(range(count))
        tokens = (0,) * (count * self.layout.block_tokens - 1)
        sample = SampleParams()
        for _ in range(2):
            self._runner.prefill([PrefillInput(tokens, 0, pages, sample)], lambda _: None)
            self._runner.decode([DecodeInput(0, len(tokens), pages, sample)])
        # Touch every page once: a first write to shared memory costs a fault for each 4 KiB of it.
        self._pages.zero_()
        touch(self._extent_region)

    def _over(self, region: Region, blocks: int) -> torch.Tensor:
        """`[blocks, layers, 2, kv_heads, block_tokens, head_dim]` over the region's memory."""
        assert region.memory is not None
        return pages_over(region.memory, self.layout, blocks, self._configure.dtype)

    def ready(self) -> m.Ready:
        config, checkpoint = self._checkpoint.config, self._checkpoint
        # A request whose KV cannot lie in the pool at all must not be promised.
        limit = min(config.max_context_tokens, self._num_pages * self.layout.block_tokens)
        wanted = self._configure.max_context_tokens
        return m.Ready(
            engine_name=self.engine.name,
            descriptor=self.engine.local_descriptor().encode(),
            model_name=checkpoint.name,
            fingerprint=checkpoint.fingerprint,
            vocab_size=config.vocab_size,
            eos_token_ids=tuple(config.eos_token_ids),
            max_context_tokens=min(wanted, limit) if wanted else limit,
            kv_bytes_per_token=self.layout.shard_bytes // self.layout.block_tokens,
            num_pages=self._num_pages,
            num_extents=self._num_extents,
            shard_bytes=self.layout.shard_bytes,
            page_base_offset=self._page_region.base_offset,
            extent_base_offset=self._extent_region.base_offset,
            direct_landing=self._configure.device == "cpu",
            load_ms=self._load_ms,
            layout=self._layout_text(),
            host_bytes=self._extent_region.length,
            warm_segment=self.warm.name if self.warm is not None else b"",
            warm_until_ns=self.warm.until_ns if self.warm is not None else 0,
        )

    def _layout_text(self) -> str:
        shape, c = self.layout, self._configure
        dims = f"{shape.layers}x2x{shape.kv_heads}x{shape.block_tokens}x{shape.head_dim}"
        part = f"L{shape.first_layer} H{shape.first_head} rank {c.rank}/{c.world_size}"
        return f"{self._checkpoint.fingerprint[:16]} {c.dtype} {dims} {part}"

    def close(self) -> None:
        self.sums.close()
        self.tiers.close()
        if self.warm is not None:
            self.warm.close()
        self.engine.close()

    @property
    def has_work(self) -> bool:
        """Whether the loop should go on without waiting for a command."""
        return bool(self.seals) or any(not row.stalled for row in self.running.values())

    @property
    def needs_ticks(self) -> bool:
        """Whether `tick` should be called now and then though nothing else happens."""
        return self.pusher.active > 0

    def tick(self) -> None:
        """Between steps and commands."""
        self.pusher.check_leases()
        self.seals.advance()

    def step(self) -> None:
        """One step of the running batch, if there is one."""
        if self.running:
            self.decode_step()

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
            case m.OpenWindow(peer, epoch, offsets):
                shard = self.layout.shard_bytes
                self.engine.open_window(peer, epoch, [Range(o, shard) for o in offsets])
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
            case m.CopyIn() | m.CopyOut():
                self._copy(message)
            case m.SealCopy():
                self.seals.add(message)
            case m.LoadCopy(ticket, extents, pages):
                start = self._move(self._pages, pages, self._extents, extents)
                self._send(m.LoadCopied(ticket, start, time.monotonic_ns()))
            case m.Join():
                self._join(message)
            case m.Grant(handle, pages):
                row = self.running.get(handle)
                if row is not None:
                    row.step.pages = (*row.step.pages, *pages)
                    row.stalled = False
            case m.Leave(handle):
                self.running.pop(handle, None)
                self._send(m.Left(handle))
            case _ if self.tiers.handle(message) or (self.warm is not None and self.warm.handle(message)):
                pass
            case _:
                log.error("unexpected message %s", type(message).__name__)

    def _fence(self, peer: str, epoch: int) -> None:
        while True:
            try:
                self.engine.fence(peer, epoch, FENCE_TIMEOUT_S)
            except TransferError as error:
                # Until it succeeds the landing stays quarantined: memory is lost for a while, never corrupted.
                log.error("fence of %s epoch %d: %s; trying again", peer, epoch, error)
                continue
            self._send(m.Fenced(peer, epoch))
            return

    def _notified(self, note: Notification) -> None:
        """An end mark (transfer engine thread)."""
        self._send(m.FillEnded(note.peer, note.handoff_epoch))

    def _copy(self, message: m.CopyIn | m.CopyOut) -> None:
        into_pages = isinstance(message, m.CopyIn)
        if into_pages:
            start = self._move(self._pages, message.pages, self._extents, message.extents)
        else:
            start = self._move(self._extents, message.extents, self._pages, message.pages)
        self._send(m.Copied(message.handle, into_pages, start, time.monotonic_ns()))

    @staticmethod
    def _move(to: torch.Tensor, targets: tuple[int, ...], source: torch.Tensor, places: tuple[int, ...]) -> int:
        """Whole blocks, one after the other; returns when it began (monotonic ns)."""
        start = time.monotonic_ns()
        for target, place in zip(targets, places, strict=True):
            to[target].copy_(source[place])
        return start

    def _join(self, j: m.Join) -> None:
        step = DecodeInput(j.next_token, j.context_tokens, j.pages, _params(j.sampling, j.token_index + 1))
        stop = frozenset(j.stop_token_ids)
        self.running[j.handle] = Row(j.handle, step, j.max_tokens, j.min_tokens, stop)

    # ── steps ────────────────────────────────────────────────────────────────────────────────────

    def prefill(self, step: m.PrefillStep, between_layers: Callable[[], None]) -> None:
        items = step.items

        def on_layer(layer: int) -> None:
            self.pusher.layer_written(items, layer)
            between_layers()

        start = time.monotonic_ns()
        self.pusher.step_begins(items)
        inputs = [
            PrefillInput(i.token_ids, i.start, i.pages, _params(i.sample, 0) if i.sample else None) for i in items
        ]
        try:
            out = self._runner.prefill(inputs, on_layer)
        except NonFiniteLogits as error:
            bad = tuple(items[i].handle for i in error.rows)
            self._prefill_failed(bad, error)
            rest = tuple(i for i in items if i.handle not in bad)
            # The others have lost nothing: computing them again writes the same bytes.
            self.prefill(m.PrefillStep(step.step_id, rest), between_layers)
            return
        except Exception as error:
            log.exception("prefill step failed")
            self._prefill_failed(tuple(i.handle for i in items), error)
            return
        sampled = tuple(
            m.Sampled(item.handle, token.token_id, _logprobs(token))
            for item, token in zip(items, out, strict=True)
            if token is not None
        )
        self._send(m.PrefillStepDone(step.step_id, start, time.monotonic_ns(), sampled))

    def _prefill_failed(self, handles: tuple[int, ...], error: Exception) -> None:
        self.pusher.step_failed(handles)
        self._send(m.RankError(handles, f"prefill step: {error}"))

    def decode_step(self) -> None:
        rows = self._runnable()
        if not rows:
            return
        start = time.monotonic_ns()
        context = sum(r.step.position for r in rows)
        try:
            out = self._runner.decode([r.step for r in rows])
        except NonFiniteLogits as error:
            # The other rows have lost nothing: their tokens are computed again in the next step.
            self._drop([rows[i] for i in error.rows], error)
            return
        except Exception as error:
            log.exception("decode step failed")
            self._drop(rows, error)
            return
        tokens = tuple(self._advance(row, token) for row, token in zip(rows, out, strict=True))
        self._send(m.DecodeStepDone(start, time.monotonic_ns(), len(rows), context, tokens))

    def _drop(self, rows: list[Row], error: Exception) -> None:
        for row in rows:
            del self.running[row.handle]
        self._send(m.RankError(tuple(r.handle for r in rows), f"decode step: {error}"))

    def _runnable(self) -> list[Row]:
        """Rows whose next token has room; the others are reported once as stalled."""
        rows = []
        for row in self.running.values():
            if row.stalled:
                continue
            if row.step.position >= len(row.step.pages) * self.layout.block_tokens:
                row.stalled = True
                self._send(m.Stalled(row.handle))
            else:
                rows.append(row)
        return rows

    def _advance(self, row: Row, token: SampledToken) -> m.Token:
        step = row.step
        index = step.sample.token_index
        step.token_id = token.token_id
        step.position += 1
        step.sample.token_index = index + 1
        finish = 0
        if token.token_id in row.stop and index + 1 >= row.min_tokens:
            finish = 1
        elif index + 1 >= row.max_tokens:
            finish = 2
        if finish:
            del self.running[row.handle]
        return m.Token(row.handle, token.token_id, index, finish, _logprobs(token))


def _params(sampling: m.Sampling, token_index: int) -> SampleParams:
    return SampleParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        token_index=token_index,
        logprobs=sampling.logprobs if sampling.logprobs >= 0 else None,
    )


def _logprobs(token: SampledToken) -> m.Logprobs | None:
    if token.logprob is None:
        return None
    return m.Logprobs(token.logprob, tuple(token.top))
