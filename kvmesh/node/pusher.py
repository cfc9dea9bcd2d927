"""Layer-wise push: from pages to the landing that decode reserved, while the next layer is computed.

A handoff is opened by PushOpen (the landing is known) at any moment of its computation. Blocks whose layers are
all written go as whole shards; those of the running step go layer by layer. Posting happens on the rank's
main thread, acknowledgements arrive on transfer engine threads; one lock guards the table.

Invariants: nothing is posted after the lease, after a failure or after a cancel; PushDone, PushFailed and PushDrained
are said once per handoff, and only when no slice of it can still be on the way (`drained` says when that is not known).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvmesh.kvcache.layout import ShardLayout
from kvmesh.node import messages as m
from kvmesh.rpc.errors import TransferError
from kvmesh.transfer import BatchId, TransferEngine, TransferRequest, TransferState
from kvmesh.transfer.api import Opcode, TransferStatus

PROGRESS_NS = 100_000_000
# A lease is renewed on progress, so what is posted at once must not be silent until its last byte has arrived.
BATCH_BYTES = 32 << 20
END_MARK = b"end"
# Handoffs whose landing never came leave a small record behind; more than this many are forgotten.
MAX_COMPUTED = 65_536


@dataclass(slots=True)
class _Computed:
    """How far a request's KV is written here."""

    done_tokens: int = 0
    chunk_end: int = 0  # the running step writes [done_tokens, chunk_end)
    layers_done: int = 0


@dataclass(slots=True)
class _Push:
    spec: m.PushOpen
    lease_until_ns: int
    posted_tokens: int  # every layer of these is posted
    posted_layers: int = 0  # of the running chunk
    batches: dict[BatchId, tuple[int, int]] = field(default_factory=dict)  # in flight → (bytes, requests)
    posted_all: bool = False
    marking: bool = False  # the end mark is on its way
    bytes_done: int = 0
    first_post_ns: int = 0
    last_ack_ns: int = 0
    reported_ns: int = 0
    cause: str = ""  # failed: nothing more is posted
    certain: bool = True  # every failed batch is known to be off the wire
    cancelled: bool = False


class Pusher:
    """All handoffs that this rank writes."""

    def __init__(
        self,
        engine: TransferEngine,
        layout: ShardLayout,
        page_address: int,
        send: Callable[[m.ToFront], None],
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._engine = engine
        self._layout = layout
        self._page_address = page_address
        self._send = send
        self._clock_ns = clock_ns
        self._lock = threading.RLock()
        self._computed: dict[int, _Computed] = {}
        self._pushes: dict[int, _Push] = {}
        self._slices = [layout.layer_slice(layer) for layer in range(layout.layers)]

    # ── the step tells how far it is (main thread) ───────────────────────────────────────────────

    def step_begins(self, items: tuple[m.PrefillItem, ...]) -> None:
        with self._lock:
            for item in items:
                computed = self._computed.setdefault(item.handle, _Computed())
                computed.done_tokens = item.start
                computed.chunk_end = item.start + len(item.token_ids)
                computed.layers_done = 0
            while len(self._computed) > MAX_COMPUTED:
                del self._computed[next(iter(self._computed))]

    def layer_written(self, items: tuple[m.PrefillItem, ...], layer: int) -> None:
        with self._lock:
            for item in items:
                computed = self._computed.get(item.handle)
                if computed is None:
                    continue
                computed.layers_done = layer + 1
                if layer + 1 == self._layout.layers:
                    computed.done_tokens, computed.layers_done = computed.chunk_end, 0
                push = self._pushes.get(item.handle)
                if push is not None:
                    self._post_ready(push, computed)

    def step_failed(self, handles: tuple[int, ...]) -> None:
        """The KV of these is not to be trusted: stop pushing it."""
        with self._lock:
            for handle in handles:
                self._computed.pop(handle, None)
                push = self._pushes.get(handle)
                if push is not None:
                    self._fail(push, "the step that computed it failed")

    # ── commands (main thread) ───────────────────────────────────────────────────────────────────

    def open(self, spec: m.PushOpen) -> None:
        with self._lock:
            computed = self._computed.setdefault(spec.handle, _Computed())
            computed.done_tokens = max(computed.done_tokens, spec.ready_tokens)
            first = spec.first_block * self._layout.block_tokens
            push = _Push(spec, spec.lease_until_ns, min(first, spec.prompt_tokens))
            self._pushes[spec.handle] = push
            self._post_ready(push, computed)

    def renew(self, handle: int, lease_until_ns: int) -> None:
        with self._lock:
            push = self._pushes.get(handle)
            if push is not None:
                push.lease_until_ns = max(push.lease_until_ns, lease_until_ns)

    def cancel(self, handle: int) -> None:
        with self._lock:
            self._computed.pop(handle, None)
            push = self._pushes.get(handle)
            if push is None:
                self._send(m.PushDrained(handle))
                return
            push.cancelled = True
            self._stop_posting(push)
            self._settle(push)

    def check_leases(self) -> None:
        """Called between steps: a handoff whose lease is over fails even when nothing is left to post soon."""
        now = self._clock_ns()
        with self._lock:
            for push in list(self._pushes.values()):
                if not push.posted_all and not push.cause and now >= push.lease_until_ns:
                    self._fail(push, "the landing's lease ran out")

    @property
    def active(self) -> int:
        return len(self._pushes)

    # ── posting ──────────────────────────────────────────────────────────────────────────────────

    def _post_ready(self, push: _Push, computed: _Computed) -> None:
        """Post all that is written and not yet posted."""
        if push.cause or push.cancelled or push.posted_all:
            return
        if self._clock_ns() >= push.lease_until_ns:
            self._fail(push, "the landing's lease ran out")
            return
        requests: list[TransferRequest] = []
        prompt = push.spec.prompt_tokens
        done = min(computed.done_tokens, prompt)
        if push.posted_tokens < done:
            # layers [0, posted_layers) of the first blocks may be posted already, as the running chunk's
            begin = push.posted_layers
            self._gather(requests, push, push.posted_tokens, done, begin, self._layout.layers)
            push.posted_tokens, push.posted_layers = done, 0
        if computed.layers_done > push.posted_layers and push.posted_tokens == done < prompt:
            end = min(computed.chunk_end, prompt)
            self._gather(requests, push, done, end, push.posted_layers, computed.layers_done)
            push.posted_layers = computed.layers_done
        if requests:
            self._submit(push, requests)
        if push.posted_tokens >= prompt and not push.cause:
            # Both at once, and not before: a fast target acknowledges inside `_submit`, which must not end the push.
            push.posted_all = push.marking = True
            try:
                # Delivered behind every write before it; its answer is the last word on this handoff.
                self._engine.notify(
                    push.spec.segment, push.spec.handoff_epoch, END_MARK, lambda status: self._marked(push, status)
                )
            except TransferError as error:
                push.marking = False
                self._fail(push, f"end mark: {error}")

    def _gather(self, out: list[TransferRequest], push: _Push, begin: int, end: int, layer0: int, layer1: int) -> None:
        """Requests for layers [layer0, layer1) of the blocks that hold tokens [begin, end)."""
        tokens, shard = self._layout.block_tokens, self._layout.shard_bytes
        spec = push.spec
        if layer0 >= layer1:
            return
        first, _ = self._slices[layer0]
        last, last_bytes = self._slices[layer1 - 1]
        length = last + last_bytes - first
        for block in range(max(begin // tokens, spec.first_block), -(-end // tokens)):
            out.append(
                TransferRequest(
                    Opcode.WRITE,
                    self._page_address + spec.pages[block] * shard + first,
                    spec.segment,
                    spec.offsets[block] + first,
                    length,
                    spec.handoff_epoch,
                )
            )

    def _submit(self, push: _Push, requests: list[TransferRequest]) -> None:
        """In batches, each of which tells of progress once it is acknowledged."""
        if not push.first_post_ns:
            push.first_post_ns = self._clock_ns()
        count = max(1, BATCH_BYTES // max(r.length for r in requests))
        for at in range(0, len(requests), count):
            self._submit_batch(push, requests[at : at + count])
            if push.cause:
                return

    def _submit_batch(self, push: _Push, requests: list[TransferRequest]) -> None:
        batch = self._engine.allocate_batch(len(requests))
        push.batches[batch] = (sum(r.length for r in requests), len(requests))
        try:
            self._engine.submit(batch, requests)
            self._engine.on_done(batch, lambda: self._acknowledged(push, batch))
        except TransferError as error:
            push.batches.pop(batch, None)
            self._engine.free_batch(batch)
            self._fail(push, f"submit: {error}")

    def _acknowledged(self, push: _Push, batch: BatchId) -> None:
        """A batch is final (transfer engine thread)."""
        with self._lock:
            found = push.batches.pop(batch, None)
            if found is None:
                return
            nbytes, count = found
            cause, certain = self._outcome(batch, count)
            self._engine.free_batch(batch)
            push.certain = push.certain and certain
            if cause and not push.cause:
                push.cause = cause
                self._stop_posting(push)
            elif not cause:
                push.bytes_done += nbytes
                push.last_ack_ns = self._clock_ns()
                if push.last_ack_ns - push.reported_ns > PROGRESS_NS:
                    push.reported_ns = push.last_ack_ns
                    self._send(m.PushProgress(push.spec.handle, push.bytes_done))
            self._settle(push)

    def _marked(self, push: _Push, status: TransferStatus) -> None:
        """The end mark was delivered, or could not be (transfer engine thread)."""
        with self._lock:
            push.marking = False
            if status.state is not TransferState.COMPLETED:
                push.cause = push.cause or f"end mark: {status.cause or status.state.value}"
            self._settle(push)

    def _outcome(self, batch: BatchId, count: int) -> tuple[str, bool]:
        """(cause of the first failure or "", whether nothing of the batch can still land)."""
        cause, certain = "", True
        for i in range(count):
            status = self._engine.status(batch, i)
            if status.state is not TransferState.COMPLETED:
                cause = cause or status.cause or status.state.value
                certain = certain and status.drained
        return cause, certain

    def _fail(self, push: _Push, cause: str) -> None:
        push.cause = push.cause or cause
        self._stop_posting(push)
        self._settle(push)

    def _stop_posting(self, push: _Push) -> None:
        for batch in list(push.batches):
            # Cancelling one may end others, and their callbacks run right here: those are freed already.
            if batch in push.batches:
                self._engine.cancel(batch)

    def _settle(self, push: _Push) -> None:
        """Say how it ended, once nothing of it is in flight."""
        handle, epoch = push.spec.handle, push.spec.handoff_epoch
        if push.batches or push.marking or self._pushes.get(handle) is not push:
            return
        if not (push.cancelled or push.cause or push.posted_all):
            return
        del self._pushes[handle]
        self._computed.pop(handle, None)
        if push.cancelled:
            self._send(m.PushDrained(handle, push.certain))
        elif push.cause:
            self._send(m.PushFailed(handle, epoch, push.cause, push.certain))
        else:
            now = self._clock_ns()
            done = m.PushDone(handle, epoch, push.first_post_ns or now, push.last_ack_ns or now, push.bytes_done)
            self._send(done)
