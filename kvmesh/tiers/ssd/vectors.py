"""Which pieces of memory one pwritev or preadv of several records carries. No I/O.

With O_DIRECT every piece must start on a page and be whole pages: whole pages of a payload go from and to the caller's
memory, its last bytes through a page of scratch; a payload that does not start on a page goes through scratch as a
whole. Without O_DIRECT payloads are never copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvmesh.tiers.ssd.disk import Scratch, is_aligned
from kvmesh.tiers.ssd.format import PAGE, pages

_ZEROS = bytes(PAGE)


class VectorRead(NamedTuple):
    """`pieces` to fill from the first payload's offset on; then `copies`: (to, from)."""

    pieces: list[memoryview]
    copies: list[tuple[memoryview, memoryview]]

    def finish(self) -> None:
        """The pieces are filled."""
        for to, source in self.copies:
            to[:] = source


def write_vector(records: Sequence[tuple[bytes, memoryview]], scratch: Scratch, *, direct: bool) -> list[memoryview]:
    """Records (header, payload), back to back. At most three pieces each."""
    staged = [direct and not is_aligned(payload) for _, payload in records]
    sizes = [PAGE + (pages(len(payload)) if copy else PAGE) for copy, (_, payload) in zip(staged, records, strict=True)]
    room, at = scratch.take(sum(sizes)), 0
    pieces: list[memoryview] = []
    for copy, size, (header, payload) in zip(staged, sizes, records, strict=True):
        mine = room[at : at + size]
        at += size
        mine[:PAGE] = header.ljust(PAGE, b"\0")
        whole = 0 if copy else len(payload) // PAGE * PAGE
        rest = len(payload) - whole
        mine[PAGE : PAGE + rest] = payload[whole:]
        mine[PAGE + rest : PAGE + pages(rest)] = _ZEROS[: pages(rest) - rest]
        pieces += [mine[:PAGE], payload[:whole], mine[PAGE : PAGE + pages(rest)]]
    return [piece for piece in pieces if len(piece)]


def read_vector(into: Sequence[memoryview], scratch: Scratch, *, direct: bool) -> VectorRead:
    """Payloads of records that lie back to back; headers between them are skipped. At most three pieces each."""
    staged = [direct and not is_aligned(view) for view in into]
    sizes = [pages(len(view)) if copy else PAGE for copy, view in zip(staged, into, strict=True)]
    room, at = scratch.take(PAGE + sum(sizes)), PAGE
    skipped = room[:PAGE]
    pieces: list[memoryview] = []
    copies: list[tuple[memoryview, memoryview]] = []
    for copy, size, view in zip(staged, sizes, into, strict=True):
        mine = room[at : at + size]
        at += size
        whole = 0 if copy else len(view) // PAGE * PAGE
        rest = len(view) - whole
        if pieces:
            pieces.append(skipped)
        pieces += [view[:whole], mine[: pages(rest)]]
        if rest:
            copies.append((view[whole:], mine[:rest]))
    return VectorRead([piece for piece in pieces if len(piece)], copies)
