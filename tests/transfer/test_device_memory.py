"""Which transports reach a device's memory: rdma alone, at either end; every one reaches the host's. Without a device:
regions are only called one, and nothing touches them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvmesh.errors import TransferError
from kvmesh.transfer import EngineConfig, Opcode, Range, TransferEngine, TransferRequest
from kvmesh.transfer.segment import LocalRegion, RegionInfo, SegmentDescriptor
from kvmesh.transfer.transports.base import FrameKind, FrameLimits
from kvmesh.transfer.windows import Windows
from tests.support.transfer.fakes import KIB, FakeTransport, World

LIMITS = FrameLimits(16 * KIB, 64 * KIB, 128, 4)
HOST, DEVICE = "cpu:0", "cuda:0"


class DeviceTransport(FakeTransport):
    device_memory = True


class Inside:
    def interrupt(self) -> None: ...


def world(*names: str) -> World:
    return World(tuple((DeviceTransport if name == "rdma" else FakeTransport)(name, LIMITS) for name in names))


def region(made: World, location: str) -> LocalRegion:
    if location == HOST:
        return made.region
    return made.segment.add(1 << 50, 1 << 20, location, memoryview(b""), None, -1)


@pytest.mark.parametrize("kind", [FrameKind.WRITE, FrameKind.READ])
@pytest.mark.parametrize("far", [HOST, DEVICE])
@pytest.mark.parametrize("near", [HOST, DEVICE])
def test_a_path_is_chosen_by_region(near: str, far: str, kind: FrameKind) -> None:
    made = world("shm", "rdma", "tcp")
    link = made.open()
    found = link.routes(kind, region(made, near), RegionInfo(1 << 20, 1 << 20, far, True), {})
    every = ["shm", "rdma", "tcp"] if near == far == HOST else ["rdma"]
    assert [way.rail.transport.name for tier in found for way in tier] == every


def test_the_same_two_regions_keep_their_paths_beside_others() -> None:
    """Routes are remembered by regions and locations: no pair may get another's."""
    made = world("shm", "rdma")
    link, device = made.open(), region(made, DEVICE)
    far = RegionInfo(1 << 20, 1 << 20, HOST, True)
    for _ in range(2):
        for near, names in ((made.region, ["shm", "rdma"]), (device, ["rdma"])):
            tiers = link.routes(FrameKind.WRITE, near, far, {})
            assert [way.rail.transport.name for tier in tiers for way in tier] == names


@pytest.mark.parametrize(
    ("near", "far", "field", "value"),
    [
        (HOST, DEVICE, "remote_offset", "remote_offset=1048576: memory of cuda:0 of 'peer#1'"),
        (DEVICE, HOST, "local_address", "local_address=0x4000000000000: memory of cuda:0"),
    ],
)
def test_without_an_rdma_path_the_request_is_refused_by_field_and_value(
    near: str, far: str, field: str, value: str
) -> None:
    made = world("shm", "tcp")
    link = made.open()
    link.renew(
        SegmentDescriptor("peer#1", "machine", "token", (RegionInfo(1 << 20, 1 << 20, far, True),), {}), link.rails
    )
    batch = made.sender.new_batch(1)
    request = TransferRequest(Opcode.WRITE, region(made, near).address, "peer#1", 1 << 20, 16, 1)
    with pytest.raises(TransferError, match="no rdma path") as caught:
        made.sender.submit(batch, [request], made.now + 1)
    assert caught.value.field == field and caught.value.message.startswith(value)
    assert caught.value.message.endswith("(paths: shm, tcp)")
    assert made.statuses(batch) == [], "nothing is queued"


def test_software_lands_nothing_in_a_device_and_hardware_may() -> None:
    windows: Windows[str] = Windows()
    windows.open("w", 1, [(0, 10, "host"), (20, 10, None)])
    assert windows.ranges("w", 1) == ([0, 20], [10, 30])
    assert windows.admit("w", 1, [20], [10], Inside()) is None
    admission = windows.admit("w", 1, [0, 20], [10, 10], Inside())
    assert admission is not None and admission.homes == ["host", None] and admission.refused == [1]


@pytest.fixture
def target() -> Iterator[TransferEngine]:
    with TransferEngine("target#1", EngineConfig(transports=("shm", "tcp"))) as engine:
        yield engine


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("opcode", [Opcode.WRITE, Opcode.READ])
def test_a_peer_that_takes_a_device_for_the_host_is_refused(
    target: TransferEngine, transport: str, opcode: Opcode
) -> None:
    """A peer with a false descriptor: the target touches nothing at the device's address, which is none of its own."""
    device = target.segment.add(1 << 50, 1 << 20, DEVICE, memoryview(b""), None, -1)
    target.open_window("liar#1", 1, [Range(device.base, device.length)])
    true = target.local_descriptor()
    false = SegmentDescriptor(
        true.name, true.machine, true.token, (RegionInfo(device.base, device.length, HOST, True),), true.endpoints
    )
    with TransferEngine("liar#1", EngineConfig(transports=(transport,), request_timeout_s=10.0)) as liar:
        mine = liar.allocate(4096)
        segment = liar.open_segment(false)
        batch = liar.allocate_batch(1)
        epoch = 1 if opcode is Opcode.WRITE else 0
        liar.submit(batch, [TransferRequest(opcode, mine.address, segment, device.base, 4096, epoch)])
        assert liar.wait_sync(batch, 20)
        (status,) = liar.statuses(batch)
        assert status.state.value == "failed", status
        causes = {Opcode.WRITE: "window closed", Opcode.READ: "memory"}
        assert causes[opcode] in status.cause, status
    target.fence("liar#1", 1)
