"""memcpy within one process between two memfd maps: what shared memory cannot beat."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence

from benchmarks.peers.link import Initiator, Memory, Piece, pieces, serve, shares


def memfd(nbytes: int, name: str) -> Memory:
    fd = os.memfd_create(name)
    os.ftruncate(fd, nbytes)
    mapped = mmap.mmap(fd, nbytes)
    os.close(fd)
    return Memory(nbytes, memoryview(mapped), ctypes.addressof(ctypes.c_char.from_buffer(mapped)))


class Source(Initiator):
    """Is its own target."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.memory = memfd(nbytes, "from")
        self.other = memfd(nbytes, "to")

    def fill_other(self, seed: int) -> None:
        self.other.fill(seed)

    def digest_other(self, count: int, length: int) -> int:
        return self.other.digest(pieces(count, length))

    def jobs(self, op: str, row: Sequence[Piece], threads: int) -> list[Callable[[], None]]:
        to, of = self.other.address, self.memory.address
        if op == "read":
            to, of = of, to

        def job(share: list[Piece]) -> Callable[[], None]:
            def run() -> None:
                for at, n in share:
                    ctypes.memmove(to + at, of + at, n)

            return run

        return [job(share) for share in shares(row, threads)]


if __name__ == "__main__":
    serve({"source": Source})
