"""The decode side's worker: has a prefill worker push blocks into windows over its staging, and copies them into pages.

Each thread has a staging of its own and takes round after round (`arrivals`): open a window, ask for the push, fence
the window, copy. A load that is over its time is given up by `poll` itself, whatever its threads wait for.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from collections.abc import Collection, Sequence

from kvmesh.connectors.vllm.book import ReceiveOrder
from kvmesh.connectors.vllm.config import ConnectorConfig
from kvmesh.connectors.vllm.counts import WorkerCounts
from kvmesh.connectors.vllm.failures import FailureLog
from kvmesh.connectors.vllm.mover import Pages
from kvmesh.connectors.vllm.push.arrivals import PageArrivals, PushRound, ReceivedPages
from kvmesh.connectors.vllm.push.endpoint import PushEndpoint
from kvmesh.connectors.vllm.push.staging import PushStaging, WorkerPages
from kvmesh.connectors.vllm.remote import RemotePrefill
from kvmesh.errors import KvmeshError, TransferError
from kvmesh.rpc.addresses import is_loopback, split_address
from kvmesh.rpc.pb import vllm_pb2 as pb
from kvmesh.rpc.protocol import PROTOCOL_VERSION
from kvmesh.transfer import TransferEngine

log = logging.getLogger(__name__)

FENCE_S = 5.0  # of one try
CLOSE_S = 5.0
NOT_PUSHED = "a prompt that prefill has computed does not arrive, and is computed here"


class PageReceiver:
    """Receives pages of one rank. `receive`, `cancel` and `poll` are of the worker's thread. Its owner must `close` it,
    before the endpoint and the engine."""

    def __init__(
        self,
        engine: TransferEngine,
        endpoint: PushEndpoint,
        pages: Sequence[Pages],
        rank: int,
        layout: str,
        config: ConnectorConfig,
        counts: WorkerCounts,
    ) -> None:
        """Raises ConfigError when the staging holds no block."""
        self._engine = engine
        self._endpoint = endpoint
        self._pages = WorkerPages(pages)
        self._rank = rank
        self._layout = layout
        self._counts = counts
        self._timeout_ms = config.push_timeout_ms
        self._failures = FailureLog()
        stagings = [PushStaging(engine, self._pages.block_bytes, config) for _ in range(config.push_threads)]
        self._descriptor = engine.local_descriptor().encode()
        self._arrivals = PageArrivals(config.push_timeout_ms / 1000, stagings[0].blocks, len(stagings))
        self._changed = threading.Condition(threading.Lock())  # of `_arrivals` and `_calls`
        self._calls: dict[PushRound, concurrent.futures.Future[None]] = {}
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, args=(staging,), name="kvmesh-receive", daemon=True)
            for staging in stagings
        ]
        for thread in self._threads:
            thread.start()

    # ── the worker's thread ──────────────────────────────────────────────────────────────────────

    def receive(self, order: ReceiveOrder) -> None:
        """Begins a load, which `poll` tells the end of."""
        with self._changed:
            self._arrivals.order(order, time.monotonic())
            self._changed.notify_all()

    def cancel(self, request_ids: Collection[str]) -> None:
        """Gives up loads whose requests have ended."""
        with self._changed:
            self._arrivals.cancel(request_ids)
            self._stop_waiting()

    def poll(self) -> ReceivedPages:
        """Returns the loads that are over since the last call, and tells the prefill worker so."""
        with self._changed:
            over = self._arrivals.poll(time.monotonic())
            if over.orders:
                self._stop_waiting()
        for order, ms in zip(over.orders, over.ms, strict=True):
            lost = sum(page in over.failed_pages for page in order.block_ids)
            came = len(order.block_ids) - lost
            self._counts.add(receives=1, receive_ms=ms, receives_late=int(order.request_id in over.late))
            self._counts.add(
                blocks_received=came, blocks_not_received=lost, bytes_received=came * self._pages.block_bytes
            )
            if order.request_id in over.late:
                self._tell(order.source, f"it was not all there within push_timeout_ms={self._timeout_ms}")
            self.release(order.source)
        return over

    def _tell(self, source: RemotePrefill, why: str) -> None:
        """Logs why a prompt has not come. An address that leads back to this machine may be the reason."""
        address = source.ranks[self._rank].address
        where = f"request {source.request_id} of engine {source.engine_id} at {address}"
        if is_loopback(split_address(address)[0]):
            where += (
                " (that address leads nowhere but to this machine: an engine on another one needs host, or "
                "advertise_host, in its kv_connector_extra_config)"
            )
        if not self._closed:
            self._failures.tell(NOT_PUSHED, f"{where}: {why}", time.monotonic())

    def release(self, source: RemotePrefill) -> None:
        """Tells the prefill worker that a prompt's pages are not wanted any more."""
        request = pb.ReleasePagesRequest(protocol_version=PROTOCOL_VERSION, prompt=self._prompt(source))
        self._endpoint.release(source.ranks[self._rank].address, request)

    def _stop_waiting(self) -> None:
        now = time.monotonic()
        for round_, call in self._calls.items():
            if self._arrivals.gives_up(round_, now):
                call.cancel()

    # ── a thread ─────────────────────────────────────────────────────────────────────────────────

    def _run(self, staging: PushStaging) -> None:
        while (round_ := self._take()) is not None:
            peer = round_.order.source.ranks[self._rank].engine
            landed = False
            try:
                self._engine.open_window(peer, round_.epoch, [staging.range(at) for at in range(len(round_.pages))])
                landed = self._ask(round_, staging)
            except KvmeshError as error:
                self._tell(round_.order.source, error.message)
            except Exception:  # the thread must live: without it every load would wait for its time
                log.exception("push of request %s failed", round_.order.source.request_id)
            with self._changed:
                self._arrivals.answered(round_, landed)
            if not self._fence(peer, round_.epoch):
                return  # this staging is lost with the engine that is being closed
            with self._changed:
                copies = self._arrivals.fenced(round_)
            if copies:
                for at, page in enumerate(round_.pages):
                    self._pages.copy_in(page, staging.block(at))
                with self._changed:
                    self._arrivals.copied(round_)

    def _take(self) -> PushRound | None:
        with self._changed:
            while not self._closed:
                round_ = self._arrivals.take(time.monotonic())
                if round_ is not None:
                    return round_
                self._changed.wait()
        return None

    def _ask(self, round_: PushRound, staging: PushStaging) -> bool:
        """Asks for the push, and returns whether all has landed. Raises KvmeshError."""
        source = round_.order.source
        left_s = round_.deadline - time.monotonic()
        request = pb.PushPagesRequest(
            protocol_version=PROTOCOL_VERSION,
            prompt=self._prompt(source),
            layout=self._layout,
            block_bytes=self._pages.block_bytes,
            segment=self._descriptor,
            handoff_epoch=round_.epoch,
            first_block=round_.first,
            offsets=[staging.range(at).offset for at in range(len(round_.pages))],
        )
        with self._changed:
            if self._closed or left_s <= 0 or self._arrivals.gives_up(round_, time.monotonic()):
                return False
            call = self._calls[round_] = self._endpoint.push(source.ranks[self._rank].address, request, left_s)
        try:
            call.result(left_s + FENCE_S)
        except (concurrent.futures.CancelledError, TimeoutError):
            call.cancel()
            return False
        finally:
            with self._changed:
                del self._calls[round_]
        return True

    def _fence(self, peer: str, epoch: int) -> bool:
        """Closes the window, and returns when nothing can land in it any more: until then its staging is not used
        again. Returns False when the engine is closed before."""
        while not self._closed:
            try:
                self._engine.fence(peer, epoch, FENCE_S)
                return True
            except TransferError as error:
                log.warning("window of %s: %s", peer, error.message)
                self._counts.add(fences_late=1)
        return False

    def _prompt(self, source: RemotePrefill) -> pb.HeldPrompt:
        return pb.HeldPrompt(
            engine=source.ranks[self._rank].engine,
            request_id=source.request_id,
            ticket=bytes.fromhex(source.ticket),
        )

    def close(self) -> None:
        """Ends the threads, within a bounded time."""
        with self._changed:
            self._closed = True
            self._arrivals.cancel_all()
            for call in self._calls.values():
                call.cancel()
            self._changed.notify_all()
        until = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.0))
