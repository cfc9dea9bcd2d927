"""Everything at once, by chance: faults, broken connections, cancels and fences, over memory that is used again and
again. What completed has its bytes; what was fenced keeps its canary."""

from __future__ import annotations

import json
import random
import threading

import pytest

from kvmesh.transfer import EngineConfig, TransferState
from tests.transfer.conftest import Nest
from tests.transfer.test_failures import connections

BLOCK = 64 << 10
BLOCKS = 24


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.slow
def test_soak(nest: Nest, transport: str, seed: int) -> None:
    rng = random.Random(seed)
    script = {
        "seed": seed,
        "rules": [
            {"kind": "delay", "probability": 0.2, "delay_ms": 15},
            {"kind": "duplicate", "probability": 0.1, "op": "write"},
            {"kind": "cut_from", "probability": 0.03},
            {"kind": "drop", "probability": 0.03},
        ],
    }
    # Rails that are silent so long are down, and without any a request fails: a busy machine may take a pause.
    silence_s = 0.3
    config = EngineConfig(
        transports=(transport,), fault=json.dumps(script), ack_timeout_s=silence_s, backoff_s=0.001, max_attempts=50
    )
    writer, target = nest.actor("writer#1", config), nest.actor("target#1", EngineConfig(transports=(transport,)))
    writer.allocate(BLOCKS * BLOCK, seed=seed)
    base = target.allocate(BLOCKS * BLOCK)
    segment = writer.open(target.descriptor())
    memory = target.region.memory  # type: ignore[union-attr]
    assert memory is not None
    canaries = dict.fromkeys(range(BLOCKS), 0)
    outcomes: dict[str, int] = {}
    unfinished = []

    for epoch in range(1, 80):
        blocks = rng.sample(range(BLOCKS), 6)
        for block in blocks:
            assert target.read(block * BLOCK, BLOCK) == bytes([canaries[block]]) * BLOCK, f"late byte in {block}"
        target.window("writer#1", epoch, [(base + block * BLOCK, BLOCK) for block in blocks])
        sources = [rng.randrange((BLOCKS - 1) * BLOCK) for _ in blocks]
        copies = [(near, base + block * BLOCK, BLOCK) for near, block in zip(sources, blocks, strict=True)]
        batch = writer.start("write", segment, copies, epoch)
        act = rng.choice(["wait", "wait", "cancel", "fence", "break"])
        threading.Event().wait(rng.random() * 0.01)
        if act == "break":
            for connection in connections(target):
                connection.interrupt()  # type: ignore[attr-defined]
        if act == "cancel":
            writer.engine.cancel(batch)
        if act == "fence":
            unfinished.append(batch)
        else:
            for status, near, block in zip(writer.finish(batch), sources, blocks, strict=True):
                outcomes[status.state.value] = outcomes.get(status.state.value, 0) + 1
                if status.state is TransferState.COMPLETED:
                    assert target.read(block * BLOCK, BLOCK) == writer.read(near, BLOCK)
        target.engine.fence("writer#1", epoch)
        for block in blocks:
            canaries[block] = epoch % 256
            memory[block * BLOCK : (block + 1) * BLOCK] = bytes([epoch % 256]) * BLOCK

    for batch in unfinished:
        writer.finish(batch)
    writer.close()
    for block, canary in canaries.items():
        assert target.read(block * BLOCK, BLOCK) == bytes([canary]) * BLOCK
    assert outcomes["completed"] > 100
    assert set(outcomes) <= {"completed", "cancelled"}
    assert writer.engine.counters()["frames_resent"] > 0
