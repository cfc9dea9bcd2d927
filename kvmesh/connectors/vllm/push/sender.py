"""The prefill side's worker: writes held pages into the windows of decode workers that ask for them.

    Push ─▶ is the prompt held? ─▶ claim ─▶ copy pages into staging ─▶ write ─▶ ... ─▶ done ─▶ answer
                                      └── the pages stay until the last copy ──┘

Pages are copied into staging first, as vLLM's memory cannot be the source of writes over shm. A staging is used by one
thread, and again only when its writes are final; a write that was given up may still read it, and then sends wrong
bytes under an epoch whose push was told as failed: the target copies nothing of it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kvmesh.connectors.vllm.book import HoldOrder
from kvmesh.connectors.vllm.config import ConnectorConfig
from kvmesh.connectors.vllm.counts import WorkerCounts
from kvmesh.connectors.vllm.mover import Pages
from kvmesh.connectors.vllm.push.holds import HeldPages, HoldState
from kvmesh.connectors.vllm.push.staging import PushStaging, WorkerPages
from kvmesh.errors import DeadlinePassed, HandoffLost, InvalidRequest, RequestCancelled
from kvmesh.rpc import protocol
from kvmesh.rpc.pb import vllm_pb2 as pb
from kvmesh.transfer import BatchId, Opcode, TransferEngine, TransferRequest, TransferState

log = logging.getLogger(__name__)

MAX_SEGMENTS = 256  # of decode workers that are open; the one that was used longest ago is closed
MAX_BLOCKS = 65_536  # of one push


@dataclass(eq=False, slots=True)
class _Push:
    request: pb.PushPagesRequest
    deadline: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    batch: BatchId | None = None
    cancelled: bool = False


class PageSender:
    """Holds and pushes pages of one rank. `hold` and `freed` are of the worker's thread, `push` and `release` of the
    control channel's loop. Its owner must `close` it, before the engine."""

    def __init__(
        self, engine: TransferEngine, pages: Sequence[Pages], layout: str, config: ConnectorConfig, counts: WorkerCounts
    ) -> None:
        """Raises ConfigError when the staging holds no block."""
        self._engine = engine
        self._pages = WorkerPages(pages)
        self._layout = layout
        self._counts = counts
        self._held = HeldPages(config.hold_ms / 1000)
        self._lock = threading.Lock()  # of `_held`
        self._news: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}  # who waits for a prompt to be held
        size = self._pages.block_bytes
        self._free = [PushStaging(engine, size, config) for _ in range(config.push_threads)]
        self._segments: OrderedDict[str, int] = OrderedDict()  # open ones → pushes that use them
        self._opening = threading.Lock()
        self._threads = ThreadPoolExecutor(config.push_threads, "kvmesh-push")
        self._closed = False

    @property
    def held(self) -> int:
        """How many prompts are held."""
        with self._lock:
            return len(self._held)

    # ── the worker's thread ──────────────────────────────────────────────────────────────────────

    def hold(self, order: HoldOrder) -> None:
        """Keeps the pages of a prompt until they are freed."""
        with self._lock:
            self._held.hold(order, time.monotonic())
            waiting = list(self._news.items())
        for event, loop in waiting:
            loop.call_soon_threadsafe(event.set)

    def freed(self) -> set[str]:
        """Returns the requests whose pages vLLM may give to others, each once."""
        with self._lock:
            lapsed = self._held.lapsed
            found = self._held.freed(time.monotonic())
            lapsed = self._held.lapsed - lapsed
        if found:
            self._counts.add(holds_ended=len(found), holds_lapsed=lapsed)
        return found

    # ── the control channel's loop ───────────────────────────────────────────────────────────────

    async def push(self, request: pb.PushPagesRequest, deadline: float) -> None:
        """Serves one push. Raises KvmeshError."""
        protocol.check(request.protocol_version, "the decode engine")
        self._check(request)
        await self._known(request.prompt.request_id, deadline)
        push = _Push(request, deadline)
        loop = asyncio.get_running_loop()
        done = loop.run_in_executor(self._threads, self._push, push)
        try:
            await asyncio.shield(done)
        except asyncio.CancelledError:  # the caller waits no more
            self._cancel(push)
            done.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            raise

    def release(self, request: pb.ReleasePagesRequest) -> bool:
        """Serves one release. Raises KvmeshError."""
        protocol.check(request.protocol_version, "the decode engine")
        self._check_engine(request.prompt)
        with self._lock:
            return self._held.release(request.prompt.request_id, request.prompt.ticket)

    def _check(self, request: pb.PushPagesRequest) -> None:
        self._check_engine(request.prompt)
        if request.layout != self._layout:
            raise InvalidRequest("layout: the pages have another layout here", field="layout")
        if request.block_bytes != self._pages.block_bytes:
            why = f"a block has {self._pages.block_bytes} bytes here"
            raise InvalidRequest.of("block_bytes", request.block_bytes, why)
        if not 1 <= len(request.offsets) <= MAX_BLOCKS:
            raise InvalidRequest.of("offsets", len(request.offsets), f"must be 1 to {MAX_BLOCKS}")

    def _check_engine(self, prompt: pb.HeldPrompt) -> None:
        if prompt.engine != self._engine.name:
            raise HandoffLost(f"engine {prompt.engine[:80]!r} is not here any more: this is {self._engine.name!r}")

    async def _known(self, request_id: str, deadline: float) -> None:
        """Waits until a prompt is held, or was. The answer of vLLM's front may be quicker than the order to hold."""
        event = asyncio.Event()
        try:
            while True:
                with self._lock:
                    if self._held.state(request_id) is not HoldState.UNKNOWN:
                        return
                    event.clear()
                    self._news[event] = asyncio.get_running_loop()
                try:
                    await asyncio.wait_for(event.wait(), max(deadline - time.monotonic(), 0.0))
                except TimeoutError:
                    raise DeadlinePassed(f"request {request_id[:80]!r} is not held here") from None
        finally:
            with self._lock:
                self._news.pop(event, None)

    def _cancel(self, push: _Push) -> None:
        with push.lock:
            push.cancelled = True
            if push.batch is not None:
                self._engine.cancel(push.batch)

    # ── a thread of the pool ─────────────────────────────────────────────────────────────────────

    def _push(self, push: _Push) -> None:
        staging = self._free.pop()  # there is one for each thread
        begun = time.monotonic()
        try:
            if push.cancelled or self._closed:
                raise RequestCancelled("the push is not wanted any more")
            segment = self._open(push.request.segment)
            try:
                self._write_all(push, staging, segment)
            finally:
                with self._opening:
                    self._segments[segment] -= 1
            blocks = len(push.request.offsets)
            self._counts.add(pushes=1, blocks_pushed=blocks, bytes_pushed=blocks * self._pages.block_bytes)
        except BaseException:
            self._counts.add(pushes_failed=1)
            raise
        finally:
            self._counts.add(push_ms=int((time.monotonic() - begun) * 1000))
            self._free.append(staging)

    def _write_all(self, push: _Push, staging: PushStaging, segment: str) -> None:
        request, prompt = push.request, push.request.prompt
        count = len(request.offsets)
        with self._lock:
            pages = self._held.claim(prompt.request_id, prompt.ticket, request.first_block, count, time.monotonic())
        reading = True
        try:
            for first in range(0, count, staging.blocks):
                part = pages[first : first + staging.blocks]
                for slot, page in enumerate(part):
                    self._pages.copy_out(page, staging.block(slot))
                if first + len(part) == count:  # the rest needs staging alone
                    reading = False
                    self._done(prompt.request_id)
                self._write(push, staging, segment, request.offsets[first : first + len(part)])
        finally:
            if reading:
                self._done(prompt.request_id)

    def _done(self, request_id: str) -> None:
        with self._lock:
            self._held.done(request_id)

    def _write(self, push: _Push, staging: PushStaging, segment: str, offsets: Sequence[int]) -> None:
        """Writes the leading blocks of a staging. Raises KvmeshError unless all of them have landed."""
        size = self._pages.block_bytes
        epoch = push.request.handoff_epoch
        requests = [
            TransferRequest(Opcode.WRITE, staging.address(slot), segment, offset, size, epoch)
            for slot, offset in enumerate(offsets)
        ]
        left_s = push.deadline - time.monotonic()
        if left_s <= 0:
            raise DeadlinePassed("no time is left for the push")
        engine = self._engine
        batch = engine.allocate_batch(len(requests))
        try:
            with push.lock:
                if push.cancelled:
                    raise RequestCancelled("the push is not wanted any more")
                engine.submit(batch, requests, left_s)
                push.batch = batch
            if not engine.wait_sync(batch, left_s + engine.config.ack_timeout_s):
                engine.cancel(batch)
                engine.close_segment(segment)  # which makes every request final
                engine.wait_sync(batch, engine.config.close_timeout_s)
            failed = [one for one in engine.statuses(batch) if one.state is not TransferState.COMPLETED]
            if failed:
                raise HandoffLost(f"{len(failed)} of {len(requests)} blocks did not arrive: {failed[0].cause}")
        finally:
            with push.lock:
                push.batch = None
            engine.free_batch(batch)

    def _open(self, descriptor: bytes) -> str:
        """Opens the segment of a decode worker, and counts one more user of it. Raises TransferError."""
        with self._opening:
            name = self._engine.open_segment(descriptor)
            self._segments[name] = self._segments.pop(name, 0) + 1
            idle = [one for one, users in self._segments.items() if not users]
            for old in idle[: max(len(self._segments) - MAX_SEGMENTS, 0)]:
                del self._segments[old]
                self._engine.close_segment(old)
        return name

    def close(self) -> None:
        """Ends the threads; pushes under way fail by their deadlines, or as the engine is closed."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
