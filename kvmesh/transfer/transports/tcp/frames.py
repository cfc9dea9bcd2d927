"""A frame as the views that go out for it."""

from __future__ import annotations

import struct

from kvmesh.transfer.transports import wire
from kvmesh.transfer.transports.base import Frame, FrameKind


def encoded(seq: int, frame: Frame) -> list[memoryview]:
    if frame.notice is not None:
        payload = frame.notice.payload
        head = wire.HEAD.pack(wire.NOTIFY, 0, 0, 0, seq, frame.epoch, len(payload))
        return [memoryview(head + frame.notice.serial.to_bytes(8, "little") + payload)]
    rows = [n for _, _, offset, length in frame.parts for n in (offset, length)]
    head = wire.HEAD.pack(frame.kind, 0, 0, len(frame.parts), seq, frame.epoch, frame.nbytes)
    asked = memoryview(head + struct.pack(f"<{len(rows)}Q", *rows))
    return [asked, *local_views(frame)] if frame.kind is FrameKind.WRITE else [asked]


def local_views(frame: Frame) -> list[memoryview]:
    region = frame.local
    base, view = region.address, region.view
    return [view[address - base : address - base + length] for _, address, _, length in frame.parts]
