"""The object tier of one node's store: blocks by key in S3-compatible storage, with the face of `ssd.tier.SsdTier`.

    tier = ObjectTier(ObjectConfig(url="s3://bucket/prefix", identity=...))    # blocking: lists what is there
    stored = await asyncio.wrap_future(tier.put(key, extent))
    if await asyncio.wrap_future(tier.get_into(key, extent)): ...              # verified bytes, or False
    tier.take_changes()                                                        # keys new and gone since: announce it
    tier.close()

Every future resolves to True or False, never to an exception; a False get is a miss. While its future is open the tier
uses the caller's memory; once it is resolved, or was cancelled successfully, it does not. A deadline is looked at when
a request would begin; what runs is waited for, at most `timeout_s` and its retries. After a failure of the store all is
refused for REST_S, so that nobody waits for a dead one, request after request.

Nodes with one url and identity share their objects. What others put since the start is not known here, what they
removed is a miss. There is no limit of space: a lifecycle rule of the bucket is the eviction.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial

from kvmesh.errors import Unavailable
from kvmesh.kvcache.store_stats import Changes
from kvmesh.tiers.calls import (
    Buffer,
    ChangeNotifier,
    NetChanges,
    answered,
    checked_key,
    expired,
    follow,
    payload,
    right_length,
    target,
)
from kvmesh.tiers.object_store.client import Client, Damaged
from kvmesh.tiers.object_store.config import ObjectConfig

log = logging.getLogger(__name__)

REST_S = 2.0
MAX_DOUBTFUL = 1 << 16

# ── what it counts, and its waiting work ────────────────────────────────────────────────────────────


@dataclass(slots=True)
class ObjectCounts:
    """Counts since the start, of operations, except `*_bytes`."""

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
    """Present values; `counts` has those since the start."""

    blocks: int
    live_bytes: int
    waiting_gets: int  # or under way
    waiting_puts: int
    resting: bool
    counts: ObjectCounts


class WorkQueue:
    """Work for a pool of threads, bounded in number and bytes."""

    def __init__(self, threads: int, name: str, config: ObjectConfig) -> None:
        self.pool = ThreadPoolExecutor(threads, name)
        self.open: dict[Future[bool], int] = {}  # → bytes
        self.nbytes = 0
        self._most = (config.queue_ops + threads, config.queue_bytes)

    def full(self, nbytes: int) -> bool:
        """Says whether no more work with `nbytes` bytes is taken."""
        ops, limit = self._most
        return len(self.open) >= ops or (self.nbytes + nbytes > limit and bool(self.open))


# ── the tier ────────────────────────────────────────────────────────────────────────────────────────


class ObjectTier:
    """The object tier of one node's store; it is thread-safe. Raises ConfigError and Unavailable as `Client` does.
    `on_changes()` is called, on a thread of the tier or of a caller, when `take_changes` has something to return, once
    until that is called."""

    def __init__(
        self,
        config: ObjectConfig,
        *,
        on_changes: Callable[[], None] | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.config = config
        self._client = Client(config)
        self._clock = clock
        self._lock = threading.RLock()
        self._teller = ChangeNotifier(self._lock, on_changes)
        self._index: dict[bytes, int] = dict(self._client.list())
        self._live_bytes = sum(self._index.values())
        self._changes = NetChanges()
        for key in self._index:
            self._changes.came(key)
        self._writing: dict[bytes, Future[bool]] = {}
        self._removing: dict[bytes, int] = {}  # → removals under way
        self._doubtful: dict[bytes, None] = {}  # a put or a deletion failed: the object may be there, now or later
        self._rest_until = 0
        self._counts = ObjectCounts()
        self._closed = False
        self._gets = WorkQueue(config.readers, "object get", config)
        self._puts = WorkQueue(config.writers, "object put", config)
        self._removals = ThreadPoolExecutor(1, "object remove")
        self._removed: set[Future[bool]] = set()

    def __enter__(self) -> ObjectTier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ── blocks ───────────────────────────────────────────────────────────────────────────────────────

    def put(self, key: bytes, data: Buffer, *, deadline_ns: int | None = None) -> Future[bool]:
        """Stores a block. The result is True when any node can read it; also when it was here before, because a block's
        bytes follow from its key. It is False when the queue is full, the store failed, the deadline has passed, the
        block was removed meanwhile, or the tier is closed. Raises InvalidRequest for a malformed key or data."""
        return self.put_many([(key, data)], deadline_ns=deadline_ns)[0]

    def put_many(self, blocks: Sequence[tuple[bytes, Buffer]], *, deadline_ns: int | None = None) -> list[Future[bool]]:
        """Stores blocks as `put` does; returns as many futures, in order."""
        checked = [(checked_key(key), payload("data", data)) for key, data in blocks]
        return [self._put_one(key, view, deadline_ns) for key, view in checked]

    def get_into(self, key: bytes, into: memoryview, *, deadline_ns: int | None = None) -> Future[bool]:
        """Reads a block into memory of exactly its length. The result is True when `into` holds the bytes that were
        put, verified now. Raises InvalidRequest for a malformed key, read-only memory, or a length other than the
        block's (see `length`)."""
        return self.get_many_into([(key, into)], deadline_ns=deadline_ns)[0]

    def get_many_into(
        self, blocks: Sequence[tuple[bytes, memoryview]], *, deadline_ns: int | None = None
    ) -> list[Future[bool]]:
        """Reads blocks as `get_into` does; returns as many futures, in order."""
        checked = [(checked_key(key), target(into)) for key, into in blocks]
        for key, view in checked:
            right_length(view, self.length(key))
        return [self._get_one(key, view, deadline_ns) for key, view in checked]

    def contains(self, key: bytes) -> bool:
        """Says whether the block can be found, as far as this node knows."""
        return key in self._index

    def length(self, key: bytes) -> int | None:
        """Returns the block's bytes, or None when it is not here."""
        return self._index.get(key)

    def may_hold(self, key: bytes) -> bool:
        """Says whether a removal has anything to do: the object is here, is being written or deleted, or may be
        there."""
        with self._lock:
            return any(key in known for known in (self._index, self._writing, self._removing, self._doubtful))

    def doubtful(self, key: bytes) -> bool:
        """Says whether a put or deletion of the block failed, so that the object may be there, now or later."""
        with self._lock:
            return key in self._doubtful

    @property
    def resting(self) -> bool:
        """Whether the store is left alone for now, after a failure."""
        return self._clock() < self._rest_until

    def keys(self) -> list[bytes]:
        """Returns the keys of all blocks. O(blocks)."""
        with self._lock:
            return list(self._index)

    def remove(self, keys: Iterable[bytes]) -> Future[bool]:
        """Removes blocks, so that none of them is found here from now on. The result is True when they are deleted, so
        that nobody finds them after a restart either; False when that failed and must be repeated."""
        checked = [checked_key(key) for key in keys]
        with self._lock:
            if self._closed:
                return answered(False)
            for key in checked:
                self._forget(key)
                self._removing[key] = self._removing.get(key, 0) + 1
            self._counts.removed += len(checked)
            under_way = [self._writing[key] for key in checked if key in self._writing]
            future = self._later(lambda: self._remove(checked, under_way))
        self._tell()
        return future

    def take_changes(self) -> Changes:
        """Returns how `keys` differs from what it was at the last call; at the first call, from none."""
        with self._lock:
            self._teller.taken()
            return self._changes.take()

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────

    def flush(self, *, sync: bool = False) -> Future[bool]:
        """The result is True when everything put or removed before is answered. What was stored is then safe (`sync`
        changes nothing)."""
        with self._lock:
            waiting = [*self._puts.open, *self._removed]
            if self._closed:
                return answered(True)
            return self._later(lambda: not wait(waiting, self._patience_s).not_done)

    def stats(self) -> ObjectStats:
        with self._lock:
            return ObjectStats(
                blocks=len(self._index),
                live_bytes=self._live_bytes,
                waiting_gets=len(self._gets.open),
                waiting_puts=len(self._puts.open),
                resting=self.resting,
                counts=replace(self._counts),
            )

    def close(self, timeout_s: float = 30.0) -> None:
        """Answers waiting operations with False and ends running ones and all threads. It may be repeated. Raises
        Unavailable when the store does not answer within `timeout_s`."""
        with self._lock:
            self._closed = True
            waiting = [*self._gets.open, *self._puts.open, *self._removed]
        pools = (self._gets.pool, self._puts.pool, self._removals)
        for pool in pools:
            pool.shutdown(wait=False)
        if wait(waiting, timeout_s).not_done:
            raise Unavailable(f"{self.config.url}: the object store has not answered for {timeout_s:g} s")
        for pool in pools:
            pool.shutdown()

    # ── inner ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _patience_s(self) -> float:
        """The seconds within which any request ends, retries included."""
        return 2 * self.config.timeout_s + 1

    def _put_one(self, key: bytes, data: memoryview, deadline_ns: int | None) -> Future[bool]:
        with self._lock:
            if key in self._index:
                self._counts.present += 1
                return answered(True)
            first = self._writing.get(key)
            if first is not None:
                self._counts.present += 1
                return follow(first, Future())
            if self._refused(self._puts, len(data)) or key in self._removing:
                return answered(False)
            future = self._submit(self._puts, len(data), lambda: self._upload(key, data, deadline_ns))
            self._writing[key] = future
            future.add_done_callback(lambda _: self._written(key))
            return future

    def _get_one(self, key: bytes, into: memoryview, deadline_ns: int | None) -> Future[bool]:
        with self._lock:
            if key not in self._index:
                self._counts.misses += 1
                return answered(False)
            if self._refused(self._gets, len(into)):
                return answered(False)
            return self._submit(self._gets, len(into), lambda: self._download(key, into, deadline_ns))

    def _refused(self, line: WorkQueue, nbytes: int) -> bool:
        """Counts and says whether an operation is refused. The caller holds the lock."""
        if self._closed:
            return True
        if self.resting:
            self._counts.resting += 1
        elif line.full(nbytes):
            self._counts.busy += 1
        else:
            return False
        return True

    def _submit(self, line: WorkQueue, nbytes: int, run: Callable[[], bool]) -> Future[bool]:
        """Runs an operation on the queue's threads. The caller holds the lock."""
        future = line.pool.submit(run)
        line.open[future] = nbytes
        line.nbytes += nbytes

        def ended(_: Future[bool]) -> None:
            with self._lock:
                line.nbytes -= line.open.pop(future)

        future.add_done_callback(ended)
        return future

    def _upload(self, key: bytes, data: memoryview, deadline_ns: int | None) -> bool:
        if not self._begin(deadline_ns) or key in self._removing:
            return False
        try:
            self._client.say()  # before the first block: no folder is without it
            self._client.put(key, data)
        except Exception as error:
            self._failed("put", error)
            self._doubt([key])
            return False
        with self._lock:
            self._counts.written_bytes += len(data)
            if key in self._removing:  # the removal waits for us, and deletes it
                return False
            self._counts.stored += 1
            self._index[key] = len(data)
            self._live_bytes += len(data)
            self._changes.came(key)
        self._tell()
        return True

    def _download(self, key: bytes, into: memoryview, deadline_ns: int | None) -> bool:
        if not self._begin(deadline_ns):
            return False
        try:
            self._client.get_into(key, into)
        except FileNotFoundError:
            self._lost(key, "misses")
            return False
        except Damaged as error:
            log.warning("object %s in %s: %s", key.hex(), self.config.url, error)
            self._lost(key, "corrupt")
            self.remove([key])
            return False
        except Exception as error:
            self._failed("get", error)
            return False
        with self._lock:
            self._counts.hits += 1
            self._counts.read_bytes += len(into)
        return True

    def _remove(self, keys: Sequence[bytes], under_way: Sequence[Future[bool]]) -> bool:
        done = False
        try:
            if not wait(under_way, self._patience_s).not_done:
                self._client.delete(keys)
                done = True
        except Exception as error:
            self._failed("delete", error)
        with self._lock:
            for key in keys:
                self._removing[key] -= 1
                if not self._removing[key]:
                    del self._removing[key]
                if done:
                    self._doubtful.pop(key, None)
            if not done:
                self._doubt(keys)
        return done

    def _doubt(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            self._doubtful.update(dict.fromkeys(keys))
            while len(self._doubtful) > MAX_DOUBTFUL:
                del self._doubtful[next(iter(self._doubtful))]

    def _later(self, run: Callable[[], bool]) -> Future[bool]:
        """Runs after all removals requested before. The caller holds the lock."""
        future = self._removals.submit(run)
        self._removed.add(future)
        future.add_done_callback(self._removed.discard)
        return future

    def _begin(self, deadline_ns: int | None) -> bool:
        """Says whether a request may begin now."""
        with self._lock:
            now = self._clock()
            if self._closed:
                return False
            if expired(deadline_ns, now):
                self._counts.expired += 1
                return False
            if now < self._rest_until:
                self._counts.resting += 1
                return False
            return True

    def _failed(self, what: str, error: Exception) -> None:
        with self._lock:
            self._counts.io_errors += 1
            now = self._clock()
            first, self._rest_until = now >= self._rest_until, now + int(REST_S * 1e9)
        if first:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            log.warning("object store %s: %s: %s; it is left alone for %g s", self.config.url, what, said, REST_S)

    def _lost(self, key: bytes, why: str) -> None:
        with self._lock:
            setattr(self._counts, why, getattr(self._counts, why) + 1)
            self._forget(key)
        self._tell()

    def _forget(self, key: bytes) -> None:
        """Removes a key from the index. The caller holds the lock."""
        nbytes = self._index.pop(key, None)
        if nbytes is None:
            return
        self._live_bytes -= nbytes
        self._changes.went(key)

    def _written(self, key: bytes) -> None:
        with self._lock:
            self._writing.pop(key, None)

    def _tell(self) -> None:
        self._teller.tell(lambda: bool(self._changes))


# ── what a tier above evicts, on its way into this one ──────────────────────────────────────────────

# Bounded, never waited for, and found by removals.
#
#     admit ─▶ (the tier above reads and verifies) ─▶ offer ─▶ ObjectTier.put
#                        └───────── withdraw
#
# A crash in between loses the block, which was about to be lost anyway; an object is there as a whole or not at all.

QUEUE_BYTES = 128 << 20  # copies in memory


class Demotion:
    """A `calls.DemotionSink` into the object tier. `tier()` returns that tier, or None while it is not in use.
    `moving(key, over)` is called when a block is admitted, before the tier above lets go of it, and with `over` when it
    is stored or never will be; so whoever tracks keys for removal misses none. It is called on any thread, without a
    lock."""

    def __init__(
        self,
        tier: Callable[[], ObjectTier | None],
        moving: Callable[[bytes, bool], None] = lambda key, over: None,
        max_bytes: int = QUEUE_BYTES,
    ) -> None:
        self.demoted = 0  # blocks that arrived
        self.dropped = 0  # blocks worth it that did not: no room, the store failed or was not there, damaged
        self._tier = tier
        self._moving = moving
        self._max_bytes = max_bytes
        self._lock = threading.RLock()  # taken before the tier's
        self._held: dict[bytes, int] = {}  # admitted → bytes, until its put has ended
        self._bytes = 0
        self._removed: set[bytes] = set()  # of those

    @property
    def waiting_bytes(self) -> int:
        """The bytes of blocks on their way."""
        return self._bytes

    def admit(self, key: bytes, nbytes: int) -> bool:
        """Implements DemotionSink. A block that the tier has already is not admitted."""
        tier = self._tier()
        with self._lock:
            if tier is not None and tier.contains(key):
                return False
            full = self._bytes + nbytes > self._max_bytes and bool(self._held)
            if tier is None or tier.resting or full or key in self._held:
                self.dropped += 1
                return False
            self._held[key] = nbytes
            self._bytes += nbytes
        self._moving(key, False)
        return True

    def offer(self, key: bytes, data: bytearray) -> None:
        tier = self._tier()
        put: Future[bool] | None = None
        with self._lock:
            # Under the lock: a removal comes before, and is seen here, or after, and the tier has heard of the put.
            if tier is not None and key not in self._removed:
                put = tier.put(key, data)
        if put is None:
            self._end(key, False)
        else:
            put.add_done_callback(partial(self._put_ended, key))

    def withdraw(self, key: bytes) -> None:
        self._end(key, False)

    def remove(self, keys: Iterable[bytes]) -> None:
        """Keeps these blocks from being put. It must follow the removal in the tier above, and precede this tier's
        `remove`."""
        with self._lock:
            self._removed.update(key for key in keys if key in self._held)

    def _put_ended(self, key: bytes, put: Future[bool]) -> None:
        self._end(key, not put.cancelled() and put.result())

    def _end(self, key: bytes, stored: bool) -> None:
        with self._lock:
            self._bytes -= self._held.pop(key)
            if stored:
                self.demoted += 1
            elif key not in self._removed:
                self.dropped += 1
            self._removed.discard(key)
        tier = self._tier()
        if stored or tier is None or not tier.doubtful(key):  # a doubtful object may be there, so its key is kept
            self._moving(key, True)
