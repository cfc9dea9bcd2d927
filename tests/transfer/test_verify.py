"""Verification and statistics over real transports."""

from __future__ import annotations

import pytest

from kvmesh.testing.fault.rules import Rule
from kvmesh.transfer import EngineConfig, Opcode, TransferRequest, TransferState
from tests.transfer.conftest import Nest

MIB = 1 << 20


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("opcode", Opcode)
def test_a_flipped_bit_is_found_and_mended(nest: Nest, transport: str, opcode: Opcode, verify: bool) -> None:
    """Without verification it stays, which shows that there was one."""
    pairs = ("rxa0=rxa0",) if transport == "rdma" else ()  # one rail, as the others have
    config = EngineConfig(transports=(transport,), fault="{}", rdma_pairs=pairs)
    here, there = nest.actor("here#1", config), nest.actor("there#1", config)
    here.allocate(4 * MIB, seed=1)
    base = there.allocate(4 * MIB, seed=2)
    segment = here.open(there.descriptor())
    there.window("here#1", 1, [(base, 4 * MIB)])
    here.engine.fault.add(Rule(kind="corrupt", op=opcode.value, count=1))
    assert here.region is not None
    batch = here.engine.allocate_batch(1)
    epoch = 1 if opcode is Opcode.WRITE else 0
    request = TransferRequest(opcode, here.region.address, segment, base, 4 * MIB, epoch, verify=verify)
    here.engine.submit(batch, [request])
    (status,) = here.finish(batch)
    assert status.state is TransferState.COMPLETED
    assert (here.read(0, 4 * MIB) == there.read(0, 4 * MIB)) is verify

    (nic,) = (nic for nic in here.engine.stats().nics if nic.traffic)
    assert nic.errors == ({"checksum": 1} if verify else {})
    carried = sum(t.nbytes for t in nic.traffic if t.operation == opcode.value)
    assert (carried > 4 * MIB) is verify
    assert any(t.operation == "checksum" for t in nic.traffic) is verify
    assert (nic.in_flight_bytes, nic.in_flight_frames, nic.waiting) == (0, 0, 0)
    (rail,) = here.engine.stats().rails
    assert (rail.segment, rail.transport, rail.losses, rail.resting) == (segment, transport, int(verify), False)
    assert rail.bandwidth > 0
