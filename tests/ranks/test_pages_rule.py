"""When KV goes straight between a device's pages and the network: the rule, and the order of posts after steps and of
flushes after fences, with a device whose steps are as late as they may be."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from kvmesh.errors import TransferError
from kvmesh.kvcache.layout import ShardLayout
from kvmesh.ranks import protocol as m
from kvmesh.ranks.worker.device import StagedCpuMemory, byte_view
from kvmesh.ranks.worker.pages_rule import LEAST_RUN, choose_pages_use, straight
from kvmesh.ranks.worker.pusher import Pusher
from kvmesh.ranks.worker.stager import Stager
from kvmesh.ranks.worker.worker import Worker
from kvmesh.transfer import EngineConfig, Range, TransferEngine
from tests.support.rank_driver import staged_configure

LAYOUT = ShardLayout(layers=3, kv_heads=4, block_tokens=16, head_dim=8, itemsize=4)  # a layer is LEAST_RUN long
BLOCKS = 4
TOKENS = BLOCKS * LAYOUT.block_tokens
NBYTES = BLOCKS * LAYOUT.shard_bytes
TIMEOUT_S = 60.0
FLOAT32: Any = type("Configure", (), {"dtype": "float32"})


# ── the rule ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("flushable", [False, True])
@pytest.mark.parametrize("missing", ["", "the GPU or its driver exports no dmabuf"])
@pytest.mark.parametrize("transports", [("rdma",), ("rdma", "shm", "tcp"), ("shm", "tcp"), ("tcp", "rdma")])
def test_pages_are_offered_only_where_every_writer_reaches_them_and_steps_see_what_landed(
    transports: tuple[str, ...], missing: str, flushable: bool, ordered: bool
) -> None:
    use = choose_pages_use(transports, missing, ordered=ordered, flushable=flushable)
    registered = "rdma" in transports and not missing
    assert use.push == registered
    assert use.land == (registered and transports == ("rdma",) and (ordered or flushable))
    assert use.flush == (use.land and not ordered)
    if "rdma" in transports and missing:
        assert missing in use.why, "an operator learns what is missing"


def test_short_runs_and_peers_without_rdma_go_through_staging() -> None:
    assert straight(True, [LEAST_RUN, 1 << 20])
    assert not straight(True, [1 << 20, LEAST_RUN - 1])
    assert not straight(False, [1 << 20])
    assert not straight(True, [])


# ── pushes ───────────────────────────────────────────────────────────────────────────────────────


class Bench:
    """A writer whose pages the engine reads, and a landing. tcp stands for rdma: it takes memory of the caller, too."""

    def __init__(self, writer: TransferEngine, reader: TransferEngine) -> None:
        reader.on_notify = lambda _: None
        self.writer, self.reader = writer, reader
        self.memory = StagedCpuMemory(FLOAT32, LAYOUT, BLOCKS, writer, "cpu:0")
        self.pages = byte_view(self.memory.pages)
        self.memory.push_region = writer.register_memory(self.memory.pages)
        landing = reader.allocate(NBYTES)
        assert landing.memory is not None
        self.landing, self.base = landing.memory, landing.base_offset
        self.segment = writer.open_segment(reader.local_descriptor())
        reader.open_window(writer.name, 1, [Range(self.base, NBYTES)])
        self.reached = True
        self.staged = 0  # bytes copied to staging
        copy = self.memory.copy

        def counted(pieces: Any, done: Any, **how: Any) -> None:
            self.staged += sum(length for _, _, length in pieces.runs)
            copy(pieces, done, **how)

        self.memory.copy = counted  # type: ignore[method-assign]
        self.said: list[m.ToFront] = []
        stager = Stager(self.memory, lambda _: self.reached)
        self.pusher = Pusher(writer, LAYOUT, 0, self.said.append, outbox=stager)

    def open(self, ready: int) -> None:
        offsets = tuple(self.base + i * LAYOUT.shard_bytes for i in range(BLOCKS))
        until = time.monotonic_ns() + int(TIMEOUT_S * 1e9)
        self.pusher.open(m.PushOpen(1, 1, self.segment, (0, 1, 2, 3), offsets, 0, ready, TOKENS, until))

    def end(self) -> m.ToFront:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            for said in self.said:
                if not isinstance(said, m.PushProgress):
                    return said
            assert time.monotonic() < deadline
            self.memory.poll()
            self.pusher.pump()
            time.sleep(0.0005)


@pytest.fixture
def bench() -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(
            *(stack.enter_context(TransferEngine(f"{name}@1", EngineConfig(transports=("tcp",)))) for name in "wr")
        )


def test_nothing_is_posted_before_the_step_that_writes_it_is_done(bench: Bench) -> None:
    """The step is launched, and writes its pages later than anybody may rely on: what is sent is what it wrote."""
    wanted = torch.arange(NBYTES) % 251

    bench.memory.begin_step(lambda: bench.pages.copy_(wanted))
    bench.open(TOKENS)
    assert bench.pusher.waiting and not any(bench.pages.tolist()), "the step has not run"
    assert isinstance(bench.end(), m.PushDone)
    assert bytes(bench.landing[:NBYTES]) == bytes(wanted.tolist())
    assert bench.staged == 0, "no byte went through staging"


def test_a_peer_that_rdma_does_not_reach_gets_its_kv_through_staging(bench: Bench) -> None:
    bench.reached = False
    bench.pages.copy_(torch.arange(NBYTES) % 251)
    bench.open(TOKENS)
    assert isinstance(bench.end(), m.PushDone)
    assert bytes(bench.landing[:NBYTES]) == bytes(bench.pages.tolist()) and bench.staged == NBYTES


def test_the_mark_and_the_end_wait_for_posts_that_wait_for_their_step(bench: Bench) -> None:
    bench.memory.begin_step(lambda: bench.pages.fill_(7))
    bench.open(TOKENS)
    bench.pusher.cancel(1)
    assert bench.said == [], "the step's pages are still in use"
    assert isinstance(bench.end(), m.PushDrained)
    assert not any(bench.landing[:NBYTES]), "what is cancelled is not posted"


# ── landings ─────────────────────────────────────────────────────────────────────────────────────


def test_what_landed_is_flushed_after_the_fence_and_before_it_is_told(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush that fails is no fence: it is tried again, and Fenced is sent once. The front hears how pages are
    used."""
    monkeypatch.setattr(StagedCpuMemory, "pages_use", "KV goes through host memory")
    told: list[str] = []
    worker = Worker(staged_configure(checkpoint), lambda message: told.append(type(message).__name__))
    try:
        extents = worker.memory.extents
        worker.handle(m.OpenWindow("p#1", 1, (worker.ready().extent_base_offset,)))
        assert len(extents) == 8 and told[-1] == "WindowOpened"
        assert worker.ready().settings.endswith("; KV goes through host memory")
        failures = [TransferError("cuFlushGPUDirectRDMAWrites fails with CUDA error 999")]

        def landed() -> None:
            told.append(f"flush, window {'open' if worker.engine.windows.ranges('p#1', 1) else 'closed'}")
            if failures:
                raise failures.pop()

        worker.memory.landed = landed  # type: ignore[method-assign]
        worker._fence("p#1", 1)
        assert told[-3:] == ["flush, window closed", "flush, window closed", "Fenced"]
    finally:
        worker.close()
