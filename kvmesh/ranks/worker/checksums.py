"""Checksums of spans of a rank's host region are made in a thread of their own: xxhash releases the GIL meanwhile."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

import xxhash

from kvmesh.ranks import protocol as m
from kvmesh.transfer import Region

log = logging.getLogger("kvmesh.rank")


class Sums:
    """Makes checksums in one thread, started when the first is asked for. `close` it before the memory is freed."""

    def __init__(self, region: Region, send: Callable[[m.ToFront], None]) -> None:
        self._region = region
        self._send = send
        self._asked: queue.SimpleQueue[m.Sum | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, asked: m.Sum) -> None:
        """Takes a request, which Summed always answers."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sums", daemon=True)
            self._thread.start()
        self._asked.put(asked)

    def close(self) -> None:
        """Ends the thread. Requests that have not begun are not answered any more."""
        self._closed = True
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None and not self._closed:
            if time.monotonic_ns() > asked.deadline_ns:
                self._send(m.Summed(asked.ticket, (), "not within its time"))
                continue
            try:
                self._send(m.Summed(asked.ticket, tuple(map(self._sum, asked.offsets, asked.sizes))))
            except Exception as error:  # whatever the front has sent, this rank goes on
                log.exception("sum %d", asked.ticket)
                self._send(m.Summed(asked.ticket, (), f"{type(error).__name__}: {error}"))

    def _sum(self, offset: int, size: int) -> int:
        region = self._region
        assert region.memory is not None
        start = offset - region.base_offset
        if not 0 <= start <= start + size <= region.length:
            raise ValueError(f"offset={offset}: {size} bytes there are not in the host region")
        return xxhash.xxh3_64_intdigest(region.memory[start : start + size])
