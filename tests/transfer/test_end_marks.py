"""End marks say that every byte is there, so they must not be sent when that is not sure, whatever has happened."""

from __future__ import annotations

from kvmesh.transfer import EngineConfig, TransferState
from tests.transfer.conftest import Nest


def test_a_segment_that_was_closed_and_opened_again_remembers_what_failed(nest: Nest, transport: str) -> None:
    config = EngineConfig(transports=(transport,))
    target, writer = nest.actor("target#1", config), nest.actor("writer#1", config)
    base = target.allocate(4096)
    writer.allocate(4096, seed=1)
    target.window("writer#1", 1, [(base, 2048)])
    segment = writer.open(target.descriptor())
    (status,) = writer.transfer("write", segment, [(0, base + 2048, 100)], 1)
    assert status.state is TransferState.FAILED
    writer.engine.close_segment(segment)
    assert writer.open(target.descriptor()) == segment
    assert writer.notify(segment, 1, b"end").state is TransferState.FAILED
    assert target.notified == []
