"""A push goes layer by layer from pages to the landing that decode reserved, while the next layer is computed.

A handoff is opened by PushOpen (the landing is known) at any moment of its computation. Blocks whose layers are all
written go as whole shards; those of the running step go layer by layer; reader ranks that cut the model differently get
the runs that the group's plan gives this rank. Posting happens on the rank's main thread, acknowledgements arrive on
transfer engine threads; one lock guards the table and all `GroupWrite`s.

Invariants: nothing is posted after the lease, after a failure or after a cancel; PushDone, PushFailed and PushDrained
are sent once per handoff, and only when no slice of it can still be on the way (`drained` says when that is not known).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvmesh.errors import ConfigError
from kvmesh.kvcache.groups import plan_group
from kvmesh.kvcache.layout import Run, ShardLayout, joined
from kvmesh.ranks import protocol as m
from kvmesh.ranks.worker.stager import Direct, StagedPushes
from kvmesh.transfer import TrafficClass, TransferEngine
from kvmesh.transfer.groups import GroupWrite

PROGRESS_NS = 100_000_000
# A lease is renewed on progress, so what is posted at once must not be silent until its last byte has arrived.
BATCH_BYTES = 32 << 20
# Handoffs whose landing never came leave a small record behind; more than this many are forgotten.
MAX_COMPUTED = 65_536


@dataclass(slots=True)
class _Computed:
    """Tells how much of a request's KV is written here."""

    done_tokens: int = 0
    chunk_end: int = 0  # the running step writes [done_tokens, chunk_end)
    layers_done: int = 0


@dataclass(frozen=True, slots=True)
class _Target:
    """Describes one reader rank. `runs(block, layer0, layer1)` returns which bytes of this rank's shard go where in the
    reader's shard."""

    segment: str
    offsets: tuple[int, ...]
    runs: Callable[[int, int, int], Sequence[Run]]


@dataclass(slots=True)
class _Push:
    spec: m.PushOpen
    targets: tuple[_Target, ...]
    write: GroupWrite
    lease_until_ns: int
    posted_tokens: int  # every layer of these is posted
    posted_layers: int = 0  # how many layers of the running chunk are posted
    reported_ns: int = 0

    @property
    def open(self) -> bool:
        """Whether something may still be posted."""
        return not self.write.over


class Pusher:
    """Pushes the KV of all handoffs that this rank writes."""

    def __init__(
        self,
        engine: TransferEngine,
        layout: ShardLayout,
        page_address: int,
        send: Callable[[m.ToFront], None],
        clock_ns: Callable[[], int] = time.monotonic_ns,
        outbox: StagedPushes | None = None,
    ) -> None:
        self._engine = engine
        self._layout = layout
        self._page_address = page_address
        self._send = send
        self._clock_ns = clock_ns
        self._outbox = outbox or Direct()
        self._lock = self._outbox.lock
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
        """Stops pushing the KV of these requests, which is not to be trusted."""
        with self._lock:
            for handle in handles:
                self._computed.pop(handle, None)
                push = self._pushes.get(handle)
                if push is not None:
                    push.write.fail("the step that computed it failed")

    # ── commands (main thread) ───────────────────────────────────────────────────────────────────

    def open(self, spec: m.PushOpen) -> None:
        with self._lock:
            computed = self._computed.setdefault(spec.handle, _Computed())
            computed.done_tokens = max(computed.done_tokens, spec.ready_tokens)
            try:
                targets = self._targets(spec)
            except ConfigError as error:
                self._computed.pop(spec.handle, None)
                self._send(m.PushFailed(spec.handle, spec.handoff_epoch, error.message, True))
                return
            write = GroupWrite(
                self._engine,
                spec.handoff_epoch,
                [target.segment for target in targets],
                lambda: self._ended(push),
                lambda _: self._progressed(push),
                traffic_class=TrafficClass.HANDOFF,  # a decode waits for it
                batch_bytes=BATCH_BYTES,
                lock=self._lock,
                clock_ns=self._clock_ns,
            )
            first = spec.first_block * self._layout.block_tokens
            push = _Push(spec, targets, write, spec.lease_until_ns, min(first, spec.prompt_tokens))
            self._pushes[spec.handle] = push
            self._post_ready(push, computed)

    def _targets(self, spec: m.PushOpen) -> tuple[_Target, ...]:
        """Returns the reader ranks. Raises ConfigError when the group's layouts do not fit together, or the writer's is
        not this rank's."""
        group = spec.group
        if group is None:
            return (_Target(spec.segment, spec.offsets, self._whole),)
        if not 0 <= group.writer < len(group.writers) or group.writers[group.writer] != self._layout:
            raise ConfigError(f"group: writer {group.writer} does not have this rank's layout", field="group")
        plan, writer = plan_group(group.writers, group.readers), group.writer

        def runs(reader: int) -> Callable[[int, int, int], Sequence[Run]]:
            return lambda block, layer0, layer1: plan.runs(writer, reader, block, layer0, layer1)

        for target in group.targets:
            if not 0 <= target.reader < len(group.readers) or len(target.offsets) != len(spec.pages):
                why = f"reader {target.reader} of {len(group.readers)}, {len(target.offsets)} offsets"
                raise ConfigError(f"group: a target is {why} for {len(spec.pages)} blocks", field="group")
        return tuple(_Target(target.segment, target.offsets, runs(target.reader)) for target in group.targets)

    def _whole(self, _: int, layer0: int, layer1: int) -> Sequence[Run]:
        """Returns the run for a reader with the same layout: these layers of the shard."""
        first, last = self._slices[layer0], self._slices[layer1 - 1]
        return ((first[0], first[0], sum(last) - first[0]),)

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
            push.write.cancel()

    def check_leases(self) -> None:
        """Fails handoffs whose lease is over, even when nothing is left to post soon. It is called between steps."""
        now = self._clock_ns()
        with self._lock:
            for push in list(self._pushes.values()):
                if push.open and now >= push.lease_until_ns:
                    push.write.fail("the landing's lease ran out")

    def pump(self) -> None:
        """Goes on with what waits for room. It is to be called often while `waiting`, and after `check_leases`."""
        self._outbox.pump()

    @property
    def waiting(self) -> bool:
        with self._lock:
            return self._outbox.busy

    @property
    def active(self) -> int:
        return len(self._pushes)

    # ── posting ──────────────────────────────────────────────────────────────────────────────────

    def _post_ready(self, push: _Push, computed: _Computed) -> None:
        """Posts all that is written and not yet posted."""
        if not push.open:
            return
        if self._clock_ns() >= push.lease_until_ns:
            push.write.fail("the landing's lease ran out")
            return
        prompt = push.spec.prompt_tokens
        done = min(computed.done_tokens, prompt)
        if push.spec.at_end and done < prompt:
            return
        spans: list[tuple[int, int, int, int]] = []
        if push.posted_tokens < done:
            # layers [0, posted_layers) of the first blocks may be posted already, as the running chunk's
            spans.append((push.posted_tokens, done, push.posted_layers, self._layout.layers))
            push.posted_tokens, push.posted_layers = done, 0
        if computed.layers_done > push.posted_layers and push.posted_tokens == done < prompt:
            end = min(computed.chunk_end, prompt)
            spans.append((done, end, push.posted_layers, computed.layers_done))
            push.posted_layers = computed.layers_done
        for target in push.targets:
            runs = (run for span in spans for run in self._runs(push.spec, target, *span))
            self._outbox.write(push.write, target.segment, joined(runs, BATCH_BYTES))
        if push.posted_tokens >= prompt:
            # The end mark is delivered after every write before it, and its answer ends this handoff.
            self._outbox.mark(push.write)

    def _runs(self, spec: m.PushOpen, target: _Target, begin: int, end: int, layer0: int, layer1: int) -> Iterator[Run]:
        """Yields (address, remote offset, length) of layers [layer0, layer1) of the blocks that hold tokens [begin,
        end)."""
        tokens, shard = self._layout.block_tokens, self._layout.shard_bytes
        if layer0 >= layer1:
            return
        for block in range(max(begin // tokens, spec.first_block), -(-end // tokens)):
            page = self._page_address + spec.pages[block] * shard
            landing = target.offsets[block]
            for a, b, length in target.runs(block, layer0, layer1):
                yield page + a, landing + b, length

    # ── what became of it (any thread, lock held) ────────────────────────────────────────────────

    def _progressed(self, push: _Push) -> None:
        now = push.write.last_ack_ns
        if now - push.reported_ns > PROGRESS_NS:
            push.reported_ns = now
            self._send(m.PushProgress(push.spec.handle, push.write.bytes_done))

    def _ended(self, push: _Push) -> None:
        """Reports the end of a push, of which nothing is in flight any more."""
        handle, epoch, write = push.spec.handle, push.spec.handoff_epoch, push.write
        if self._pushes.get(handle) is not push:
            return
        del self._pushes[handle]
        self._computed.pop(handle, None)
        if write.cancelled:
            self._send(m.PushDrained(handle, write.certain))
        elif write.cause:
            times = write.first_post_ns, write.last_ack_ns
            self._send(m.PushFailed(handle, epoch, write.cause, write.certain, *times, write.bytes_done, write.carried))
        else:
            now = self._clock_ns()
            times = write.first_post_ns or now, write.last_ack_ns or now
            self._send(m.PushDone(handle, epoch, *times, write.bytes_done, write.carried, write.busy_ns))
