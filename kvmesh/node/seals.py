"""Copies of full blocks from device pages to the host segment, a few mebibytes between two steps.

Decode seals a whole prompt when its request joins the batch: copied at once, gigabytes of KV would keep every running
row waiting. The front holds pages and extents until SealCopied, so there is no hurry.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kvmesh.node import messages as m

SLICE_BYTES = 8 << 20  # about a millisecond of copying and looking


@dataclass(slots=True)
class _Seal:
    spec: m.SealCopy
    done: int = 0  # blocks
    start_ns: int = 0
    bad: list[int] = field(default_factory=list)


class Seals:
    """What one rank has still to copy, in the order in which it was told. `pages` and `extents`: whole blocks, the
    first dimension counts them."""

    def __init__(
        self, pages: torch.Tensor, extents: torch.Tensor, shard_bytes: int, send: Callable[[m.ToFront], None]
    ) -> None:
        self._pages = pages
        self._extents = extents
        self._blocks = max(1, SLICE_BYTES // shard_bytes)
        self._send = send
        self._waiting: deque[_Seal] = deque()

    def __bool__(self) -> bool:
        """Whether anything is left to copy."""
        return bool(self._waiting)

    def add(self, spec: m.SealCopy) -> None:
        """Answered by SealCopied, after some calls of `advance`."""
        self._waiting.append(_Seal(spec))

    def advance(self) -> None:
        """Copy the next slice."""
        left = self._blocks
        while self._waiting and left > 0:
            seal = self._waiting[0]
            spec = seal.spec
            seal.start_ns = seal.start_ns or time.monotonic_ns()
            end = min(seal.done + left, len(spec.pages))
            left -= end - seal.done
            for at in range(seal.done, end):
                block = self._extents[spec.extents[at]]
                block.copy_(self._pages[spec.pages[at]])
                if not finite(block):
                    seal.bad.append(at)
            seal.done = end
            if end == len(spec.pages):
                self._waiting.popleft()
                self._send(m.SealCopied(spec.ticket, seal.start_ns, time.monotonic_ns(), tuple(seal.bad)))


def finite(block: torch.Tensor) -> bool:
    """Whether a block's KV holds neither NaN nor infinity: the sum would show it. About as dear as the copy."""
    wide = torch.float32 if block.dtype == torch.float16 else None
    return math.isfinite(block.sum(dtype=wide).item())
