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
    """Takes what a tier evicts, as far as it has room. It is thread-safe and never waits. Each block is first
    `admit`ted, then read (if it was not removed meanwhile), then offered or withdrawn."""

    def admit(self, key: bytes, nbytes: int) -> bool:
        """Returns whether this block is to be offered. A removal of the block from now on is reported here, too."""

    def offer(self, key: bytes, data: bytearray) -> None:
        """Takes an admitted block's verified bytes, which nobody changes from now on."""

    def withdraw(self, key: bytes) -> None:
        """Notes that an admitted block is not offered after all."""


class NetChanges:
    """Which keys came and went since the changes were last taken; no key is in both sets. Pure."""

    def __init__(self) -> None:
        self._new: dict[bytes, None] = {}
        self._gone: dict[bytes, None] = {}

    def __bool__(self) -> bool:
        return bool(self._new or self._gone)

    def came(self, key: bytes) -> None:
        """Notes that the key can be found now, and could not before."""
        if key in self._gone:
            del self._gone[key]
        else:
            self._new[key] = None

    def went(self, key: bytes) -> None:
        """Notes that the key cannot be found any more, and could before."""
        if key in self._new:
            del self._new[key]
        else:
            self._gone[key] = None

    def take(self) -> Changes:
        """Returns the changes since the last call; at the first call, from nothing."""
        changes = Changes(tuple(self._new), tuple(self._gone))
        self._new, self._gone = {}, {}
        return changes

    def check(self) -> None:
        """Raises AssertionError when a key is in both sets."""
        assert not self._new.keys() & self._gone.keys()


class ChangeNotifier:
    """Calls `on_changes` once for the changes until they are taken. `lock` is the tier's."""

    def __init__(self, lock: threading.Lock | threading.RLock, on_changes: Callable[[], None] | None) -> None:
        self._lock = lock
        self._on_changes = on_changes
        self._said = False

    def taken(self) -> None:
        """Notes that the changes were taken, so that the next one is reported. The caller holds the lock."""
        self._said = False

    def tell(self, changed: Callable[[], bool]) -> None:
        """Reports changes unless that was done already. Any thread may call it, without the lock; `changed` is called
        with it."""
        with self._lock:
            news = not self._said and changed()
            self._said = self._said or news
        if news and self._on_changes is not None:
            try:
                self._on_changes()
            except Exception:
                log.exception("on_changes")


def checked_key(key: bytes) -> bytes:
    """Returns the key. Raises InvalidRequest when it does not have 16 bytes."""
    if len(key) != KEY_BYTES:
        raise InvalidRequest.of("key", key.hex(), f"must be {KEY_BYTES} bytes")
    return bytes(key)


def payload(field: str, data: Buffer, most: int | None = None) -> memoryview:
    """Returns a block's bytes as a flat view. Raises InvalidRequest unless they are contiguous and 1..`most` bytes."""
    view = memoryview(data)
    if not view.c_contiguous:
        raise InvalidRequest.of(field, view.strides, "must be contiguous")
    view = view.cast("B")
    if not view or (most is not None and len(view) > most):
        raise InvalidRequest.of(field, f"{len(view)} bytes", f"must be 1..{'' if most is None else most}")
    return view


def target(into: memoryview, most: int | None = None) -> memoryview:
    """Returns memory for a block's bytes as a flat view. Raises InvalidRequest when it is read-only, not contiguous, or
    too long."""
    if memoryview(into).readonly:
        raise InvalidRequest.of("into", "read-only memory", "must be writable")
    return payload("into", into, most)


def right_length(into: memoryview, length: int | None) -> None:
    """Raises InvalidRequest when the block has another length than `into`. `length` None means that it is not here."""
    if length is not None and length != len(into):
        raise InvalidRequest.of("into", f"{len(into)} bytes", f"the block has {length}")


def expired(deadline_ns: int | None, now: int) -> bool:
    """Says whether it is too late to begin."""
    return deadline_ns is not None and deadline_ns <= now


def resolve(future: Future[bool], value: bool) -> None:
    """Sets the result of a future, unless its owner has cancelled it."""
    try:
        future.set_result(value)
    except InvalidStateError:
        pass


def answered(value: bool) -> Future[bool]:
    """Returns a future with this result."""
    future: Future[bool] = Future()
    future.set_result(value)
    return future


def follow(first: Future[bool], future: Future[bool]) -> Future[bool]:
    """Gives `future` the outcome of `first`, another put of the same block. It cannot be cancelled from then on."""
    future.set_running_or_notify_cancel()
    first.add_done_callback(lambda done: resolve(future, not done.cancelled() and done.result()))
    return future
