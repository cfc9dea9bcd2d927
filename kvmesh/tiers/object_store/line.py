"""What the object tier counts, and its lines of waiting work."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from kvmesh.tiers.object_store.config import ObjectConfig


@dataclass(slots=True)
class Counts:
    """Since the start; operations, but for `*_bytes`."""

    hits: int = 0
    misses: int = 0  # not here
    stored: int = 0
    present: int = 0  # puts of what was here already
    busy: int = 0  # the queue was full
    expired: int = 0  # the deadline was over before the request began
    resting: int = 0  # refused after a failure
    io_errors: int = 0  # requests that failed, after retries
    corrupt: int = 0  # objects whose bytes were not those put; never given out
    removed: int = 0  # keys
    written_bytes: int = 0
    read_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ObjectStats:
    """Now; `counts` since the start."""

    blocks: int
    live_bytes: int
    waiting_gets: int  # or under way
    waiting_puts: int
    resting: bool
    counts: Counts


class Line:
    """Work for some threads, bounded in number and bytes."""

    def __init__(self, threads: int, name: str, config: ObjectConfig) -> None:
        self.pool = ThreadPoolExecutor(threads, name)
        self.open: dict[Future[bool], int] = {}  # → bytes
        self.nbytes = 0
        self._most = (config.queue_ops + threads, config.queue_bytes)

    def full(self, nbytes: int) -> bool:
        """Whether no more work with so many bytes is taken."""
        ops, limit = self._most
        return len(self.open) >= ops or (self.nbytes + nbytes > limit and bool(self.open))
