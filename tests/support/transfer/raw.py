"""A peer that speaks the wire by hand, so that a test decides at which byte it stops."""

from __future__ import annotations

import array
import socket
import ssl
import struct

from kvmesh.rpc.certificates import Certificates
from kvmesh.transfer import SegmentDescriptor
from kvmesh.transfer.segment import RegionInfo
from kvmesh.transfer.transports import tls, wire
from kvmesh.transfer.transports.shm.path import raw_address
from kvmesh.transfer.transports.tls import ByteStream, TlsIdentity

BASE = 1 << 20  # offset of a RawTarget's only region
HANDSHAKE_S = 10.0

tls_files: Certificates | None = None  # what the engines under test have where tcp speaks TLS


def secured(sock: socket.socket) -> socket.socket:
    """The opener's end, over Python's own TLS socket where TLS was asked for."""
    if tls_files is None:
        return sock
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(tls_files.ca)
    context.load_cert_chain(tls_files.cert, tls_files.key)
    context.check_hostname = False
    try:
        return context.wrap_socket(sock)
    except BaseException:
        sock.close()
        raise


def greeting(descriptor: SegmentDescriptor, peer: str, conn_id: int, supersedes: tuple[int, ...] = ()) -> bytes:
    return wire.encode_hello(
        wire.Hello(wire.WIRE_VERSION, peer, descriptor.name, descriptor.token, conn_id, supersedes)
    )


class RawTcp:
    """A greeted tcp connection; `welcome` is the acceptor's cause, "" when it was taken."""

    def __init__(self, descriptor: SegmentDescriptor, peer: str, conn_id: int = 1, supersedes: tuple[int, ...] = ()):
        endpoint = descriptor.endpoints["tcp"]
        self.sock = secured(socket.create_connection((endpoint["host"], int(endpoint["port"])), HANDSHAKE_S))
        data = greeting(descriptor, peer, conn_id, supersedes)
        self.sock.sendall(wire.LENGTH.pack(len(data)) + data)
        (length,) = wire.LENGTH.unpack(self.receive(wire.LENGTH.size))
        try:
            wire.decode_welcome(self.receive(length))
            self.welcome = ""
        except wire.ConnectionRefused as err:
            self.welcome = str(err)

    def receive(self, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            more = self.sock.recv(nbytes - len(data))
            assert more, "connection ended"
            data += more
        return data

    def start_write(self, seq: int, epoch: int, offset: int, length: int) -> None:
        """The head and the row of a one-slice WRITE; its bytes are the test's business."""
        head = wire.HEAD.pack(wire.WRITE, 0, 0, 1, seq, epoch, length)
        self.sock.sendall(head + struct.pack("<2Q", offset, length))

    def answer(self) -> tuple[int, str, int]:
        """(sequence number, cause, how many were refused)."""
        answer = wire.Asked.parse(self.receive(wire.HEAD_BYTES))
        self.receive(4 * answer.count)
        return answer.seq, wire.CAUSES[answer.flags], answer.count

    def close(self) -> None:
        self.sock.close()


def write_rows(seq: int, epoch: int, rows: list[tuple[int, int, int]]) -> bytes:
    """A WRITE of shm: (source offset, target offset, length) each."""
    head = wire.HEAD.pack(wire.WRITE, 0, 0, len(rows), seq, epoch, sum(row[2] for row in rows))
    return head + b"".join(struct.pack("<3Q", *row) for row in rows)


class RawShm:
    """A greeted shm connection."""

    def __init__(self, descriptor: SegmentDescriptor, peer: str, conn_id: int = 1) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(10)
        self.sock.connect(raw_address(descriptor.endpoints["shm"]["path"]))
        self.sock.send(greeting(descriptor, peer, conn_id))
        wire.decode_welcome(self.sock.recv(4096))

    def want(self, base: int) -> tuple[int, int]:
        """Asks for a region: its length and its descriptor."""
        self.sock.send(wire.HEAD.pack(wire.WANT, 0, 0, 0, base, 0, 0))
        data, fds, _, _ = socket.recv_fds(self.sock, 4096, 1)
        return wire.Asked.parse(data).nbytes, fds[0]

    def send_with_fd(self, packet: bytes, fd: int) -> None:
        self.sock.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])

    def close(self) -> None:
        self.sock.close()


class RawTarget:
    """A tcp peer that is asked, and answers what and when the test says. One connection at a time."""

    def __init__(self, name: str, nbytes: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(10)
        self.sock: ByteStream = socket.socket()
        endpoint = {"host": "127.0.0.1", "port": str(self._listener.getsockname()[1])}
        region = RegionInfo(BASE, nbytes, "cpu:0", False)
        self.descriptor = SegmentDescriptor(name, "elsewhere", "token", (region,), {"tcp": endpoint})
        self.hello: wire.Hello | None = None

    def accept(self) -> None:
        """Takes the next connection."""
        self.sock.close()
        self.sock = sock = self._listener.accept()[0]
        sock.settimeout(10)
        if (made := tls_files) is not None:
            identity = TlsIdentity(str(made.cert), str(made.key), str(made.ca))
            self.sock = tls.accepted(sock, identity, HANDSHAKE_S)
        (length,) = wire.LENGTH.unpack(wire.recv_exact(self.sock, wire.LENGTH.size))
        self.hello = wire.decode_hello(bytes(wire.recv_exact(self.sock, length)))
        welcome = wire.encode_hello(wire.Welcome(wire.WIRE_VERSION))
        self.sock.sendall(wire.LENGTH.pack(len(welcome)) + welcome)

    def asked(self) -> wire.Asked:
        """The next frame; a WRITE's bytes are dropped."""
        asked = wire.Asked.parse(wire.recv_exact(self.sock, wire.HEAD_BYTES))
        wire.recv_exact(self.sock, 16 * asked.count + (asked.nbytes if asked.kind == wire.WRITE else 0))
        return asked

    def answer(self, seq: int, payload: bytes = b"", refused: tuple[int, ...] = (), code: int = 0) -> bytes:
        """For the test to send."""
        head = wire.HEAD.pack(wire.ANSWER, code, 0, len(refused), seq, 0, len(payload))
        return head + struct.pack(f"<{len(refused)}I", *refused) + payload

    def close(self) -> None:
        self.sock.close()
        self._listener.close()
