"""The worker's side of the connector: moves blocks between vLLM's pages and the pool, by threads of its own.

    load   windows of a request's blocks ─▶ get into staging ─▶ copy into the pages, unless the load was given up
    save   copy out of the pages into staging, as the step ends ─▶ put ─▶ the staging is free again

A transfer reaches staging alone: what a slow node does late never lands in a page that somebody else has by then. A
load that is over its time is given up by `poll` itself, whatever its thread waits for. Memory is the two stagings; what
does not fit is not saved.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvmesh.connectors.vllm.book import LoadOrder, SaveOrder
from kvmesh.connectors.vllm.config import ConnectorConfig
from kvmesh.connectors.vllm.counts import WorkerCounts
from kvmesh.connectors.vllm.failures import FailureLog, with_store
from kvmesh.connectors.vllm.keys import part_key, split_layers
from kvmesh.errors import ConfigError, KvmeshError
from kvmesh.storeclient import Buffer, Got, Span, SyncStoreClient

log = logging.getLogger(__name__)

Pages = npt.NDArray[np.uint8]  # of one layer: [blocks, bytes of a block]

ALIGN = 4096
GRACE_S = 0.25  # a load's thread comes back by its deadline; so much later it is given up without it
CLOSE_S = 5.0
PUT_PARTS = 32  # parts of one put
NOT_LOADED = "blocks that the pool should have are not loaded, and are computed instead"
NOT_SAVED = "blocks are not saved, so nobody will load them"


@dataclass(slots=True)
class _Load:
    """Is one request's load. Pages are written under `lock`, and not once it is `over`."""

    request_id: str
    deadline: float
    begun: float
    windows: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    missing: dict[int, int] = field(default_factory=dict)  # page → parts that it lacks
    late: bool = False
    broken: bool = False  # a part was not there: what comes after it is of no use
    over: bool = False


@dataclass(frozen=True, slots=True)
class _LoadWindow:
    """Is what one thread gets at once: for each part its page and its key."""

    load: _Load
    parts: tuple[tuple[int, int, bytes], ...]  # page, part, key


@dataclass(frozen=True, slots=True)
class _Saved:
    """Is a block in staging, part by part."""

    slots: tuple[int, ...]
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class LoadResults:
    """Tells which loads are over, and which pages have no content of theirs; `late`: how many ran out of time."""

    request_ids: frozenset[str] = frozenset()
    failed_pages: frozenset[int] = frozenset()
    late: int = 0


class PageMover:
    """Loads and saves blocks of one rank's pages. `load`, `save` and `poll` are of one thread, the worker's. Its owner
    must `close` it, before the client."""

    def __init__(
        self, client: SyncStoreClient, pages: Sequence[Pages], rank: int, ranks: int, config: ConnectorConfig
    ) -> None:
        """Raises ConfigError when a staging holds no block."""
        self._client = client
        self._pages = list(pages)
        self._rank, self._ranks = rank, ranks
        self._config = config
        self.parts = split_layers([layer.shape[1] for layer in pages], config.part_kib << 10)
        self._sizes: list[int] = [sum(self._pages[at].shape[1] for at in range(*layers)) for layers in self.parts]
        self._slot_bytes = -(-max(self._sizes) // ALIGN) * ALIGN
        load_slots = (config.load_staging_mb << 20) // config.load_threads // self._slot_bytes
        save_slots = (config.save_staging_mb << 20) // self._slot_bytes
        for name, slots, least in (
            ("load_staging_mb", load_slots, 1),
            ("save_staging_mb", save_slots, len(self.parts)),
        ):
            if slots < least:
                why = f"is too little: a block has {len(self.parts)} parts, each in {self._slot_bytes:,} bytes"
                raise ConfigError(f"{name}={getattr(config, name)}: {why}", field=name)
        self._window = min(load_slots, PUT_PARTS)
        self._counts = WorkerCounts()
        self._count = self._counts.add
        self._failures = FailureLog()
        self._loads: dict[str, _Load] = {}
        self._wanted: queue.SimpleQueue[_LoadWindow | None] = queue.SimpleQueue()
        self._free: deque[int] = deque(range(save_slots))
        self._saving: Buffer = client.allocate(save_slots * self._slot_bytes)
        self._full: queue.SimpleQueue[_Saved | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._load_windows, args=(client.allocate(self._window * self._slot_bytes),))
            for _ in range(config.load_threads)
        ] + [threading.Thread(target=self._put_saved) for _ in range(config.save_threads)]
        self._closed = False
        for thread in self._threads:
            thread.name, thread.daemon = "kvmesh-mover", True
            thread.start()

    @property
    def block_bytes(self) -> int:
        return sum(self._sizes)

    @property
    def staging_free(self) -> int:
        """How many parts could be saved right now, of `staging_parts`."""
        return len(self._free)

    @property
    def staging_parts(self) -> int:
        return len(self._saving) // self._slot_bytes

    def take_counts(self) -> dict[str, int]:
        """Returns what was counted since the last call."""
        return self._counts.take()

    # ── loads ────────────────────────────────────────────────────────────────────────────────────

    def load(self, order: LoadOrder) -> None:
        """Begins a load, which `poll` tells the end of: after `load_timeout_ms` at the latest, and once each page has
        its content."""
        now = time.monotonic()
        parts = [
            (page, part, part_key(key, self._rank, self._ranks, part, len(self.parts)))
            for page, key in zip(order.block_ids, order.keys, strict=True)
            for part in range(len(self.parts))
        ]
        windows = [tuple(parts[at : at + self._window]) for at in range(0, len(parts), self._window)]
        load = _Load(order.request_id, now + self._config.load_timeout_ms / 1000, now, len(windows))
        load.missing.update(dict.fromkeys(order.block_ids, len(self.parts)))
        self._loads[order.request_id] = load
        for window in windows:
            self._wanted.put(_LoadWindow(load, window))

    def poll(self) -> LoadResults:
        """Returns the loads that are over since the last call."""
        now = time.monotonic()
        over = []
        for load in self._loads.values():
            if load.windows == 0 or now >= load.deadline + GRACE_S:
                over.append(load)
        if not over:
            return LoadResults()
        failed: set[int] = set()
        late = 0
        for load in over:
            del self._loads[load.request_id]
            with load.lock:  # a window that is being copied is finished first; none is begun after
                load.over = True
                load.late |= load.windows > 0
            failed.update(load.missing)
            late += load.late
            self._count(loads=1, loads_late=int(load.late), load_ms=int((now - load.begun) * 1000))
            self._count(blocks_not_loaded=len(load.missing))
        return LoadResults(frozenset(load.request_id for load in over), frozenset(failed), late)

    def _load_windows(self, staging: Buffer) -> None:
        """Is a thread: gets window after window into its own staging."""
        spans = [[staging.span(slot * self._slot_bytes, size) for size in self._sizes] for slot in range(self._window)]
        while (window := self._wanted.get()) is not None:
            load = window.load
            got: list[Got] = []
            late = False
            if not (load.over or load.late or load.broken or self._closed):
                targets = [spans[at][part] for at, (_, part, _) in enumerate(window.parts)]
                got, late = self._get([key for _, _, key in window.parts], targets, load.deadline)
            with load.lock:
                load.late |= late
                if not load.over:
                    self._land(window, got, spans)
                load.windows -= 1

    def _get(self, keys: list[bytes], targets: list[Span], deadline: float) -> tuple[list[Got], bool]:
        """Returns what came of each part, nothing after an error, and whether the time is over."""
        got: list[Got] = []
        try:
            here = self._client.client.at_hand(keys, targets)
            if here is not None:
                return here, False
            left_ms = int((deadline - time.monotonic()) * 1000)
            if left_ms >= 1:
                got = self._client.get_many_into(keys, targets, timeout_ms=left_ms)
                self._tell(NOT_LOADED, next((one.cause for one in got if not one.here and one.cause), ""))
        except KvmeshError as error:
            self._tell(NOT_LOADED, with_store(error, self._config.store))
        except Exception:  # the thread must live: without it every load would wait for its time
            log.exception("load of %d parts failed", len(keys))
        return got, time.monotonic() >= deadline

    def _tell(self, kind: str, why: str) -> None:
        if why and not self._closed:
            self._failures.tell(kind, why, time.monotonic())

    def _land(self, window: _LoadWindow, got: Sequence[Got], spans: Sequence[Sequence[Span]]) -> None:
        """Copies the parts that are here into their pages."""
        load, done, nbytes = window.load, 0, 0
        for at, (page, part, _) in enumerate(window.parts):
            if at >= len(got) or not got[at].here or got[at].nbytes != self._sizes[part]:
                load.broken = True
                continue
            memory = np.frombuffer(spans[at][part].memory, np.uint8)
            start = 0
            for layer in range(*self.parts[part]):
                target = self._pages[layer][page]
                np.copyto(target, memory[start : start + len(target)])
                start += len(target)
            nbytes += start
            load.missing[page] -= 1
            if not load.missing[page]:
                del load.missing[page]
                done += 1
        self._count(blocks_loaded=done, bytes_loaded=nbytes)

    # ── saves ────────────────────────────────────────────────────────────────────────────────────

    def save(self, order: SaveOrder) -> None:
        """Copies the pages' content now, and puts it in the background. Blocks that find no room are not saved."""
        for page, key in zip(order.block_ids, order.keys, strict=True):
            if len(self._free) < len(self.parts) or self._closed:  # only this thread takes slots
                self._count(blocks_not_saved=1)
                continue
            slots = tuple(self._free.popleft() for _ in self.parts)
            for slot, layers in zip(slots, self.parts, strict=True):
                memory = np.frombuffer(self._saving.view, np.uint8)
                at = slot * self._slot_bytes
                for layer in range(*layers):
                    source = self._pages[layer][page]
                    np.copyto(memory[at : at + len(source)], source)
                    at += len(source)
            keys = (part_key(key, self._rank, self._ranks, part, len(self.parts)) for part in range(len(self.parts)))
            self._full.put(_Saved(slots, tuple(keys)))

    def _put_saved(self) -> None:
        """Is a thread: puts what is in staging, several blocks at once where several wait."""
        while (first := self._full.get()) is not None:
            blocks = [first]
            ends = False
            while len(blocks) * len(self.parts) < PUT_PARTS and not ends:
                try:
                    more = self._full.get_nowait()
                except queue.Empty:
                    break
                if more is None:
                    ends = True
                else:
                    blocks.append(more)
            try:
                self._put(blocks)
            finally:
                for block in blocks:
                    self._free.extend(block.slots)
            if ends:
                return

    def _put(self, blocks: Sequence[_Saved]) -> None:
        spans, keys = [], []
        for block in blocks:
            for part, (slot, key) in enumerate(zip(block.slots, block.keys, strict=True)):
                spans.append(self._saving.span(slot * self._slot_bytes, self._sizes[part]))
                keys.append(key)
        held: list[bool] = [False] * len(keys)
        begun = time.monotonic()
        try:
            if not self._closed:
                puts = self._client.put_many_from(spans, keys=keys, timeout_ms=self._config.save_timeout_ms)
                held = [put.held for put in puts]
                self._tell(NOT_SAVED, next((put.cause for put in puts if not put.held), ""))
        except KvmeshError as error:
            self._tell(NOT_SAVED, with_store(error, self._config.store))
        except Exception:  # the thread must live: without it the staging would stay full
            log.exception("save of %d blocks failed", len(blocks))
        step = len(self.parts)
        done = sum(all(held[at : at + step]) for at in range(0, len(held), step))
        ms = int((time.monotonic() - begun) * 1000)
        self._count(blocks_saved=done, blocks_not_saved=len(blocks) - done, bytes_saved=done * self.block_bytes)
        self._count(saves=1, save_ms=ms)

    def close(self) -> None:
        """Ends the threads, within a bounded time. Loads that are under way write no page any more."""
        self._closed = True
        for load in self._loads.values():
            with load.lock:
                load.over = True
        for _ in range(self._config.load_threads):
            self._wanted.put(None)
        for _ in range(self._config.save_threads):
            self._full.put(None)
        until = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.0))
