"""What the tiers below DRAM share: checks of what they are given, futures that say True or False and never raise, what
has changed since it was last told, and how one tier hands on what it evicts.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Protocol

from kvmesh.errors import InvalidRequest
from kvmesh.kvcache.keys import KEY_BYTES
from kvmesh.kvcache.store_stats import Changes

log = logging.getLogger(__name__)

Buffer = bytes | bytearray | memoryview


class DemotionSink(Protocol):
    """Takes what a tier evicts, as far as it has room; thread-safe, never waits. Each block is `admit`ted, then read
    (if it was not removed meanwhile), then offered or withdrawn."""

    def admit(self, key: bytes, nbytes: int) -> bool:
        """Whether this block is to be offered; a removal of it that comes from now on is heard here too."""

    def offer(self, key: bytes, data: bytearray) -> None:
        """An admitted block's bytes, verified; nobody changes them from now on."""

    def withdraw(self, key: bytes) -> None:
        """An admitted block is not offered after all."""


class NetChanges:
    """Which keys came and went since they were last taken. Pure; no key is in both."""

    def __init__(self) -> None:
        self._new: dict[bytes, None] = {}
        self._gone: dict[bytes, None] = {}

    def __bool__(self) -> bool:
        return bool(self._new or self._gone)

    def came(self, key: bytes) -> None:
        """It can be found, and could not before."""
        if key in self._gone:
            del self._gone[key]
        else:
            self._new[key] = None

    def went(self, key: bytes) -> None:
        """It could be found, and cannot any more."""
        if key in self._new:
            del self._new[key]
        else:
            self._gone[key] = None

    def take(self) -> Changes:
        """Everything since the last call; the first call: since there was nothing."""
        changes = Changes(tuple(self._new), tuple(self._gone))
        self._new, self._gone = {}, {}
        return changes

    def check(self) -> None:
        """AssertionError: a key is in both."""
        assert not self._new.keys() & self._gone.keys()


class ChangeNotifier:
    """Says that there are changes, once until they are taken. `lock`: the tier's."""

    def __init__(self, lock: threading.Lock | threading.RLock, on_changes: Callable[[], None] | None) -> None:
        self._lock = lock
        self._on_changes = on_changes
        self._said = False

    def taken(self) -> None:
        """With the lock: the next change is to be said again."""
        self._said = False

    def tell(self, changed: Callable[[], bool]) -> None:
        """Without the lock, from any thread; `changed` is asked with it."""
        with self._lock:
            news = not self._said and changed()
            self._said = self._said or news
        if news and self._on_changes is not None:
            try:
                self._on_changes()
            except Exception:
                log.exception("on_changes")


def checked_key(key: bytes) -> bytes:
    """InvalidRequest: it is none."""
    if len(key) != KEY_BYTES:
        raise InvalidRequest.of("key", key.hex(), f"must be {KEY_BYTES} bytes")
    return bytes(key)


def payload(field: str, data: Buffer, most: int | None = None) -> memoryview:
    """A block's bytes, 1..most of them. InvalidRequest."""
    view = memoryview(data)
    if not view.c_contiguous:
        raise InvalidRequest.of(field, view.strides, "must be contiguous")
    view = view.cast("B")
    if not view or (most is not None and len(view) > most):
        raise InvalidRequest.of(field, f"{len(view)} bytes", f"must be 1..{'' if most is None else most}")
    return view


def target(into: memoryview, most: int | None = None) -> memoryview:
    """Memory for a block's bytes. InvalidRequest."""
    if memoryview(into).readonly:
        raise InvalidRequest.of("into", "read-only memory", "must be writable")
    return payload("into", into, most)


def right_length(into: memoryview, length: int | None) -> None:
    """InvalidRequest: the block (None: it is not here) has another one."""
    if length is not None and length != len(into):
        raise InvalidRequest.of("into", f"{len(into)} bytes", f"the block has {length}")


def expired(deadline_ns: int | None, now: int) -> bool:
    """Whether it is too late to begin."""
    return deadline_ns is not None and deadline_ns <= now


def resolve(future: Future[bool], value: bool) -> None:
    """One that its owner cancelled stays so."""
    try:
        future.set_result(value)
    except InvalidStateError:
        pass


def answered(value: bool) -> Future[bool]:
    """One that is over."""
    future: Future[bool] = Future()
    future.set_result(value)
    return future


def follow(first: Future[bool], future: Future[bool]) -> Future[bool]:
    """`future` ends as another put of the same block does; it cannot be cancelled any more."""
    future.set_running_or_notify_cancel()
    first.add_done_callback(lambda done: resolve(future, not done.cancelled() and done.result()))
    return future
