"""What a request's machine asks of ranks and prefill, as messages. Pure translation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kvmesh.instance.sampling import history_of
from kvmesh.kvcache.keys import unpack_tokens
from kvmesh.ranks import protocol as m
from services.decode import events as e
from services.decode import inputs as i
from services.decode.handoff import Handoff
from services.decode.limits import Shape


def to_all(shape: Shape, message: m.ToRank) -> Iterable[i.Output]:
    """The same to every rank."""
    return (i.TellRank(rank, message) for rank in range(len(shape.ranks)))


def _offsets(h: Handoff, rank: int) -> tuple[int, ...]:
    shape = h.shape.ranks[rank]
    if h.extents:
        return tuple(shape.extent_base_offset + x * shape.shard_bytes for x in h.extents)
    return tuple(shape.page_base_offset + p * shape.shard_bytes for p in h.pages)


def open_window(h: Handoff, action: e.OpenWindow) -> Iterable[i.Output]:
    """Nobody is invited to write where blocks lie that are here already."""
    offsets = _offsets(h, action.rank)[h.first_block :]
    yield i.TellRank(action.rank, m.OpenWindow(action.peer, h.epoch, offsets))


def _ask(h: Handoff, action: e.AskPrefill) -> Iterable[i.Output]:
    yield i.AskPrefill(h.peer, h)


def _landing(h: Handoff, action: e.SendLanding) -> Iterable[i.Output]:
    ranks = tuple(i.RankOffsets(rank, shape.segment, _offsets(h, rank)) for rank, shape in enumerate(h.shape.ranks))
    yield i.TellLanding(h.peer, h.handle, h.epoch, action.lease_ms, ranks, h.first_block)


def _renewed(h: Handoff, action: e.SendRenewed) -> Iterable[i.Output]:
    yield i.TellRenewed(h.peer, h.handle, h.epoch, action.lease_ms)


def _cancel(h: Handoff, action: e.SendCancel) -> Iterable[i.Output]:
    yield i.TellCancel(h.peer, h.handle, action.reason)


def _fence(h: Handoff, action: e.Fence) -> Iterable[i.Output]:
    yield i.TellRank(action.rank, m.Fence(action.peer, h.epoch))


def _load_copy(h: Handoff, action: e.LoadCopy) -> Iterable[i.Output]:
    # A request loads once, for its landing: the epoch is the ticket.
    return to_all(h.shape, m.LoadCopy(h.epoch, action.extents, action.pages))


def _copy_in(h: Handoff, action: e.CopyIn) -> Iterable[i.Output]:
    return to_all(h.shape, m.CopyIn(h.handle, action.extents, action.pages))


def _copy_out(h: Handoff, action: e.CopyOut) -> Iterable[i.Output]:
    return to_all(h.shape, m.CopyOut(h.handle, action.pages, action.extents))


def join(h: Handoff, action: e.Join) -> Iterable[i.Output]:
    """Into the batch of every rank."""
    spec = h.spec
    message = m.Join(
        handle=h.handle,
        pages=tuple(h.pages),
        context_tokens=h.context,
        next_token=h.last_token,
        token_index=h.made - 1,
        max_tokens=spec.max_tokens,
        min_tokens=spec.min_tokens,
        stop_token_ids=spec.stop_token_ids,
        sampling=spec.sampling,
        history=history_of(spec.sampling, unpack_tokens(spec.said), h.answer) if h.answer is not None else None,
    )
    return to_all(h.shape, message)


def _grant(h: Handoff, action: e.Grant) -> Iterable[i.Output]:
    return to_all(h.shape, m.Grant(h.handle, action.pages))


def _leave(h: Handoff, action: e.Leave) -> Iterable[i.Output]:
    return to_all(h.shape, m.Leave(h.handle))


Order = Callable[[Handoff, Any], Iterable[i.Output]]
ORDERS: dict[type[Any], Order] = {
    e.AskPrefill: _ask,
    e.SendLanding: _landing,
    e.SendRenewed: _renewed,
    e.SendCancel: _cancel,
    e.Fence: _fence,
    e.LoadCopy: _load_copy,
    e.CopyIn: _copy_in,
    e.CopyOut: _copy_out,
    e.Grant: _grant,
    e.Leave: _leave,
}
