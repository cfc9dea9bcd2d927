"""The tcp transport at the target: lands WRITEs, serves READs, delivers NOTIFYs; one thread per connection."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from typing import NoReturn

from kvmesh.rpc.authorisation import why_no_kv
from kvmesh.transfer.config import EngineConfig
from kvmesh.transfer.segment import LocalRegion
from kvmesh.transfer.transports import tls, wire
from kvmesh.transfer.transports.adaptive_spin import AdaptiveSpin
from kvmesh.transfer.transports.serving import Accepted, AcceptingServer
from kvmesh.transfer.transports.tcp.dial import size_buffers, tune
from kvmesh.transfer.transports.tls import ByteStream, TlsIdentity, TlsSocket
from kvmesh.transfer.transports.wire import Asked, Hello, ProtocolBroken, Welcome

_SCRATCH_BYTES = 256 << 10


class TcpAccepted(Accepted):
    """Receives straight into registered memory, all slices of a frame in one system call."""

    def __init__(
        self,
        server: AcceptingServer,
        sock: socket.socket,
        config: EngineConfig,
        identity: TlsIdentity | None,
        *,
        many_nics: bool,
    ) -> None:
        super().__init__(server, sock)
        self._identity = identity
        self.stream: ByteStream = sock  # what bytes go through
        tune(sock, config, many_nics=many_nics)
        size_buffers(sock, config)
        self._scratch: memoryview | None = None

    def read_hello(self) -> Hello:
        if self._identity is not None:
            self._secure(self._identity)
        first = wire.recv_exact(self.stream, wire.LENGTH.size)
        (length,) = wire.LENGTH.unpack(first)
        if length > wire.MAX_HELLO_BYTES:
            if self._identity is None and tls.looks_like_tls(first):
                self._refuse(f"speaks TLS over tcp, and this side does not: {tls.SETTING}")
            raise ProtocolBroken(f"hello of {length} bytes")
        return wire.decode_hello(bytes(wire.recv_exact(self.stream, length)))

    def why_refused(self, hello: Hello) -> str:
        return why_no_kv(self.stream.identities, hello.peer) if isinstance(self.stream, TlsSocket) else ""

    def _secure(self, identity: TlsIdentity) -> None:
        """Shakes hands, within the time of a greeting. Raises ProtocolBroken when there is no trusting the peer."""
        try:
            self.stream = tls.accepted(self.sock, identity, self.server.connect_timeout_s)
        except tls.NotTls:
            self._refuse(f"speaks no TLS over tcp, and this side does: {tls.SETTING}")
        except tls.TlsRefused as err:
            raise ProtocolBroken(f"TLS with {self._from()}: {err}") from None

    def _refuse(self, why: str) -> NoReturn:
        """Says in plain what is wrong, to a peer that understands it. Raises ProtocolBroken."""
        data = wire.encode_hello(Welcome(wire.WIRE_VERSION, f"one side {why}"))
        self.sock.sendall(wire.LENGTH.pack(len(data)) + data)
        tls.part(self.sock)
        raise ProtocolBroken(f"{self._from()} {why}")

    def _from(self) -> str:
        try:
            return str(self.sock.getpeername()[0])
        except OSError:
            return "a peer that has gone"

    def send_welcome(self, welcome: Welcome) -> None:
        data = wire.encode_hello(welcome)
        self.stream.sendall(wire.LENGTH.pack(len(data)) + data)

    def serve(self) -> None:
        head = memoryview(bytearray(wire.HEAD_BYTES))
        patience = AdaptiveSpin()
        while True:
            got = patience.await_first(self.stream, head)
            if got < wire.HEAD_BYTES:
                wire.recv_views(self.stream, [head[got:]], wire.HEAD_BYTES - got)
            asked = Asked.parse(head)
            patience.met(asked.nbytes)
            if asked.kind == wire.WRITE:
                self._write(asked)
            elif asked.kind == wire.READ:
                self._read(asked)
            elif asked.kind == wire.CHECKSUM:
                self._checksum(asked)
            elif asked.kind == wire.NOTIFY:
                self._notify(asked)
            elif asked.kind != wire.PING:
                raise ProtocolBroken(f"frame of kind {asked.kind}")

    def _rows(self, asked: Asked) -> tuple[tuple[int, ...], tuple[int, ...]]:
        numbers = struct.unpack(f"<{2 * asked.count}Q", wire.recv_exact(self.stream, 16 * asked.count))
        offsets, lengths = numbers[0::2], numbers[1::2]
        if sum(lengths) != asked.nbytes or 0 in lengths:
            raise ProtocolBroken(f"rows of {sum(lengths)} bytes in a frame of {asked.nbytes}")
        return offsets, lengths

    def _write(self, asked: Asked) -> None:
        offsets, lengths = self._rows(asked)
        windows = self.host.windows
        admission = windows.admit(self.peer, asked.epoch, offsets, lengths, self)
        if admission is None:
            self._swallow(asked.nbytes)
            self._answer(asked.seq, range(asked.count), wire.WINDOW_CLOSED)
            return
        landed = 0
        try:
            if self.dead:
                raise wire.Gone("cut by a fence")
            views: list[memoryview] = []
            for home, offset, length in zip(admission.homes, offsets, lengths, strict=True):
                if home is None:
                    views += self._scratch_views(length)
                else:
                    views.append(home.slice_at(offset, length))
            self._land(views, asked.nbytes)
            landed = asked.nbytes - sum(lengths[i] for i in admission.refused)
        finally:
            windows.leave(admission, landed)
        self._answer(asked.seq, admission.refused, wire.OUTSIDE_WINDOW if admission.refused else 0)

    def _land(self, views: list[memoryview], nbytes: int) -> None:
        while nbytes > 0:
            got = wire.receive(self.stream, views, socket.MSG_WAITALL)
            nbytes -= got
            if nbytes > 0:
                if got == 0 or self.dead:
                    raise wire.Gone("closed in the middle of a slice")
                views = wire.advanced(views, got)

    def _read(self, asked: Asked) -> None:
        segment = self.host.segment
        start_ns = time.monotonic_ns() if segment.reads.watching else 0
        offsets, lengths = self._rows(asked)
        regions: list[LocalRegion] = []
        try:
            for offset, length in zip(offsets, lengths, strict=True):
                region = segment.use(offset, length)
                if region is None:
                    self._answer(asked.seq, range(asked.count), wire.NO_MEMORY)
                    return
                regions.append(region)
            views = [r.slice_at(o, n) for r, o, n in zip(regions, offsets, lengths, strict=True)]
            head = wire.HEAD.pack(wire.ANSWER, 0, 0, 0, asked.seq, asked.epoch, asked.nbytes)
            if start_ns:
                segment.reads.begin(offsets, lengths, start_ns)
            try:
                wire.send_views(self.stream, [memoryview(head), *views], wire.HEAD_BYTES + asked.nbytes)
            finally:
                if start_ns:
                    segment.reads.end(offsets, lengths, time.monotonic_ns())
        finally:
            for region in regions:
                segment.unuse(region)

    def _checksum(self, asked: Asked) -> None:
        sums = self.sums(*self._rows(asked))
        if sums is None:
            self._answer(asked.seq, range(asked.count), wire.NO_MEMORY)
        else:
            self.stream.sendall(wire.HEAD.pack(wire.ANSWER, 0, 0, 0, asked.seq, asked.epoch, len(sums)) + sums)

    def _notify(self, asked: Asked) -> None:
        if asked.nbytes > wire.MAX_NOTIFY_BYTES:
            raise ProtocolBroken(f"notification of {asked.nbytes} bytes")
        serial = int.from_bytes(wire.recv_exact(self.stream, 8), "little")
        payload = bytes(wire.recv_exact(self.stream, asked.nbytes))
        code = self.host.deliver(self.peer, asked.epoch, serial, payload)
        self._answer(asked.seq, (), code)

    def _answer(self, seq: int, refused: Sequence[int], code: int) -> None:
        self.stream.sendall(wire.encode_answer(seq, refused, code))

    def _scratch_views(self, nbytes: int) -> list[memoryview]:
        if self._scratch is None:
            self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        whole, rest = divmod(nbytes, _SCRATCH_BYTES)
        return [self._scratch] * whole + ([self._scratch[:rest]] if rest else [])

    def _swallow(self, nbytes: int) -> None:
        wire.recv_views(self.stream, self._scratch_views(nbytes), nbytes)
