"""Pushes out of pages that the transfer engine cannot read, over two real transfer engines: few slots, late copies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from kvmesh.kvcache.layout import ShardLayout
from kvmesh.ranks import protocol as m
from kvmesh.ranks.worker.device import StagedCpuMemory, byte_view
from kvmesh.ranks.worker.pusher import Pusher
from kvmesh.ranks.worker.stager import Stager
from kvmesh.transfer import EngineConfig, Notification, Range, TransferEngine

LAYOUT = ShardLayout(layers=3, kv_heads=1, block_tokens=16, head_dim=8, itemsize=4)
BLOCKS = 4
TOKENS = BLOCKS * LAYOUT.block_tokens
TIMEOUT_S = 20.0


class Bench:
    """A writer with staged pages, and a landing for two handoffs."""

    def __init__(self, writer: TransferEngine, reader: TransferEngine) -> None:
        self.nbytes = BLOCKS * LAYOUT.shard_bytes
        self.reader = reader
        self.marks: list[Notification] = []
        reader.on_notify = self.marks.append
        configure: Any = type("Configure", (), {"dtype": "float32"})
        self.memory = StagedCpuMemory(configure, LAYOUT, BLOCKS, writer, "cpu:0")
        self.pages = byte_view(self.memory.pages)
        self.pages.copy_(torch.arange(self.nbytes) % 251)
        landing = reader.allocate(2 * self.nbytes, "cpu:0")
        assert landing.memory is not None
        self.landing, self.base = landing.memory, landing.base_offset
        self.segment = writer.open_segment(reader.local_descriptor())
        for epoch in (1, 2):
            reader.open_window(writer.name, epoch, [Range(self.base + (epoch - 1) * self.nbytes, self.nbytes)])
        self.said: list[m.ToFront] = []  # but for progress
        self.stager = Stager(self.memory)
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
