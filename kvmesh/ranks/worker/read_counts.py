"""A rank counts, for its front, what peers READ of the blocks that a traced lease is on."""

from __future__ import annotations

import time

from kvmesh.ranks import protocol as m
from kvmesh.transfer import TransferEngine


def count_reads(engine: TransferEngine, message: m.WatchReads | m.UnwatchReads) -> m.ReadsServed | None:
    """Begins or ends a count; returns what was served, for the front, when a count ends."""
    reads = engine.segment.reads
    if isinstance(message, m.WatchReads):
        reads.watch(message.ticket, message.offsets, message.sizes)
        return None
    count = reads.unwatch(message.ticket, time.monotonic_ns())
    if count is None:
        return None
    return m.ReadsServed(message.ticket, count.reads, count.nbytes, count.start_ns, count.end_ns)
