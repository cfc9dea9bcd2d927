"""Pushes out of pages that the transfer engine cannot read, over real transfer engines: few slots, late copies."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.kvcache.layout import ShardLayout
from kvmesh.ranks import protocol as m
from kvmesh.ranks.worker.device import LATE_LOOKS, CopyPieces, OnDone, StagedCpuMemory, byte_view
from kvmesh.ranks.worker.pusher import Pusher
from kvmesh.ranks.worker.stager import StagedPiece, Stager, pack
from kvmesh.transfer import BatchId, EngineConfig, Notification, Range, TransferEngine, TransferRequest
from kvmesh.transfer.groups import Copy, GroupWrite

LAYOUT = ShardLayout(layers=3, kv_heads=1, block_tokens=16, head_dim=8, itemsize=4)
BLOCKS = 4
TOKENS = BLOCKS * LAYOUT.block_tokens
TIMEOUT_S = 60.0
FLOAT32: Any = type("Configure", (), {"dtype": "float32"})


class Bench:
    """A writer with staged pages, and a landing for two handoffs."""

    def __init__(self, writer: TransferEngine, reader: TransferEngine, stager: Stager | None = None) -> None:
        self.nbytes = BLOCKS * LAYOUT.shard_bytes
        self.reader = reader
        self.marks: list[Notification] = []
        reader.on_notify = self.marks.append
        self.memory = StagedCpuMemory(FLOAT32, LAYOUT, BLOCKS, writer, "cpu:0")
        self.pages = byte_view(self.memory.pages)
        self.pages.copy_(torch.arange(self.nbytes) % 251)
        landing = reader.allocate(2 * self.nbytes, "cpu:0")
        assert landing.memory is not None
        self.landing, self.base = landing.memory, landing.base_offset
        self.segment = writer.open_segment(reader.local_descriptor())
        for epoch in (1, 2):
            reader.open_window(writer.name, epoch, [Range(self.base + (epoch - 1) * self.nbytes, self.nbytes)])
        self.said: list[m.ToFront] = []  # but for progress
        self.stager = stager or Stager(self.memory)
        self.memory = self.stager._memory
        self.pusher = Pusher(writer, LAYOUT, 0, self._send, outbox=self.stager)

    def _send(self, message: m.ToFront) -> None:
        if not isinstance(message, m.PushProgress):
            self.said.append(message)

    def open(self, epoch: int, ready: int = TOKENS, lease_s: float = TIMEOUT_S) -> None:
        first = self.base + (epoch - 1) * self.nbytes
        offsets = tuple(first + i * LAYOUT.shard_bytes for i in range(BLOCKS))
        lease = time.monotonic_ns() + int(lease_s * 1e9)
        self.pusher.open(m.PushOpen(epoch, epoch, self.segment, (0, 1, 2, 3), offsets, 0, ready, TOKENS, lease))

    def look(self) -> None:
        """What a rank does between steps and layers."""
        self.pusher.check_leases()
        self.memory.poll()
        self.pusher.pump()

    def until(self, count: int) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while len(self.said) < count:
            assert time.monotonic() < deadline, self.said
            self.look()
            time.sleep(0.0005)

    def landed(self, epoch: int) -> bytes:
        return bytes(self.landing[(epoch - 1) * self.nbytes : epoch * self.nbytes])


@pytest.fixture
def bench() -> Iterator[Bench]:
    with ExitStack() as stack:
        engines = [stack.enter_context(TransferEngine(f"{name}@1", EngineConfig(transports=("shm",)))) for name in "wr"]
        yield Bench(*engines)


def test_two_handoffs_through_fewer_slots_than_either_needs(bench: Bench) -> None:
    assert bench.memory.slots < BLOCKS * LAYOUT.layers
    bench.open(1)
    bench.open(2)
    assert bench.pusher.waiting and not bench.marks, "copies are late: nothing can have been posted"
    bench.until(2)
    assert all(isinstance(said, m.PushDone) and said.bytes_done == bench.nbytes for said in bench.said), bench.said
    assert bench.landed(1) == bench.landed(2) == bytes(bench.pages.tolist())
    assert sorted(mark.handoff_epoch for mark in bench.marks) == [1, 2]
    assert not bench.pusher.waiting and len(bench.stager._free) == bench.memory.slots


def test_layers_go_while_later_ones_are_computed(bench: Bench) -> None:
    item = m.PrefillItem(1, (0,) * TOKENS, 0, (0, 1, 2, 3), None)
    bench.open(1, ready=0)
    bench.pusher.step_begins((item,))
    blocks = bench.memory.pages.clone()
    bench.memory.pages.zero_()
    for layer in range(LAYOUT.layers):
        assert not bench.marks
        bench.memory.pages[:, layer] = blocks[:, layer]
        bench.pusher.layer_written((item,), layer)
        deadline = time.monotonic() + TIMEOUT_S
        while bench.reader.landed_bytes("w@1", 1) < (layer + 1) * BLOCKS * LAYOUT.layer_bytes:
            assert time.monotonic() < deadline
            bench.look()
    bench.until(1)
    assert isinstance(bench.said[-1], m.PushDone) and bench.landed(1) == bytes(byte_view(blocks).tolist())


@pytest.mark.parametrize("end", ["cancel", "lease"])
def test_pages_are_let_go_only_when_no_copy_reads_them(bench: Bench, end: str) -> None:
    """Cancelled, or out of time, while a copy is under way: nothing is posted, and the front hears of it afterwards."""
    bench.open(1, lease_s=TIMEOUT_S if end == "cancel" else 0.05)
    if end == "cancel":
        bench.pusher.cancel(1)
    else:
        while time.monotonic_ns() < bench.pusher._pushes[1].lease_until_ns:
            time.sleep(0.01)
        bench.pusher.check_leases()
    assert bench.memory.copying and bench.said == [], "a copy still reads the pages"
    bench.until(1)
    kind = m.PushDrained if end == "cancel" else m.PushFailed
    assert isinstance(bench.said[0], kind) and not any(bench.landed(1))
    assert len(bench.stager._free) == bench.memory.slots and not bench.pusher.waiting
    bench.open(2)
    bench.until(2)
    assert isinstance(bench.said[-1], m.PushDone) and bench.landed(2) == bytes(bench.pages.tolist())


# ── runs of ranks that cut the model differently ─────────────────────────────────────────────────


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 64)), max_size=30),
    st.integers(0, 6),
)
def test_pieces_lie_side_by_side_in_no_more_slots_than_needed(given: list[tuple[str, int]], slots: int) -> None:
    pieces = [StagedPiece(segment, 100 * at, 200 * at, length) for at, (segment, length) in enumerate(given)]
    left = deque(pieces)
    packed = pack(left, slots, 64)
    assert [piece for slot in packed for piece in slot] + list(left) == pieces
    assert len(packed) <= slots and (not left or len(packed) == slots)
    for slot in packed:
        assert sum(piece.length for piece in slot) <= 64 and len({piece.segment for piece in slot}) == 1
    begins = [slot[0] for slot in packed[1:]] + list(left)[:1]
    for slot, after in zip(packed, begins, strict=False):
        assert after.segment != slot[0].segment or sum(piece.length for piece in slot) + after.length > 64


class Counted(StagedCpuMemory):
    """Keeps what it was asked to copy."""

    def copy(self, pieces: CopyPieces, done: OnDone, *, into_pages: bool, check: bool = False) -> None:
        self.asked.append(pieces)
        super().copy(pieces, done, into_pages=into_pages, check=check)

    asked: list[CopyPieces]


class Posting(TransferEngine):
    """Keeps what it was asked to transfer."""

    def submit(self, batch: BatchId, requests: Sequence[TransferRequest], timeout_s: float | None = None) -> None:
        self.posted += requests
        super().submit(batch, requests, timeout_s)

    posted: list[TransferRequest]


def cut(ranks: int) -> tuple[ShardLayout, ...]:
    """A model of 3 layers and 4 heads over these ranks."""
    return tuple(ShardLayout(3, 4 // ranks, 16, 8, 4, first_head=4 * i // ranks) for i in range(ranks))


@pytest.mark.parametrize(
    ("writers", "readers", "slots", "launches", "copied", "posts"),
    [
        # Each reader's 24 runs of 1 KiB lie four a slot, and its shard of 6 KiB in one piece in its landing: a post for
        # what a launch has of a block. They were 48 slots and 48 posts.
        (cut(1), cut(2), 12, 6, 48, 12),
        # A layer's K and V are neighbours in the pages, and apart in the landing.
        (cut(2), cut(1), 12, 6, 8, 24),
        (cut(1), cut(1), 12, 6, 8, 8),
    ],
)
def test_runs_of_one_piece_share_slots_copies_and_posts(
    writers: tuple[ShardLayout, ...],
    readers: tuple[ShardLayout, ...],
    slots: int,
    launches: int,
    copied: int,
    posts: int,
) -> None:
    """All that one writer rank has of four blocks, which lie apart in its pages and in the landings."""
    with ExitStack() as stack:
        writer = stack.enter_context(Posting("w@1", EngineConfig(transports=("shm",))))
        memory = Counted(FLOAT32, writers[0], BLOCKS, writer, "cpu:0")
        memory.asked, writer.posted = [], []
        memory.pages.view(-1).copy_(torch.arange(memory.pages.numel()))
        targets, landings = [], []
        for at, layout in enumerate(readers):
            reader = stack.enter_context(TransferEngine(f"r{at}@1", EngineConfig(transports=("shm",)), lambda _: None))
            landing = reader.allocate(2 * BLOCKS * layout.shard_bytes, "cpu:0")
            assert landing.memory is not None
            reader.open_window("w@1", 1, [Range(landing.base_offset, landing.length)])
            offsets = tuple(landing.base_offset + 2 * i * layout.shard_bytes for i in (2, 0, 3, 1))
            targets.append(m.PushTarget(at, writer.open_segment(reader.local_descriptor()), offsets))
            landings.append(landing.memory)
        said: list[m.ToFront] = []
        stager = Stager(memory)
        pusher = Pusher(writer, writers[0], 0, said.append, outbox=stager)
        group = m.PushGroup(0, writers, readers, tuple(targets))
        lease = time.monotonic_ns() + int(TIMEOUT_S * 1e9)
        pusher.open(m.PushOpen(1, 1, "", (3, 1, 2, 0), (), 0, TOKENS, TOKENS, lease, group))
        deadline = time.monotonic() + TIMEOUT_S
        while pusher.active:
            assert time.monotonic() < deadline, said
            memory.poll()
            pusher.pump()
        assert isinstance(said[-1], m.PushDone), said
        assert sorted(stager._free) == list(range(memory.slots))
        size = memory.slot_bytes
        touched = [
            {at // size for _, end, length in asked.runs for at in (*range(end, end + length, size), end + length - 1)}
            for asked in memory.asked
        ]
        assert (sum(len(some) for some in touched), len(memory.asked)) == (slots, launches)
        assert (sum(len(asked.runs) for asked in memory.asked), len(writer.posted)) == (copied, posts)
        for layout, landing in zip(readers, landings, strict=True):
            here = torch.frombuffer(landing, dtype=torch.float32).view(2 * BLOCKS, *layout.shape)
            first, end = layout.first_head, min(layout.kv_heads, writers[0].kv_heads)
            for page, place in zip((3, 1, 2, 0), (2, 0, 3, 1), strict=True):
                sent = memory.pages[page][:, :, first : first + end]
                assert torch.equal(here[2 * place][:, :, :end], sent)


class Wires:
    """A writer whose frames can be held, and two readers whose landings have a half for each of two writes."""

    half = 64 << 10

    def __init__(self, stack: ExitStack) -> None:
        self.writer = stack.enter_context(TransferEngine("w@1", EngineConfig(transports=("shm",), fault="{}")))
        self.memory = StagedCpuMemory(FLOAT32, LAYOUT, BLOCKS, self.writer, "cpu:0")
        self.pages = byte_view(self.memory.pages)
        self.pages.copy_(torch.arange(len(self.pages)) % 251)
        self.readers, self.landings, self.segments = [], [], []
        for name in "ab":
            reader = stack.enter_context(TransferEngine(f"{name}@1", EngineConfig(transports=("shm",)), lambda _: None))
            self.readers.append(reader)
            self.landings.append(reader.allocate(2 * self.half, "cpu:0"))
            self.segments.append(self.writer.open_segment(reader.local_descriptor()))
        self.epoch = 0

    def windows(self) -> int:
        """Opens a window for each of two new epochs at each reader; returns the first of the two."""
        first, self.epoch = self.epoch + 1, self.epoch + 2
        for reader, landing in zip(self.readers, self.landings, strict=True):
            assert landing.memory is not None
            landing.memory[: 2 * self.half] = bytes(2 * self.half)
            for which in (0, 1):
                reader.open_window("w@1", first + which, [Range(landing.base_offset + which * self.half, self.half)])
        return first


@pytest.fixture(scope="module")
def wires() -> Iterator[Wires]:
    with ExitStack() as stack:
        yield Wires(stack)


EVENTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("write"),
            st.integers(0, 1),
            st.integers(0, 1),
            st.lists(st.tuples(st.integers(0, 900), st.integers(0, 40), st.integers(1, 4000)), min_size=1, max_size=9),
        ),
        st.tuples(st.sampled_from(["cancel", "mark"]), st.integers(0, 1)),
        st.sampled_from([("look",), ("look",), ("freeze",), ("thaw",)]),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(EVENTS)
def test_every_slot_comes_back_and_every_byte_that_was_marked_arrives(wires: Wires, events: list[Any]) -> None:
    """Two writes share the slots while the readers' wires freeze and thaw and writes are cancelled. A slot that is used
    again before its post has left would send other bytes."""
    first, stager, memory = wires.windows(), Stager(wires.memory), wires.memory
    ended: list[int] = []
    writes = [
        GroupWrite(wires.writer, first + i, wires.segments, lambda i=i: ended.append(i), lock=stager.lock)  # type: ignore[misc]
        for i in (0, 1)
    ]
    sent: dict[tuple[int, int], list[tuple[int, int, int]]] = {(i, to): [] for i in (0, 1) for to in (0, 1)}
    filled, marked = dict.fromkeys(sent, 0), set[int]()

    def write(i: int, to: int, runs: list[tuple[int, int, int]]) -> None:
        copies: list[Copy] = []
        for place, gap, length in runs:
            at = filled[i, to] + gap
            if i in marked or at + length > wires.half:
                continue
            copies.append((place, wires.landings[to].base_offset + i * wires.half + at, length))
            sent[i, to].append((place, at, length))
            filled[i, to] = at + length
        if not writes[i].over:
            stager.write(writes[i], wires.segments[to], copies)

    def cancel(i: int) -> None:
        with stager.lock:
            writes[i].cancel()

    def mark(i: int) -> None:
        marked.add(i)
        stager.mark(writes[i])

    def look() -> None:
        """Until the copies that are under way are done."""
        for _ in range(LATE_LOOKS):
            memory.poll()
        stager.pump()
        with stager.lock:
            assert len(set(stager._free)) == len(stager._free)

    fault = wires.writer.fault
    does = {"write": write, "cancel": cancel, "mark": mark, "look": look, "freeze": fault.freeze, "thaw": fault.thaw}
    for name, *arguments in events:
        does[name](*arguments)
    fault.thaw()
    for i in {0, 1} - marked:
        mark(i)
    deadline = time.monotonic() + TIMEOUT_S
    while len(ended) < 2 or stager.busy:
        assert time.monotonic() < deadline, [vars(write) for write in writes]
        look()
        time.sleep(0.0002)
    assert sorted(stager._free) == list(range(memory.slots))
    for (i, to), runs in sent.items():
        landing = wires.landings[to].memory
        assert landing is not None and writes[i].certain and not writes[i].cause
        for place, at, length in runs if not writes[i].cancelled else ():
            begin = i * wires.half + at
            assert bytes(landing[begin : begin + length]) == bytes(wires.pages[place : place + length].tolist())


def test_a_reader_that_does_not_answer_keeps_no_slot() -> None:
    """Its requests run out of time; a reader that answers gets all of its bytes meanwhile and afterwards."""
    config = EngineConfig(transports=("shm",), fault="{}", request_timeout_s=3.0)
    with ExitStack() as stack:
        writer = stack.enter_context(TransferEngine("w@1", config))
        silent, other = (
            stack.enter_context(TransferEngine(f"{name}@1", EngineConfig(transports=("shm",)))) for name in "so"
        )
        bench = Bench(writer, other)
        dumb = Bench(writer, silent, bench.stager)
        writer.fault.freeze(peer="s@*")
        dumb.open(1)
        bench.open(1)
        bench.until(1)
        assert isinstance(bench.said[0], m.PushDone) and bench.landed(1) == bytes(bench.pages.tolist())
        assert dumb.said == [], "the other had to wait until the silent reader was given up"
        dumb.until(1)
        failed = dumb.said[0]
        assert isinstance(failed, m.PushFailed) and not failed.drained, failed
        assert sorted(bench.stager._free) == list(range(bench.memory.slots))
        bench.open(2)
        bench.until(2)
        assert isinstance(bench.said[1], m.PushDone) and bench.landed(2) == bytes(bench.pages.tolist())
        writer.fault.thaw()
