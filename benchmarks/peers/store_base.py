"""One client of a store as a process: puts values under names not used before, gets the last ones, removes them.

Standard library only: Mooncake's runs in another environment."""

from __future__ import annotations

import os
import time
from typing import Any

from benchmarks.peers.link import End, Memory

GAP = 4096  # bytes between values: nobody can merge neighbours


class StoreEnd(End):
    """Subclasses move values between `source`, `target` and their store."""

    def __init__(self, nbytes: int) -> None:
        self.source, self.target = self.memories(nbytes)
        self.memory = self.source
        self.put_sets: list[Any] = []  # handles
        self._number = 0

    def memories(self, nbytes: int) -> tuple[Memory, Memory]:
        """What is put, and where gets go: so many bytes each, all pages there."""
        made = Memory(nbytes), Memory(nbytes)
        for one in made:
            one.fill(1)
        return made

    def put(self, names: list[str], length: int) -> Any:
        """Value i lies `length + GAP` times i behind the start of `source`; the handle of all of them for `get`."""
        raise NotImplementedError

    def get(self, handle: Any, length: int) -> None:
        """Likewise, to `target`."""
        raise NotImplementedError

    def remove(self, handle: Any) -> None:
        raise NotImplementedError

    def turn(self, op: str, count: int, length: int, times: int) -> tuple[float, float]:
        """When it began and when it ended, on the clock that all processes of this machine share."""
        start = time.perf_counter()
        for _ in range(times):
            if op == "put":
                self._number += 1
                names = [f"{os.getpid()}-{self._number}-{i}" for i in range(count)]
                self.put_sets.append(self.put(names, length))
            else:
                self.get(self.put_sets[-1], length)
        return start, time.perf_counter()

    def drop(self) -> None:
        """What was put is gone."""
        for handle in self.put_sets:
            self.remove(handle)
        self.put_sets.clear()

    def check(self, count: int, length: int, seed: int) -> bool:
        """Whether random values come back as they were put."""
        self.source.fill(seed)
        self.target.fill(0)
        self.turn("put", count, length, 1)
        self.turn("get", count, length, 1)
        self.drop()
        row = [(i * (length + GAP), length) for i in range(count)]
        return self.source.digest(row) == self.target.digest(row)


def spread(memory: Memory, count: int, length: int) -> list[int]:
    """Addresses of the values."""
    return [memory.address + i * (length + GAP) for i in range(count)]


def room(count: int, length: int) -> int:
    return count * (length + GAP)
