"""MSG_ZEROCOPY (Linux: Documentation/networking/msg_zerocopy.rst) for the payload of WRITE frames.

The pages of the source are the kernel's until the peer's has acknowledged them. Nothing waits for that: a frame's
memory is in use until the target answers for it, and an answer to a frame means that all of it was acknowledged. The
head lives shorter, so it is copied. Where the kernel must copy after all (loopback, virtual Ethernet, NICs without
scatter-gather) it says so in the completion; pinning the pages was then in vain, and the connection stops asking.
"""

from __future__ import annotations

import errno
import socket
import struct

from kvmesh.transfer.transports import wire

SO_ZEROCOPY, MSG_ZEROCOPY = 60, 0x4000000
MIN_BYTES = 64 << 10  # below it pinning pages costs more than copying them
_RECVERR = {(socket.SOL_IP, 11), (41, 25)}  # IP_RECVERR, IPV6_RECVERR
_EXTENDED_ERR = struct.Struct("@IBBBxII")  # errno, origin, type, code, info, data
_ORIGIN_ZEROCOPY, _CODE_COPIED = 5, 1


class ZeroCopy:
    """The sending side of one connection; only its sending thread uses it."""

    def __init__(self, sock: socket.socket) -> None:
        self.useful = True
        try:
            sock.setsockopt(socket.SOL_SOCKET, SO_ZEROCOPY, 1)
        except OSError:
            self.useful = False  # a kernel before 4.14

    def send_views(self, sock: socket.socket, views: list[memoryview], nbytes: int) -> None:
        """Sends as `wire.send_views` does. All views but the first must stay unchanged until the target has
        answered."""
        if not self.useful or nbytes < MIN_BYTES:
            wire.send_views(sock, views, nbytes)
            return
        head, rest = views[0], views[1:]
        sock.sendall(head, socket.MSG_MORE)
        nbytes -= len(head)
        while nbytes > 0:
            sent = self._send(sock, rest)
            nbytes -= sent
            if nbytes > 0:
                rest = wire.advanced(rest, sent)
        self.reap(sock)

    def _send(self, sock: socket.socket, views: list[memoryview]) -> int:
        if self.useful:
            try:
                return sock.sendmsg(views[: wire.IOV_MAX], (), MSG_ZEROCOPY)
            except OSError as err:
                if err.errno != errno.ENOBUFS:
                    raise
                self.reap(sock)  # over RLIMIT_MEMLOCK or optmem_max: copies until some pages are free again
        return sock.sendmsg(views[: wire.IOV_MAX])

    def reap(self, sock: socket.socket) -> None:
        """Removes completions, which use the socket's option memory, from the error queue."""
        while True:
            try:
                _, notes, _, _ = sock.recvmsg(1, 256, socket.MSG_ERRQUEUE | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            for level, kind, data in notes:
                if (level, kind) in _RECVERR and len(data) >= _EXTENDED_ERR.size:
                    _, origin, _, code, _, _ = _EXTENDED_ERR.unpack_from(data)
                    if origin == _ORIGIN_ZEROCOPY and code & _CODE_COPIED:
                        self.useful = False
