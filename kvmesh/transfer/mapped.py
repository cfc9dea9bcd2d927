"""READs of peers' memory that is mapped here already: one copy, without a batch or a frame.

Only over shm, where the peer's region is mapped read-only and its owner is connected. Whoever gets False or None reads
with a batch, which connects, maps, and survives what goes wrong.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvmesh.errors import TransferError
from kvmesh.transfer.api import Carried, Region, TransferState
from kvmesh.transfer.engine import TransferEngine
from kvmesh.transfer.memory import Mapping, copy_runs
from kvmesh.transfer.send_queue import rank_of
from kvmesh.transfer.stats import bytes_counter
from kvmesh.transfer.transports.base import FrameKind, Rail
from kvmesh.transfer.transports.shm.copy import CopyJob
from kvmesh.transfer.transports.shm.transport import ShmTransport

log = logging.getLogger(__name__)

MAX_PEEK_BYTES = 4096


def peek(engine: TransferEngine, segment: str, offset: int, nbytes: int) -> bytes | None:
    """Returns at most MAX_PEEK_BYTES bytes of an open segment as they are now, or None when they are not mapped here.
    They are read after everything that this thread, or a thread it synchronized with, has read before. Raises
    TransferError when the segment is not open or `nbytes` is out of range."""
    if not 0 < nbytes <= MAX_PEEK_BYTES:
        raise TransferError(f"nbytes={nbytes}: not in 1..{MAX_PEEK_BYTES}", field="nbytes")
    found = _mapped(engine, segment, offset, nbytes)
    return None if found is None else ctypes.string_at(found.address, nbytes)


def copy_mapped(
    engine: TransferEngine,
    segment: str,
    local: Region,
    addresses: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
    traffic_class: int,
    done: Callable[[str, Carried], None],
) -> bool:
    """Copies from a peer's `offsets` to `addresses` in the local region, in this thread, with helper threads for large
    copies. Returns False, and copies nothing, when the source is not all in one mapped region. Otherwise `done(cause,
    how)` is called once, on one of these threads, when nothing touches the memory any more; cause "" means that every
    byte is there. Raises TransferError when the segment is not open, an address is not in `local`, or a length is not
    positive."""
    if not addresses or min(lengths) < 1:
        raise TransferError(f"lengths={list(lengths)!r}: at least one, each positive", field="length")
    ends = map(sum, zip(addresses, lengths, strict=True))
    if min(addresses) < local.address or max(ends) > local.address + local.length:
        raise TransferError("local_address: not all of it in the own region", field="local_address")
    first = min(offsets)
    found = _mapped(engine, segment, first, max(map(sum, zip(offsets, lengths, strict=True))) - first)
    mine = engine.segment.use(local.base_offset, local.length) if found is not None else None
    if found is None or mine is None:
        return False
    start, total, copiers = time.monotonic(), sum(lengths), found.transport.copiers

    def over(error: BaseException | None) -> None:
        engine.segment.unuse(mine)
        if error is None:
            _count(engine, segment, found.rail, rank_of(traffic_class), len(lengths), total, time.monotonic() - start)
        done("" if error is None else str(error), Carried(((str(found.rail), total if error is None else 0),)))

    sources = [found.address + offset - first for offset in offsets]
    if copiers.wants(total):
        job = CopyJob(addresses, sources, lengths, over)
        copiers.start(job)
        while job.work():
            pass
        return True
    try:
        copy_runs(addresses, sources, lengths)
    except Exception as error:
        log.exception("a copy from %s failed", segment)
        over(error)
    else:
        over(None)
    return True


class _Found(NamedTuple):
    rail: Rail
    transport: ShmTransport
    mapping: Mapping  # stays mapped while somebody holds it
    address: int  # of the offset that was asked for


def _mapped(engine: TransferEngine, segment: str, offset: int, nbytes: int) -> _Found | None:
    """Looks in the peer's map over the preferred rail, if that is shm."""
    rails = engine.rails(segment)
    transport = rails[0].transport if rails else None
    if not isinstance(transport, ShmTransport):
        return None
    found = transport.mapped(segment, rails[0], offset, nbytes)
    return None if found is None else _Found(rails[0], transport, *found)


def _count(
    engine: TransferEngine, segment: str, rail: Rail, rank: int, parts: int, nbytes: int, seconds: float
) -> None:
    """Counts the copy in the engine's statistics as one frame that was answered."""
    sender = engine._sender
    with sender.lock:
        link = sender.links.get(segment)
        way = link.ways.get(rail) if link is not None else None
        if way is not None:
            way.class_bytes[rank] += nbytes
            way.nic.meter.arrived(FrameKind.READ, rank, nbytes, parts, seconds)
        finals = (rank, TransferState.COMPLETED)
        sender.finals[finals] = sender.finals.get(finals, 0) + parts
        sender.count(bytes_counter(rail.transport.name, FrameKind.READ), nbytes)
