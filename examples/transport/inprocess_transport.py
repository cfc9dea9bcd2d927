"""A transport between engines of one process: the thread that posts a frame copies its bytes."""

from __future__ import annotations

import zlib

from kvmesh.transfer.memory import copy_runs
from kvmesh.transfer.segment import LocalRegion, RegionInfo, SegmentDescriptor
from kvmesh.transfer.transports import wire
from kvmesh.transfer.transports.base import Frame, FrameKind, FrameLimits, Rail, Transport, TransportHost

HERE: dict[str, InProcessTransport] = {}  # by its engine's token


class InProcessTransport(Transport):
    name = "inprocess"
    limits = FrameLimits(slice_bytes=1 << 20, frame_bytes=4 << 20, frame_parts=512, inflight_frames=2)

    def __init__(self, host: TransportHost, config: object) -> None:
        self.host = host

    def start(self) -> None:
        HERE[self.host.token] = self

    def endpoint(self) -> dict[str, str]:
        return {}

    def reaches(self, descriptor: SegmentDescriptor) -> bool:
        return descriptor.token in HERE

    def carries(self, kind: FrameKind, local: LocalRegion, remote: RegionInfo) -> bool:
        return local.public.location.startswith("cpu") and remote.location.startswith("cpu")

    def post(self, frame: Frame) -> None:
        peer = HERE.get(frame.link.descriptor.token)
        if peer is None:  # nothing was copied, so nothing can land: settled
            frame.lost("the peer's engine was closed", settled=True, down=True)
        elif frame.kind is FrameKind.NOTIFY:
            assert frame.notice is not None
            code = peer.host.deliver(self.host.name, frame.epoch, frame.notice.serial, frame.notice.payload)
            frame.done((), wire.CAUSES[code])
        elif frame.kind is FrameKind.WRITE:
            self._write(frame, peer)
        else:
            self._read(frame, peer)

    def _write(self, frame: Frame, peer: InProcessTransport) -> None:
        """A byte lands only between `admit` and `leave`: a fence of the target waits for whoever is there."""
        offsets, lengths = [part[2] for part in frame.parts], [part[3] for part in frame.parts]
        windows = peer.host.windows
        admission = windows.admit(self.host.name, frame.epoch, offsets, lengths, self)
        if admission is None:
            frame.done(range(len(offsets)), wire.CAUSES[wire.WINDOW_CLOSED])
            return
        landed = 0
        try:
            for (_, address, offset, length), home in zip(frame.parts, admission.homes, strict=True):
                if home is not None:
                    copy_runs([home.address + offset - home.base], [address], [length])
                    landed += length
        finally:
            windows.leave(admission, landed)
        frame.done(admission.refused, wire.CAUSES[wire.OUTSIDE_WINDOW] if admission.refused else "")

    def _read(self, frame: Frame, peer: InProcessTransport) -> None:
        """A region in use is not unregistered until `unuse`."""
        sums = []
        for _, address, offset, length in frame.parts:
            region = peer.host.segment.use(offset, length)
            if region is None:
                frame.done(range(len(frame.parts)), wire.CAUSES[wire.NO_MEMORY])
                return
            try:
                if frame.kind is FrameKind.CHECKSUM:
                    sums.append(zlib.crc32(region.slice_at(offset, length)))
                else:
                    copy_runs([address], [region.address + offset - region.base], [length])
            finally:
                peer.host.segment.unuse(region)
        frame.sums = tuple(sums)
        frame.done()

    # A frame is answered before `post` returns: there is never one to take back, to wait for or to give up.

    def recall(self, frame: Frame) -> bool:
        return False

    def expire(self, frame: Frame, idle_s: float) -> None: ...

    def forget(self, segment: str, cause: str, rail: Rail | None = None) -> None: ...

    def idle(self, segment: str, rail: Rail) -> bool:
        return True

    def interrupt(self) -> None:
        """Called by a fence whose grace is over: a copy of one frame ends by itself."""

    def close(self, timeout_s: float) -> None:
        HERE.pop(self.host.token, None)
