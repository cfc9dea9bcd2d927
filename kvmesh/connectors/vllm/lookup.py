"""Lookups of keys at the store master, by a thread, so that vLLM's scheduler never waits for one."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.connectors.vllm.failures import FailureLog, with_store
from kvmesh.connectors.vllm.keys import part_key
from kvmesh.errors import KvmeshError
from kvmesh.storeclient import SyncStoreClient

log = logging.getLogger(__name__)

MAX_WAITING = 1024  # lookups that wait for the thread; another one is answered as a miss
CLOSE_S = 5.0
NOT_LOOKED_UP = "lookups fail, and what the pool has is computed instead"


@dataclass(frozen=True, slots=True)
class _Lookup:
    request_id: str
    keys: tuple[bytes, ...]
    deadline: float  # monotonic


class HeldLookups:
    """Finds which blocks the pool holds in all their parts. Its owner must `close` it, before the client."""

    def __init__(self, client: SyncStoreClient, *, ranks: int, parts: int, timeout_s: float) -> None:
        self._client = client
        self._ranks = ranks
        self._parts = parts
        self._timeout_s = timeout_s
        self._waiting: queue.Queue[_Lookup | None] = queue.Queue(MAX_WAITING)
        self._done: deque[tuple[str, bytes]] = deque()
        self._failures = FailureLog()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvmesh-lookups", daemon=True)
        self._thread.start()

    def ask(self, request_id: str, keys: Sequence[bytes]) -> None:
        """Begins a lookup, whose answer comes out of `answers`."""
        try:
            self._waiting.put_nowait(_Lookup(request_id, tuple(keys), time.monotonic() + self._timeout_s))
        except queue.Full:
            self._done.append((request_id, b""))

    def answers(self) -> list[tuple[str, bytes]]:
        """Returns the lookups that have ended: a byte a block, 1 for one that is held; empty when one failed."""
        found = []
        while self._done:
            found.append(self._done.popleft())
        return found

    def close(self) -> None:
        """Ends the thread; what still waits is not looked up."""
        self._closed = True
        try:
            self._waiting.put_nowait(None)
        except queue.Full:  # the thread sees `_closed` with the next one
            pass
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (one := self._waiting.get()) is not None and not self._closed:
            held = b""
            try:
                held = self._look_up(one)
            except KvmeshError as error:
                if not self._closed:
                    why = with_store(error, self._client.config.store)
                    self._failures.tell(NOT_LOOKED_UP, why, time.monotonic())
            except Exception:  # the thread must live: without it every request would wait for its time
                log.exception("lookup of %d blocks failed", len(one.keys))
            self._done.append((one.request_id, held))

    def _look_up(self, one: _Lookup) -> bytes:
        left_ms = int((one.deadline - time.monotonic()) * 1000)
        if left_ms < 1:
            return b""
        each = [(rank, part) for rank in range(self._ranks) for part in range(self._parts)]
        asked = [part_key(key, rank, self._ranks, part, self._parts) for key in one.keys for rank, part in each]
        found = self._client.replicas(asked, timeout_ms=left_ms)
        step = len(each)
        return bytes(all(found[at : at + step]) for at in range(0, len(found), step))
