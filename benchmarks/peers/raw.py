"""Plain sockets over loopback: sendall from memory, recv_into memory, one byte of answer for each stream.

A thread for each stream at both ends; how many is part of the contender's name, whatever submits.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Sequence

from benchmarks.peers.link import End, Initiator, Memory, Piece, serve, shares

HEAD = struct.Struct("<BI")  # 1 if the target sends; pieces
ROW = struct.Struct("<QQ")
STREAMS = 4


def receive(sock: socket.socket, view: memoryview) -> None:
    while len(view):
        got = sock.recv_into(view, 0, socket.MSG_WAITALL)
        if got == 0:
            raise ConnectionError("the other end closed")
        view = view[got:]


class Target(End):
    def __init__(self, nbytes: int) -> None:
        self.memory = Memory(nbytes)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=STREAMS)
        self.told = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        for _ in range(STREAMS):
            sock, _ = self._listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        head = memoryview(bytearray(HEAD.size))
        view = self.memory.view
        try:
            while True:
                receive(sock, head)
                sends, count = HEAD.unpack(head)
                rows = memoryview(bytearray(ROW.size * count))
                receive(sock, rows)
                for at, n in ROW.iter_unpack(rows):
                    if sends:
                        sock.sendall(view[at : at + n])
                    else:
                        receive(sock, view[at : at + n])
                if not sends:
                    sock.sendall(b"k")
        except ConnectionError:
            sock.close()


class Source(Initiator):
    def __init__(self, nbytes: int, told: int) -> None:
        super().__init__()
        self.memory = Memory(nbytes)
        self.streams = [socket.create_connection(("127.0.0.1", told)) for _ in range(STREAMS)]
        for sock in self.streams:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def jobs(self, op: str, row: Sequence[Piece], threads: int) -> list[Callable[[], None]]:
        """`threads` streams."""

        def job(sock: socket.socket, share: list[Piece]) -> Callable[[], None]:
            return lambda: self._move(sock, op == "read", share)

        return [job(sock, share) for sock, share in zip(self.streams, shares(row, threads), strict=False)]

    def _move(self, sock: socket.socket, reads: bool, share: list[Piece]) -> None:
        view = self.memory.view
        sock.sendall(HEAD.pack(reads, len(share)) + b"".join(ROW.pack(at, n) for at, n in share))
        for at, n in share:
            if reads:
                receive(sock, view[at : at + n])
            else:
                sock.sendall(view[at : at + n])
        if not reads:
            receive(sock, memoryview(bytearray(1)))


if __name__ == "__main__":
    serve({"target": Target, "source": Source})
