"""What a node says to a reader of its index (`shared_index`) when it hands it over."""

from __future__ import annotations

import os
import socket
import struct

import msgspec

from kvmesh.transfer.transports.wire import UNREADABLE

MAX_HELLO_BYTES = 64 << 10
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid


class IndexHello(msgspec.Struct, frozen=True):
    """`base`, `nbytes`: where all blocks of this life of the node lie, in the segment of `descriptor`. `index_bytes`:
    of the index itself."""

    store_id: str
    incarnation: int
    base: int
    nbytes: int
    index_bytes: int
    descriptor: bytes

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, packet: bytes) -> IndexHello:
        """ValueError: it is none."""
        try:
            found = msgspec.msgpack.decode(packet, type=cls)
        except UNREADABLE as error:
            raise ValueError(f"{len(packet)} bytes that are no hello of an index: {error}") from None
        if min(found.base, found.nbytes, found.index_bytes) < 0:
            raise ValueError("a hello of an index with negative sizes")
        return found


def same_user(sock: socket.socket) -> bool:
    """Whether the process at the other end of this unix-domain socket runs as the user that we are."""
    told = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(told)[1] == os.geteuid())
