"""A pool node's rank owns memory that peers read, and pulls into it. It has no engine and no torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kvmesh.drafts.step_share import NO_COSTS, DraftCosts
from kvmesh.errors import ConfigError, TransferError
from kvmesh.ranks import protocol as m
from kvmesh.ranks.transfer_config import own_location, start_engine
from kvmesh.ranks.worker.checksums import Sums
from kvmesh.ranks.worker.prefault import PrefaultAhead, touch
from kvmesh.ranks.worker.puller import ShardPuller
from kvmesh.ranks.worker.read_counts import count_reads
from kvmesh.ranks.worker.tier_worker import TierWorker
from kvmesh.ranks.worker.warm_segment import POOL_SLOT_BYTES, host_region
from kvmesh.transfer.transports.registry import described

log = logging.getLogger("kvmesh.rank")

COPY_BYTES = 32 << 20  # some milliseconds, which everything else that this thread does can wait


class StoreWorker:
    """Has the rank's state, with the same methods as `worker.Worker`. All methods run on the main thread."""

    wants_step = has_chores = keeps_rounds = False
    rounds = (0, False)
    rows = loads = 0
    needs_ticks = copying = False
    expert_stats = None  # there is no model

    def __init__(self, configure: m.Configure, send: Callable[[m.ToFront], None]) -> None:
        started = time.monotonic()
        if configure.memory_bytes < 1:
            raise ConfigError(f"memory_bytes={configure.memory_bytes}: must be positive", field="memory_mb")
        name = f"{configure.instance_id}/{configure.rank}@{configure.incarnation:x}"
        self.engine = start_engine(name, configure, None)
        try:
            slots = configure.memory_bytes // POOL_SLOT_BYTES
            self._region, self.warm = host_region(
                self.engine, configure.memory_bytes, own_location(), configure, "pool", slots, send
            )
            touch(self._region)
        except OSError as error:
            self.engine.close()
            raise ConfigError(f"memory_mb={configure.memory_bytes >> 20}: {error}", field="memory_mb") from None
        except BaseException:
            self.engine.close()
            raise
        self._send = send
        self._ahead = PrefaultAhead(self._region)
        self.puller = ShardPuller(self.engine, self._region, send, copy_bytes=COPY_BYTES)
        self.sums = Sums(self._region, send)
        self.tiers = TierWorker(self._region, send, configure.ssd_path)
        self._load_ms = int((time.monotonic() - started) * 1000)

    def ready(self) -> m.Ready:
        """Returns the Ready message of a rank without pages: only its host region is real."""
        return m.Ready(
            engine_name=self.engine.name,
            descriptor=self.engine.local_descriptor().encode(),
            model_name="",
            fingerprint="",
            vocab_size=0,
            eos_token_ids=(),
            max_context_tokens=0,
            kv_bytes_per_token=0,
            num_pages=0,
            num_extents=0,
            shard_bytes=0,
            page_base_offset=0,
            extent_base_offset=self._region.base_offset,
            direct_landing=False,
            load_ms=self._load_ms,
            host_bytes=self._region.length,
            warm_segment=self.warm.name if self.warm is not None else b"",
            warm_until_ns=self.warm.until_ns if self.warm is not None else 0,
            transports=described(self.engine.choices),
        )

    def tick(self) -> None:
        """Does nothing: no part of this rank needs regular calls."""

    def loaded(self, loads: int) -> bool:
        """Returns True: nothing is ever loaded here."""
        return True

    draft_costs = NO_COSTS  # it has no steps

    def step(
        self, prefill: m.PrefillStep | None, between_layers: Callable[[], None], costs: DraftCosts = NO_COSTS
    ) -> None:
        """Refuses a step: this rank has no engine."""
        if prefill is not None:
            self._send(m.RankError(tuple(item.handle for item in prefill.items), "this rank has no engine"))

    def handle(self, message: m.ToRank) -> None:
        """Takes messages about segments, pulls and tiers; any other is logged as an error."""
        match message:
            case m.PullOpen():
                self._ahead.used(max(message.landing, default=0) - self._region.base_offset)
                self.puller.open(message)
            case m.PullCancel(ticket):
                self.puller.cancel(ticket)
            case m.Sum():
                self.sums.add(message)
            case m.WatchReads() | m.UnwatchReads():
                served = count_reads(self.engine, message)
                if served is not None:
                    self._send(served)
            case m.OpenSegment(descriptor):
                try:
                    self.engine.open_segment(descriptor)
                except TransferError as error:
                    # A holder that cannot be reached fails its own pulls (PullEnded), not this rank.
                    log.error("%s", error)
            case m.CloseSegment(name):
                self.engine.close_segment(name)
            case _ if self.tiers.handle(message) or (self.warm is not None and self.warm.handle(message)):
                pass
            case _:
                log.error("unexpected message %s", type(message).__name__)

    def close(self) -> None:
        self.sums.close()
        self.tiers.close()
        self._ahead.close()
        if self.warm is not None:
            self.warm.close()
        self.engine.close()
