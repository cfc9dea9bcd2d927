"""One engine that writes to many, and one that is told more than it can send at once."""

from __future__ import annotations

import base64
import os
import threading
import time
from typing import Any

from benchmarks.peers.link import LIMIT_S, End, serve
from kvmesh.transfer import EngineConfig, Opcode, Range, TransferEngine, TransferRequest, TransferState
from kvmesh.transfer.api import BatchId

EPOCH = 1
PIECE = 4 << 10
STRIDE = 8 << 10  # so that no two pieces join
PIECES = 1024  # places in each target; more slices than that go round again
PAGE = os.sysconf("SC_PAGE_SIZE")


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


class Targets(End):
    """Engines of one process: only the writer's side is measured."""

    def __init__(self, peers: int, transport: str) -> None:
        self.engines = []
        self.told: list[tuple[str, int]] = []
        for i in range(peers):
            engine = TransferEngine(f"target-{i}", EngineConfig(transports=(transport,)))
            region = engine.allocate(PIECES * STRIDE, "cpu:0")
            engine.open_window("source", EPOCH, [Range(region.base_offset, region.length)])
            self.engines.append(engine)
            self.told.append((base64.b64encode(engine.local_descriptor().encode()).decode(), region.base_offset))

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


class Source(End):
    def __init__(self, told: list[tuple[str, int]], transport: str) -> None:
        self.engine = TransferEngine("source", EngineConfig(transports=(transport,), request_timeout_s=LIMIT_S))
        self.region = self.engine.allocate(PIECES * STRIDE, "cpu:0")
        self.peers = [(self.engine.open_segment(base64.b64decode(text)), base) for text, base in told]

    def deal(self, slices: int) -> dict[str, float]:
        """So many slices in one batch, one to each peer in turn."""
        requests = []
        for i in range(slices):
            segment, base = self.peers[i % len(self.peers)]
            at = i // len(self.peers) % PIECES * STRIDE
            requests.append(TransferRequest(Opcode.WRITE, self.region.address + at, segment, base + at, PIECE, EPOCH))
        return self._timed(requests)

    def _timed(self, requests: list[TransferRequest]) -> dict[str, float]:
        engine = self.engine
        before, cpu, start = resident(), time.process_time(), time.perf_counter()
        batch = engine.allocate_batch(len(requests))
        engine.submit(batch, requests)
        queued, grown = time.perf_counter() - start, resident() - before
        self._finish(batch)
        wall = time.perf_counter() - start
        told: dict[str, float] = {
            "submit_s": queued,
            "wall_s": wall,
            "cpu_s": time.process_time() - cpu,
            "queued_bytes": grown,
            "resident_bytes": resident(),
            "threads": threading.active_count(),
        }
        return told

    def _finish(self, batch: BatchId) -> None:
        engine = self.engine
        if not engine.wait_sync(batch, LIMIT_S):
            raise TimeoutError("the batch is not final")
        states = [status.state for status in engine.statuses(batch)]
        if any(state is not TransferState.COMPLETED for state in states):
            raise RuntimeError(f"{sum(s is not TransferState.COMPLETED for s in states)} requests failed")
        engine.free_batch(batch)

    def counters(self) -> dict[str, Any]:
        return dict(self.engine.counters())

    def close(self) -> None:
        self.engine.close()


if __name__ == "__main__":
    serve({"targets": Targets, "source": Source})
