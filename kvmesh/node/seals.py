"""Copies of full blocks from device pages to the host segment, slice by slice between two steps.

Decode seals a whole prompt when its request joins the batch: copied at once, gigabytes of KV would keep every running
row waiting. The front holds pages and extents until SealCopied, so there is no hurry.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kvmesh.node import messages as m
from kvmesh.node.device import Done, Memory


@dataclass(slots=True)
class _Seal:
    spec: m.SealCopy
    begun: int = 0  # blocks
    start_ns: int = 0
    bad: list[int] = field(default_factory=list)


class Seals:
    """What one rank has still to copy from `memory`'s pages to its extents, in the order in which it was told."""

    def __init__(self, memory: Memory, send: Callable[[m.ToFront], None]) -> None:
        self._memory = memory
        self._blocks = max(1, memory.seal_bytes // memory.layout.shard_bytes)
        self._send = send
        self._waiting: deque[_Seal] = deque()
        self._copying = 0

    def __bool__(self) -> bool:
        """Whether anything is left to copy."""
        return bool(self._waiting)

    @property
    def ready(self) -> bool:
        """`advance` would begin something."""
        return bool(self._waiting) and not self._copying

    def add(self, spec: m.SealCopy) -> None:
        """Answered by SealCopied, after some calls of `advance`."""
        self._waiting.append(_Seal(spec))

    def advance(self) -> None:
        """Copy the next slice, once the one before it is done."""
        if self._copying:
            return
        left = self._blocks
        for seal in list(self._waiting):
            if left <= 0:
                return
            first, end = seal.begun, min(seal.begun + left, len(seal.spec.pages))
            left -= end - first
            seal.begun = end
            self._copying += 1
            pages, extents = self._memory.pages, self._memory.extents
            places = zip(seal.spec.extents[first:end], seal.spec.pages[first:end], strict=True)
            self._memory.copy(
                [(extents[extent], pages[page]) for extent, page in places],
                partial(self._copied, seal, first),
                into_pages=False,
                check=True,
            )

    def _copied(self, seal: _Seal, first: int, done: Done) -> None:
        self._copying -= 1
        seal.start_ns = seal.start_ns or done.start_ns
        seal.bad.extend(first + at for at in done.bad)
        if seal.begun == len(seal.spec.pages):
            self._waiting.remove(seal)
            self._send(m.SealCopied(seal.spec.ticket, seal.start_ns, done.end_ns, tuple(seal.bad)))
