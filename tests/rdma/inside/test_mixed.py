"""Engines with several transports, over Soft-RoCE: rdma alone for a device's region, any for the host's. The kernel's
Soft-RoCE takes no dmabuf, so host memory is registered in the place of a device's, under a device's name."""

from __future__ import annotations

import pytest

from kvmesh.errors import TransferError
from kvmesh.transfer import EngineConfig, Opcode, Range, Region, TransferEngine, TransferRequest, TransferState
from kvmesh.transfer.transports.rdma.device import RdmaNic, Registration
from tests.support.transfer.peer import pattern
from tests.transfer.conftest import Nest, nest

__all__ = ["nest"]

GUEST = {"timeout_s": 400, "memory_mb": 3072}
NBYTES = 1 << 20


@pytest.fixture(autouse=True)
def no_dmabuf(monkeypatch: pytest.MonkeyPatch) -> None:
    def register(self: RdmaNic, public: Region) -> Registration:
        return self.register_memory(public.address, public.length)

    monkeypatch.setattr(RdmaNic, "register_device_memory", register)


def config(side: str, *transports: str) -> EngineConfig:
    nics = (f"rx{side}0", f"rx{side}1") if "rdma" in transports else ()
    return EngineConfig(transports=transports, nics=nics)


def moved(engine: TransferEngine, opcode: Opcode, segment: str, near: int, far: int, epoch: int = 0) -> set[str]:
    """The transports that carried NBYTES."""
    batch = engine.allocate_batch(1)
    engine.submit(batch, [TransferRequest(opcode, near, segment, far, NBYTES, epoch)])
    assert engine.wait_sync(batch, 20)
    (status,) = engine.statuses(batch)
    assert status.state is TransferState.COMPLETED, status
    return {rail.split()[0] for rail, nbytes in engine.carried(batch).rails if nbytes}


def test_a_device_is_reached_by_rdma_alone_and_the_host_by_what_is_preferred(nest: Nest) -> None:
    writer = nest.actor("writer#1", config("a", "shm", "rdma", "tcp")).engine
    target = nest.actor("target#1", config("b", "shm", "rdma", "tcp")).engine
    own, other = bytearray(pattern(1, NBYTES)), bytearray(NBYTES)
    near_host, near_device = writer.allocate(NBYTES), writer.register_memory(own, "cuda:0")
    far_host, far_device = target.allocate(NBYTES), target.register_memory(other, "cuda:1")
    assert near_host.memory is not None and far_host.memory is not None
    near_host.memory[:] = pattern(2, NBYTES)
    segment = writer.open_segment(target.local_descriptor())
    assert writer.reaches_devices(segment)
    target.open_window("writer#1", 1, [Range(r.base_offset, NBYTES) for r in (far_host, far_device)])

    def write(near: Region, far: Region) -> set[str]:
        return moved(writer, Opcode.WRITE, segment, near.address, far.base_offset, 1)

    assert write(near_device, far_device) == {"rdma"} and bytes(other) == pattern(1, NBYTES)
    assert write(near_host, far_device) == {"rdma"} and bytes(other) == pattern(2, NBYTES)
    assert write(near_device, far_host) == {"rdma"} and bytes(far_host.memory) == pattern(1, NBYTES)
    assert write(near_host, far_host) == {"shm"} and bytes(far_host.memory) == pattern(2, NBYTES)
    own[:] = bytes(NBYTES)
    assert moved(writer, Opcode.READ, segment, near_device.address, far_device.base_offset) == {"rdma"}
    assert bytes(own) == pattern(2, NBYTES)
    target.fence("writer#1", 1)


def test_a_peer_without_rdma_hears_which_region_it_cannot_reach(nest: Nest) -> None:
    target = nest.actor("target#1", config("b", "shm", "rdma", "tcp")).engine
    device, host = target.register_memory(bytearray(NBYTES), "cuda:1"), target.allocate(NBYTES)
    writer = nest.actor("writer#1", config("a", "shm", "tcp")).engine
    near = writer.allocate(NBYTES)
    segment = writer.open_segment(target.local_descriptor())
    assert not writer.reaches_devices(segment)
    target.open_window("writer#1", 1, [Range(host.base_offset, NBYTES), Range(device.base_offset, NBYTES)])
    batch = writer.allocate_batch(1)
    with pytest.raises(TransferError, match=f"remote_offset={device.base_offset}: .*cuda:1.*no rdma path") as caught:
        writer.submit(batch, [TransferRequest(Opcode.WRITE, near.address, segment, device.base_offset, NBYTES, 1)])
    assert caught.value.field == "remote_offset"
    assert moved(writer, Opcode.WRITE, segment, near.address, host.base_offset, 1) == {"shm"}
    target.fence("writer#1", 1)
