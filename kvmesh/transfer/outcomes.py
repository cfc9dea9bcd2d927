"""What an answer, or the loss of a frame, means for the requests it carried. Pure; the core's lock is held around every
call, except `local_sums`."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from kvmesh.transfer.api import TransferState
from kvmesh.transfer.batch import AfterUnlock, Group, Part, doom, finish
from kvmesh.transfer.transports.base import Frame, FrameKind


def landed(
    frame: Frame, group: Group, refused: Sequence[int], cause: str, after: AfterUnlock
) -> tuple[int, int, list[Part]]:
    """Every part arrived but the refused. Returns bytes that count, parts that were refused, parts to verify."""
    batch = group.batch
    refusals = frozenset(refused)
    states, flight, left, dooms = batch.states, batch.flight, batch.left, batch.doom
    pending, verify = TransferState.PENDING, group.verify
    carried = turned_away = 0
    to_verify: list[Part] = []
    for i, part in enumerate(frame.parts):
        slot = part[0]
        flight[slot] -= 1
        if states[slot] is not pending:
            continue
        if i in refusals:
            turned_away += 1
            doom(group, slot, TransferState.FAILED, cause, after)
            continue
        carried += part[3]
        if not verify:
            left[slot] -= part[3]
            if left[slot] == 0:
                finish(group, slot, TransferState.COMPLETED, "", after)
                continue
        elif slot not in dooms:
            to_verify.append(part)
        if slot in dooms:
            doom(group, slot, *dooms[slot], after)
    return carried, turned_away, to_verify


def strayed(frame: Frame, group: Group, cause: str, *, settled: bool, again: bool, after: AfterUnlock) -> bool:
    """The frame is lost. What may still land has failed, undrained; true when some of the rest should go `again`. A
    CHECKSUM changes no memory: wherever it is, it does no harm."""
    batch = group.batch
    wanted = False
    for slot, _, _, _ in frame.parts:
        batch.flight[slot] -= 1
        if batch.states[slot].final:
            continue
        if not settled and frame.kind is not FrameKind.CHECKSUM:
            finish(group, slot, TransferState.FAILED, cause, after, drained=False)
        elif slot in batch.doom or not again:
            doom(group, slot, TransferState.FAILED, cause, after)
        else:
            wanted = True
    return wanted


def verified(
    frame: Frame, group: Group, refused: Sequence[int], cause: str, sums: Sequence[int], after: AfterUnlock
) -> list[Part]:
    """A CHECKSUM was answered; `sums` are those of the memory here. Returns the parts that differ."""
    batch = group.batch
    refusals = frozenset(refused)
    differ: list[Part] = []
    for i, part in enumerate(frame.parts):
        slot = part[0]
        batch.flight[slot] -= 1
        if batch.states[slot].final:
            continue
        if i in refusals:
            doom(group, slot, TransferState.FAILED, cause, after)
        elif i >= len(frame.sums) or frame.sums[i] != sums[i]:
            differ.append(part)
        else:
            batch.left[slot] -= part[3]
            if batch.left[slot] == 0:
                finish(group, slot, TransferState.COMPLETED, "", after)
                continue
        if slot in batch.doom:
            doom(group, slot, *batch.doom[slot], after)
    return [part for part in differ if not batch.states[part[0]].final and part[0] not in batch.doom]


def local_sums(frame: Frame) -> list[int]:
    """CRC-32 of each part's local memory. Takes its time, without the GIL: no lock may be held."""
    region = frame.local
    base, view = region.address, region.view
    return [zlib.crc32(view[at - base : at - base + length]) for _, at, _, length in frame.parts]
