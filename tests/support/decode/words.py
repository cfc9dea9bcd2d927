"""What the words of a handoff story stand for: blocks, pulls, what a rank says, how a request is told."""

from __future__ import annotations

from collections.abc import Callable

from kvmesh.kvcache.sources import PullRange
from kvmesh.ranks import protocol as m
from kvmesh.services.decode.events import Phase
from kvmesh.services.decode.handoff import Handoff


def key(letter: str) -> bytes:
    """The block of that name."""
    return letter.encode() * 16


def pull_range(text: str) -> PullRange:
    """`1-3@h1`: blocks 1 to 3 lie at h1."""
    blocks, _, holder = text.partition("@")
    first, _, last = blocks.partition("-")
    return PullRange(holder, f"{holder}:1", 1, int(first), int(last) - int(first) + 1)


RANK_SAYS: dict[str, Callable[[Handoff], m.ToFront]] = {
    "opened": lambda h: m.WindowOpened(_writer(h), h.epoch),
    "ended": lambda h: m.FillEnded(_writer(h), h.epoch),
    "fenced": lambda h: m.Fenced(_writer(h), h.epoch),
    "loaded": lambda h: m.LoadCopied(h.epoch, 1, 2),
    "copied-in": lambda h: m.Copied(h.handle, True, 1, 2),
    "copied-out": lambda h: m.Copied(h.handle, False, 1, 2),
    "left": lambda h: m.Left(h.handle),
    "stalled": lambda h: m.Stalled(h.handle),
    "step-error": lambda h: m.RankError((h.handle,), "a step failed"),
}


def _writer(h: Handoff) -> str:
    return f"p{h.peer}"


def describe(h: Handoff) -> str:
    """Phase, memory, and the hands on it."""
    parts = [h.phase.name]
    if h.pages:
        parts.append(f"pages={h.pages}")
    if h.extents:
        parts.append(f"extents={h.extents}")
    if h.windows:
        parts.append("window=" + ",".join(sorted({w.value for w in h.windows.values()})))
    if h.pulling:
        parts.append("pulling")
    if h.loading:
        parts.append(f"loading from {h.held}")
    if h.copying:
        parts.append(f"copying-{h.copying[0]}")
    if h.in_batch:
        parts.append("leaving" if h.leaving else "stalled" if h.stalled else "in-batch")
    if h.wants_landing:
        parts.append("wants-landing")
    if h.wants_pages:
        parts.append("wants-pages")
    if h.phase is Phase.READY:
        parts.append("wants-seat")
    return " ".join(parts)
