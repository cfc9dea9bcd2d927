"""From the caller's requests to groups: checked, and sorted by what decides their way."""

from __future__ import annotations

from collections.abc import Sequence

from kvmesh.errors import TransferError
from kvmesh.transfer import checks
from kvmesh.transfer.api import Opcode, TransferRequest
from kvmesh.transfer.batch import Batch, Group
from kvmesh.transfer.core import Core
from kvmesh.transfer.segment import LocalSegment
from kvmesh.transfer.send_queue import rank_of
from kvmesh.transfer.transports.base import FrameKind


def grouped(
    core: Core, segment: LocalSegment, batch: Batch, requests: Sequence[TransferRequest], deadline: float
) -> list[Group]:
    """Requests that share everything but addresses, in order; checks each."""
    groups: dict[tuple[object, ...], Group] = {}
    group: Group | None = None
    slot = len(batch.states)
    same: tuple[object, ...] = ()
    near = near_end = far = far_end = 0
    for request in requests:
        address, offset, length = request.local_address, request.remote_offset, request.length
        kin = (request.segment, request.opcode, request.handoff_epoch, request.traffic_class, request.verify)
        if not (
            group is not None
            and kin == same
            and length > 0
            and near <= address
            and address + length <= near_end
            and far <= offset
            and offset + length <= far_end
        ):
            group = _new_group(core, segment, batch, request, groups, deadline)
            same = kin
            near, near_end = group.local.address, group.local.address + group.local.length
            far, far_end = group.remote.base_offset, group.remote.base_offset + group.remote.length
        group.slots.append(slot)
        group.addresses.append(address)
        group.offsets.append(offset)
        group.todo += length
        slot += 1
    for group in groups.values():
        group.open = len(group.slots)
    return list(groups.values())


def _new_group(
    core: Core,
    segment: LocalSegment,
    batch: Batch,
    request: TransferRequest,
    groups: dict[tuple[object, ...], Group],
    deadline: float,
) -> Group:
    lane = checks.opened(core.lanes, request.segment)
    epoch = checks.epoch_of(request)
    if request.length <= 0:
        raise TransferError(f"length={request.length}: must be positive", field="length")
    local = segment.by_address(request.local_address, request.length)
    if local is None:
        raise TransferError(
            f"local_address={request.local_address:#x}: {request.length} bytes there are in no registered region",
            field="local_address",
        )
    remote = lane.descriptor.region_at(request.remote_offset, request.length)
    if remote is None:
        raise TransferError(
            f"remote_offset={request.remote_offset}: {request.length} bytes there are not in one region of "
            f"{request.segment!r}",
            field="remote_offset",
        )
    if request.verify and not (local.public.location.startswith("cpu") and remote.location.startswith("cpu")):
        raise TransferError("verify=True: only host memory can be verified", field="verify")
    rank = rank_of(request.traffic_class)
    key = (lane.name, request.opcode, epoch, rank, request.verify, local.base, remote.base_offset)
    group = groups.get(key)
    if group is None:
        group = groups[key] = Group(
            next(core.serials),
            lane,
            batch,
            request.opcode,
            epoch,
            local,
            remote,
            lane.routes(
                FrameKind.WRITE if request.opcode is Opcode.WRITE else FrameKind.READ, local, remote, core.topology
            ),
            deadline,
            [],
            [],
            [],
            rank,
            request.verify,
        )
    return group
