"""A push goes layer by layer from pages to the landing that decode reserved, while the next layer is computed.

A handoff is opened by PushOpen (the landing is known) at any moment of its computation. Blocks whose layers are all
written go as whole shards; those of the running step go layer by layer; reader ranks that cut the model differently get
the runs that the group's plan gives this rank. Posting happens on the rank's main thread, acknowledgements arrive on
transfer engine threads; one lock guards the table and all `GroupWrite`s.

Of a model that is kept by cache groups a layer is posted group by group, of each group the blocks that its landing
names: a block's page is what PushOpen says or, behind that, the PrefillItem that computed it. States are posted as they
are after the last chunk.

Invariants: nothing is posted after the lease, after a failure or after a cancel; PushDone, PushFailed and PushDrained
are sent once per handoff, and only when no slice of it can still be on the way (`drained` says when that is not known).
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvmesh.errors import ConfigError
from kvmesh.kvcache.cache_groups import GroupPages
from kvmesh.kvcache.groups import GroupPlan, plan_group
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
    groups: tuple[GroupPages, ...] = ()  # what the last step named


class PushedGroup(NamedTuple):
    """Is what one cache group has to push: which of the model's `layers`, this rank's `layout` of a block, and how many
    bytes behind the first of all pages its own begin."""

    layers: Sequence[int]
    layout: ShardLayout
    start: int = 0
    state: bool = False


Runs = Callable[[int, int, int], Sequence[Run]]


class _Landing(NamedTuple):
    """Says where one group's blocks from `first` on land in a reader's segment: `runs(block, layer0, layer1)` returns
    which bytes of this rank's shard go where in the reader's, by layers of the group."""

    group: int
    first: int
    offsets: tuple[int, ...]
    runs: Runs


class _Target(NamedTuple):
    """Describes one reader rank."""

    segment: str
    landings: tuple[_Landing, ...]


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


class _Pages:
    """Finds the pages of blocks: where PushOpen names none, the last step did. Raises ConfigError where nobody did."""

    def __init__(self, spec: m.PushOpen, computed: tuple[GroupPages, ...]) -> None:
        own = spec.groups or (GroupPages(0, 0, spec.pages),)
        self._named: dict[int, list[GroupPages]] = {}
        for pages in (*own, *computed):
            self._named.setdefault(pages.group, []).append(pages)

    def of(self, group: int, blocks: range) -> Sequence[int]:
        """Returns the pages of these blocks."""
        for _, first, ids in self._named.get(group, ()):
            if first <= blocks.start and blocks.stop <= first + len(ids):
                found = ids[blocks.start - first : blocks.stop - first]
                if min(found, default=0) >= 0:
                    return found
        return [self._page(group, block) for block in blocks]

    def _page(self, group: int, block: int) -> int:
        for _, first, ids in self._named.get(group, ()):
            if 0 <= block - first < len(ids) and ids[block - first] >= 0:
                return ids[block - first]
        raise ConfigError(f"groups: nobody named the page of block {block} in cache group {group}", field="groups")

    def slot(self, group: int) -> int:
        for pages in self._named.get(group, ()):
            if pages.ids:
                return pages.ids[0]
        raise ConfigError(f"groups: nobody named the slot of cache group {group}", field="groups")


def planned(plan: GroupPlan, writer: int, reader: int) -> Runs:
    """Returns the runs that `plan` gives this writer for a reader."""
    return lambda block, layer0, layer1: plan.runs(writer, reader, block, layer0, layer1)


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
        groups: Sequence[PushedGroup] = (),
    ) -> None:
        """`layout` is that of the whole model, or of group 0 where there are `groups`."""
        self._engine = engine
        self._grouped = bool(groups)
        self._groups = tuple(groups) or (PushedGroup(range(layout.layers), layout),)
        self._layers = 1 + max(group.layers[-1] for group in self._groups)
        self._block_tokens = next(group.layout.block_tokens for group in self._groups if not group.state)
        self._page_address = page_address
        self._send = send
        self._clock_ns = clock_ns
        self._outbox = outbox or Direct()
        self._lock = self._outbox.lock
        self._computed: dict[int, _Computed] = {}
        self._pushes: dict[int, _Push] = {}

    def pages_moved(self, page_address: int) -> None:
        """Pushes out of pages that begin at another address from here on. No push is open."""
        with self._lock:
            self._page_address = page_address

    # ── the step tells how far it is (main thread) ───────────────────────────────────────────────

    def step_begins(self, items: tuple[m.PrefillItem, ...]) -> None:
        with self._lock:
            for item in items:
                computed = self._computed.setdefault(item.handle, _Computed())
                computed.done_tokens = item.start
                computed.chunk_end = item.start + len(item.token_ids)
                computed.layers_done = 0
                computed.groups = item.groups
            while len(self._computed) > MAX_COMPUTED:
                del self._computed[next(iter(self._computed))]

    def layer_written(self, items: tuple[m.PrefillItem, ...], layer: int) -> None:
        with self._lock:
            for item in items:
                computed = self._computed.get(item.handle)
                if computed is None:
                    continue
                computed.layers_done = layer + 1
                if layer + 1 == self._layers:
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
            first = spec.first_block
            if self._grouped:
                every = (landing for target in targets for landing in target.landings)
                first = min((one.first for one in every if not self._groups[one.group].state), default=0)
            begin = min(first * self._block_tokens, spec.prompt_tokens)
            push = _Push(spec, targets, write, spec.lease_until_ns, begin)
            self._pushes[spec.handle] = push
            self._post_ready(push, computed)

    def _targets(self, spec: m.PushOpen) -> tuple[_Target, ...]:
        """Returns the reader ranks. Raises ConfigError when the group's layouts do not fit together, or the writer's is
        not this rank's."""
        if self._grouped:
            return self._group_targets(spec)
        group = spec.group
        if group is None:
            return (_Target(spec.segment, (_Landing(0, 0, spec.offsets, self._whole(0)),)),)
        layout = self._groups[0].layout
        if not 0 <= group.writer < len(group.writers) or group.writers[group.writer] != layout:
            raise ConfigError(f"group: writer {group.writer} does not have this rank's layout", field="group")
        plan = plan_group(group.writers, group.readers)
        for target in group.targets:
            if not 0 <= target.reader < len(group.readers) or len(target.offsets) != len(spec.pages):
                why = f"reader {target.reader} of {len(group.readers)}, {len(target.offsets)} offsets"
                raise ConfigError(f"group: a target is {why} for {len(spec.pages)} blocks", field="group")
        return tuple(
            _Target(target.segment, (_Landing(0, 0, target.offsets, planned(plan, group.writer, target.reader)),))
            for target in group.targets
        )

    def _group_targets(self, spec: m.PushOpen) -> tuple[_Target, ...]:
        """Returns the reader ranks of a model that is kept by cache groups, each of which is planned by itself."""
        named = (pages for target in (spec.group.targets if spec.group is not None else ()) for pages in target.groups)
        blocks = -(-spec.prompt_tokens // self._block_tokens)
        for pages in (*spec.group_offsets, *named):
            if not 0 <= pages.group < len(self._groups):
                raise ConfigError(f"groups: the model has no cache group {pages.group}", field="groups")
            if pages.ids and not self._groups[pages.group].state and pages.first + len(pages.ids) != blocks:
                why = f"{len(pages.ids)} offsets from block {pages.first} on, of {blocks} blocks"
                raise ConfigError(f"groups: cache group {pages.group} has {why}", field="groups")
        group = spec.group
        if group is None:
            same = tuple(_Landing(*pages, self._whole(pages.group)) for pages in spec.group_offsets)
            return (_Target(spec.segment, same),)
        plans = []
        for number, own in enumerate(self._groups):
            writers, readers = (
                tuple(shard for shard in shards if shard.group == number) for shards in (group.writers, group.readers)
            )
            if not 0 <= group.writer < len(writers) or writers[group.writer] != own.layout:
                why = f"writer {group.writer} does not have this rank's layout of cache group {number}"
                raise ConfigError(f"group: {why}", field="group")
            plans.append(plan_group(writers, readers))
        targets = []
        for target in group.targets:
            landings = []
            for pages in target.groups:
                if not 0 <= target.reader < len(plans[pages.group].readers):
                    raise ConfigError(f"group: no reader {target.reader} in cache group {pages.group}", field="group")
                landings.append(_Landing(*pages, planned(plans[pages.group], group.writer, target.reader)))
            targets.append(_Target(target.segment, tuple(landings)))
        return tuple(targets)

    def _whole(self, group: int) -> Runs:
        """Returns the runs for a reader with the same layout: layers of the shard as they lie there."""
        layout = self._groups[group].layout
        slices = [layout.layer_slice(layer) for layer in range(layout.layers)]

        def runs(_: int, layer0: int, layer1: int) -> Sequence[Run]:
            first, last = slices[layer0], slices[layer1 - 1]
            return ((first[0], first[0], sum(last) - first[0]),)

        return runs

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
            spans.append((push.posted_tokens, done, push.posted_layers, self._layers))
            push.posted_tokens, push.posted_layers = done, 0
        if computed.layers_done > push.posted_layers and push.posted_tokens == done < prompt:
            end = min(computed.chunk_end, prompt)
            spans.append((done, end, push.posted_layers, computed.layers_done))
            push.posted_layers = computed.layers_done
        over = push.posted_tokens >= prompt
        pages = _Pages(push.spec, computed.groups)
        for target in push.targets:
            try:
                runs = [run for span in spans for run in self._runs(pages, target, *span)]
                runs += self._state_runs(pages, target) if over else []
            except ConfigError as error:
                push.write.fail(error.message)
                return
            self._outbox.write(push.write, target.segment, joined(runs, BATCH_BYTES))
        if over:
            # The end mark is delivered after every write before it, and its answer ends this handoff.
            self._outbox.mark(push.write)

    def _runs(self, pages: _Pages, target: _Target, begin: int, end: int, layer0: int, layer1: int) -> Iterator[Run]:
        """Yields (address, remote offset, length) of layers [layer0, layer1) of the blocks that hold tokens [begin,
        end)."""
        tokens = self._block_tokens
        for number, first, offsets, planned_runs in target.landings:
            layers, layout, start, state = self._groups[number]
            own0, own1 = bisect_left(layers, layer0), bisect_left(layers, layer1)
            if state or own0 >= own1 or not offsets:
                continue
            address, shard = self._page_address + start, layout.shard_bytes
            begun = max(begin // tokens, first)
            blocks = range(begun, max(begun, -(-end // tokens)))
            landings = offsets[blocks.start - first : blocks.stop - first]
            for block, page, landing in zip(blocks, pages.of(number, blocks), landings, strict=True):
                if landing < 0:
                    continue
                place = address + page * shard
                for a, b, length in planned_runs(block, own0, own1):
                    yield place + a, landing + b, length

    def _state_runs(self, pages: _Pages, target: _Target) -> Iterator[Run]:
        """Yields the runs of all states, which the prompt's last token has changed."""
        for number, _, offsets, planned_runs in target.landings:
            _, layout, start, state = self._groups[number]
            if state and offsets:
                slot = self._page_address + start + pages.slot(number) * layout.shard_bytes
                for a, b, length in planned_runs(0, 0, layout.layers):
                    yield slot + a, offsets[0] + b, length

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
