"""The shm transport at the target: the copier. It maps writers' memory read-only and copies from there."""

from __future__ import annotations

import array
import logging
import os
import socket
import struct
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from functools import partial
from operator import add

from kvmesh.errors import TransferError
from kvmesh.transfer.memory import Mapping, copy_runs, map_peer
from kvmesh.transfer.segment import LocalRegion
from kvmesh.transfer.transports import wire
from kvmesh.transfer.transports.adaptive_spin import AdaptiveSpin
from kvmesh.transfer.transports.serving import Accepted, AcceptingServer
from kvmesh.transfer.transports.shm.copy import Copiers, CopyJob
from kvmesh.transfer.transports.wire import Asked, Gone, Hello, ProtocolBroken, Welcome
from kvmesh.transfer.windows import WindowAdmission

log = logging.getLogger(__name__)

PACKET_BYTES = 64 << 10
MAX_MAPS = 4096  # of one peer's regions; a process has 65530 maps
_FD_SPACE = socket.CMSG_SPACE(array.array("i").itemsize)


def receive(sock: socket.socket, buffer: bytearray, flags: int = 0) -> tuple[int, int]:
    """Receives one packet; returns its length and the descriptor that came with it, or -1. Raises Gone at the end."""
    got, ancillary, flags, _ = sock.recvmsg_into([buffer], _FD_SPACE, socket.MSG_CMSG_CLOEXEC | flags)
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(fds) > 1:
        for fd in fds:
            os.close(fd)
        raise ProtocolBroken("packet too long")
    if got == 0:
        raise Gone("closed by the peer")
    return got, fds[0] if fds else -1


def send_region(sock: socket.socket, base: int, length: int, fd: int) -> None:
    """Sends a region's read-only descriptor; `fd` < 0 says that there is no such region (any more). It never blocks: it
    raises BlockingIOError when the peer takes no packets."""
    head = wire.HEAD.pack(wire.REGION, 0, 0, int(fd >= 0), base, 0, length)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd >= 0 else []
    sock.sendmsg([head], rights, socket.MSG_DONTWAIT)


class PeerMaps:
    """A peer's regions, mapped read-only, by segment offset. It is for one thread; a map lives while something holds
    it."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._maps: list[Mapping] = []

    def add(self, asked: Asked, fd: int) -> bool:
        """Takes a REGION packet and closes `fd`. Returns False when the peer has no such region (any more)."""
        base = asked.seq
        try:
            mapping = map_peer(fd, asked.nbytes) if asked.count and fd >= 0 else None
        except TransferError as err:
            raise ProtocolBroken(str(err)) from err
        finally:
            if fd >= 0:
                os.close(fd)
        at = bisect_right(self._bases, base) - 1
        if at >= 0 and self._bases[at] == base:
            del self._bases[at], self._maps[at]
        if mapping is not None:
            if len(self._bases) >= MAX_MAPS:
                raise ProtocolBroken(f"more than {MAX_MAPS} regions")
            at = bisect_right(self._bases, base)
            self._bases.insert(at, base)
            self._maps.insert(at, mapping)
        return mapping is not None

    def find(self, offset: int, length: int) -> tuple[Mapping, int] | None:
        """Returns the map that holds all of these bytes and their address in it, or None."""
        at = bisect_right(self._bases, offset) - 1
        if at < 0:
            return None
        inside = offset - self._bases[at]
        mapping = self._maps[at]
        if inside + length > mapping.length:
            return None
        return mapping, mapping.address + inside

    def clear(self) -> None:
        self._bases, self._maps = [], []


class ShmAccepted(Accepted):
    """The copier thread of one writer. Large frames are jobs, which helpers share; while they copy the last pieces of
    one, the thread receives the next frame."""

    def __init__(self, server: AcceptingServer, sock: socket.socket, copiers: Copiers) -> None:
        super().__init__(server, sock)
        self._copiers = copiers
        self._maps = PeerMaps()
        self._buffer = bytearray(PACKET_BYTES)
        self._given: set[int] = set()  # own regions that the peer has mapped
        self._jobs: deque[CopyJob] = deque()  # of which pieces may be left to take
        self._ended = threading.Condition()
        self._patience = AdaptiveSpin()
        self._last_bytes = 0  # of the last frame: after a large one the other side has more to do than to ask
        self._open = 0  # jobs whose last byte is not there yet

    def withdraw(self, base: int) -> None:
        """Tells the peer that a local region is gone; any thread may call it."""
        if base in self._given:
            self._given.discard(base)
            try:
                send_region(self.sock, base, 0, -1)
            except OSError:
                pass  # full or ended: the peer's map goes with the connection

    def read_hello(self) -> Hello:
        got, fd = receive(self.sock, self._buffer)
        if fd >= 0:
            os.close(fd)
        return wire.decode_hello(bytes(self._buffer[:got]))

    def send_welcome(self, welcome: Welcome) -> None:
        self.sock.send(wire.encode_hello(welcome))

    def serve(self) -> None:
        try:
            while True:
                self._serve_packet(*self._next_packet())
        finally:
            self._finish_jobs()

    def _next_packet(self) -> tuple[int, int]:
        """Copies pieces until a packet comes; it looks for one just before the helpers run out of pieces."""
        jobs = self._jobs
        while jobs:
            if len(jobs) == 1 and len(jobs[0].pieces) < self._copiers.threads:
                try:
                    return receive(self.sock, self._buffer, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    pass
            if not jobs[0].work():
                jobs.popleft()
        until = self._patience.begin()
        while self._patience.eager and time.monotonic() < until:
            try:
                packet = receive(self.sock, self._buffer, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            self._patience.met(self._last_bytes)
            return packet
        packet = receive(self.sock, self._buffer)
        self._patience.met(self._last_bytes)
        return packet

    def _finish_jobs(self) -> None:
        """Returns when no thread copies bytes of this connection any more."""
        while self._jobs:
            if not self._jobs[0].work():
                self._jobs.popleft()
        with self._ended:
            self._ended.wait_for(lambda: not self._open)

    def _serve_packet(self, got: int, fd: int) -> None:
        asked = Asked.parse_packet(self._buffer, got, fd)
        self._last_bytes = asked.nbytes
        if asked.kind == wire.REGION:
            self._maps.add(asked, fd)
        elif asked.kind == wire.WRITE:
            self._write(asked, got)
        elif asked.kind == wire.NOTIFY:
            self._finish_jobs()
            self._notify(asked, got)
        elif asked.kind == wire.CHECKSUM:
            self._finish_jobs()
            self._checksum(asked, got)
        elif asked.kind == wire.WANT:
            self._hand_over(asked.seq)
        else:
            raise ProtocolBroken(f"packet of kind {asked.kind}")

    def _hand_over(self, base: int) -> None:
        """Sends the region's descriptor. The region is in use meanwhile, so that the number cannot come to name another
        file."""
        segment = self.host.segment
        region = segment.use(base, 1)
        try:
            if region is None or region.base != base or region.fd < 0:
                send_region(self.sock, base, 0, -1)
            else:
                self._given.add(base)
                send_region(self.sock, base, region.length, region.fd)
        finally:
            if region is not None:
                segment.unuse(region)

    def _write(self, asked: Asked, got: int) -> None:
        if got != wire.HEAD_BYTES + 24 * asked.count:
            raise ProtocolBroken(f"packet of {got} bytes with {asked.count} rows")
        rows = struct.unpack_from(f"<{3 * asked.count}Q", self._buffer, wire.HEAD_BYTES)
        sources, targets, lengths = rows[0::3], rows[1::3], rows[2::3]
        if 0 in lengths or sum(lengths) != asked.nbytes:
            raise ProtocolBroken("rows do not add up")
        windows = self.host.windows
        admission = windows.admit(self.peer, asked.epoch, targets, lengths, self)
        if admission is None:
            self._answer(asked.seq, range(asked.count), wire.WINDOW_CLOSED)
            return
        job: CopyJob | None = None
        landed = 0
        try:
            if self.dead:
                raise Gone("cut by a fence")
            to, of, runs, keep = self._runs(admission, sources, targets, lengths)
            if self._copiers.wants(asked.nbytes):
                job = CopyJob(to, of, runs, partial(self._landed, asked.seq, admission, sum(runs), keep))
            else:
                copy_runs(to, of, runs)
                landed = sum(runs)
        finally:
            if job is None:
                windows.leave(admission, landed)
        if job is not None:
            with self._ended:
                self._open += 1
            self._jobs.append(job)
            self._copiers.start(job)
        else:
            self._answer(asked.seq, admission.refused, wire.OUTSIDE_WINDOW if admission.refused else 0)

    def _runs(
        self,
        admission: WindowAdmission[LocalRegion],
        sources: Sequence[int],
        targets: Sequence[int],
        lengths: Sequence[int],
    ) -> tuple[Sequence[int], Sequence[int], Sequence[int], list[Mapping]]:
        """Returns target and source addresses and lengths of the admitted slices, and the maps that must be held for
        the copy."""
        home = admission.homes[0]
        if home is not None and admission.homes.count(home) == len(lengths):
            start = min(sources)
            source = self._maps.find(start, max(map(add, sources, lengths)) - start)
            if source is not None:
                near, far = home.address - home.base, source[1] - start
                return [at + near for at in targets], [at + far for at in sources], lengths, [source[0]]
        keep: list[Mapping] = []
        to, of, runs = [], [], []
        for i, home in enumerate(admission.homes):
            if home is None:
                continue
            source = self._maps.find(sources[i], lengths[i])
            if source is None:
                raise ProtocolBroken("write from memory that was not handed over")
            if not keep or keep[-1] is not source[0]:
                keep.append(source[0])
            to.append(home.address + targets[i] - home.base)
            of.append(source[1])
            runs.append(lengths[i])
        return to, of, runs, keep

    def _landed(
        self,
        seq: int,
        admission: WindowAdmission[LocalRegion],
        nbytes: int,
        keep: Sequence[Mapping],
        error: BaseException | None,
    ) -> None:
        """Ends a job, on any thread. Helpers serve all peers and wait for none, so a peer that takes no answers is cut
        off."""
        self.host.windows.leave(admission, 0 if error else nbytes)
        try:
            if error is not None:
                raise error
            code = wire.OUTSIDE_WINDOW if admission.refused else 0
            self._answer(seq, admission.refused, code, socket.MSG_DONTWAIT)
        except OSError:
            self.interrupt()
        except Exception:
            log.exception("shm copy for %r failed", self.peer)
            self.interrupt()
        finally:
            with self._ended:
                self._open -= 1
                self._ended.notify_all()

    def _checksum(self, asked: Asked, got: int) -> None:
        if got != wire.HEAD_BYTES + 16 * asked.count:
            raise ProtocolBroken(f"packet of {got} bytes with {asked.count} rows")
        rows = struct.unpack_from(f"<{2 * asked.count}Q", self._buffer, wire.HEAD_BYTES)
        if sum(rows[1::2]) != asked.nbytes:
            raise ProtocolBroken("rows do not add up")
        sums = self.sums(rows[0::2], rows[1::2])
        if sums is None:
            self._answer(asked.seq, range(asked.count), wire.NO_MEMORY)
        else:
            self.sock.send(wire.HEAD.pack(wire.ANSWER, 0, 0, 0, asked.seq, 0, len(sums)) + sums)

    def _notify(self, asked: Asked, got: int) -> None:
        start = wire.HEAD_BYTES + 8
        if got != start + asked.nbytes:
            raise ProtocolBroken("notification of another length")
        serial = int.from_bytes(self._buffer[wire.HEAD_BYTES : start], "little")
        code = self.host.deliver(self.peer, asked.epoch, serial, bytes(self._buffer[start:got]))
        self._answer(asked.seq, (), code)

    def _answer(self, seq: int, refused: Sequence[int], code: int, flags: int = 0) -> None:
        self.sock.send(wire.encode_answer(seq, refused, code), flags)

    def release(self) -> None:
        self._maps.clear()
