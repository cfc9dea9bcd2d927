"""memcpy between two memfd maps of one process: what no store can beat."""

from __future__ import annotations

import ctypes

from benchmarks.peers.copying import memfd
from benchmarks.peers.link import Memory, serve
from benchmarks.peers.store_base import StoreEnd, spread


class Client(StoreEnd):
    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.held = memfd(nbytes, "held")
        self.held.fill(1)

    def memories(self, nbytes: int) -> tuple[Memory, Memory]:
        made = memfd(nbytes, "from"), memfd(nbytes, "to")
        for one in made:
            one.fill(1)
        return made

    def put(self, names: list[str], length: int) -> int:
        self._copy(self.source, self.held, len(names), length)
        return len(names)

    def get(self, handle: int, length: int) -> None:
        self._copy(self.held, self.target, handle, length)

    def remove(self, handle: int) -> None:
        pass

    def _copy(self, of: Memory, to: Memory, count: int, length: int) -> None:
        for source, target in zip(spread(of, count, length), spread(to, count, length), strict=True):
            ctypes.memmove(target, source, length)


if __name__ == "__main__":
    serve({"client": Client})
