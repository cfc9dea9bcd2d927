"""The pusher over two real transfer engines, one of which answers before the pusher can look away."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kvmesh.kvcache.layout import ShardLayout
from kvmesh.ranks import protocol as m
from kvmesh.ranks.worker import pusher
from kvmesh.ranks.worker.device import CpuMemory, StagedCpuMemory, StagedMemory, byte_view
from kvmesh.ranks.worker.pusher import Pusher
from kvmesh.ranks.worker.stager import Stager
from kvmesh.transfer import BatchId, EngineConfig, Notification, Range, TransferEngine, TransferRequest
from kvmesh.transfer.groups import END_MARK

LAYOUT = ShardLayout(layers=2, kv_heads=1, block_tokens=16, head_dim=8, itemsize=4)
BLOCKS = 4
TIMEOUT_S = 60.0
PATIENCE = EngineConfig(transports=("shm",))
FLOAT32: Any = type("Configure", (), {"dtype": "float32"})


class Prompt(TransferEngine):
    """Every write has been acknowledged when `submit` returns: the fastest target there can be."""

    def submit(self, batch: BatchId, requests: Sequence[TransferRequest], timeout_s: float | None = None) -> None:
        super().submit(batch, requests, timeout_s)
        assert self.wait_sync(batch, TIMEOUT_S)


class Pair:
    """A pusher with its pages, and the landing of BLOCKS blocks."""

    def __init__(self, writer: TransferEngine, reader: TransferEngine) -> None:
        nbytes = BLOCKS * LAYOUT.shard_bytes
        self.reader = reader
        source, target = writer.allocate(nbytes, "cpu:0"), reader.allocate(nbytes, "cpu:0")
        assert source.memory is not None and target.memory is not None
        source.memory[:nbytes] = bytes(i % 251 for i in range(nbytes))
        self.source, self.target = source.memory[:nbytes], target.memory[:nbytes]
        self.said: list[m.ToFront] = []
        self.base = target.base_offset
        self.segment = writer.open_segment(reader.local_descriptor())
        reader.open_window(writer.name, 1, [Range(self.base, nbytes)])
        self.pusher = Pusher(writer, LAYOUT, source.address, self.said.append)

    def open(self, ready: int = BLOCKS * LAYOUT.block_tokens, *, at_end: bool = False) -> None:
        """`ready` tokens are computed already."""
        offsets = tuple(self.base + i * LAYOUT.shard_bytes for i in range(BLOCKS))
        tokens = BLOCKS * LAYOUT.block_tokens
        lease = time.monotonic_ns() + int(TIMEOUT_S * 1e9)
        spec = m.PushOpen(7, 1, self.segment, tuple(range(BLOCKS)), offsets, 0, ready, tokens, lease)
        self.pusher.open(msgspec.structs.replace(spec, at_end=at_end))

    def ended(self) -> m.ToFront:
        """What the push was said to end with."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.pusher.active:
            assert time.monotonic() < deadline, "the push never ended"
            time.sleep(0.001)
        return self.said[-1]


@contextmanager
def pair(kind: type[TransferEngine]) -> Iterator[Pair]:
    with ExitStack() as stack:
        writer = stack.enter_context(kind("writer@1", PATIENCE))
        reader = stack.enter_context(TransferEngine("reader@1", PATIENCE))
        yield Pair(writer, reader)


def test_done_is_said_behind_the_end_mark_however_fast_the_target_is() -> None:
    """Nobody listens for marks at the target: a push that is done before its mark was answered does not notice."""
    with pair(Prompt) as two:
        two.open()
        assert bytes(two.target) == bytes(two.source)
        ended = two.ended()
        assert isinstance(ended, m.PushFailed), two.said
        assert "end mark" in ended.cause
        assert not any(isinstance(said, m.PushDone) for said in two.said), "a push ends once"


def test_a_long_push_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is what the lease is renewed for: many blocks that go at once must not be silent until the last."""
    monkeypatch.setattr(pusher, "PROGRESS_NS", 0)
    monkeypatch.setattr(pusher, "BATCH_BYTES", LAYOUT.shard_bytes)
    marks: list[Notification] = []
    with pair(TransferEngine) as two:
        two.reader.on_notify = marks.append
        two.open()
        ended = two.ended()
        assert isinstance(ended, m.PushDone) and ended.bytes_done == BLOCKS * LAYOUT.shard_bytes
        assert bytes(two.target) == bytes(two.source)
        told = [said.bytes_done for said in two.said if isinstance(said, m.PushProgress)]
        assert told == [LAYOUT.shard_bytes * (i + 1) for i in range(BLOCKS)]
        assert [mark.payload for mark in marks] == [END_MARK]


class Counted(TransferEngine):
    """What was handed over for writing so far."""

    nbytes = 0

    def submit(self, batch: BatchId, requests: Sequence[TransferRequest], timeout_s: float | None = None) -> None:
        self.nbytes += sum(request.length for request in requests)
        super().submit(batch, requests, timeout_s)


@pytest.mark.parametrize("at_end", [False, True])
def test_layers_go_as_they_are_written_or_all_at_the_end(at_end: bool) -> None:
    """Two chunks of two blocks, two layers each."""
    half = BLOCKS * LAYOUT.block_tokens // 2
    chunks = [
        (m.PrefillItem(handle=7, token_ids=(0,) * half, start=start, pages=(), sample=None),) for start in (0, half)
    ]
    with pair(Counted) as two:
        writer = two.pusher._engine
        assert isinstance(writer, Counted)
        two.reader.on_notify = lambda mark: None
        two.open(ready=0, at_end=at_end)
        sent = []
        for items in chunks:
            two.pusher.step_begins(items)
            for layer in range(LAYOUT.layers):
                two.pusher.layer_written(items, layer)
                sent.append(writer.nbytes)
        assert isinstance(two.ended(), m.PushDone)
        assert bytes(two.target) == bytes(two.source)
    whole = BLOCKS * LAYOUT.shard_bytes
    assert sent == ([0, 0, 0, whole] if at_end else [whole // 4, whole // 2, 3 * whole // 4, whole])


class Chained(TransferEngine):
    """Cancelling one batch ends them all, callbacks included, before it returns: so it is when the room that the first
    leaves lets the others be tried, and their peer is dead."""

    def cancel(self, batch: BatchId) -> None:
        super().cancel(batch)
        for other in list(self.callbacks):
            super().cancel(other)
            assert self.wait_sync(other, TIMEOUT_S)
            self.callbacks.pop(other)()

    def on_done(self, batch: BatchId, callback: Callable[[], None]) -> None:
        self.callbacks[batch] = callback

    @cached_property
    def callbacks(self) -> dict[BatchId, Callable[[], None]]:
        return {}


def test_batches_that_end_while_another_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop that cancels must not trip over them: the step that runs it would fail for everybody in it, and the push
    would never say its end."""
    monkeypatch.setattr(pusher, "BATCH_BYTES", LAYOUT.shard_bytes)
    frozen = EngineConfig(transports=("shm",), fault='{"rules": [{"kind": "freeze"}]}', ack_timeout_s=0.2)
    with ExitStack() as stack:
        writer = stack.enter_context(Chained("writer@1", frozen))
        reader = stack.enter_context(TransferEngine("reader@1", PATIENCE))
        two = Pair(writer, reader)
        two.open()
        assert isinstance(writer, Chained)
        assert len(writer.callbacks) > 1, "several batches are on their way"
        two.pusher.step_failed((7,))
        assert isinstance(two.ended(), m.PushFailed)


def halves(tp: int) -> tuple[ShardLayout, ...]:
    """A model of 3 layers and 2 heads over one or two tensor-parallel ranks."""
    return tuple(ShardLayout(3, 2 // tp, 16, 8, 4, first_head=i * 2 // tp) for i in range(tp))


def block_of(layout: ShardLayout, block: int) -> bytes:
    """What a rank with this layout holds of the model's `block`-th block."""
    model = np.arange(3 * 2 * 2 * 16 * 8, dtype=np.float32).reshape(3, 2, 2, 16, 8) + 10_000 * block
    return model[:, :, layout.first_head : layout.first_head + layout.kv_heads].tobytes()


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(("writers", "readers"), [(halves(2), halves(1)), (halves(1), halves(2))])
def test_ranks_that_cut_the_model_differently(
    writers: tuple[ShardLayout, ...], readers: tuple[ShardLayout, ...], staged: bool
) -> None:
    """Layer by layer from every writer rank, into the shards of every reader rank, the first block being there already;
    a mark of each writer at each reader, and nothing done before the last of them. `staged`: out of pages that the
    transfer engine cannot read, by copies that are late."""
    epoch, tokens = 5, BLOCKS * 16 - 3
    with ExitStack() as stack:
        marks: list[Notification] = []
        targets = []
        for r, layout in enumerate(readers):
            reader = stack.enter_context(TransferEngine(f"reader-{r}@1", PATIENCE, marks.append))
            landing = reader.allocate(BLOCKS * layout.shard_bytes, "cpu:0")
            for w in range(len(writers)):
                reader.open_window(f"writer-{w}@1", epoch, [Range(landing.base_offset, landing.length)])
            order = (2, 0, 3, 1)  # of the blocks at the reader
            offsets = tuple(landing.base_offset + at * layout.shard_bytes for at in order)
            targets.append((reader, landing, m.PushTarget(r, reader.name, offsets), order))
        said: list[list[m.ToFront]] = []
        pushers, memories = [], []
        for w, layout in enumerate(writers):
            writer = stack.enter_context(TransferEngine(f"writer-{w}@1", PATIENCE))
            kind = StagedCpuMemory if staged else CpuMemory
            memory = kind(FLOAT32, layout, BLOCKS, writer, "cpu:0")
            memories.append(memory)
            for block in range(BLOCKS):  # the last block in the first page
                byte_view(memory.pages[BLOCKS - 1 - block]).copy_(
                    torch.frombuffer(bytearray(block_of(layout, block)), dtype=torch.uint8)
                )
            for reader, _, _, _ in targets:
                writer.open_segment(reader.local_descriptor())
            said.append([])
            outbox, region = Stager(memory) if isinstance(memory, StagedMemory) else None, memory.page_region
            push = Pusher(writer, layout, region.address if region else 0, said[-1].append, outbox=outbox)
            lease = time.monotonic_ns() + int(TIMEOUT_S * 1e9)
            group = m.PushGroup(w, writers, readers, tuple(target for _, _, target, _ in targets))
            push.open(m.PushOpen(7, epoch, "", (3, 2, 1, 0), (), 1, 0, tokens, lease, group))
            pushers.append(push)
        for start, end in ((0, 33), (33, tokens)):  # two chunks, cut within a block
            item = m.PrefillItem(7, tuple(range(end - start)), start, (3, 2, 1, 0), None)
            for push in pushers:
                push.step_begins((item,))
            for layer in range(3):
                assert not any(isinstance(s, m.PushDone) for heard in said for s in heard)
                for push in pushers:
                    push.layer_written((item,), layer)
        deadline = time.monotonic() + TIMEOUT_S
        while any(push.active for push in pushers):
            assert time.monotonic() < deadline, said
            for push, memory in zip(pushers, memories, strict=True):
                memory.poll()
                push.pump()
            time.sleep(0.001)
        assert all(isinstance(heard[-1], m.PushDone) for heard in said), said
        assert sorted(mark.peer for mark in marks) == sorted(
            f"writer-{w}@1" for w in range(len(writers)) for _ in readers
        )
        for layout, (_, landing, _, order) in zip(readers, targets, strict=True):
            assert landing.memory is not None
            for block in range(BLOCKS):
                at = order[block] * layout.shard_bytes
                got = bytes(landing.memory[at : at + layout.shard_bytes])
                assert got == (block_of(layout, block) if block else bytes(layout.shard_bytes)), block


def test_a_group_that_is_not_ours_is_refused() -> None:
    """The front's mistake must not write wrong runs, nor bring the rank down."""
    with pair(TransferEngine) as two:
        lease = time.monotonic_ns() + int(TIMEOUT_S * 1e9)
        for group in (
            m.PushGroup(0, halves(1), halves(1), ()),
            m.PushGroup(3, (LAYOUT,), (LAYOUT,), ()),
            m.PushGroup(0, (LAYOUT,), (LAYOUT,), (m.PushTarget(1, two.segment, (0,)),)),
            m.PushGroup(0, (LAYOUT,), halves(1), ()),
        ):
            two.pusher.open(m.PushOpen(7, 1, "", (0,), (), 0, 16, 16, lease, group))
            failed = two.ended()
            assert isinstance(failed, m.PushFailed) and failed.drained and failed.cause, group
