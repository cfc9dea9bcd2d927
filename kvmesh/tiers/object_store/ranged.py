"""Parts of objects under one prefix, read by several requests at once: retried, within a deadline, and all of one
version of each object."""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, NamedTuple, TypeVar

import obstore
from obstore.exceptions import BaseError, PreconditionError

from kvmesh.errors import CheckpointError, ConfigError, DeadlinePassed
from kvmesh.tiers.object_store.client import named_error, open_store

PIECE_BYTES = 8 << 20  # of one request
READERS = 8
REQUEST_S, CONNECT_S = 20.0, 3.0
ATTEMPTS = 4  # of each piece, beside the library's own of a request that has no answer yet
BACKOFF_S = 0.2  # before the second attempt; doubles

Answer = TypeVar("Answer")


class ObjectVersion(NamedTuple):
    """Says how long an object is, and which version of it."""

    size: int
    etag: str


class RangedReader:
    """Reads spans of the objects below `url`. What is read of an object is of the version that `version` found first.
    `until`, by `time.monotonic`, is when reading is to be over. Endpoint and credentials come from the environment, as
    those of the object tier. Raises ConfigError for a URL that cannot be used.

    Its calls raise CheckpointError for an object that is not there, or has changed; ConfigError for no access or no
    such bucket; Unavailable when the store does not answer; DeadlinePassed."""

    def __init__(self, url: str, until: float = math.inf) -> None:
        self.url, self.until = url, until
        self._store = open_store(url, REQUEST_S, CONNECT_S, 2, told=url)
        self._versions: dict[str, ObjectVersion | None] = {}
        self._pool = ThreadPoolExecutor(READERS, "object-weights")
        self._closed = threading.Event()

    def version(self, name: str) -> ObjectVersion | None:
        """Returns which version of an object is read; None where there is none."""
        if name not in self._versions:
            self._versions[name] = self._retried(name, lambda: self._head(name))
        return self._versions[name]

    @property
    def versions(self) -> str:
        """Names the versions of all objects that were asked for."""
        return hashlib.sha256(repr(sorted(self._versions.items())).encode()).hexdigest()

    def read(self, name: str, spans: Sequence[tuple[int, int]], into: memoryview) -> None:
        """Reads spans of an object's bytes, one after the other, into memory that just holds them."""
        version = self.version(name)
        if version is None:
            raise CheckpointError(f"{self.url}/{name}: no such object", field="path")
        running, at, stop = [], 0, threading.Event()  # which is set once one piece has failed
        for first, end in spans:
            for begin in range(first, end, PIECE_BYTES):
                target = into[at : at + min(PIECE_BYTES, end - begin)]
                piece = partial(self._get, name, version.etag, begin, target)
                running.append(self._pool.submit(self._retried, name, piece, stop))
                at += len(target)
        left_s = None if math.isinf(self.until) else max(0.0, self.until - time.monotonic())
        done, left = wait(running, left_s, FIRST_EXCEPTION)
        stop.set()
        for one in left:
            one.cancel()
        for one in done:
            one.result()
        if left:
            raise self._late(name)

    def close(self) -> None:
        """Ends it; a request that is under way is not waited for."""
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _head(self, name: str) -> ObjectVersion | None:
        try:
            meta = obstore.head(self._store, name)
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise
            return None
        return ObjectVersion(meta["size"], meta["e_tag"] or "")

    def _get(self, name: str, etag: str, first: int, into: memoryview) -> None:
        options: Any = {"range": (first, first + len(into))} | ({"if_match": etag} if etag else {})
        data = memoryview(obstore.get(self._store, name, options=options).bytes())
        if len(data) != len(into):
            raise OSError(f"{len(data)} bytes of {name} from byte {first} on, not {len(into)}")
        into[:] = data

    def _retried(self, name: str, call: Callable[[], Answer], stop: threading.Event | None = None) -> Answer:
        """Returns what `call` does, at one of ATTEMPTS."""
        attempt, ended = 0, self._closed if stop is None else stop
        while True:
            attempt += 1
            try:
                return call()
            except FileNotFoundError:
                raise CheckpointError(f"{self.url}/{name}: no such object", field="path") from None
            except PreconditionError:
                text = f"{self.url}/{name}: has changed while it was being read"
                raise CheckpointError(text, field="path") from None
            except (BaseError, OSError) as error:
                known = named_error(self.url, error)
                if isinstance(known, ConfigError) or attempt == ATTEMPTS:
                    raise type(known)(known.message, field="path") from None
            left_s = self.until - time.monotonic()
            if left_s <= 0 or self._closed.is_set():
                raise self._late(name)
            ended.wait(min(BACKOFF_S * 2**attempt / 2, left_s))
            if ended.is_set():
                raise self._late(name)

    def _late(self, name: str) -> DeadlinePassed:
        return DeadlinePassed(f"{self.url}/{name}: was not read in time", field="deadline_ms")
